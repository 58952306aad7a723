"""Distribute items to bins: balanced over a given number of bins, or packed into as few as a capacity allows.

A synchronous step waits for its slowest rank, and micro-batches have a token budget.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapreplace

import numpy as np

_MAX_ROUNDS = 24  # of swaps
_GOOD_ENOUGH = 1e-3  # overload of the heaviest bin at which the search ends
_MAX_CANDIDATES = 32  # items of a bin that a round considers; more finds no better swap and costs their square


def balance(costs: Sequence[float] | np.ndarray, k: int, equal_size: bool = False) -> list[list[int]]:
    """Put every item into one of `k` bins, making the bins' summed costs as equal as a fast search can.

    Longest processing time first (Graham 1969), then swaps between heavy and light bins. No bin is empty as long as
    there are `k` items. The result depends on the costs alone.

    Args:
        costs: (n,) cost of every item, not negative.
        k: Number of bins.
        equal_size: Let the bins' numbers of items differ by one at most (by none if `k` divides n).

    Returns:
        Per bin the positions of its items, ascending.

    Raises:
        ValueError: `k` is not positive, or a cost is negative or not finite.
    """
    cost = np.asarray(costs, dtype=np.float64)
    if k < 1:
        raise ValueError(f"cannot balance over {k} bins")
    wrong = np.flatnonzero(~np.isfinite(cost) | (cost < 0))
    if len(wrong):
        raise ValueError(f"item {wrong[0]} costs {cost[wrong[0]]}; a cost is finite and not negative")
    if k == 1:
        return [list(range(len(cost)))]
    members = _deal_in_rounds(cost, k) if equal_size else _as_rows(_longest_first(cost, k))
    return [row[row >= 0].tolist() for row in np.sort(_swap(cost, members, equal_size), axis=1)]


def longest_first(costs: Sequence[float] | np.ndarray, k: int) -> list[list[int]]:
    """Balance without swaps: a sixth of the work of `balance`, for many small calls.

    Returns:
        Per bin the positions of its items, the costliest first.
    """
    return _longest_first(np.asarray(costs, dtype=np.float64), k)


def _descending(cost: np.ndarray) -> np.ndarray:
    return np.argsort(-cost, kind="stable")


def _longest_first(cost: np.ndarray, k: int) -> list[list[int]]:
    """Give each item, the costliest first, to the lightest bin."""
    bins: list[list[int]] = [[] for _ in range(k)]
    # The number of items breaks ties, so that items that cost nothing fill empty bins too.
    heap = [(0.0, 0, b) for b in range(k)]
    order = _descending(cost)
    for item, item_cost in zip(order.tolist(), cost[order].tolist(), strict=True):
        load, size, b = heap[0]
        bins[b].append(item)
        heapreplace(heap, (load + item_cost, size + 1, b))
    return bins


def _as_rows(bins: list[list[int]]) -> np.ndarray:
    """Return the bins as (k, width) items, -1 where there is none."""
    width = max(map(len, bins))
    return np.array([items + [-1] * (width - len(items)) for items in bins])


def _deal_in_rounds(cost: np.ndarray, k: int) -> np.ndarray:
    """Deal the items out in rounds of `k`, in each round the costliest to the lightest bin. Returns as `_as_rows`."""
    order = _descending(cost)
    rounds = -(-len(cost) // k)
    members = np.full((k, rounds), -1, dtype=np.int64)
    load = np.zeros(k)
    for number in range(rounds):
        items = order[number * k : (number + 1) * k]
        lightest = np.argsort(load, kind="stable")[: len(items)]
        members[lightest, number] = items
        load[lightest] += cost[items]
    return members


def _swap(cost: np.ndarray, members: np.ndarray, equal_size: bool) -> np.ndarray:
    """Pair the heaviest bin with the lightest, the next with the next, and let every pair swap its best two items.

    An empty place (-1) counts as an item of cost 0; swapping with it moves an item. If a round doesn't make the
    heaviest bin lighter, the next round pairs it with the next lighter bin.
    """
    k = len(members)
    padded = np.append(cost, 0.0)
    bins = np.concatenate([members, np.full((k, 1), -1, dtype=np.int64)], axis=1) if not equal_size else members.copy()
    columns = np.unique(np.linspace(0, bins.shape[1] - 1, _MAX_CANDIDATES).astype(np.int64))
    load = padded[bins].sum(axis=1)
    target = _lower_bound(cost, k, equal_size) * (1 + _GOOD_ENOUGH)
    shift = 0
    for _ in range(_MAX_ROUNDS):
        by_load = _descending(load)
        heaviest = load[by_load[0]]
        if heaviest <= target or shift >= k // 2:
            break
        pairs = min(k // 2, int(np.count_nonzero(load > target)))  # bins below the target need no relief
        lightest = by_load[::-1][: k // 2]
        heavy, light = by_load[:pairs], np.concatenate([lightest[shift:], lightest[:shift]])[:pairs]
        _swap_pairs(padded, bins, load, heavy, light, columns, keep_sizes=equal_size)
        shift = shift + 1 if load.max() >= heaviest else 0
    return bins


def _lower_bound(cost: np.ndarray, k: int, equal_size: bool) -> float:
    """Return a lower bound on the heaviest bin: the mean, or the costliest item plus those it must share a bin with."""
    forced = max(len(cost) // k, 1) if equal_size else 1
    ascending = np.sort(cost)
    return max(cost.sum() / k, float(ascending[-1:].sum() + ascending[: forced - 1].sum()))


def _swap_pairs(
    padded: np.ndarray,
    bins: np.ndarray,
    load: np.ndarray,
    heavy: np.ndarray,
    light: np.ndarray,
    columns: np.ndarray,
    keep_sizes: bool,
) -> None:
    """Swap, in place and for all pairs at once, the two items whose difference in cost is closest to half the gap."""
    half_gap = (load[heavy] - load[light]) / 2
    given, taken = bins[heavy][:, columns], bins[light][:, columns]
    moved = padded[given][:, :, None] - padded[taken][:, None, :]  # (pairs, given, taken)
    miss = np.abs(moved - half_gap[:, None, None])
    if keep_sizes:  # a bin that is already one item short may not give another one away
        short = (bins[heavy] < 0).any(axis=1)
        miss[short[:, None, None] & (taken < 0)[:, None, :].repeat(given.shape[1], axis=1)] = np.inf
    best = miss.reshape(len(heavy), -1).argmin(axis=1)
    row = np.arange(len(heavy))
    i, j = np.divmod(best, taken.shape[1])
    better = miss[row, i, j] < half_gap * (1 - 1e-9)
    row, i, j = row[better], i[better], j[better]
    bins[heavy[row], columns[i]], bins[light[row], columns[j]] = taken[row, j], given[row, i]
    load[heavy[row]] -= moved[row, i, j]
    load[light[row]] += moved[row, i, j]


def pack(sizes: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Put every item, the largest first, into the fullest bin that still has room for it (best fit decreasing).

    The capacity is a hard limit. Best fit decreasing needs at worst 11/9 of the minimum number of bins, usually the
    minimum.

    Args:
        sizes: (n,) size of every item, not negative.
        capacity: Maximum total size of the items in a bin.

    Returns:
        Per bin the positions of its items, the largest first; no bin is empty.

    Raises:
        ValueError: An item alone exceeds the capacity; the item is named.
    """
    size = np.asarray(sizes)
    outside = np.flatnonzero((size < 0) | (size > capacity))
    if len(outside):
        raise ValueError(f"item {outside[0]} of size {size[outside[0]]} does not fit a capacity of {capacity}")
    bins: list[list[int]] = []
    # Ascending, free capacity times n plus bin, one number each: the first that is large enough fits best.
    room: list[int] = []
    unit = len(size)
    order = np.argsort(-size, kind="stable")
    for item, item_size in zip(order.tolist(), size[order].tolist(), strict=True):
        at = bisect_left(room, item_size * unit)
        if at < len(room):
            free = room.pop(at)
        else:
            free = capacity * unit + len(bins)
            bins.append([])
        bins[free % unit].append(item)
        insort(room, free - item_size * unit)
    return bins
