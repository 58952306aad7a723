"""One judgement of what was probably meant, for keys, values, names and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.nearest import did_you_mean, edit_distance, nearest, nearest_path


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ("grpo", "grpo", 0),
        ("gpro", "grpo", 1),  # swapped
        ("gpro", "gspo", 2),  # one left out, one put in
        ("gvpo", "gspo", 2),  # exchanged
        ("sed", "seed", 1),
        ("", "ab", 2),
        ("abcd", "badc", 2),
    ],
)
def test_the_distance_counts_slips_of_a_hand(one, other, distance):
    assert edit_distance(one, other) == edit_distance(other, one) == distance


def test_the_value_of_a_choice_is_near_whatever_its_case():
    assert nearest("GRPO", ["grpo", "gspo"]) == ["grpo"]
    assert nearest("token_mean", ["token-mean", "token-sum"]) == ["token-mean"]
    assert nearest("xyz", ["grpo"]) == []


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("max_position", "max_position_embeddings"),  # the end left out
        ("max_positions", "max_position_embeddings"),
        ("ppo_mini_batch", "ppo_mini_batch_size"),
    ],
)
def test_a_name_that_lacks_something_is_near(name, choice):
    assert nearest(name, [choice, "something_else"]) == [choice]


def test_a_short_name_must_be_nearer_than_a_long_one():
    assert nearest("gpo", ["grpo"]) == ["grpo"]
    assert nearest("gvpo", ["grpo"]) == []
    assert nearest("clip_ratoi_hgih", ["clip_ratio_high", "clip_ratio_low"]) == ["clip_ratio_high"]


def test_the_hint_names_all_that_are_equally_near():
    assert did_you_mean("top", ["top_k", "top_p"], "No.") == "No."
    assert did_you_mean("top_", ["top_k", "top_p"]) == "Did you mean top_k or top_p?"
    assert did_you_mean("zzz", ["top_k"], "Choose top_k.") == "Choose top_k."


def test_a_path_is_found_by_its_names(tmp_path: Path):
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "models" / "qwen" / "config.json").touch()
    assert nearest_path(tmp_path / "model" / "qwne" / "config.jsn") == tmp_path / "models" / "qwen" / "config.json"
    assert nearest_path(tmp_path / "models" / "config.json") == tmp_path / "models" / "qwen" / "config.json"
    assert nearest_path(tmp_path / "elsewhere") is None
