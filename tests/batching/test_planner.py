import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.batching import planner
from hrl.batching.plan import BatchPlan, MiniBatchPlan, RankPlan
from hrl.batching.planner import MicroBatchLimits, RowLengths

BUDGET = 64


def plan_forward(prompt_lens, response_lens, *, world_size, limits, group_ids=None, share_prefix=False):
    rows = RowLengths.of(prompt_lens, response_lens, response_lens, group_ids, share_prefix)
    return planner.plan_forward(rows, world_size, limits)


def plan_update(
    prompt_lens, response_lens, trained_tokens, *, world_size, limits, group_ids=None, share_prefix=False, **cuts
) -> BatchPlan:
    rows = RowLengths.of(prompt_lens, response_lens, trained_tokens, group_ids, share_prefix)
    return planner.plan_update(rows, world_size, limits, **cuts)


def plan_pairs(prompt_lens, response_lens, trained_tokens, *, world_size, limits, share_prefix=False, **cuts):
    rows = RowLengths.of(prompt_lens, response_lens, trained_tokens, None, share_prefix)
    return planner.plan_pairs(rows, world_size, limits, **cuts)


def limits(max_tokens: int | None, max_rows: int | None = None) -> MicroBatchLimits:
    return MicroBatchLimits(max_tokens, max_rows, "a.key")


@st.composite
def batches(draw):
    """Rows in groups of any size, each group with one prompt length; no row exceeds the budget by itself."""
    group_sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=10))
    prompts, responses, groups = [], [], []
    for number, size in enumerate(group_sizes):
        prompt = draw(st.integers(1, 20))
        prompts += [prompt] * size
        responses += draw(st.lists(st.integers(0, BUDGET - 20), min_size=size, max_size=size))
        groups += [f"uid-{number}"] * size
    return np.array(prompts), np.array(responses), np.array(groups, dtype=object)


def micro_batches(plan, step, rank):
    """The micro-batches of one rank in one mini-batch, as rows of the whole batch."""
    return [[plan.rows[rank][p] for p in mb] for mb in plan.ranks[rank].mini_batches[step].micro_batches]


def rows_run(plan, step):
    return [row for rank in range(len(plan.ranks)) for mb in micro_batches(plan, step, rank) for row in mb]


def tokens_run(rows, prompts, responses, groups, share_prefix):
    shared = {groups[row]: prompts[row] for row in rows}
    of_prompts = sum(shared.values()) if share_prefix else sum(prompts[row] for row in rows)
    return of_prompts + sum(responses[row] for row in rows)


def assert_one_shape_on_all_ranks(plan):
    for mini_batches in zip(*(rank.mini_batches for rank in plan.ranks), strict=True):
        assert len({len(mb.micro_batches) for mb in mini_batches}) == 1
        assert len({(mb.num_tokens, mb.num_sequences, mb.num_groups) for mb in mini_batches}) == 1


@given(batches(), st.integers(1, 6), st.booleans())
def test_a_forward_runs_every_row_once_under_the_cap_in_equal_steps(batch, world_size, share_prefix):
    prompts, responses, groups = batch
    plan = plan_forward(
        prompts, responses, world_size=world_size, limits=limits(BUDGET), group_ids=groups, share_prefix=share_prefix
    )
    assert sorted(rows_run(plan, 0)) == list(range(len(prompts)))
    assert sorted(itertools.chain(*plan.rows)) == list(range(len(prompts)))
    assert_one_shape_on_all_ranks(plan)
    assert all(len(rank.mini_batches) == 1 for rank in plan.ranks)
    for rank in range(world_size):
        for rows in micro_batches(plan, 0, rank):
            assert tokens_run(rows, prompts, responses, groups, share_prefix) <= BUDGET
            runs = [key for key, _ in itertools.groupby(groups[row] for row in rows)]
            assert len(runs) == len(set(runs)), "rows of a group follow each other"


