"""An environment that asks again until an answer is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hrl.environments.interface import Action, Environment, StepResult
from hrl.errors import RefusedError
from hrl.reward.library.answer import Answer

_RIGHT = 1.0


class RetryError(RefusedError, ValueError):
    """Arguments of the environment make no sense."""


class RetryEnvironment(Environment):
    """The policy answers the row's question, is told when it is wrong, and may try again.

    An answer is worth what hrl's own scorer for the row's data source says, such as that of a dataset of reasoning-gym,
    and right from 1.0 on. The reward comes with the last answer: `discount` to the power of the wrong ones before it.

    Args:
        attempts: Answers that the policy may give.
        feedback: What it is told after a wrong one.
        discount: What each wrong answer leaves of the reward.

    Raises:
        RetryError: An argument makes no sense.
    """

    def __init__(
        self, attempts: int = 3, feedback: str = "That is not right. Try again.", discount: float = 1.0
    ) -> None:
        if attempts < 1 or not 0 <= discount <= 1:
            raise RetryError(
                f"environment.kwargs has attempts {attempts} and discount {discount}: at least one attempt, and a "
                "discount from 0 to 1"
            )
        self._attempts, self._feedback, self._discount = attempts, feedback, discount
        self._score = Answer()
        self._tried = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, Any]]:
        """Begin with the row's question."""
        self._row = row
        prompt: Sequence[Mapping[str, Any]] = row["prompt"]
        return prompt

    def step(self, action: Action) -> StepResult:
        """Score an answer."""
        model = self._row.get("reward_model") or {}
        reward = self._score(
            action.answer,
            model.get("ground_truth"),
            str(self._row.get("data_source", "")),
            self._row.get("extra_info") or {},
        )
        score = float(reward["score"])
        self._tried += 1
        is_right = score >= _RIGHT
        if not is_right and self._tried < self._attempts:
            return StepResult(self._feedback, reward=0.0, metrics={"right": 0.0})
        worth = score * self._discount ** (self._tried - 1)
        return StepResult(reward=worth, done=True, metrics={"right": float(is_right), "answers": float(self._tried)})
