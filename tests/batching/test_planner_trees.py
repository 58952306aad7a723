"""Plans of rows that form trees, against the beginnings that their tokens have."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.batching import planner
from hrl.batching.planner import MicroBatchLimits, Planner, RowLengths, plan_forward
from hrl.batching.trie import Trie
from hrl.protocol import DataProto
from tests.models.trees import num_nodes, sequences_of, tree_batch

BUDGET = 24


def limits(max_tokens: int | None, max_rows: int | None = None) -> MicroBatchLimits:
    return MicroBatchLimits(max_tokens, max_rows, "a.key")


@st.composite
def batches(draw):
    """Trees of several groups, in any order of the rows."""
    seed, rows = draw(st.integers(0, 10**6)), draw(st.integers(1, 24))
    batch = tree_batch(seed, rows)
    batch.non_tensor_batch["uid"] = np.array(
        draw(st.lists(st.sampled_from("abc"), min_size=rows, max_size=rows)), object
    )
    return batch


def row_lengths(batch: DataProto) -> RowLengths:
    return Planner(share_prefix=True)._rows(batch)


def micro_batches(plan, step=0):
    """The rows of the batch of every micro-batch, by rank."""
    return [
        [[held[place] for place in picked] for picked in rank.mini_batches[step].micro_batches]
        for held, rank in zip(plan.rows, plan.ranks, strict=True)
    ]


def nodes_of_groups(batch, rows):
    """Tokens of the tries of the groups of these rows."""
    sequences, uid = sequences_of(batch), batch.non_tensor_batch["uid"]
    return sum(num_nodes([sequences[row] for row in rows if uid[row] == group]) for group in set(uid[rows]))


@given(batches(), st.data())
def test_a_unit_has_as_many_tokens_as_its_rows_have_beginnings(batch, data):
    rows = row_lengths(batch)
    units = [
        run[sorted(data.draw(st.sets(st.integers(0, len(run) - 1), min_size=1)))]
        for run in rows.runs(np.arange(len(rows)))
    ]
    units = data.draw(st.permutations(units))
    assert rows.tokens(units).tolist() == [nodes_of_groups(batch, rows.index[unit].tolist()) for unit in units]


def test_what_a_tree_costs_by_hand():
    """Rows of 6, 5 and 3 tokens; the second has 4 in common with the first, the third 2 with the second."""
    rows = RowLengths.of([2] * 3, [4, 3, 1], [1] * 3, [0] * 3, True, Trie(np.arange(3), np.array([0, 4, 2])))

    def cost(tokens):
        return tokens + tokens**2 / planner.EQUAL_COST_TOKENS

    assert rows.tokens([np.arange(3)]).tolist() == [6 + 1 + 1]
    assert rows.tokens([np.array([0, 2]), np.array([1])]).tolist() == [6 + 1, 5]
    assert rows.cost([np.arange(3)]) == pytest.approx([cost(6) + cost(5) - cost(4) + cost(3) - cost(2)])
    assert rows.in_common(np.arange(3)).tolist() == [0, 4, 2]
    assert [part.tolist() for part in rows.subtrees(np.arange(3))[0]] == [[0, 1], [2]]


@settings(max_examples=60)
@given(batches(), st.integers(1, 5))
def test_a_forward_runs_every_row_once_under_the_cap_in_equal_steps(batch, world_size):
    plan = Planner(share_prefix=True).forward(batch, world_size, limits(BUDGET))
    ranks = micro_batches(plan)
    assert sorted(itertools.chain(*itertools.chain(*ranks))) == list(range(len(batch)))
    assert len({len(rank) for rank in ranks}) == 1
    assert all(rank.is_tree for rank in plan.ranks)
    for rows in itertools.chain(*ranks):
        assert nodes_of_groups(batch, rows) <= BUDGET


@given(batches(), st.integers(1, 4), st.integers(1, 6))
def test_a_fixed_number_of_rows_is_run_in_order_and_cut_where_the_budget_ends(batch, world_size, max_rows):
    plan = Planner(share_prefix=True).forward(batch, world_size, limits(BUDGET, max_rows))
    ranks = micro_batches(plan)
    place = np.argsort(row_lengths(batch).index)
    for rank in ranks:
        places = [place[row] for rows in rank for row in rows]
        assert places == sorted(places)
    assert sorted(itertools.chain(*itertools.chain(*ranks))) == list(range(len(batch)))
    assert max(map(len, plan.rows)) - min(map(len, plan.rows)) <= 1
    for rank in ranks:
        found = [rows for rows in rank if rows]
        assert all(len(rows) <= max_rows and nodes_of_groups(batch, rows) <= BUDGET for rows in found)
        for rows, after in itertools.pairwise(found):
            assert len(rows) == max_rows or nodes_of_groups(batch, [*rows, after[0]]) > BUDGET


def share_of_heaviest(groups, lengths, shared, world_size):
    """The tokens of the fullest rank against the mean of all, of trees dealt out by their number of rows."""
    count = len(groups)
    rows = RowLengths.of([100] * count, lengths, [1] * count, groups, True, Trie(np.arange(count), np.array(shared)))
    plan = plan_forward(rows, world_size, limits(None, 4))
    held = [int(rows.tokens(rows.runs(np.array(sorted(of_rank)))).sum()) for of_rank in plan.rows]
    return max(held) / np.mean(held), [set(np.asarray(groups)[list(of_rank)].tolist()) for of_rank in plan.rows]


def test_trees_of_a_fixed_number_of_rows_are_as_even_over_ranks_as_whole_groups_make_them():
    eight = np.repeat(np.arange(8), 4)
    evenness, groups = share_of_heaviest(eight, np.where(eight < 4, 2000, 100), [0, 100, 100, 100] * 8, 4)
    assert evenness == 1.0
    assert [len(of_rank) for of_rank in groups] == [2] * 4  # whole, one long and one short
    # Three groups for two ranks: halves of four rows, since single rows would compute each prompt twice.
    three = np.repeat(np.arange(3), 4)
    evenness, groups = share_of_heaviest(three, [300] * 12, [0, 390, 390, 390] * 3, 2)
    assert evenness == 1.0 and sorted(map(len, groups)) == [2, 2]
    # Groups of unequal size have no such parts, and stay in their order where that is lighter.
    evenness, groups = share_of_heaviest([0, 0, 0, 1], [300] * 4, [0, 390, 390, 0], 2)
    assert groups == [{0}, {0, 1}]


@given(batches(), st.integers(1, 3), st.integers(1, 9), st.integers(0, 3))
def test_an_update_counts_and_runs_the_rows_that_are_not_left_out(batch, world_size, size, seed):
    skip = np.random.default_rng(seed).random(len(batch)) < 0.3
    plan = Planner(share_prefix=True).update(
        batch, world_size, limits(BUDGET), mini_batch_rows=size, epochs=2, skip=skip
    )
    steps = range(plan.num_steps // 2)
    ran = [rows for step in steps for rank in micro_batches(plan, step) for rows in rank]
    assert sorted(itertools.chain(*ran)) == np.flatnonzero(~skip).tolist()
    assert all(nodes_of_groups(batch, rows) <= BUDGET for rows in ran)
    trained = batch.batch["response_mask"]
    assert sum(plan.ranks[0].mini_batches[step].num_tokens for step in steps) == int(trained.sum())
    assert sum(plan.ranks[0].mini_batches[step].num_sequences for step in steps) == int(trained.any(1).sum())


def episodes(num_groups: int, samples: int, branches: int, *, prompt=20, history=60, tail=10) -> DataProto:
    """Groups whose samples share their prompt, and whose branches of one sample share a history after it."""
    rng, rows, uid, which = np.random.default_rng(0), [], [], []
    for group in range(num_groups):
        start = rng.integers(5, 10**6, prompt)
        for sample in range(samples):
            middle = rng.integers(5, 10**6, history)
            for _ in range(branches):
                rows.append(np.concatenate([start, middle, rng.integers(5, 10**6, tail)]))
                uid.append(f"g{group}")
                which.append(group * samples + sample)
    tokens = np.stack(rows)
    shuffled = rng.permutation(len(rows))
    ones = torch.ones(len(rows), tokens.shape[1], dtype=torch.int64)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.from_numpy(tokens[shuffled, :prompt]),
            "responses": torch.from_numpy(tokens[shuffled, prompt:]),
            "attention_mask": ones,
            "response_mask": ones[:, prompt:].clone(),
        },
        non_tensors={
            "uid": np.array(uid, object)[shuffled],
            "num_turns": np.full(len(rows), 3),
            "episode": np.array(which)[shuffled],
        },
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_branches_of_an_episode_stay_together_where_its_group_is_cut(world_size):
    batch = episodes(num_groups=1, samples=8, branches=3)  # 8 * (60 + 30) tokens behind a prompt of 20
    plan = Planner(share_prefix=True).forward(batch, world_size, limits(20 + 2 * 90))
    episode = batch.non_tensor_batch["episode"]
    for rows in itertools.chain(*micro_batches(plan)):
        assert len(rows) == 6 and len(set(episode[rows])) == 2
        assert nodes_of_groups(batch, rows) == 20 + 2 * 90


def test_an_episode_that_is_too_large_is_cut_and_pays_its_history_in_each_part():
    batch = episodes(num_groups=1, samples=1, branches=6)
    plan = Planner(share_prefix=True).forward(batch, 1, limits(20 + 60 + 20))
    assert [len(rows) for rows in micro_batches(plan)[0]] == [2, 2, 2]


def test_groups_are_cut_over_ranks_by_episodes_and_only_where_ranks_would_wait():
    batch = episodes(num_groups=8, samples=2, branches=2)
    plan = Planner(share_prefix=True).forward(batch, 4, limits(10_000))
    assert all(len(set(batch.non_tensor_batch["uid"][list(rows)])) == 2 for rows in plan.rows)
    one = episodes(num_groups=1, samples=4, branches=3)
    plan = Planner(share_prefix=True).forward(one, 4, limits(10_000))
    assert [len(set(one.non_tensor_batch["episode"][list(rows)])) for rows in plan.rows] == [1, 1, 1, 1]


@pytest.mark.parametrize(("world_size", "budget"), [(1, 4096), (8, 4096), (8, 16384)])
def test_ranks_are_balanced_and_little_is_computed_twice(world_size, budget):
    """Episodes of one to seven turns, a branch each: their tokens are less than half of those of their rows."""
    rng = np.random.default_rng(0)
    lengths, shared, group = [], [], []
    for number in range(32):
        prompt = int(rng.integers(50, 400))
        for _ in range(8):
            said = common = prompt
            for _ in range(rng.integers(1, 8)):
                lengths.append(said + int(np.clip(rng.lognormal(5, 0.7), 10, 1500)))
                shared.append(common if group and group[-1] == number else 0)
                group.append(number)
                common, said = said, said + int(rng.integers(60, 340))
    prompts, count = np.ones(len(lengths), int), len(lengths)
    trie = Trie(np.arange(count), np.array(shared))
    rows = RowLengths.of(prompts, np.array(lengths) - 1, np.ones(count, int), group, True, trie)
    plan = plan_forward(rows, world_size, limits(budget))
    ran = [rows.runs(np.sort(part)) for rank in micro_batches(plan) for part in rank]
    assert sum(rows.tokens(units).sum() for units in ran) <= 1.06 * rows.tokens(rows.runs(np.arange(count))).sum()
    costs = [
        rows.cost([run for part in rank for run in rows.runs(np.sort(part))]).sum() for rank in micro_batches(plan)
    ]
    assert max(costs) <= 1.05 * np.mean(costs)
    steps = len(plan.ranks[0].mini_batches[0].micro_batches)
    assert steps <= 1.3 * sum(rows.tokens(units).sum() for units in ran) / (world_size * budget) + 1


def test_one_long_chain_of_branches_is_cut_too():
    """Each row goes on where the one before it was left: a tree as deep as it has rows."""
    count = 400
    trie = Trie(np.arange(count), np.append(0, 10 + np.arange(count - 1)))
    rows = RowLengths.of([5] * count, 10 + np.arange(count), [1] * count, [0] * count, True, trie)
    for world_size in (1, 3):
        plan = plan_forward(rows, world_size, limits(1000))
        ran = list(itertools.chain(*micro_batches(plan)))
        assert sorted(itertools.chain(*ran)) == list(range(count))
        assert all(rows.tokens([np.sort(part)])[0] <= 1000 for part in ran if part)


def test_how_much_is_shared_by_hand():
    batch, plans = episodes(num_groups=2, samples=2, branches=2), Planner(share_prefix=True)
    whole = 2 * 4 * (20 + 60 + 10)
    for budget, computed in ((1000, 2 * (20 + 2 * (60 + 20))), (100, 4 * (20 + 60 + 20))):
        plan = plans.update(batch, 1, limits(budget), mini_batch_rows=4, epochs=2)
        assert plans.shared_tokens(batch, plan) == pytest.approx(1 - computed / whole)
    nothing = plans.update(batch, 2, limits(1000), mini_batch_rows=4, epochs=1, skip=np.ones(8, bool))
    assert plans.shared_tokens(batch, nothing) is None
    batch.non_tensor_batch["num_turns"][:] = 1
    assert plans.shared_tokens(batch, plans.forward(batch, 2, limits(1000))) is None


# ---------------------------------------------------------------------------------------------- which batches are trees


def plain(batch: DataProto) -> DataProto:
    return batch.select(non_tensor_batch_keys=["uid"])


def test_a_batch_without_several_turns_is_planned_from_lengths_alone(monkeypatch):
    batch = episodes(num_groups=2, samples=2, branches=2)
    batch.non_tensor_batch["num_turns"][:] = 1
    monkeypatch.setattr(Trie, "of", None)
    want = Planner(share_prefix=True).forward(plain(batch), 2, limits(200))
    assert Planner(share_prefix=True).forward(batch, 2, limits(200)) == want
    assert not any(rank.is_tree for rank in want.ranks)


def test_nothing_is_shared_where_the_model_shares_nothing(monkeypatch):
    batch = episodes(num_groups=2, samples=2, branches=2)
    monkeypatch.setattr(Trie, "of", None)
    plan = Planner(share_prefix=False).forward(batch, 1, limits(200))
    assert not plan.ranks[0].is_tree
    assert max(map(len, micro_batches(plan)[0])) == 200 // 90


def test_tokens_are_read_once_for_all_stages_of_a_step(monkeypatch):
    read, of = [], Trie.of

    def counted(*arguments):
        read.append(1)
        return of(*arguments)

    monkeypatch.setattr(Trie, "of", counted)
    batch, plans = episodes(num_groups=2, samples=2, branches=2), Planner(share_prefix=True)
    first = plans.forward(batch, 1, limits(200))
    batch = batch.union(DataProto.from_dict(tensors={"old_log_probs": torch.zeros(8, 70)}))
    assert plans.forward(batch, 1, limits(200)) == first
    assert len(read) == 1
    other = episodes(num_groups=2, samples=2, branches=2, tail=9)
    assert plans.forward(other, 1, limits(200)).rows == Planner(share_prefix=True).forward(other, 1, limits(200)).rows
    assert len(read) == 3