@given(batches(), st.integers(1, 5), st.integers(1, 7), st.booleans())
def test_a_fixed_number_of_rows_is_never_exceeded_and_the_steps_are_as_few_as_can_be(batch, world, max_rows, share):
    prompts, responses, groups = batch
    plan = plan_forward(
        prompts, responses, world_size=world, limits=limits(None, max_rows), group_ids=groups, share_prefix=share
    )
    assert sorted(rows_run(plan, 0)) == list(range(len(prompts)))
    steps = {len(rank.mini_batches[0].micro_batches) for rank in plan.ranks}
    assert steps == {math.ceil(math.ceil(len(prompts) / world) / max_rows)}
    assert all(len(mb) <= max_rows for rank in plan.ranks for mb in rank.mini_batches[0].micro_batches)


@given(
    batches(), st.integers(1, 4), st.integers(1, 30), st.integers(1, 3), st.randoms(use_true_random=False), st.data()
)
def test_an_update_runs_each_epochs_rows_once_and_counts_them_like_brute_force(
    batch, world, size, epochs, random, data
):
    prompts, responses, groups = batch
    skip = np.array([random.random() < 0.3 for _ in prompts])
    trained = np.array([random.randint(0, int(r)) for r in responses])
    share = data.draw(st.booleans())
    seed = data.draw(st.none() | st.integers(0, 100))
    plan = plan_update(
        prompts,
        responses,
        trained,
        world_size=world,
        mini_batch_rows=size,
        epochs=epochs,
        limits=limits(BUDGET),
        group_ids=groups,
        share_prefix=share,
        skip=skip,
        shuffle_seed=seed,
    )
    assert_one_shape_on_all_ranks(plan)
    assert all(len(set(rows)) == len(rows) for rows in plan.rows)
    num_steps = len(plan.ranks[0].mini_batches)
    assert num_steps == epochs * min(math.ceil(len(prompts) / size), len(set(groups)))
    per_epoch = num_steps // epochs
    for epoch in range(epochs):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        ran = [row for step in steps for row in rows_run(plan, step)]
        assert sorted(ran) == np.flatnonzero(~skip).tolist()
        counted = [plan.ranks[0].mini_batches[step] for step in steps]
        assert sum(step.num_tokens for step in counted) == trained.sum()
        assert sum(step.num_sequences for step in counted) == (trained > 0).sum()
        assert sum(step.num_groups for step in counted) == len(set(groups[trained > 0]))
    for step, rank in itertools.product(range(num_steps), range(world)):
        for rows in micro_batches(plan, step, rank):
            assert tokens_run(rows, prompts, responses, groups, share) <= BUDGET


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_mini_batches_that_divide_are_consecutive_rows(num_groups, n, groups_per_step, world):
    total = num_groups * n
    trained = np.arange(total) % 3
    plan = plan_update(
        [4] * total,
        [5] * total,
        trained,
        world_size=world,
        mini_batch_rows=groups_per_step * n,
        epochs=1,
        limits=limits(1000),
        group_ids=np.repeat(np.arange(num_groups), n),
        share_prefix=True,
    )
    for step, mini_batch in enumerate(plan.ranks[0].mini_batches):
        expected = range(step * groups_per_step * n, min((step + 1) * groups_per_step * n, total))
        assert sorted(rows_run(plan, step)) == list(expected)
        assert mini_batch.num_tokens == trained[expected.start : expected.stop].sum()


def greedy_runs(rows, prompts, responses, groups, max_rows, share_prefix):
    """Take rows one by one, and begin anew where the next would be one too many or exceed the budget."""
    runs = []
    for row in rows:
        longer = [*(runs[-1] if runs else []), row]
        fits = tokens_run(longer, prompts, responses, groups, share_prefix) <= BUDGET
        if runs and len(longer) <= max_rows and fits:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


