"""Rescale the rewards of whole responses before they are trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from hrl.algos.registry import REWARD_SHAPER_NAMES, Registry, Traits


@dataclass
class RunningNormalizer:
    """Mean and spread of all rewards of the run so far.

    They are merged batch by batch (Chan, Golub, LeVeque 1979), so the order and size of batches don't matter. The state
    is three numbers, saved and restored with the run.

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
        """The unbiased standard deviation; 1 until two different rewards were seen."""
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
        """Return `rewards / std`, or `(rewards - mean) / std`, in any shape."""
        return (rewards - self.mean if centre else rewards) / self.std

    def state_dict(self) -> dict[str, float]:
        """Return the three numbers, for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "deviation": self.deviation}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a `state_dict`.

        Raises:
            ValueError: The state does not have exactly these three numbers.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"a reward normaliser's state holds {sorted(self.state_dict())}, got {sorted(state)}")
        self.count, self.mean, self.deviation = int(state["count"]), float(state["mean"]), float(state["deviation"])


def _clip(rewards: Tensor, seen: RunningNormalizer, limit: float) -> Tensor:
    """`clip(s, -limit, limit)` (Mnih et al. 2015, with limit 1)."""
    if limit <= 0:
        raise ValueError(f"the limit of rewards must be positive, got {limit}")
    return rewards.clamp(-limit, limit)


def _scale(rewards: Tensor, seen: RunningNormalizer, limit: float) -> Tensor:
    """`s / std`, by the spread of the whole run (arXiv:2005.12729, "reward scaling"); signs and zeros stay."""
    return seen.normalise(rewards)


def _standardise(rewards: Tensor, seen: RunningNormalizer, limit: float) -> Tensor:
    """`(s - mean) / std`, by mean and spread of the whole run: a reward model's arbitrary zero and unit drop out."""
    return seen.normalise(rewards, centre=True)


REWARD_SHAPERS: Registry[Callable[[Tensor, RunningNormalizer, float], Tensor], Traits] = Registry(
    "reward shaper",
    {"clip": _clip, "scale": _scale, "standardise": _standardise},
    table=REWARD_SHAPER_NAMES,
)
"""From rewards `(B,)`, the statistics of the run (these rewards included) and a limit to rewards `(B,)`."""
