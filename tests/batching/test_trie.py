"""The trie of token sequences, against all their beginnings."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hrl.batching.trie import Trie, common_length
from tests.models.trees import grow_tree, num_nodes

TREES = st.builds(grow_tree, st.integers(0, 10**6), st.integers(0, 12))


def in_common(one: np.ndarray, other: np.ndarray) -> int:
    """By the definition."""
    pairs = list(zip(one.tolist(), other.tolist(), strict=False))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))


@given(TREES, st.data())
def test_any_two_have_in_common_the_least_of_the_numbers_between_them(sequences, data):
    group = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(sequences), max_size=len(sequences))), int)
    trie = Trie.of(sequences, group)
    assert sorted(trie.order.tolist()) == list(range(len(sequences)))
    assert (np.diff(group[trie.order]) >= 0).all()
    for last in range(len(sequences)):
        for first in range(last):
            one, other = trie.order[first], trie.order[last]
            want = in_common(sequences[one], sequences[other]) if group[one] == group[other] else 0
            assert trie.shared[first + 1 : last + 1].min() == want


@given(TREES, st.data())
def test_any_part_of_the_rows_has_as_many_tokens_as_beginnings(sequences, data):
    trie = Trie.of(sequences)
    kept = data.draw(st.sets(st.integers(0, max(len(sequences) - 1, 0)), max_size=len(sequences)))
    places = [place for place in range(len(sequences)) if place in kept]
    parts = [sequences[at] for at in trie.order[places]]
    shared = [0] + [int(trie.shared[a + 1 : b + 1].min()) for a, b in pairwise(places)]
    assert sum(map(len, parts)) - sum(shared[: len(parts)]) == num_nodes(parts)


def test_the_shorter_of_two_that_begin_alike_comes_first():
    rows = [np.array(tokens) for tokens in ([1, 2, 3], [1, 2], [300, 2], [1, 2, 4], [1, 2])]
    trie = Trie.of(rows)
    place = np.argsort(trie.order)
    assert place[1] < place[4] < min(place[0], place[3])
    assert sorted(trie.shared.tolist()) == [0, 0, 2, 2, 2]


def test_what_two_rows_have_in_common_by_hand():
    assert common_length(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert common_length(np.array([1, 2]), np.array([1, 2, 3])) == 2
    assert common_length(np.array([2]), np.array([1])) == common_length(np.array([], int), np.array([1])) == 0
