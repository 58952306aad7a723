"""What happens to a run's rewards between the judges and the learner."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hrl.algos.reward_shaping import REWARD_SHAPERS, RunningNormalizer


class RewardShaping:
    """Members of `REWARD_SHAPERS` one after the other, each with what it has seen in the run.

    Args:
        limits: Names of the members in their order, with the limit of those that have one.

    Raises:
        ValueError: No member has that name.
    """

    def __init__(self, limits: Mapping[str, float | None]) -> None:
        unknown = sorted(limits.keys() - REWARD_SHAPERS.keys())
        if unknown:
            raise ValueError(f"no reward shaping is called {unknown[0]!r}; there is {', '.join(REWARD_SHAPERS)}")
        self._limits = dict(limits)
        self._seen = {name: RunningNormalizer() for name in limits}

    def __call__(self, scores: Tensor, kept: Tensor) -> Tensor:
        """Shapes the scores of a step.

        Args:
            scores: Float (B,).
            kept: Bool (B,); other rows count in no statistics.

        Returns:
            Float (B,), 0 where not kept.
        """
        for name, limit in self._limits.items():
            seen = self._seen[name]
            seen.update(scores[kept])
            scores = REWARD_SHAPERS[name](scores, seen, float("inf") if limit is None else limit)
        return torch.where(kept, scores, 0.0)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return what each member has seen, for a checkpoint."""
        return {name: seen.state_dict() for name, seen in self._seen.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Goes on from what `state_dict` gave; members that the checkpoint doesn't know begin anew."""
        for name in self._seen.keys() & state.keys():
            self._seen[name].load_state_dict(state[name])