@given(batches(), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_a_fixed_number_of_rows_is_cut_as_taking_row_by_row_would(batch, max_rows, world_size, share_prefix):
    prompts, responses, groups = batch
    plan = plan_forward(
        prompts,
        responses,
        world_size=world_size,
        limits=limits(BUDGET, max_rows),
        group_ids=groups,
        share_prefix=share_prefix,
    )
    for rank in range(world_size):
        found = [rows for rows in micro_batches(plan, 0, rank) if rows]
        rows = [row for rows in found for row in rows]
        assert found == greedy_runs(rows, prompts, responses, groups, max_rows, share_prefix)


def test_a_cut_inside_a_group_moves_to_the_groups_nearest_end():
    # Groups of 3, 5 and 4 rows; every 4 rows would cut at 4 and 8: the ends of groups are 3, 8 and 12.
    groups = np.repeat([0, 1, 2], [3, 5, 4])
    plan = plan_update(
        [1] * 12, [1] * 12, [1] * 12, world_size=1, mini_batch_rows=4, epochs=1, limits=limits(99), group_ids=groups
    )
    assert [sorted(rows_run(plan, step)) for step in range(3)] == [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9, 10, 11]]


def test_rows_of_a_group_that_lie_apart_come_together():
    plan = plan_update(
        [1] * 4,
        [1] * 4,
        [1] * 4,
        world_size=1,
        mini_batch_rows=2,
        epochs=1,
        limits=limits(99),
        group_ids=["a", "b", "a", "b"],
    )
    assert [sorted(rows_run(plan, step)) for step in range(2)] == [[0, 2], [1, 3]]


def test_rows_that_are_brought_together_bring_their_counts_and_whether_they_run():
    plan = plan_update(
        [1] * 4,
        [8] * 4,
        [1, 2, 4, 8],
        world_size=1,
        mini_batch_rows=2,
        epochs=1,
        limits=limits(99),
        group_ids=["a", "b", "a", "b"],
        skip=[False, True, False, False],
    )
    assert [step.num_tokens for step in plan.ranks[0].mini_batches] == [1 + 4, 2 + 8]
    assert [sorted(rows_run(plan, step)) for step in range(2)] == [[0, 2], [3]]


def test_a_mini_batch_of_which_every_row_is_left_out_stays_an_optimizer_step():
    plan = plan_update(
        [2] * 8,
        [3] * 8,
        [3] * 8,
        world_size=2,
        mini_batch_rows=4,
        epochs=1,
        limits=limits(100),
        group_ids=np.repeat([0, 1, 2, 3], 2),
        skip=np.array([True] * 4 + [False] * 4),
    )
    for rank in plan.ranks:
        assert rank.mini_batches[0] == MiniBatchPlan((), num_tokens=12, num_sequences=4, num_groups=2)
        assert len(rank.mini_batches[1].micro_batches) == 1
    assert sorted(itertools.chain(*plan.rows)) == [4, 5, 6, 7], "rows that don't run don't travel"


def test_a_shared_prompt_is_paid_once_and_that_decides_how_many_micro_batches_there_are():
    lengths = {
        "prompt_lens": [40] * 4,
        "response_lens": [5] * 4,
        "world_size": 1,
        "limits": limits(60),
        "group_ids": [7] * 4,
    }
    shared = plan_forward(**lengths, share_prefix=True)  # 40 + 4 · 5 = 60
    apart = plan_forward(**lengths)  # 45 each
    assert len(shared.ranks[0].mini_batches[0].micro_batches) == 1
    assert len(apart.ranks[0].mini_batches[0].micro_batches) == 4


def test_a_group_too_large_for_the_budget_is_split_and_pays_its_prompt_in_each_part():
    plan = plan_forward([40] * 6, [10] * 6, world_size=1, limits=limits(60), group_ids=[0] * 6, share_prefix=True)
    assert [len(mb) for mb in plan.ranks[0].mini_batches[0].micro_batches] == [2, 2, 2]


