"""Show a run in progress: on a terminal, as plain lines in a file, or as JSON for programs.

A terminal shows a bar of phases below the lines, which disappears when the step ends; a file or pipe gets only plain
lines. The environment variable `NO_COLOR` turns colours off.
"""

from __future__ import annotations

import fnmatch
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hrl.report.first_look import FirstLook
from hrl.report.phases import LABELS
from hrl.report.run_folder import RolloutKind, json_line
from hrl.report.samples import (
    Sample,
    before_and_after_table,
    best_median_worst,
    describe_changes,
    number,
    printable,
    samples_table,
)

PLAIN_WIDTH = 120
"""The width of a line in a file."""


# ---------------------------------------------------------------------------------------------- the step line


@dataclass(frozen=True)
class Field:
    """A number of the step line.

    Attributes:
        label: What stands before it.
        metrics: Patterns of metric names, in which `*` stands for any text. The first that a step has metrics for is
            shown, as the mean of these.
        spec: Its format.
        unit: What stands behind it.
        drop: The fields with the highest number are left out first if the line is too long; those with 0 stay.
        optional: Whether it is left out in a step that has no such metric; otherwise a dash is shown.
    """

    label: str
    metrics: tuple[str, ...]
    spec: str
    unit: str = ""
    drop: int = 0
    optional: bool = False

    def text(self, metrics: Mapping[str, float]) -> str | None:
        """Return the field of a step with these metrics, or None if it is left out."""
        found = (fnmatch.filter(metrics, pattern) for pattern in self.metrics)
        values = [metrics[name] for name in next(filter(None, found), ())]
        if not values and self.optional:
            return None
        value = sum(values) / len(values) if values else None
        return f"{self.label} {number(value, self.spec)}{self.unit}".removeprefix(" ")


@dataclass(frozen=True)
class StepLine:
    """What the line of a step shows, for a kind of run.

    Attributes:
        fields: Numbers, in order.
        seconds: Label → the phases whose seconds are shown under it, besides those of the whole step.
    """

    fields: tuple[Field, ...]
    seconds: Mapping[str, tuple[str, ...]]

    def text(self, step: int, total_steps: int, metrics: Mapping[str, float], width: int) -> str:
        """Return the line of a step, without the less important fields if it doesn't fit into `width` columns.

        Args:
            step: The step, from 1.
            total_steps: Steps of the run; sets the width of the counter.
            metrics: The metrics of the step, under their names in `metrics.jsonl`.
            width: Columns.
        """
        fields = [(field.drop, field.text(metrics)) for field in (*self.fields, _RATE)]
        fields = [(0, _counter(step, total_steps)), *fields[:-1], (0, self._seconds(metrics)), fields[-1]]
        parts = [(drop, text) for drop, text in fields if text is not None]
        for least in sorted({drop for drop, _ in parts if drop}, reverse=True):
            if len("  ".join(text for _, text in parts)) <= width:
                break
            parts = [(drop, text) for drop, text in parts if drop != least]
        return "  ".join(text for _, text in parts)

    def _seconds(self, metrics: Mapping[str, float]) -> str:
        sums = {
            label: sum(metrics.get(f"timing_s/{name}", 0.0) for name in names) for label, names in self.seconds.items()
        }
        step = f"{number(metrics.get('timing_s/step'), '4.1f')}s"
        return " ".join([step, *(f"{label} {seconds:4.1f}" for label, seconds in sums.items())])


_RATE = Field("", ("perf/throughput",), "5.0f", " tok/s", drop=4, optional=True)


def _counter(step: int, total_steps: int) -> str:
    return f"step {step:{len(str(total_steps))}d}/{total_steps}"


# ---------------------------------------------------------------------------------------------- the phase bar


