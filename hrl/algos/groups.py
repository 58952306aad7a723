"""Groups of responses to one prompt: integer codes, statistics, spread.

Groups are defined by `uid`; their rows may have any number and order. A response without trained tokens is a row of its
group but is left out of the group's statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hrl.algos.numbering import number_groups
from hrl.algos.registry import Registry, Traits

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Bools = NDArray[np.bool_]


def group_codes(uids: Sequence[Hashable] | np.ndarray | Tensor) -> Tensor:
    """Number the groups 0, 1, 2, ... in order of appearance. `(B,) -> (B,)` int64."""
    return torch.from_numpy(number_groups(uids.numpy(force=True) if isinstance(uids, Tensor) else uids))


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each row's group, one entry per row `(B,)`, over the rows that count.

    Attributes:
        size: Rows of the group that count.
        mean: Mean score; 0 if no row counts.
        std: Unbiased standard deviation; 0 for groups of one.
        has_spread: At least two scores of the group differ.
    """

    size: Tensor
    mean: Tensor
    std: Tensor
    has_spread: Tensor


def group_sum(row_values: Tensor, group_ids: Tensor) -> Tensor:
    """Return each row's group total `(B,)` of `row_values (B,)`, in float64."""
    return torch.bincount(group_ids, weights=row_values).index_select(0, group_ids)


def group_statistics(scores: Tensor, group_ids: Tensor, counted: Tensor) -> GroupStatistics:
    """Return statistics of the scores within each group.

    Args:
        scores: `(B,)`.
        group_ids: Integer codes from 0 up `(B,)`, as of `group_codes`.
        counted: `(B,)` bool, the rows that take part.

    Returns:
        Statistics per row, in float64.
    """
    if scores.shape != group_ids.shape:
        raise ValueError(f"scores have shape {tuple(scores.shape)}, group ids {tuple(group_ids.shape)}")
    values, ids, counts = _columns(scores, group_ids, counted)
    exact = np.where(counts, values, 0.0)
    size = np.bincount(ids, counts)
    mean = np.bincount(ids, exact) / np.maximum(size, 1)
    deviation = np.where(counts, exact - mean.take(ids), 0.0)
    std = np.sqrt(np.bincount(ids, deviation * deviation) / np.maximum(size - 1, 1))
    # Spread is a difference of scores, not a standard deviation above 0: the mean of equal rewards of 0.1 is rounded,
    # and dividing by that error would train on noise.
    lowest, highest = _extremes(values, ids, counts)
    of_groups = (size, mean, std, highest > lowest)
    return GroupStatistics(*(torch.from_numpy(of_group.take(ids)).to(scores.device) for of_group in of_groups))


def _columns(scores: Tensor, group_ids: Tensor, counted: Tensor) -> tuple[Floats, Codes, Bools]:
    """Return the columns as arrays: with few rows a call of NumPy takes a third of the time of one of torch."""
    return scores.double().numpy(force=True), group_ids.numpy(force=True), counted.numpy(force=True)


def _extremes(scores: Floats, ids: Codes, counted: Bools) -> tuple[Floats, Floats]:
    """Return the lowest and the highest counted score of each group, `(G,)` each.

    They are infinity and minus infinity in a group where nothing counts.
    """
    groups = int(ids.max(initial=-1)) + 1
    lowest, highest = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(lowest, ids, np.where(counted, scores, np.inf))
    np.maximum.at(highest, ids, np.where(counted, scores, -np.inf))
    return lowest, highest


def count_groups_without_spread(scores: Tensor, group_ids: Tensor, counted: Tensor) -> int:
    """Count the groups without a training signal: all counted scores are equal, or fewer than two count."""
    stats = group_statistics(scores, group_ids, counted)
    return int(group_ids[~stats.has_spread].unique().numel())


def groups_with_spread(scores: Tensor, group_ids: Tensor, counted: Tensor) -> Tensor:
    """Return the rows of the groups in which at least two counted scores differ.

    DAPO's dynamic sampling, `0 < |{correct answers}| < G` (arXiv:2503.14476, equation 11), for scores of any kind.
    """
    return group_statistics(scores, group_ids, counted).has_spread


GROUP_FILTERS: Registry[Callable[[Tensor, Tensor, Tensor], Tensor], Traits] = Registry(
    "group filter", {"spread": groups_with_spread}
)
"""Which groups are worth training on: from scores, group codes and counted rows `(B,)` to the rows to keep `(B,)`
bool. A filter keeps or drops whole groups."""


def filter_groups(name: str, scores: Tensor, group_ids: Tensor, counted: Tensor) -> Tensor:
    """Return the rows of the groups that a filter keeps.

    Args:
        name: A key of `GROUP_FILTERS`.
        scores: `(B,)`.
        group_ids: Integer codes from 0 up `(B,)`, as of `group_codes`.
        counted: `(B,)` bool, the rows that take part.

    Returns:
        `(B,)` bool.

    Raises:
        ValueError: Unknown name; a filter that keeps a part of a group.
    """
    kept = GROUP_FILTERS.find(name)(scores, group_ids, counted)
    torn = kept & (group_sum((~kept).double(), group_ids) > 0)
    if torn.any():
        raise ValueError(f"group filter {name!r} keeps row {int(torn.nonzero()[0])} and drops others of its group")
    return kept


def share_of_best(scores: Tensor, group_ids: Tensor, counted: Tensor) -> Tensor:
    """Return 1 for the row with its group's highest score, shared by those that tie for it; 0 for all others.

    Args:
        scores: `(B,)`.
        group_ids: Integer codes from 0 up `(B,)`, as of `group_codes`.
        counted: `(B,)` bool, the rows that may be chosen.

    Returns:
        `(B,)` float64, 0 in groups without spread.
    """
    values, ids, counts = _columns(scores, group_ids, counted)
    lowest, highest = _extremes(values, ids, counts)
    best = counts & (values == highest.take(ids)) & (highest > lowest).take(ids)
    shares = best / np.maximum(np.bincount(ids, best), 1).take(ids)
    return torch.from_numpy(shares).to(scores.device)


def best_against_worst(scores: Tensor, group_ids: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return a pair of rows for every group that has spread: those with the highest and the lowest score.

    Args:
        scores: `(B,)`.
        group_ids: Integer codes from 0 up `(B,)`, as of `group_codes`.
        counted: `(B,)` bool, the rows that may be chosen.

    Returns:
        Row numbers of the best and of the worst, `(N,)` int64 each, in the order of the groups. Among equal scores the
        first row is taken.
    """
    values, ids, counts = _columns(scores, group_ids, counted)
    lowest, highest = _extremes(values, ids, counts)

    def first_row_at(extreme: Floats) -> Codes:
        rows = np.flatnonzero(counts & (values == extreme.take(ids)))
        first = np.full(len(extreme), len(values))
        np.minimum.at(first, ids[rows], rows)
        return first

    has_pair = highest > lowest
    best, worst = (first_row_at(extreme)[has_pair] for extreme in (highest, lowest))
    return torch.from_numpy(best).to(scores.device), torch.from_numpy(worst).to(scores.device)
