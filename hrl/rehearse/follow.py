"""What a run of a rehearsal says as it goes on, as parts with their seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hrl.rehearse.child import Child
from hrl.rehearse.parts import Rehearsal, RehearsalError

_SHOWN_S = 0.05
_LAST_OF_THE_START = ("giving the engine the weights", "taking the weights to start from")
"""Stages at whose end a run is up: of runs that sample, and of others."""
_OF_THE_END = ("ending the processes", "ending Ray", "writing the report")
"""Stages of every end, also of one after an error, which was before them."""


class Follower:
    """Takes what a run says into the table, as parts with their seconds.

    Args:
        found: Takes them.
        start: Name of the part up to the first step.
    """

    def __init__(self, found: Rehearsal, start: str) -> None:
        self._found, self._start = found, start
        self._began = time.monotonic()
        self._stages: dict[str, float] = {}
        self._stage = "the beginning"
        self._is_up = False
        self.steps: list[int] = []

    @property
    def phase(self) -> str:
        """What goes on now."""
        if not self._is_up:
            return f"{self._start}: {self._stage}"
        return self._stage if self._stages else f"step {self.steps[-1] + 1}" if self.steps else "the first step"

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        what = event["event"]
        if what == "stage" and "now" not in event:
            self._take_stage(event)
        elif what == "validation":
            self._up()
            scores = {name: value for name, value in event.items() if name.startswith("val/") and "mean" in name}
            self._end(f"validation after step {event['step']}", _numbers(scores))
        elif what == "step":
            seconds = {name.removeprefix("timing_s/"): value for name, value in event.items() if "timing_s/" in name}
            self._up(seconds.pop("step", 0.0))
            self.steps.append(event["step"])
            self._end(f"step {event['step']}", _in_seconds(seconds))

    def _take_stage(self, event: Mapping[str, Any]) -> None:
        title = event["title"]
        if title in _OF_THE_END:
            self._found.show(title)
        elif "seconds" not in event:
            self._stage = title
            self._found.show(self.phase)
            self._stages |= {title: 0.0} if self._is_up else {}
        elif self._is_up:
            self._stages = {}
        else:
            self._stages[title] = event["seconds"]
            if title in _LAST_OF_THE_START:
                self._up()

    def _up(self, ago_s: float = 0.0) -> None:
        """Note that everything has started, so many seconds ago."""
        if not self._is_up:
            self._is_up = True
            now = time.monotonic() - ago_s
            self._found.add(self._start, max(0.0, now - self._began), _in_seconds(self._stages))
            self._began, self._stages = max(now, self._began), {}

    def _end(self, name: str, detail: str = "") -> None:
        self._found.add(name, time.monotonic() - self._began, detail)
        self._began, self._stages = time.monotonic(), {}

    def ended(self) -> None:
        """Note that the run has ended in order."""
        self._end("end of the run")

    def failed(self, child: Child, why: str) -> RehearsalError:
        """Note that the present phase failed; return what to raise."""
        said, phase = child.last_words(), self.phase
        detail = f"{why}\n{said}" if said else why
        self._found.add(phase, time.monotonic() - self._began, detail, passed=False)
        self._found.status = self._found.status or 1
        return RehearsalError(phase)


def _in_seconds(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if value >= _SHOWN_S)


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in metrics.items())
