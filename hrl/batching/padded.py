"""Micro-batches of padded rows: rows of about one length together, so that little of what is computed is filling."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np

# What a micro-batch costs beside its tokens, in tokens. With weights of 7B parameters over 8 GPUs: they are gathered
# twice (2 x 15 GB at 400 GB/s), and some 6,000 kernels are started, 0.1 s together; a token takes 0.1 ms.
MICRO_BATCH_TOKENS = 1024


def cut_padded(length: np.ndarray, world_size: int, *, max_tokens: int, max_rows: int | None) -> list[list[np.ndarray]]:
    """Give every row to a micro-batch of one rank, whose rows are padded to the longest of them.

    Rows are sorted by length, and of neighbours every rank gets one. So all ranks run micro-batches of about one length
    at the same time, and as many rows give or take one. Where the sorted rows are cut is found by dynamic programming:
    the least tokens with filling, and `MICRO_BATCH_TOKENS` for each micro-batch; with a number of rows given, the
    fewest micro-batches, and of those the least tokens.

    Args:
        length: (n,) tokens of every row, none more than `max_tokens`.
        world_size: Number of ranks.
        max_tokens: Of a micro-batch, with filling.
        max_rows: Of a micro-batch; None for as many as it can hold.

    Returns:
        Per rank and micro-batch the positions of rows, ascending; longest first. Every rank has as many micro-batches,
        of which the last may be empty.
    """
    order = np.argsort(-length, kind="stable")
    longest = length[order[::world_size]]  # of the ranks' rows with the same place
    fixed = MICRO_BATCH_TOKENS if max_rows is None else int(length.sum()) + 1
    ends = _cut(longest, max_tokens, sys.maxsize if max_rows is None else max_rows, fixed)
    return [
        [
            np.sort(order[start * world_size + rank : end * world_size : world_size])
            for start, end in pairwise([0, *ends])
        ]
        for rank in range(world_size)
    ]


def _cut(length: np.ndarray, max_tokens: int, max_rows: int, fixed: int) -> list[int]:
    """Return where to cut rows that are sorted, the longest first: the end of each run."""
    count = len(length)
    cost, start = np.full(count + 1, np.inf), np.zeros(count + 1, np.int64)
    cost[0] = 0.0
    for first, width in enumerate(length.tolist()):
        most = min(count - first, max_rows, max_tokens // max(width, 1))
        with_run = cost[first] + fixed + np.arange(1, most + 1) * width
        ends = slice(first + 1, first + 1 + most)
        is_better = with_run < cost[ends]
        cost[ends][is_better] = with_run[is_better]
        start[ends][is_better] = first
    ends_found, at = [], count
    while at:
        ends_found.append(at)
        at = int(start[at])
    return ends_found[::-1]
