import itertools

import pytest

from hrl.data.tasks import bundled_rows
from hrl.data.tasks.addition import held_out
from hrl.data.tasks.reasoning_gym import parse_address, reasoning_gym_rows
from hrl.errors import DatasetError


def _sums(split):
    return {
        row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in bundled_rows(f"addition/{split}")
    }


def test_train_and_val_share_no_sum_and_make_up_all_81():
    train, val = _sums("train"), _sums("val")
    assert (len(train), len(val)) == (65, 16)
    assert train | val == _sums("all")
    assert val["What is 7 + 8? Answer with the final number only."] == "15"


def test_a_held_out_sum_is_held_out_in_both_orders():
    assert held_out() == {(b, a) for a, b in held_out()}
    assert all(a != b for a, b in held_out())


def test_unknown_tasks_and_splits_are_named():
    with pytest.raises(DatasetError, match="unknown bundled task 'adition'.*there is: addition"):
        bundled_rows("adition/train")
    with pytest.raises(DatasetError, match="unknown split 'test'.*train, val, all"):
        bundled_rows("addition/test")


def test_an_address_holds_parameters_as_json():
    assert parse_address("chain_sum?size=3&max_terms=4&flag=true&name=x") == (
        "chain_sum",
        {"size": 3, "seed": 1, "max_terms": 4, "flag": True, "name": "x"},
    )


def test_generated_rows_are_the_same_in_every_process():
    """word_ladder walks through sets of words, whose order differs between processes."""
    first, second = (list(reasoning_gym_rows("word_ladder?size=2&seed=5")) for _ in range(2))
    assert first == second
    assert first[0]["data_source"] == "reasoning_gym/word_ladder"
    assert first[0]["reward_model"]["ground_truth"]["question"] in first[0]["prompt"][0]["content"]
    assert len(set(itertools.chain(*(row["extra_info"]["parameters"] for row in first)))) == 2


def test_a_wrong_address_is_refused():
    with pytest.raises(DatasetError, match=r"can't make 'reasoning_gym:chain_sum\?siz=3': .*refuses.*siz"):
        reasoning_gym_rows("chain_sum?siz=3")
    with pytest.raises(DatasetError, match="is not <dataset>"):
        reasoning_gym_rows("chain_sum?=&&")