class PhaseBar:
    """The phases of the running step: finished ones with their seconds, and the running one counting up.

    Args:
        labels: Labels in order, e.g. `("gen", "reward", "update", "sync")`.
        clock: Seconds, replaced in tests.
    """

    def __init__(self, labels: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self.labels = list(labels)
        self.title = ""
        self._clock = clock
        self._done: dict[str, float] = {}
        self._running: str | None = None
        self._started_at = 0.0

    def begin_step(self, title: str) -> None:
        """Start a step with no phase run yet."""
        self.title = title
        self._done = {}
        self._running = None

    def begin(self, label: str) -> None:
        """Start a phase."""
        if label not in self.labels:
            self.labels.append(label)
        self._running = label
        self._started_at = self._clock()

    def end(self) -> None:
        """End the running phase. The seconds of a phase that runs twice in a step add up."""
        if self._running is not None:
            seconds = self._clock() - self._started_at
            self._done[self._running] = self._done.get(self._running, 0.0) + seconds
            self._running = None

    def __rich__(self) -> Text:
        text = Text(f"{self.title}  ", style="bold", no_wrap=True, overflow="ellipsis")
        for label in self.labels:
            if label == self._running:
                text.append(f"▸ {label} {self._clock() - self._started_at:.1f}s", style="bold cyan")
            elif label in self._done:
                text.append(f"✓ {label} {self._done[label]:.1f}s", style="green")
            else:
                text.append(f"· {label}", style="bright_black")
            text.append("  ")
        text.rstrip()
        return text


# ---------------------------------------------------------------------------------------------- a validation


def validation_table(metrics: Mapping[str, float], first: Mapping[str, float], title: str) -> Table:
    """Return every `val/<source>/<metric>` as a row, with its change since the first validation."""
    table = Table(title=title, title_justify="left")
    table.add_column("source", overflow="fold")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("since start", justify="right")
    for name in sorted(name for name in metrics if name.startswith("val/") and not name.endswith("/n")):
        source, metric = name.removeprefix("val/").rsplit("/", 1)
        change = Text(f"{metrics[name] - first[name]:+.3f}") if name in first else Text("-")
        table.add_row(Text(source), Text(metric), Text(f"{metrics[name]:.3f}"), change)
    return table


# ---------------------------------------------------------------------------------------------- the run


class RunConsole:
    """Shows a run on a terminal, or writes it as plain lines.

    Args:
        total_steps: Steps of the run.
        line: What the line of a step shows.
        phases: The phases of a step of this run, in order (names in `PHASES`).
        console: Where to write; standard output by default.
    """

    def __init__(
        self, total_steps: int, line: StepLine, phases: Sequence[str] = (), console: Console | None = None
    ) -> None:
        self._console = console if console is not None else Console(highlight=False)
        self.total_steps = total_steps
        self._step_line = line
        self._bar = PhaseBar([LABELS.get(name, name) for name in phases])
        self._live: Live | None = None
        self._first_validation: dict[str, float] = {}

    @property
    def width(self) -> int:
        """The columns of a line."""
        return self._console.width if self._console.is_terminal else max(self._console.width, PLAIN_WIDTH)

    def banner(self, title: str, facts: Mapping[str, str]) -> None:
        """Show a summary of the run that is about to start."""
        self._line(Text(title, style="bold"))
        label_width = max((len(label) for label in facts), default=0)
        for label, fact in facts.items():
            self._line(Text.assemble((f"  {label:<{label_width}}  ", "cyan"), printable(fact, limit=1000)))

    def note(self, text: str) -> None:
        """Show a remark about the run."""
        self._line(printable(text, limit=4000))

    def first_look(self, look: FirstLook) -> None:
        """Show what the first samples say: a line, or one of them and what to try if there is nothing to learn."""
        self.banner(f"first look: {look.headline}", look.facts)

    @contextmanager
    def step_phases(self, step: int) -> Iterator[None]:
        """Show the phases of a step on a terminal for the duration of the block."""
        self._bar.begin_step(_counter(step, self.total_steps))
        if not self._console.is_terminal:
            yield
            return
        self._live = Live(self._bar, console=self._console, transient=True, refresh_per_second=4)
        try:
            with self._live:
                yield
        finally:
            self._live = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase as running for the duration of the block; `name` is that of its timer."""
        self._bar.begin(LABELS.get(name, name))
        try:
            yield
        finally:
            self._bar.end()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the line of a finished step."""
        self._line(Text(self._step_line.text(step, self.total_steps, metrics, self.width)))

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the table of a validation; nothing if `metrics` has none."""
        table = validation_table(metrics, self._first_validation, f"validation after step {step}")
        if not table.row_count:
            return
        if not self._first_validation:
            self._first_validation = dict(metrics)
        self._show(table)

    def rollouts(self, step: int, samples: Sequence[Sample], kind: RolloutKind = "train") -> None:
        """Show the best, the median and the worst sample of a step, or of the validation after it."""
        of = "step" if kind == "train" else "the validation after step"
        self._show(samples_table(best_median_worst(samples), f"samples of {of} {step}"))

    def before_and_after(self, pairs: Sequence[tuple[Sample, Sample]], limit: int = 5) -> None:
        """Show the answers of two validations to the same prompts, at most `limit` pairs."""
        self._show(before_and_after_table(pairs, limit))

    def _line(self, text: Text) -> None:
        # No line breaks: a terminal wraps long lines, and a file keeps them whole.
        self._console.print(text, soft_wrap=True)

    def _show(self, renderable: RenderableType) -> None:
        self._console.print(renderable, width=self.width)


class JsonConsole:
    """Writes a run for programs: one JSON object per line on standard output, and nothing else there.

    Every object has a `time` (UTC, ISO 8601) and an `event`: `banner`, `note`, `first_look`, `step`, `validation`,
    `rollouts` or `before_and_after`. The metrics of a step are added under their names in `metrics.jsonl`. Lines are
    ASCII, so a model's text can neither break a line nor control a terminal.

    Args:
        total_steps: Steps of the run.
        file: Where to write; standard output by default.
    """

    def __init__(self, total_steps: int, file: IO[str] | None = None) -> None:
        self.total_steps = total_steps
        self._file = sys.stdout if file is None else file

    def banner(self, title: str, facts: Mapping[str, str]) -> None:
        """Write a summary of the run that is about to start."""
        self._write("banner", title=title, facts=facts)

    def note(self, text: str) -> None:
        """Write a remark about the run."""
        self._write("note", text=text)

    def first_look(self, look: FirstLook) -> None:
        """Write what the first samples say."""
        self._write("first_look", **look.as_dict())

    def step_phases(self, step: int) -> AbstractContextManager[None]:
        """Do nothing; a step's metrics have the seconds of its phases."""
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a finished step."""
        self._write("step", step=step, total_steps=self.total_steps, **metrics)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the `val/...` metrics, if there are any."""
        scores = {name: value for name, value in metrics.items() if name.startswith("val/")}
        if scores:
            self._write("validation", step=step, **scores)

    def rollouts(self, step: int, samples: Sequence[Sample], kind: RolloutKind = "train") -> None:
        """Write the best, the median and the worst sample of a step, or of the validation after it."""
        picked = [{"label": label, **sample} for label, sample in best_median_worst(samples)]
        self._write("rollouts", step=step, kind=kind, samples=picked)

    def before_and_after(self, pairs: Sequence[tuple[Sample, Sample]], limit: int = 5) -> None:
        """Write the answers of two validations to the same prompts, at most `limit` pairs."""
        shown = [{"before": before, "after": after} for before, after in pairs[:limit]]
        self._write("before_and_after", changes=describe_changes(pairs, len(shown)), pairs=shown)

    def _write(self, event: str, **content: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.write(json_line({"time": now, "event": event, **content}, ascii_only=True))
        self._file.flush()


Display = RunConsole | JsonConsole
"""Where a run is shown."""
