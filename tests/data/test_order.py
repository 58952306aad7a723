import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrl.config.offline import DemonstrationDataConfig, PairDataConfig, ScoredPairDataConfig
from hrl.data.dataset import RLHFDataset
from hrl.data.offline.demonstrations import DemonstrationDataset
from hrl.data.offline.pairs import PairDataset
from hrl.data.order import EpochOrder, MixedOrder, Position, differences, fingerprint, uniform


@given(st.integers(1, 200), st.integers(0, 2**31), st.integers(0, 50))
def test_an_epoch_deals_every_row_once(rows, seed, epoch):
    assert sorted(EpochOrder(rows, seed).epoch(epoch).tolist()) == list(range(rows))


def test_the_order_is_the_same_on_every_machine():
    order = EpochOrder(8, seed=1)
    assert order.epoch(0).tolist() == [2, 5, 1, 4, 6, 0, 3, 7]
    assert order.epoch(1).tolist() == [4, 2, 0, 7, 1, 3, 6, 5]


def test_epochs_and_seeds_have_different_orders():
    orders = {tuple(EpochOrder(50, seed).epoch(epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@given(st.integers(1, 40), st.data())
def test_going_on_from_a_saved_position_equals_never_having_stopped(rows, data):
    order = EpochOrder(rows, seed=9)
    batch = data.draw(st.integers(1, rows))
    straight, position, resumed = [], Position(), None
    stop = data.draw(st.integers(0, 7))
    for step in range(8):
        if step == stop:
            resumed = Position.from_dict(position.to_dict())
        dealt, position = order.next(position, batch)
        straight.append(dealt)
    again = []
    for _ in range(stop, 8):
        dealt, resumed = order.next(resumed, batch)
        again.append(dealt)
    assert again == straight[stop:]


@given(st.integers(1, 30), st.data())
def test_the_rows_ahead_are_those_that_will_be_dealt(rows, data):
    order = EpochOrder(rows, seed=4)
    batch, skipped, ahead = (data.draw(st.integers(low, high)) for low, high in ((1, rows), (0, 9), (0, 9)))
    position = Position()
    for _ in range(skipped):
        _, position = order.next(position, batch)
    found, start = set(), position
    for _ in range(ahead):
        dealt, position = order.next(position, batch)
        found |= set(dealt)
    assert order.ahead(start, batch, ahead).nonzero()[0].tolist() == sorted(found)


def test_the_end_of_an_epoch_is_followed_by_the_next_ones_order():
    order = EpochOrder(10, seed=0)
    _, position = order.next(Position(0, 5), 5)
    assert position == Position(0, 10)
    dealt, position = order.next(position, 5)
    assert (dealt, position) == (order.epoch(1)[:5].tolist(), Position(1, 5))


def test_rows_that_fill_no_batch_are_not_dealt():
    order = EpochOrder(10, seed=0)
    dealt, _ = order.next(Position(0, 8), 4)
    assert dealt == order.epoch(1)[:4].tolist()


def test_without_shuffling_rows_come_in_their_order():
    assert EpochOrder(5, seed=7, shuffle=False).epoch(3).tolist() == [0, 1, 2, 3, 4]


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(ValueError, match="batch of 6 rows can't be drawn from a data set of 5 rows"):
        EpochOrder(5, seed=0).next(Position(), 6)
    with pytest.raises(ValueError, match="belongs to other"):
        EpochOrder(5, seed=0).next(Position(0, 9), 2)
    with pytest.raises(ValueError, match="batch of 6 rows can't be drawn"):
        EpochOrder(5, seed=0).ahead(Position(), 6, 1)
    with pytest.raises(ValueError, match="epoch and offset"):
        Position.from_dict({"epoch": 1, "offset": -1})


# ---------------------------------------------------------------------- which rows a position belongs to

ROWS = [[1, 2, 3], [4, 5], [6]]


def of(rows=ROWS, seed=1, shuffle=True, dtype=np.int32):
    return fingerprint(EpochOrder(len(rows), seed, shuffle), [np.array(row, dtype=dtype) for row in rows])


def test_the_same_rows_in_the_same_order_differ_in_nothing_also_after_a_file():
    assert differences(json.loads(json.dumps(of())), of()) == []
    assert of(dtype=np.int64) == of()


def test_the_digest_is_the_same_on_every_machine():
    assert of()["tokens"] == "c256e2ec94540de1a9e5c8d23bb1eba0"


@pytest.mark.parametrize("rows", [[[1, 2], [3, 4, 5], [6]], [[4, 5], [1, 2, 3], [6]], [[1, 2, 3], [4, 5], [7]]])
def test_a_shifted_an_exchanged_and_another_token_are_other_rows(rows):
    (found,) = differences(of(), of(rows))
    assert "other tokens" in found


def test_each_difference_is_named_with_both_values():
    assert differences(of(), of(ROWS[:2], seed=7)) == ["2 rows, were 3", "data.seed=7, was 1"]
    assert differences(of(), of(shuffle=False)) == ["data.shuffle=False, was True"]


def test_a_seed_that_shuffles_nothing_makes_no_difference():
    assert differences(of(seed=1, shuffle=False), of(seed=2, shuffle=False)) == []


def test_other_answers_to_the_same_prompts_are_other_data(tokenizer, config, make_row):
    def saved(*truths):
        rows = [make_row(f"p{n}", reward_model={"ground_truth": truth}) for n, truth in enumerate(truths)]
        return RLHFDataset(rows, tokenizer, config).fingerprint

    assert differences(saved(10**5000, ["a"], None), saved(10**5000, ["a"], None)) == []
    assert differences(saved("1", "2"), saved("1", "3")) == ["the right answers of the rows are others"]
    assert differences(saved("1", "2"), saved("1", 2)) == ["the right answers of the rows are others"]
    older = {name: value for name, value in saved("1").items() if name != "answers"}
    assert differences(older, saved("2")) == []


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        ({"data_source": "math"}, "data_source"),
        ({"extra_info": {"level": 2}}, "extra_info"),
        ({"reward_model": {"ground_truth": "4", "style": "model"}}, "reward_model"),
        ({"difficulty": 0.5}, "difficulty"),
        ({"difficulty": None}, "difficulty"),
        ({"tests": ["assert f(1) == 1"]}, "tests"),
        ({"data_source": "math", "extra_info": {}, "difficulty": "0.25"}, "data_source, difficulty, extra_info"),
    ],
)
def test_whatever_else_a_reward_function_is_given_is_part_of_the_data(tokenizer, config, make_row, other, differ):
    given = {"data_source": "sums", "extra_info": {"level": 1}, "difficulty": 0.25}
    given["reward_model"] = {"ground_truth": "4", "style": "rule"}

    def saved(**changes):
        rows = [make_row(**given), make_row(**(given | changes)), make_row(**given)]
        return RLHFDataset(rows, tokenizer, config).fingerprint

    assert differences(json.loads(json.dumps(saved())), saved()) == []
    for one, two in itertools.permutations((saved(), saved(**other))):
        assert differences(one, two) == [f"the rows differ in {differ}"]
    older = {name: value for name, value in saved().items() if name != "columns"}
    assert differences(older, saved(**other)) == []


def test_a_value_that_moved_to_another_row_is_other_data(tokenizer, config, make_row):
    one, two = ([make_row(level=level) for level in levels] for levels in ((1, None), (None, 1)))
    found = differences(*(RLHFDataset(rows, tokenizer, config).fingerprint for rows in (one, two)))
    assert found == ["the rows differ in level"]


def test_prompts_that_a_lower_limit_filters_are_other_data(tokenizer, config, make_row):
    rows = [make_row("a" * length) for length in (1, 8)]
    config.filter_overlong_prompts = True
    config.max_prompt_length = 100
    full, again = (RLHFDataset(rows, tokenizer, config) for _ in range(2))
    assert differences(full.fingerprint, again.fingerprint) == []
    config.max_prompt_length = len(full[0]["raw_prompt_ids"])
    assert differences(full.fingerprint, RLHFDataset(rows, tokenizer, config).fingerprint) == ["1 rows, were 2"]


def test_a_pair_whose_rejected_answer_changed_is_other_data(tokenizer):
    data = PairDataConfig(train_files=["rows"], val_files=[], seed=0, max_length=64)

    def pairs(rejected):
        row = {"prompt": "?", "chosen": "y", "rejected": rejected}
        return PairDataset([row], tokenizer, data, stop_ids=[tokenizer.eos_token_id]).fingerprint

    assert differences(pairs("n"), pairs("n")) == []
    assert "other tokens" in differences(pairs("n"), pairs("m"))[0]


def test_another_margin_is_other_data_where_margins_are_learnt_from(tokenizer):
    def pairs(margin, of=ScoredPairDataConfig):
        data = of(train_files=["rows"], val_files=[], seed=0, max_length=64)
        row = {"prompt": "?", "chosen": "y", "rejected": "n", "margin": margin}
        return PairDataset([row], tokenizer, data, stop_ids=[tokenizer.eos_token_id]).fingerprint

    assert differences(pairs(1.0), pairs(1.0)) == []
    assert differences(pairs(1.0), pairs(2.0)) == ["the rows differ in margin"]
    assert differences(pairs(1.0, PairDataConfig), pairs(2.0, PairDataConfig)) == []


def test_other_trained_tokens_of_the_same_chats_are_other_data(tokenizer):
    data = DemonstrationDataConfig(train_files=["rows"], val_files=[], seed=0, max_length=99)

    def chats(weight):
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "y"}
        row = {"messages": [question, answer, question, answer | {"weight": weight}, question, answer]}
        return DemonstrationDataset([row], tokenizer, data, stop_ids=[tokenizer.eos_token_id]).fingerprint

    assert differences(chats(1), chats(1)) == []
    assert differences(chats(1), chats(0)) == ["the rows differ in trained tokens"]


