"""Pairs stay together, on one rank and in one micro-batch, within the budget, each once an epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrl.batching import plan_pairs

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


def columns(lengths):
    """Prompt and answer lengths (2N,) from (prompt, chosen, rejected)."""
    return [p for p, _, _ in lengths for _ in range(2)], [n for _, *both in lengths for n in both]


def micro_batches(plan):
    """Global rows of every micro-batch of every mini-batch, over all ranks."""
    for rows, rank in zip(plan.rows, plan.ranks, strict=True):
        for step in rank.mini_batches:
            yield from ([rows[i] for i in picked] for picked in step.micro_batches)


@given(
    LENGTHS,
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(27, 60),
    st.booleans(),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 3]),
)
def test_every_pair_runs_whole_and_once_within_the_limits(lengths, world, size, budget, share, max_pairs, seed):
    prompt, response = columns(lengths)
    budget += 0 if share else 9
    plan = plan_pairs(
        prompt,
        response,
        response,
        world_size=world,
        mini_batch_pairs=size,
        max_tokens=budget,
        max_pairs=max_pairs,
        share_prefix=share,
        shuffle_seed=seed,
    )
    seen = []
    for rows in micro_batches(plan):
        pairs = [row // 2 for row in rows[::2]]
        assert rows == [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
        tokens = sum((lengths[p][0] * (1 if share else 2)) + lengths[p][1] + lengths[p][2] for p in pairs)
        assert tokens <= budget and (max_pairs is None or len(pairs) <= max_pairs)
        seen += pairs
    assert sorted(seen) == list(range(len(lengths)))
    steps = plan.ranks[0].mini_batches
    assert sum(step.num_groups for step in steps) == len(lengths)
    assert sum(step.num_sequences for step in steps) == 2 * len(lengths)
    assert sum(step.num_tokens for step in steps) == sum(response)
    assert len(steps) == -(-len(lengths) // size)


def test_epochs_repeat_the_steps():
    plan = plan_pairs(
        [2] * 8, [3] * 8, [3] * 8, world_size=1, mini_batch_pairs=2, max_tokens=99, epochs=3, share_prefix=True
    )
    assert len(plan.ranks[0].mini_batches) == 6
    assert plan.rows == (tuple(range(8)),)


@pytest.mark.parametrize(
    ("prompt", "response", "trained", "message"),
    [
        ([2, 2, 2], [1, 1, 1], [1, 1, 1], "3 rows are no pairs"),
        ([2, 2, 2, 3], [1, 1, 1, 1], [1, 1, 1, 1], "pair 1 has two prompts of different length"),
        ([2, 2], [1, 1], [1, 0], "pair 0 has an answer without a trained token"),
        (
            [2, 2, 4, 4],
            [1, 1, 4, 5],
            [1, 1, 4, 5],
            "pair 1 have 13 tokens .* data.max_token_len_per_gpu to at least",
        ),
    ],
)
def test_what_is_no_pair_is_named(prompt, response, trained, message):
    with pytest.raises(ValueError, match=message):
        plan_pairs(prompt, response, trained, world_size=1, mini_batch_pairs=2, max_tokens=12, share_prefix=True)


def test_a_prompt_that_is_not_shared_counts_twice():
    lengths = ([4, 4], [4, 5], [4, 5])
    shared = {"world_size": 1, "mini_batch_pairs": 1}
    assert plan_pairs(*map(np.array, lengths), max_tokens=13, share_prefix=True, **shared).rows == ((0, 1),)
    with pytest.raises(ValueError, match="17 tokens"):
        plan_pairs(*lengths, max_tokens=13, share_prefix=False, **shared)
