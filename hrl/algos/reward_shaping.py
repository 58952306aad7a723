"""What may happen to rewards between the judge and the learner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def clip_rewards(rewards: Tensor, limit: float) -> Tensor:
    """Rewards within ``[-limit, limit]``, any shape.

    Raises:
        ValueError: The limit is not positive.
    """
    if limit <= 0:
        raise ValueError(f"the limit of rewards must be positive, got {limit}")
    return rewards.clamp(-limit, limit)


def combine_rewards(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Weighted sum of several judges' rewards, each ``(B,)``.

    Raises:
        ValueError: Parts and weights don't have the same names, or there are none.
    """
    if not parts or parts.keys() != weights.keys():
        raise ValueError(
            f"rewards {sorted(parts)} and weights {sorted(weights)} must have the same names, one at least"
        )
    return torch.stack([weights[name] * part for name, part in parts.items()]).sum(dim=0)


@dataclass
class RunningNormalizer:
    """Divides rewards by the spread seen so far in the run.

    Mean and variance over all rewards up to now, merged batch by batch (Chan, Golub, LeVeque 1979), so that the order
    and the size of batches don't matter. All state is three numbers; save and restore them with the run.

    Attributes:
        count: Rewards seen.
        mean: Their mean.
        deviation: Their summed squared deviation from it.
    """

    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 before two rewards were seen or while all were equal."""
        variance = self.deviation / (self.count - 1) if self.count > 1 else 0.0
        return math.sqrt(variance) if variance > 0 else 1.0

    def update(self, rewards: Tensor) -> None:
        """Take a batch of rewards ``(B,)`` into account."""
        if not rewards.numel():
            return
        values = rewards.detach().double()
        count, mean = values.numel(), float(values.mean())
        shift, merged = mean - self.mean, self.count + count
        self.deviation += float((values - mean).square().sum()) + shift**2 * self.count * count / merged
        self.mean += shift * count / merged
        self.count = merged

    def normalise(self, rewards: Tensor, *, centre: bool = False) -> Tensor:
        """``rewards / std``, or ``(rewards - mean) / std``."""
        return (rewards - self.mean if centre else rewards) / self.std
