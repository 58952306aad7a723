"""How long the rows of a batch are: the one place of the driver that reads it from the mask, never from token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hrl.protocol import DataProto


def lengths_of(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Tokens of prompt and response, int64 (B,) each.

    Args:
        batch: `attention_mask (B, P+R)` and `responses (B, R)`.
    """
    mask = batch.batch["attention_mask"]
    prompt_width = mask.shape[-1] - batch.batch["responses"].shape[-1]
    return mask[:, :prompt_width].sum(-1), mask[:, prompt_width:].sum(-1)
