"""What a run can be told through: a terminal for people, or lines of JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from hrl.report.rollout_log import Sample
from hrl.report.run_folder import RolloutKind


class Display(Protocol):
    """Shows one run while it goes on: `RunConsole` or `JsonConsole`.

    Attributes:
        total_steps: Steps of the run; 0 while they are not known.
    """

    total_steps: int

    def banner(self, title: str, facts: Mapping[str, str]) -> None:
        """Say what is about to run."""

    def note(self, text: str) -> None:
        """One remark about the run."""

    def step_phases(self, step: int) -> AbstractContextManager[None]:
        """Around a step."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a phase of a step; `name` is the timer's name."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a step that is over."""

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The `val/...` among `metrics`; nothing where there are none."""

    def rollouts(self, step: int, records: Sequence[Sample], kind: RolloutKind = "train") -> None:
        """Best, median and worst of the samples of a step, or of the validation after it."""

    def before_and_after(self, first: Sequence[Sample], last: Sequence[Sample], limit: int = 5) -> None:
        """What two validations answered to the same prompts, the largest changes first; at most `limit` pairs."""
