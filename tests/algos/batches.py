"""Random ragged batches in float64 for the tests of `hrl.algos`."""

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hrl.algos.advantages import AdvantageInput

ACTOR = SimpleNamespace(
    clip_ratio=0.2,
    clip_ratio_low=0.15,
    clip_ratio_high=0.3,
    clip_ratio_c=1.5,
    tau_pos=1.0,
    tau_neg=1.05,
    policy_loss=SimpleNamespace(
        clip_cov_ratio=0.3, clip_cov_lb=-5.0, clip_cov_ub=5.0, kl_cov_ratio=0.2, ppo_kl_coef=0.7, dro_beta=0.3
    ),
)
"""An actor configuration under which every policy loss has something to clip."""

MASK_WITH_EVERYTHING = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 1],
        [0, 0, 0, 0, 0, 1],
        [1, 1, 1, 0, 0, 0],
    ]
)
"""Eight rows: full, with tool tokens inside and in front, one token only, none at all."""


@dataclass(frozen=True)
class Batch:
    """Columns `(B, R)` of a random batch."""

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    values: Tensor
    returns: Tensor
    weights: Tensor
    mask: Tensor

    @classmethod
    def random(cls, seed: int = 0, mask: Tensor = MASK_WITH_EVERYTHING, dtype: torch.dtype = torch.float64) -> "Batch":
        generator = torch.Generator().manual_seed(seed)

        def normal() -> Tensor:
            return torch.randn(mask.shape, generator=generator, dtype=torch.float64).to(dtype)

        old = -normal().abs() - 0.05
        new = (old + 0.4 * normal()).clamp(max=-0.01)
        return cls(new, old, normal(), normal(), normal(), normal().abs() + 0.1, mask)

    def rows(self, index: Any) -> "Batch":
        """The same columns of some rows."""
        return Batch(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def without_trailing_padding(self) -> "Batch":
        """Columns behind the last trained token of any row cut off, one at least kept."""
        used = int(self.mask.any(dim=0).nonzero().max()) + 1 if self.mask.any() else 1
        return Batch(**{field.name: getattr(self, field.name)[:, :used] for field in fields(self)})


def advantage_input(mask: Tensor, group_ids: Tensor, seed: int = 0, **overrides: Any) -> AdvantageInput:
    """A batch with every column that any estimator reads."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(mask)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    old_log_probs = -normal(*mask.shape).abs()
    columns: dict[str, Any] = {
        "token_level_rewards": normal(*mask.shape) * mask,
        "response_mask": mask,
        "group_ids": group_ids,
        "values": normal(*mask.shape),
        "reward_baselines": normal(rows),
        "reward_parts": normal(rows, 3),
        "old_log_probs": old_log_probs,
        "sum_pi_squared": old_log_probs.exp().square() + 0.1,
        "turn_index": torch.arange(mask.shape[1]).div(2, rounding_mode="floor").expand(mask.shape).contiguous(),
    }
    return AdvantageInput(**columns | overrides)