def test_rows_of_a_group_whose_prompts_differ_bring_their_own():
    prompts, groups = [40, 7, 40, 7], ["a"] * 4
    rows = RowLengths.of(prompts, [5] * 4, [5] * 4, groups, share_prefix=True)
    assert rows.index.tolist() == [1, 3, 0, 2]
    assert rows.tokens([np.arange(4)]).tolist() == [7 + 40 + 4 * 5]
    plan = plan_forward(prompts, [5] * 4, world_size=1, limits=limits(67), group_ids=groups, share_prefix=True)
    assert len(plan.ranks[0].mini_batches[0].micro_batches) == 1
    plan = plan_forward(prompts, [5] * 4, world_size=1, limits=limits(66), group_ids=groups, share_prefix=True)
    assert len(plan.ranks[0].mini_batches[0].micro_batches) == 2


def test_a_group_is_cut_over_ranks_only_where_ranks_would_wait_otherwise():
    one_group = plan_forward(
        [4] * 8, [100] * 8, world_size=4, limits=limits(10_000), group_ids=[0] * 8, share_prefix=True
    )
    assert [len(rows) for rows in one_group.rows] == [2, 2, 2, 2]
    groups = np.repeat(np.arange(8), 8)
    whole = plan_forward([50] * 64, [10] * 64, world_size=4, limits=limits(10_000), group_ids=groups, share_prefix=True)
    assert all(len(set(groups[list(rows)])) == 2 for rows in whole.rows)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_each_mini_batch_is_balanced_over_the_ranks(seed):
    rng = np.random.default_rng(seed)
    responses = np.clip(rng.lognormal(5.5, 0.7, 512), 1, 2048).astype(int)
    prompts = np.repeat(rng.integers(20, 200, 64), 8)
    groups = np.repeat(np.arange(64), 8)
    plan = plan_update(
        prompts,
        responses,
        responses,
        world_size=4,
        mini_batch_rows=128,
        epochs=1,
        limits=limits(8192),
        group_ids=groups,
        share_prefix=True,
    )
    for step in range(4):
        tokens = [
            sum(tokens_run(rows, prompts, responses, groups, True) for rows in micro_batches(plan, step, rank))
            for rank in range(4)
        ]
        assert max(tokens) <= 1.08 * np.mean(tokens)


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("seed", range(4))
def test_there_is_at_most_one_micro_batch_more_than_the_tokens_of_all_ranks_ask_for(seed, world_size):
    rng = np.random.default_rng(seed)
    prompts = rng.integers(50, 1000, 1024)
    responses = np.clip(rng.lognormal(7.2, 0.8, 1024), 16, 7000).astype(int)
    plan = plan_forward(prompts, responses, world_size=world_size, limits=limits(16384))
    fewest = math.ceil((prompts + responses).sum() / (world_size * 16384))
    assert len(plan.ranks[0].mini_batches[0].micro_batches) <= fewest + 1


def test_the_costliest_micro_batch_comes_first_on_every_rank():
    rng = np.random.default_rng(0)
    prompts, responses = np.full(64, 10), rng.integers(1, 100, 64)
    plan = plan_forward(prompts, responses, world_size=2, limits=limits(256))
    for rank in range(2):
        cost = [
            (responses[rows] + 10 + (responses[rows] + 10) ** 2 / 24576).sum() for rows in micro_batches(plan, 0, rank)
        ]
        assert cost == sorted(cost, reverse=True)


def test_shuffling_depends_on_seed_and_epoch_alone():
    def orders(seed):
        plan = plan_update(
            [1] * 32,
            [1] * 32,
            [1] * 32,
            world_size=2,
            mini_batch_rows=8,
            epochs=2,
            limits=limits(99),
            shuffle_seed=seed,
        )
        return [sorted(rows_run(plan, step)) for step in range(8)]

    assert orders(3) == orders(3)
    assert orders(3) != orders(4)
    assert orders(3)[:4] != orders(3)[4:]


