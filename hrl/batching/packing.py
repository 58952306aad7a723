"""Pack items into as few bins of a fixed capacity as a fast search finds: micro-batches under a token budget."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def pack(sizes: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Put every item, the largest first, into the fullest bin that still has room for it (best fit decreasing).

    The capacity is a hard cap. Best fit decreasing needs 11/9 of the fewest bins at worst, mostly the fewest.

    Args:
        sizes: (n,) size of every item, not negative.
        capacity: What the items of a bin may add up to.

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
    room: list[tuple[int, int]] = []  # (free capacity, bin), ascending: the first that is large enough fits best
    order = np.argsort(-size, kind="stable")
    for item, item_size in zip(order.tolist(), size[order].tolist(), strict=True):
        at = bisect_left(room, (item_size, 0))
        if at < len(room):
            free, b = room.pop(at)
        else:
            free, b = capacity, len(bins)
            bins.append([])
        bins[b].append(item)
        insort(room, (free - item_size, b))
    return bins