# ---- shares of several sources ----------------------------------------------------------------------------------


def mixed(sizes, weights, seed=5, shuffle=True):
    return MixedOrder(sum(sizes), seed, shuffle, tuple(sizes), tuple(weights))


def source_of_rows(order, rows):
    return np.searchsorted(np.cumsum(order.sizes), rows, side="right")


def test_shares_are_those_of_the_weights_in_every_epoch_and_batch():
    order = mixed([90, 10, 100], [1.0, 1.0, 2.0])
    assert order.counts == (50, 50, 100)
    assert [order.share(i) for i in range(3)] == [0.25, 0.25, 0.5]
    position = Position()
    for _ in range(40):
        rows, position = order.next(position, 20)
        found = np.bincount(source_of_rows(order, rows), minlength=3)
        assert np.abs(found - [5, 5, 10]).max() <= 1


def test_each_source_goes_through_its_own_rows_before_it_repeats_one():
    order = mixed([30, 7], [1.0, 2.0])
    drawn = np.concatenate([order.epoch(epoch) for epoch in range(30)])
    for source, (start, size) in enumerate(((0, 30), (30, 7))):
        mine = drawn[source_of_rows(order, drawn) == source] - start
        passes = mine[: len(mine) // size * size].reshape(-1, size)
        assert (np.sort(passes, axis=1) == np.arange(size)).all()
        assert len({tuple(one) for one in passes}) > len(passes) // 2  # in another order each time


def test_the_rounded_counts_add_up_and_a_tiny_share_may_be_none():
    assert sum(mixed([10, 10, 10], [1.0, 1.0, 1.0]).counts) == 30
    assert mixed([4, 4], [1.0, 1e-6]).counts == (8, 0)
    assert sorted(mixed([4, 4], [1.0, 1e-6]).epoch(3)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_without_shuffling_each_source_counts():
    order = mixed([4, 2], [1.0, 1.0], shuffle=False)
    assert order.epoch(0).tolist() == [0, 4, 1, 5, 2, 4]
    assert order.epoch(1).tolist() == [3, 5, 0, 4, 1, 5]


def test_a_large_weight_of_a_tiny_source_is_quick():
    order = mixed([1_000_000, 1], [1.0, 9.0])
    rows = order.epoch(0)
    assert len(rows) == 1_000_001 and (rows == 1_000_000).mean() == pytest.approx(0.9, abs=1e-5)


def test_other_weights_are_other_data():
    tokens = [np.arange(3)] * 4
    plain, one, other = EpochOrder(4, 5), mixed([2, 2], [1.0, 1.0]), mixed([2, 2], [1.0, 2.0])
    before = fingerprint(one, tokens)
    assert differences(before, fingerprint(mixed([2, 2], [1.0, 1.0]), tokens)) == []
    for changed in (plain, other):
        assert differences(before, fingerprint(changed, tokens)) == ["the weights of its sources are others"]


def test_uniform_numbers_follow_from_seed_and_place():
    first = uniform(10_000, 3, 7)
    assert (first > 0).all() and (first < 1).all()
    assert first.mean() == pytest.approx(0.5, abs=0.02)
    assert (first == uniform(10_000, 3, 7)).all()
    assert abs(np.corrcoef(first, uniform(10_000, 3, 8))[0, 1]) < 0.05
