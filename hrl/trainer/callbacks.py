"""Watch a run, and stop it: moments of the loop that a caller may listen to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hrl.errors import HrlError


class CallbackError(HrlError, RuntimeError):
    """A callback raised; the message names callback and moment, and the exception is the cause."""


class RunState:
    """Where a run is, for its callbacks, which read it and may stop the run.

    Args:
        total_steps: Where the run ends.
        path: The run folder.
    """

    def __init__(self, total_steps: int, path: Path) -> None:
        self._total_steps, self._path = total_steps, path
        self._step = 0
        self._stop_reason: str | None = None

    @property
    def total_steps(self) -> int:
        """Where the run ends."""
        return self._total_steps

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._path

    @property
    def step(self) -> int:
        """Steps done, the running one included."""
        return self._step

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends before `total_steps`; None as long as nobody asked for it."""
        return self._stop_reason

    def stop(self, reason: str) -> None:
        """End the run after this step, as if it had been the last: it is validated and saved as configured."""
        self._stop_reason = self._stop_reason or reason

    def _advance(self, step: int) -> None:
        self._step, self._stop_reason = step, None

    def __repr__(self) -> str:
        return f"<RunState: step {self.step} of {self.total_steps} in {self.path}>"


class Callback:
    """Called at named moments of a run; override those that matter.

    A callback reads and may stop the run. What it is given is a view or a copy: changing it changes nothing. For
    changes of the algorithm there are the methods of the trainer. An exception of a callback ends the run, after the
    checkpoint of the step where the run writes checkpoints.
    """

    def on_step_end(self, run: RunState, metrics: Mapping[str, float]) -> None:
        """Called after each step, with the metrics that `metrics.jsonl` has of it."""

    def on_validation(self, run: RunState, metrics: Mapping[str, float]) -> None:
        """Called after each validation, with its `val/...` metrics."""

    def on_rollouts(self, run: RunState, samples: Sequence[Mapping[str, Any]]) -> None:
        """Called with the samples of each step, as in the folder `rollouts`; never in a run that samples nothing."""

    def on_checkpoint(self, run: RunState, folder: Path) -> None:
        """Called after each checkpoint, with its folder, which is whole.

        Checkpoints are written while the run goes on. A run with a callback that has this method waits for each.
        """

    @property
    def listens(self) -> bool:
        """Whether anybody is told."""
        return type(self) is not Callback

    @property
    def look_at_checkpoints(self) -> bool:
        """Whether `on_checkpoint` does anything."""
        return type(self).on_checkpoint is not Callback.on_checkpoint


class Callbacks(Callback):
    """Several callbacks as one, in order; they get views and copies.

    Raises:
        CallbackError: From every moment: a callback raised.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def on_step_end(self, run: RunState, metrics: Mapping[str, float]) -> None:
        self._call("on_step_end", run, lambda: MappingProxyType(dict(metrics)))

    def on_validation(self, run: RunState, metrics: Mapping[str, float]) -> None:
        of_validation = {name: value for name, value in metrics.items() if name.startswith("val/")}
        if of_validation:
            self._call("on_validation", run, lambda: MappingProxyType(dict(of_validation)))

    def on_rollouts(self, run: RunState, samples: Sequence[Mapping[str, Any]]) -> None:
        self._call("on_rollouts", run, lambda: tuple(copy.deepcopy(dict(sample)) for sample in samples))

    def on_checkpoint(self, run: RunState, folder: Path) -> None:
        self._call("on_checkpoint", run, lambda: folder)

    @property
    def listens(self) -> bool:
        """Whether there is any."""
        return bool(self._callbacks)

    @property
    def look_at_checkpoints(self) -> bool:
        """Whether one of them has `on_checkpoint`."""
        own = (getattr(type(callback), "on_checkpoint", None) for callback in self._callbacks)
        return any(method not in (None, Callback.on_checkpoint) for method in own)

    def _call(self, moment: str, run: RunState, given: Callable[[], Any]) -> None:
        for callback in self._callbacks:
            method = getattr(callback, moment, None)  # an object with some of the moments will do
            if method is None:
                continue
            try:
                method(run, given())
            except Exception as error:  # the user's own code, which may raise anything
                name = type(callback).__qualname__
                raise CallbackError(
                    f"the callback {name} raised {type(error).__name__} in {moment} after step {run.step}: {error}"
                ) from error
