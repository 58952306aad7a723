import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrl.batching import pack


@given(st.lists(st.integers(0, 100), max_size=80), st.integers(100, 300))
def test_every_item_once_and_never_above_the_capacity(sizes, capacity):
    bins = pack(sizes, capacity)
    assert sorted(itertools.chain(*bins)) == list(range(len(sizes)))
    assert all(members and sum(sizes[i] for i in members) <= capacity for members in bins)


@given(st.lists(st.integers(1, 10), max_size=40), st.integers(10, 30))
def test_no_two_bins_could_be_one(sizes, capacity):
    filled = sorted(sum(sizes[i] for i in members) for members in pack(sizes, capacity))
    assert len(filled) < 2 or filled[0] + filled[1] > capacity


@pytest.mark.parametrize("seed", range(8))
def test_a_thousand_sequences_need_at_most_one_micro_batch_more_than_their_tokens_ask_for(seed):
    lengths = np.clip(np.random.default_rng(seed).lognormal(7.2, 0.9, 1024), 16, 8192).astype(int)
    assert len(pack(lengths, 16384)) <= -(-lengths.sum() // 16384) + 1


def test_the_fullest_bin_that_has_room_is_taken():
    assert pack([7, 6, 3, 4], 10) == [[0, 2], [1, 3]]


def test_an_item_above_the_capacity_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="item 1 of size 11"):
        pack([5, 11], 10)
