"""The line of a step: which numbers it shows, aligned from step to step, and which go first where it is too long."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.cells import cell_len, set_cell_size

from hrl.report.samples import number, readable

PART_WIDTH = 12
"""Columns of the longest name of a part of the reward that is shown whole."""

JUDGEMENT = "acc"
"""The part that says whether an answer is right. It is often the same number as the part that it was judged by."""
_PARTS = 4
"""Parts of the reward that stay as long as any others; of a reward with more, those are left out first."""


@dataclass(frozen=True)
class Field:
    """A number of the step line.

    Attributes:
        label: What stands before it.
        metrics: Patterns of metric names, in which `*` stands for any text; the first that a step has metrics for is
            shown, as the mean of these. Or a function of the step's metrics.
        spec: Its format.
        unit: What stands behind it.
        drop: The fields with the highest number are left out first if the line is too long; those with 0 stay.
        optional: Whether it is left out in a step that has no such metric; otherwise a dash is shown.
        waits: Whether it is left out until it is not 0 for the first time.
    """

    label: str
    metrics: tuple[str, ...] | Callable[[Mapping[str, float]], float | None]
    spec: str
    unit: str = ""
    drop: int = 0
    optional: bool = False
    waits: bool = False

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the number of a step with these metrics; None if it has none."""
        if callable(self.metrics):
            return self.metrics(metrics)
        found = (fnmatch.filter(metrics, pattern) for pattern in self.metrics)
        values = [metrics[name] for name in next(filter(None, found), ())]
        return fmean(values) if values else None

    def text(self, value: float | None) -> str:
        """Return the field with its label and unit."""
        return f"{self.label} {number(value, self.spec)}{self.unit}".removeprefix(" ")


@dataclass(frozen=True)
class StepLine:
    """What the line of a step shows, for a kind of run.

    Attributes:
        fields: Numbers, in order.
        seconds: Label → the phases whose seconds are shown under it, besides those of the whole step.
        parts: Pattern of the metrics that are parts of the first field, with one `*` for the name; None for no parts.
    """

    fields: tuple[Field, ...]
    seconds: Mapping[str, tuple[str, ...]]
    parts: str | None = None

    def text(self, step: int, total_steps: int, metrics: Mapping[str, float], width: int) -> str:
        """Return the line of a run's first step; see `Layout`."""
        return Layout(self, total_steps).text(step, metrics, width)


_RATE = Field("", ("perf/throughput",), "5.0f", " tok/s", drop=5, optional=True)


def counter(step: int, total_steps: int) -> str:
    """Return `step  3/30`."""
    return f"step {step:{len(str(total_steps))}d}/{total_steps}"


class Layout:
    """The step lines of one run, which remember what earlier lines showed, so that columns stay where they are.

    Args:
        line: What they show.
        total_steps: Steps of the run; sets the width of the counter.
    """

    def __init__(self, line: StepLine, total_steps: int) -> None:
        self._line = line
        self._total_steps = total_steps
        self._parts: list[str] = []
        self._moved: set[str] = set()

    def text(self, step: int, metrics: Mapping[str, float], width: int, alarms: Sequence[str] = ()) -> str:
        """Return the line of a step, without the less important fields if it doesn't fit into `width` columns.

        Args:
            step: The step, from 1.
            metrics: The metrics of the step, under their names in `metrics.jsonl`.
            width: Columns.
            alarms: Alarms that are raised. They are marked with `!` behind the counter, and named where room is left.
        """
        first, *others = self._line.fields
        shown = [
            (0, counter(step, self._total_steps)),
            *self._shown([first], metrics),
            *self._parts_of(metrics),
            *self._shown(others, metrics),
            *self._seconds(metrics),
            *self._shown([_RATE], metrics),
        ]
        while _width(shown) > width and any(drop for drop, _ in shown):
            most = max(drop for drop, _ in shown)
            shown.pop(max(place for place, (drop, _) in enumerate(shown) if drop == most))
        texts = [text for _, text in shown]
        if not alarms:
            return "  ".join(texts)
        marked = f"{texts[0]}! {'  '.join(texts[1:])}"
        names = f"  ! {', '.join(alarms)}"
        return marked + names if cell_len(marked) + len(names) <= width else marked

    def _shown(self, fields: Sequence[Field], metrics: Mapping[str, float]) -> list[tuple[int, str]]:
        values = [(field, field.value(metrics)) for field in fields]
        self._moved |= {field.label for field, value in values if value}
        return [
            (field.drop, field.text(value))
            for field, value in values
            if not (field.optional and value is None) and (not field.waits or field.label in self._moved)
        ]

    def _parts_of(self, metrics: Mapping[str, float]) -> list[tuple[int, str]]:
        """Return the parts of the reward; one that has only ever been the whole, or another part, says nothing new."""
        if self._line.parts is None:
            return []
        before, after = self._line.parts.split("*")
        whole = self._line.fields[0].value(metrics)
        found = {name: value for name, value in metrics.items() if fnmatch.fnmatchcase(name, self._line.parts)}
        judgement = f"{before}{JUDGEMENT}{after}"
        of_others = [value for name, value in found.items() if name != judgement]
        self._parts += [
            name
            for name, value in found.items()
            if name not in self._parts and value != whole and not (name == judgement and value in of_others)
        ]
        return [
            (
                1 if place < _PARTS else 8,
                f"{_short(name.removeprefix(before).removesuffix(after))} {number(metrics.get(name), '5.2f')}",
            )
            for place, name in enumerate(self._parts)
        ]

    def _seconds(self, metrics: Mapping[str, float]) -> list[tuple[int, str]]:
        sums = {
            label: sum(metrics.get(f"timing_s/{name}", 0.0) for name in names)
            for label, names in self._line.seconds.items()
        }
        step = f"{number(metrics.get('timing_s/step'), '4.1f')}s"
        details = " ".join(f"{label} {seconds:4.1f}" for label, seconds in sums.items())
        return [(0, step), (2, details)]


def _width(fields: Sequence[tuple[int, str]]) -> int:
    return cell_len("  ".join(text for _, text in fields))


def _short(name: str) -> str:
    """Return a name of the user's as it can stand in a line, in at most `PART_WIDTH` columns."""
    shown = readable(name).replace("\n", r"\n")
    return shown if cell_len(shown) <= PART_WIDTH else f"{set_cell_size(shown, PART_WIDTH - 1)}…"
