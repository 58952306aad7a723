"""Padded rows: nothing above the budget, every rank as many micro-batches, as little filling as there can be."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrl.batching.padded import MICRO_BATCH_TOKENS, cut_padded
from hrl.batching.planner import MicroBatchLimits, Planner, RowLengths, plan_forward, plan_pairs, plan_update
from tests.models.tiny import make_batch

BUDGET = 64
LENGTHS = st.lists(st.integers(1, BUDGET), min_size=1, max_size=40).map(np.array)


def cut(length, world=1, *, max_tokens=BUDGET, max_rows=None):
    return cut_padded(length, world, max_tokens=max_tokens, max_rows=max_rows)


@given(LENGTHS, st.integers(1, 5), st.none() | st.integers(1, 5))
def test_every_row_runs_once_under_the_limits_and_equals_meet(length, world, max_rows):
    ranks = cut(length, world, max_rows=max_rows)
    assert sorted(np.concatenate([rows for rank in ranks for rows in rank]).tolist()) == list(range(len(length)))
    assert len({len(rank) for rank in ranks}) == 1
    counts = [sum(map(len, rank)) for rank in ranks]
    assert max(counts) - min(counts) <= 1
    for rank in ranks:
        for rows in rank:
            assert len(rows) * length[rows].max(initial=0) <= BUDGET
            assert max_rows is None or len(rows) <= max_rows
            assert (np.diff(rows) > 0).all()
    # What one step of all ranks runs is no shorter than what the next one does.
    steps = [np.concatenate([length[rows] for rows in step]) for step in zip(*ranks, strict=True)]
    assert all(earlier.min() >= later.max() for earlier, later in itertools.pairwise(steps))


def splits(count):
    """All ways to cut so many rows into runs."""
    for inner in itertools.product([False, True], repeat=count - 1):
        ends = [*(place + 1 for place, is_end in enumerate(inner) if is_end), count]
        yield list(itertools.pairwise([0, *ends]))


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=8).map(np.array), st.none() | st.integers(1, 3))
def test_no_other_cut_of_sorted_rows_costs_less(length, max_rows):
    sorted_rows = np.sort(length)[::-1]
    fixed = MICRO_BATCH_TOKENS if max_rows is None else 10**6

    def cost(runs):
        return sum(fixed + (end - start) * sorted_rows[start] for start, end in runs)

    allowed = (
        runs
        for runs in splits(len(length))
        if all((end - start) * sorted_rows[start] <= BUDGET for start, end in runs)
        and all(end - start <= (max_rows or sys.maxsize) for start, end in runs)
    )
    (found,) = cut(length, max_rows=max_rows)
    found_cost = sum(fixed + len(rows) * length[rows].max() for rows in found)
    assert found_cost == min(map(cost, allowed))


def test_a_micro_batch_ends_where_filling_costs_more_than_another_one():
    """By hand: 4 rows of 1,000 tokens and 8 of 100; together they are 12,000 tokens, apart 4,800."""
    length = np.array([100] * 8 + [1000] * 4)
    (found,) = cut(length, max_tokens=100_000)
    assert [rows.tolist() for rows in found] == [[8, 9, 10, 11], [0, 1, 2, 3, 4, 5, 6, 7]]
    (few,) = cut(np.array([1000, 999, 900]), max_tokens=100_000)
    assert [rows.tolist() for rows in few] == [[0, 1, 2]]


def test_budgets_of_a_plan_count_the_padding():
    rows = RowLengths.of([10] * 6, [50, 1, 1, 1, 1, 1], [1] * 6, None, False, is_padded=True)
    plan = plan_forward(rows, 1, MicroBatchLimits(66, None, "a.key"))
    (mini_batch,) = plan.ranks[0].mini_batches
    held = plan.rows[0]
    assert [sorted(held[at] for at in picked) for picked in mini_batch.micro_batches] == [[0], [1, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match=r"row 0 alone has 60 tokens.*a.key"):
        plan_forward(rows, 1, MicroBatchLimits(59, None, "a.key"))


def test_pairs_stay_whole_and_are_padded_to_their_longer_answer():
    responses = [9, 1, 3, 3, 2, 8, 1, 1]
    rows = RowLengths.of([4] * 8, responses, responses, None, False, is_padded=True)
    plan = plan_pairs(rows, 1, MicroBatchLimits(2 * 2 * 13, None, "a.key"), mini_batch_pairs=4)
    (mini_batch,) = plan.ranks[0].mini_batches
    for picked in mini_batch.micro_batches:
        held = [plan.rows[0][at] for at in picked]
        assert len(held) * (4 + max(responses[row] for row in held)) <= 52
        assert sorted({row // 2 for row in held}) == sorted(row // 2 for row in held)[::2]
    with pytest.raises(ValueError, match="pair 0 have 26 tokens"):
        plan_pairs(rows, 1, MicroBatchLimits(25, None, "a.key"), mini_batch_pairs=4)


def test_counts_and_mini_batches_are_those_of_packed_rows():
    """How rows run changes no divisor of a loss and no number of steps."""
    batch = make_batch()
    limits = MicroBatchLimits(40, None, "a.key")
    plans = [
        Planner(share_prefix=True, packs_rows=packs).update(batch, 2, limits, mini_batch_rows=4, epochs=2)
        for packs in (True, False)
    ]
    counts = [
        [(step.num_tokens, step.num_sequences, step.num_groups) for step in plan.ranks[0].mini_batches]
        for plan in plans
    ]
    assert counts[0] == counts[1]
    assert not plans[1].ranks[0].is_tree
    skipped = np.arange(12) < 5
    plan = plan_update(
        Planner(True, packs_rows=False)._rows(batch), 2, limits, mini_batch_rows=12, epochs=1, skip=skipped
    )
    assert sorted(itertools.chain(*plan.rows)) == list(range(5, 12))


def test_padded_rows_share_no_prefix():
    with pytest.raises(ValueError, match="share no prefix"):
        RowLengths.of([1], [1], [1], None, True, is_padded=True)
