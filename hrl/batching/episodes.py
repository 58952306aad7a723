"""Which rows of a batch are one episode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hrl.algos.numbering import number_groups

if TYPE_CHECKING:
    from hrl.protocol import DataProto


def episode_numbers(batch: DataProto) -> NDArray[np.int64] | None:
    """Number the episodes of a batch 0, 1, 2, ... in order of appearance, `(B,)`; None where each row is one.

    Args:
        batch: With non-tensor `uid` and `sample_index`, which the rows of an episode share, and `branch`, which tells
            them apart. Without `branch` every row is an episode.
    """
    others = batch.non_tensor_batch
    if "branch" not in others or not others["branch"].any():
        return None
    return number_groups(list(zip(others["uid"], others["sample_index"], strict=True)))
