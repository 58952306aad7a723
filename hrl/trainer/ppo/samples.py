"""The samples of a batch, where an episode of several rows is one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hrl.algos.episodes import episode_sums
from hrl.algos.masked import rows_with_tokens
from hrl.batching.episodes import episode_numbers
from hrl.protocol import DataProto


def sample_rows(batch: DataProto) -> Tensor:
    """Return which rows are the first of their sample, `(B,)` bool."""
    first, episodes = torch.ones(len(batch), dtype=torch.bool), episode_numbers(batch)
    if episodes is None:
        return first
    return torch.zeros_like(first).index_fill(
        0, torch.from_numpy(np.unique(episodes, return_index=True)[1]), value=True
    )


def counted_samples(batch: DataProto, has_tokens: Tensor | None = None) -> Tensor:
    """Return which rows stand for the samples that have a trained token, one for each, `(B,)` bool.

    Args:
        batch: With `response_mask (B, R)`.
        has_tokens: Its rows with a trained token, `(B,)` bool, where they are known already.
    """
    counted = rows_with_tokens(batch.batch["response_mask"]) if has_tokens is None else has_tokens
    episodes = episode_numbers(batch)
    if episodes is None:
        return counted
    rows = counted.numpy().nonzero()[0]
    first = rows[np.unique(episodes[rows], return_index=True)[1]]
    return torch.zeros_like(counted).index_fill(0, torch.from_numpy(first), value=True)


def sample_sums(batch: DataProto, row_values: Tensor) -> Tensor:
    """Return for each row the total of its sample, `(B,)`: what is given, or its sum over the rows of the episode."""
    episodes = episode_numbers(batch)
    if episodes is None:
        return row_values
    return episode_sums(row_values, torch.from_numpy(episodes)).to(row_values.dtype)


def count_episode_tokens(batch: DataProto) -> bool:
    """Add `episode_tokens (B,)`, the trained tokens of each row's episode, where an episode has several rows.

    Returns:
        Whether one has.
    """
    episodes = episode_numbers(batch)
    if episodes is None:
        return False
    trained = batch.batch["response_mask"].bool().sum(-1)
    batch.batch["episode_tokens"] = episode_sums(trained, torch.from_numpy(episodes)).long()
    return True