def test_no_rows_are_no_work():
    assert plan_forward([], [], world_size=2, limits=limits(8)).rows == ((), ())
    assert plan_update([], [], [], world_size=2, mini_batch_rows=4, epochs=2, limits=limits(8)).ranks[1] == RankPlan(())


def test_a_row_that_exceeds_the_budget_alone_is_named_with_its_length_and_the_key_to_raise():
    with pytest.raises(ValueError, match=r"row 2 alone has 70 tokens, more than the 64 .* set a\.key to at least 70"):
        plan_forward([10] * 3, [20, 54, 60], world_size=1, limits=limits(64))
    with pytest.raises(ValueError, match=r"row 0 .* a\.key"):
        plan_update([50], [20], [20], world_size=1, mini_batch_rows=1, epochs=1, limits=limits(64))


def test_a_row_that_is_left_out_may_be_longer_than_the_budget():
    plan = plan_update(
        [10, 10], [99, 9], [99, 9], world_size=1, mini_batch_rows=2, epochs=1, limits=limits(64), skip=[True, False]
    )
    assert rows_run(plan, 0) == [1]
    assert plan.ranks[0].mini_batches[0].num_tokens == 108


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_lens": [4.0, 4.0]}, "must be integers"),
        ({"response_lens": [1, -1]}, "response_lens of row 1 is negative"),
        ({"response_lens": [1]}, "response_lens has shape"),
        ({"group_ids": [1]}, "group_ids has 1 entries"),
        ({"trained_tokens": [1, 9]}, "row 1 has more trained tokens"),
        ({"skip": [0, 1]}, "skip must be 2 booleans"),
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"mini_batch_rows": 0}, "mini_batch_rows must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"limits": limits(None)}, "needs a limit"),
        ({"limits": limits(64, 0)}, "max_rows must be at least 1"),
    ],
)
def test_bad_input_is_refused_by_name(change, message):
    good = {
        "prompt_lens": [4, 4],
        "response_lens": [2, 2],
        "trained_tokens": [2, 2],
        "world_size": 1,
        "mini_batch_rows": 2,
        "epochs": 1,
        "limits": limits(64),
        "group_ids": [0, 0],
        "share_prefix": True,
    }
    with pytest.raises(ValueError, match=message):
        plan_update(**{**good, **change})


def test_ranks_that_disagree_are_no_plan():
    one, two = (RankPlan((MiniBatchPlan(((0,),) * steps, 1, 1, 1),)) for steps in (1, 2))
    with pytest.raises(ValueError, match="rank 1 would run"):
        BatchPlan(rows=((0,), (1,)), ranks=(one, two))
    with pytest.raises(ValueError, match="rows for each of its ranks"):
        BatchPlan(rows=((0,),), ranks=(one, one))


# ---------------------------------------------------------------------------------------------- sequence groups


def in_groups_of(ranks: int, max_tokens: int | None = BUDGET, max_rows: int | None = None) -> MicroBatchLimits:
    return MicroBatchLimits(max_tokens, max_rows, "a.key", ranks)


@settings(max_examples=30, deadline=None)
@given(batches(), st.sampled_from([2, 4]), st.sampled_from([1, 2, 3]))
def test_ranks_that_run_their_rows_together_are_planned_as_one(batch, degree, groups):
    prompts, responses, uids = batch
    given = {"group_ids": uids, "share_prefix": True}
    plan = plan_forward(prompts, responses, world_size=degree * groups, limits=in_groups_of(degree), **given)
    alone = plan_forward(prompts, responses, world_size=groups, limits=limits(BUDGET), **given)
    assert (plan.rows, plan.ranks, plan.ranks_each, alone.ranks_each) == (alone.rows, alone.ranks, degree, 1)
    cuts = {"mini_batch_rows": 4, "epochs": 2}
    update = plan_update(prompts, responses, responses, world_size=degree, limits=in_groups_of(degree), **cuts)
    assert (update.ranks_each, len(update.ranks)) == (degree, 1)


