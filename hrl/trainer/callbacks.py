"""Watch a run, and stop it: moments of the loop that a caller may listen to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass
class RunState:
    """Where a run is, for its callbacks.

    Attributes:
        total_steps: Where the run ends.
        path: The run folder.
        step: Steps done, the running one included.
        stop_reason: Why the run ends before `total_steps`; None as long as nobody asked for it.
    """

    total_steps: int
    path: Path
    step: int = 0
    stop_reason: str | None = field(default=None, init=False)

    def stop(self, reason: str) -> None:
        """End the run after this step, as if it had been the last: it is validated and saved as configured."""
        self.stop_reason = reason


class Callback:
    """Called at named moments of a run; override those that matter.

    A callback reads and may stop the run. What it is given is a view or a copy: changing it changes nothing. For
    changes of the algorithm there are the methods of the trainer. An exception of a callback ends the run.
    """

    def on_step_end(self, run: RunState, metrics: Mapping[str, float]) -> None:
        """Called after each step, with the metrics that `metrics.jsonl` has of it."""

    def on_validation(self, run: RunState, metrics: Mapping[str, float]) -> None:
        """Called after each validation, with its `val/...` metrics."""

    def on_rollouts(self, run: RunState, samples: Sequence[Mapping[str, Any]]) -> None:
        """Called with the samples of each step, as in the folder `rollouts`; never in a run that samples nothing."""

    def on_checkpoint(self, run: RunState, folder: Path) -> None:
        """Called after each checkpoint, with its folder."""


class Callbacks(Callback):
    """Several callbacks as one, in order; they get views that can't be changed."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def on_step_end(self, run: RunState, metrics: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            callback.on_step_end(run, MappingProxyType(metrics))

    def on_validation(self, run: RunState, metrics: Mapping[str, float]) -> None:
        of_validation = {name: value for name, value in metrics.items() if name.startswith("val/")}
        for callback in self._callbacks if of_validation else ():
            callback.on_validation(run, MappingProxyType(of_validation))

    def on_rollouts(self, run: RunState, samples: Sequence[Mapping[str, Any]]) -> None:
        for callback in self._callbacks:
            callback.on_rollouts(run, tuple(map(MappingProxyType, samples)))

    def on_checkpoint(self, run: RunState, folder: Path) -> None:
        for callback in self._callbacks:
            callback.on_checkpoint(run, folder)
