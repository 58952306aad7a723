"""How long a run still takes, from what its steps and validations have taken so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean

RECENT = 10
"""Steps whose mean stands for the coming ones."""


class Pace:
    """Estimates the remaining time of a run.

    Args:
        total_steps: Where the run ends.
        test_freq: Steps between validations; none if not positive.
        val_after_train: Whether the last step is followed by a validation in any case.
    """

    def __init__(self, total_steps: int, test_freq: int = -1, val_after_train: bool = False) -> None:
        self._total_steps = total_steps
        self._test_freq = test_freq
        self._val_after_train = val_after_train
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._validations: deque[float] = deque(maxlen=RECENT)
        self._step = 0
        self._is_first = True

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a validation."""
        if "timing_s/testing" in metrics:
            self._validations.append(metrics["timing_s/testing"])

    def step_done(self, step: int, metrics: Mapping[str, float], seconds: float | None = None) -> None:
        """Take the metrics of a step.

        Args:
            step: The step.
            metrics: Its metrics, with `timing_s/step`, and with `timing_s/testing` if it was validated.
            seconds: From the end of the step before to its end, if known; more than `timing_s/step` by what is saved
                and written between steps.
        """
        self.validated(metrics)
        own = metrics.get("timing_s/step", 0.0)
        if seconds is not None:
            own = max(own, seconds - metrics.get("timing_s/testing", 0.0))
        if len(self._steps) == 1 and self._is_first:
            self._steps.clear()  # the first step had to warm up: caches, compilers, kernels
            self._is_first = False
        self._steps.append(own)
        self._step = step

    def left_s(self) -> float | None:
        """Return the seconds that the steps after the last one will take, with their validations; None before any."""
        if not self._steps:
            return None
        coming = range(self._step + 1, self._total_steps + 1)
        tests = sum(self._is_tested(step) for step in coming)
        validation = fmean(self._validations) if self._validations else 0.0
        return len(coming) * fmean(self._steps) + tests * validation

    def _is_tested(self, step: int) -> bool:
        due = self._test_freq > 0 and step % self._test_freq == 0
        return due or (self._val_after_train and step == self._total_steps)


def duration(seconds: float) -> str:
    """Return `0:42`, `12:05` or `3:07:09`."""
    whole = max(round(seconds), 0)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
