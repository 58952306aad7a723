"""The environment in which the policy answers once."""

from __future__ import annotations

from hrl.environments.interface import Action, Environment, StepResult


class SingleTurn(Environment):
    """A prompt and one answer, whose worth the run's reward functions say. One that was cut off is truncated."""

    def step(self, action: Action) -> StepResult:
        return StepResult(done=True, truncated=action.finish_reason == "length")
