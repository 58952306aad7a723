"""Combine and rescale rewards before they are trained on.

The rewards of a response are added up (:func:`combine_rewards`); then any of :data:`REWARD_SHAPERS` may follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hrl.algos.registry import REWARD_SHAPER_NAMES, Registry, Traits


def clip_rewards(rewards: Tensor, limit: float) -> Tensor:
    """Return rewards within `[-limit, limit]`, any shape.

    Raises:
        ValueError: The limit is not positive.
    """
    if limit <= 0:
        raise ValueError(f"the limit of rewards must be positive, got {limit}")
    return rewards.clamp(-limit, limit)


def combine_rewards(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Return the weighted sum of several rewards of each response, `(B,)` each.

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

    Mean and variance of all rewards so far are merged batch by batch (Chan, Golub, LeVeque 1979), so the order and size
    of batches don't matter. The state is three numbers, saved and restored with the run.

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
        """Take a batch of rewards `(B,)` into account."""
        if not rewards.numel():
            return
        values = rewards.detach().double()
        count, mean = values.numel(), float(values.mean())
        shift, merged = mean - self.mean, self.count + count
        self.deviation += float((values - mean).square().sum()) + shift**2 * self.count * count / merged
        self.mean += shift * count / merged
        self.count = merged

    def normalise(self, rewards: Tensor, *, centre: bool = False) -> Tensor:
        """`rewards / std`, or `(rewards - mean) / std`."""
        return (rewards - self.mean if centre else rewards) / self.std

    def state_dict(self) -> dict[str, float]:
        """Return the three numbers, for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "deviation": self.deviation}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a :meth:`state_dict`.

        Raises:
            ValueError: The state does not have exactly these three numbers.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"a reward normaliser's state holds {sorted(self.state_dict())}, got {sorted(state)}")
        self.count, self.mean, self.deviation = int(state["count"]), float(state["mean"]), float(state["deviation"])


def _clip(rewards: Tensor, seen: RunningNormalizer, limit: float) -> Tensor:
    """`clip(s, -limit, limit)` (Mnih et al. 2015, with limit 1)."""
    return clip_rewards(rewards, limit)


def _scale(rewards: Tensor, seen: RunningNormalizer, limit: float) -> Tensor:
    """`s / std`, by the spread of the whole run (arXiv:2005.12729, "reward scaling"); signs and zeros stay."""
    return seen.normalise(rewards)


def _standardise(rewards: Tensor, seen: RunningNormalizer, limit: float) -> Tensor:
    """`(s - mean) / std`, by mean and spread of the whole run: a reward model's arbitrary zero and unit drop out."""
    return seen.normalise(rewards, centre=True)


REWARD_SHAPERS: Registry[Callable[[Tensor, RunningNormalizer, float], Tensor], Traits] = Registry(
    "reward shaper",
    {
        "clip": _clip,
        "scale": _scale,
        "standardise": _standardise,
    },
    table=REWARD_SHAPER_NAMES,
)
"""From rewards `(B,)`, what was seen of them in the run (these included) and a limit to rewards `(B,)`."""
