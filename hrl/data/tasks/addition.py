"""One-digit addition: the smallest task on which a 135M model visibly learns.

All 81 sums of 1..9 and 1..9. Sixteen are held out for validation, always with their mirror image: whoever has trained
on 5 + 7 has seen 7 + 5, so eight pairs of different numbers are held out in both orders.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from hrl.data.errors import DatasetError

DATA_SOURCE = "bundled/addition"
SPLITS = ("train", "val", "all")
_HELD_OUT_PAIRS = 8
_HELD_OUT_SEED = 20_240


def held_out() -> frozenset[tuple[int, int]]:
    """The 16 sums (a, b) that are never trained on."""
    pairs = list(combinations(range(1, 10), 2))
    chosen = random.Random(_HELD_OUT_SEED).sample(pairs, _HELD_OUT_PAIRS)
    return frozenset(order for a, b in chosen for order in ((a, b), (b, a)))


def rows(split: str) -> Iterator[dict[str, Any]]:
    """The rows of a split: `train` (65), `val` (16) or `all` (81).

    Raises:
        DatasetError: no such split.
    """
    if split not in SPLITS:
        raise DatasetError(f"unknown split {split!r} of bundled:addition; there are: {', '.join(SPLITS)}")
    kept_back = held_out()
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    chosen = [s for s in sums if split == "all" or (s in kept_back) == (split == "val")]
    return (_row(a, b, index) for index, (a, b) in enumerate(chosen))


def _row(a: int, b: int, index: int) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the final number only."}],
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"index": index},
    }
