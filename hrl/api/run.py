"""What a run left in its folder."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.api.arguments import file_arguments
from hrl.config.compose import compose_kind
from hrl.config.run_kind import KINDS
from hrl.report.run_folder import MODEL, RolloutKind, read_jsonl, rollouts_file, rollouts_steps

if TYPE_CHECKING:
    from hrl.config.outline import RunConfiguration

_SHOWN = ("reward/mean", "train/loss", "rewards/accuracies", "response_length/mean", "timing_s/step")
"""Metrics of the summary, where the run has them; beside the parts of the reward and every validation."""


@dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes:
        path: The run folder.
        kind: `ppo`, `dpo`, `sft` or `rm`.
    """

    path: Path
    kind: str

    @property
    def config(self) -> RunConfiguration:
        """The configuration that it ran with, from `config.yaml` in the folder; a trainer takes it as `config`."""
        return compose_kind(KINDS[self.kind], file_arguments(self.path / "config.yaml"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of every step, one dict per step, as in `metrics.jsonl`.

        A run that validates before its first step has a record with `step` 0, of this validation alone, before that of
        step 1.
        """
        file = self.path / "metrics.jsonl"
        return list(read_jsonl(file)) if file.exists() else []

    @property
    def model_path(self) -> Path:
        """The trained model, a folder that transformers and vLLM load."""
        return self.path / MODEL

    @property
    def report(self) -> Path:
        """The page with curves, samples, times and configuration."""
        return self.path / "report.html"

    def samples(self, step: int | None = None, *, validation: bool = False) -> list[dict[str, Any]]:
        """Return the samples of a step, of the last one by default, or those of the validation after it."""
        kind: RolloutKind = "val" if validation else "train"
        steps = rollouts_steps(self.path / "rollouts", kind)
        if not steps:
            return []
        return list(read_jsonl(rollouts_file(self.path / "rollouts", steps[-1] if step is None else step, kind)))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the first and the last value of the main metrics, the curve, the places."""
        rows = "".join(
            f"<tr><td style='text-align:left'>{escape(name)}</td><td>{first:.4g}</td><td>{last:.4g}</td></tr>"
            for name, first, last in _first_and_last(self.metrics)
        )
        pictures = sorted(self.path.glob("*_curve.png"))
        picture = ""
        if pictures:
            data = base64.b64encode(pictures[0].read_bytes()).decode("ascii")
            picture = (
                f"<img alt='curve of the run' style='max-width:min(100%,48em)' src='data:image/png;base64,{data}'>"
            )
        steps = max((record["step"] for record in self.metrics), default=0)
        places = "".join(
            f"<div>{label}: <code>{escape(str(place))}</code></div>"
            for label, place in (("model", self.model_path), ("report", self.report))
            if place.exists()
        )
        return (
            f"<div><b>{escape(self.path.name)}</b>: {steps} steps"
            f"<table><thead><tr><th></th><th>first</th><th>last</th></tr></thead><tbody>{rows}</tbody></table>"
            f"{picture}{places}</div>"
        )


def _first_and_last(records: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return name, first and last value of the metrics of the summary."""
    names = dict.fromkeys(name for record in records for name in record)
    shown = [name for name in _SHOWN if name in names]
    shown += [name for name in names if name.startswith("reward/") and name.endswith("/mean") and name not in shown]
    shown += [name for name in names if name.startswith("val/") and not name.endswith("/n")]
    found = []
    for name in shown:
        values = [record[name] for record in records if isinstance(record.get(name), int | float)]
        if values:
            found.append((name, values[0], values[-1]))
    return found