def test_pairs_and_nothing_are_planned_for_groups_of_ranks_too():
    pairs = plan_pairs([2] * 4, [3] * 4, [3] * 4, world_size=4, limits=in_groups_of(2), mini_batch_pairs=2)
    assert (pairs.ranks_each, len(pairs.ranks)) == (2, 2)
    nothing = plan_update([], [], [], world_size=4, limits=in_groups_of(2), mini_batch_rows=2, epochs=1)
    assert (nothing.ranks_each, nothing.rows) == (2, ((), ()))


def test_groups_of_ranks_have_to_divide_the_ranks():
    with pytest.raises(ValueError, match="6 ranks do not make groups of 4: set ulysses_sequence_parallel_size"):
        plan_forward([4], [2], world_size=6, limits=in_groups_of(4))
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        plan_forward([4], [2], world_size=2, limits=in_groups_of(0))


def test_the_budget_that_a_long_row_needs_is_told_as_the_key_counts_it():
    # The key has the tokens of one rank: 33 on each of two hold 65.
    with pytest.raises(ValueError, match="65 tokens, more than the 64 .* set a.key to at least 33"):
        plan_forward([40], [25], world_size=2, limits=in_groups_of(2))
    with pytest.raises(ValueError, match="64 that one micro-batch may hold; set a.key to at least 35"):
        plan_pairs([10] * 2, [25] * 2, [25] * 2, world_size=2, limits=in_groups_of(2), mini_batch_pairs=1)


# ---------------------------------------------------------------------------------------------- pairs

PAIRS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


def columns_of_pairs(lengths):
    """Prompt and answer lengths (2N,) from (prompt, chosen, rejected)."""
    return [p for p, _, _ in lengths for _ in range(2)], [n for _, *both in lengths for n in both]


def rows_of_micro_batches(plan):
    """Global rows of every micro-batch of every mini-batch, over all ranks."""
    for rows, rank in zip(plan.rows, plan.ranks, strict=True):
        for step in rank.mini_batches:
            yield from ([rows[i] for i in picked] for picked in step.micro_batches)


@given(
    PAIRS,
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(27, 60),
    st.booleans(),
    st.sampled_from([None, 1, 2]),
)
def test_every_pair_runs_whole_and_once_within_the_limits(lengths, world, size, budget, share, max_pairs):
    prompt, response = columns_of_pairs(lengths)
    budget += 0 if share else 9
    plan = plan_pairs(
        prompt,
        response,
        response,
        world_size=world,
        mini_batch_pairs=size,
        limits=limits(budget, max_pairs),
        share_prefix=share,
    )
    seen = []
    for rows in rows_of_micro_batches(plan):
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


def test_epochs_of_pairs_repeat_the_steps():
    plan = plan_pairs(
        [2] * 8, [3] * 8, [3] * 8, world_size=1, mini_batch_pairs=2, limits=limits(99), epochs=3, share_prefix=True
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
            "pair 1 have 13 tokens .* a.key to at least",
        ),
    ],
)
def test_what_is_no_pair_is_named(prompt, response, trained, message):
    with pytest.raises(ValueError, match=message):
        plan_pairs(prompt, response, trained, world_size=1, mini_batch_pairs=2, limits=limits(12), share_prefix=True)


def test_a_prompt_that_is_not_shared_counts_twice():
    lengths = ([4, 4], [4, 5], [4, 5])
    shared = {"world_size": 1, "mini_batch_pairs": 1}
    assert plan_pairs(*map(np.array, lengths), limits=limits(13), share_prefix=True, **shared).rows == ((0, 1),)
    with pytest.raises(ValueError, match="17 tokens"):
        plan_pairs(*lengths, limits=limits(13), share_prefix=False, **shared)
