"""The environment in which the policy answers once."""

from __future__ import annotations

from hrl.environments.interface import Action, Environment, StepResult


class SingleTurn(Environment):
    """A prompt and one answer, whose worth the run's reward functions say."""

    def step(self, action: Action) -> StepResult:
        return StepResult(done=True)
