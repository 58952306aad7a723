"""The named numbers that a reward is made of, as columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hrl.errors import HrlError
from hrl.protocol import DataProto
from hrl.trainer.ppo.samples import sample_sums

WHOLE_SCORE = ("reward", "seq_reward")
"""Names of what is trained on: the weighted sum of all that judges a response."""
OWN_SCORE = "score"
"""What the reward function returned as its score, or the reward model where there is no function; without penalties."""


class RewardPartError(HrlError, ValueError):
    """The configuration names a part that a reward does not have."""


def reward_values(batch: DataProto, name: str, key: str) -> Tensor:
    """Return the whole reward of every row's sample, or one part of it, float64 (B,).

    Args:
        batch: `token_level_scores`, `plain_scores`, `response_mask`; non-tensor `reward_parts`, `uid` and
            `sample_index`.
        name: One of `WHOLE_SCORE`, `OWN_SCORE`, what a reward function calls a part, `reward_model`, or, where
            it is logged, `overlong`.
        key: The configuration key that names it, for errors.

    Returns:
        0 for samples without a trained token, which need have no reward.

    Raises:
        RewardPartError: The reward of a sample has no such part, or it is no number; names the sample.
    """
    if name in WHOLE_SCORE:
        return sample_sums(batch, batch.batch["token_level_scores"].sum(-1).double())
    if name == OWN_SCORE:
        return batch.batch["plain_scores"].double()
    columns = batch.non_tensor_batch
    values = torch.zeros(len(batch), dtype=torch.float64)
    for row in batch.batch["response_mask"].bool().any(-1).nonzero()[:, 0].tolist():
        parts = columns["reward_parts"][row]
        value = parts.get(name)
        if not isinstance(value, int | float):
            sample = f"{columns['uid'][row]}/{columns['sample_index'][row]}"
            raise RewardPartError(
                f"{key} names {name!r}, which is {value!r} in the reward of sample {sample}; its parts are "
                f"{', '.join(sorted(parts)) or 'none'}. Return a dict with this number from the reward function"
            )
        values[row] = float(value)
    return values


def reward_columns(batch: DataProto, names: Sequence[str], key: str) -> Tensor:
    """Return several parts side by side, float64 (B, K); see `reward_values`."""
    return torch.stack([reward_values(batch, name, key) for name in names], dim=1)
