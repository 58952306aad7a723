"""Numbers for the groups of a batch. Needs no torch, so that plans are made without it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray


def number_groups(uids: Sequence[Hashable] | np.ndarray) -> NDArray[np.int64]:
    """Number the groups 0, 1, 2, ... in order of appearance. `(B,) -> (B,)`."""
    if not isinstance(uids, np.ndarray):
        uids = np.fromiter(uids, dtype=object, count=len(uids))
    # Rows of a group are mostly neighbours, so that only the first of each run is looked up.
    begins = np.ones(len(uids), dtype=bool)
    begins[1:] = uids[1:] != uids[:-1]
    runs = uids[begins].tolist()
    numbers: NDArray[np.int64] = begins.cumsum() - 1
    if len(set(runs)) == len(runs):
        return numbers
    first_run: dict[Hashable, int] = {}
    of_run = np.fromiter(map(first_run.setdefault, runs, count()), dtype=np.int64)
    codes = (of_run == np.arange(len(of_run))).cumsum() - 1
    return codes[of_run].take(numbers)
