"""The display for programs: one JSON object a line on standard output, and nothing else there.

Every object has `time` (UTC, ISO 8601) and `event`: `banner`, `note`, `step`, `validation`, `rollouts` or
`before_and_after`. The metrics of a step stand beside these under their names in `metrics.jsonl`. Lines are ASCII,
so that text of a model can neither break a line nor steer a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Any

from hrl.report.rollout_log import Sample, before_and_after, best_median_worst, describe_changes
from hrl.report.run_folder import RolloutKind, json_line


class JsonConsole:
    """Tells one run to a program.

    Args:
        total_steps: Steps of the run; 0 while they are not known, and the attribute can be set later.
        file: Where to write; standard output by default.
    """

    def __init__(self, total_steps: int, file: IO[str] | None = None) -> None:
        self.total_steps = total_steps
        self._file = sys.stdout if file is None else file

    def banner(self, title: str, facts: Mapping[str, str]) -> None:
        self._write("banner", title=title, facts=facts)

    def note(self, text: str) -> None:
        self._write("note", text=text)

    @contextmanager
    def step_phases(self, step: int) -> Iterator[None]:
        yield  # the seconds of its phases are among the step's metrics

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("step", step=step, total_steps=self.total_steps, **metrics)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        scores = {name: value for name, value in metrics.items() if name.startswith("val/")}
        if scores:
            self._write("validation", step=step, **scores)

    def rollouts(self, step: int, records: Sequence[Sample], kind: RolloutKind = "train") -> None:
        picked = [{"label": label, **record} for label, record in best_median_worst(records)]
        self._write("rollouts", step=step, kind=kind, samples=picked)

    def before_and_after(self, first: Sequence[Sample], last: Sequence[Sample], limit: int = 5) -> None:
        pairs = before_and_after(first, last)
        if pairs:
            shown = [{"before": before, "after": after} for before, after in pairs[:limit]]
            self._write("before_and_after", changes=describe_changes(pairs, len(shown)), pairs=shown)

    def _write(self, event: str, **content: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.write(json_line({"time": time, "event": event, **content}, ascii_only=True))
        self._file.flush()
