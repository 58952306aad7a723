"""What token sequences have in common at their beginnings, in a form that plans and packs are made from.

Sequences are put in an order in which those that begin alike are neighbours. The trie of their tokens then follows from
one number each, `shared`: how many tokens a sequence has in common with the one before it. A node of the trie is a
token that is counted once, so the trie of all has `sum(length - shared)` of them; and any two sequences have in common
the least of the numbers between them, so the same holds for any part of the sequences that is kept in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Trie:
    """An order of N sequences, and what neighbours share.

    Attributes:
        order: `(N,)` int64 numbers of the sequences; a sequence that another one begins with comes before it.
        shared: `(N,)` int64 tokens that each, in this order, has in common with the one before it; 0 for the first of
            all and the first of a group.
    """

    order: np.ndarray
    shared: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], group: np.ndarray | None = None) -> Trie:
        """Sort sequences, those of each group by themselves.

        Args:
            sequences: Tokens `(L_i,)`, all of one dtype.
            group: `(N,)` numbers; the groups follow each other in ascending order. None is one group.
        """
        # Any order of the tokens will do. That of their bytes is one, and Python compares bytes as fast as memory goes.
        names = [sequence.tobytes() for sequence in sequences]
        numbers = [0] * len(names) if group is None else group.tolist()
        order = sorted(range(len(names)), key=lambda at: (numbers[at], names[at]))
        shared = [0] * len(order)
        for place, (before, at) in enumerate(pairwise(order), start=1):
            if numbers[before] == numbers[at]:
                shared[place] = common_length(sequences[before], sequences[at])
        return cls(np.array(order, np.int64), np.array(shared, np.int64))


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many tokens two sequences have in common before they part."""
    length = min(len(one), len(other))
    parted = one[:length] != other[:length]
    first = int(parted.argmax()) if length else 0
    return first if length and parted[first] else length
