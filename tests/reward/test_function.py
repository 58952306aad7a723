from fractions import Fraction

import numpy as np
import pytest

from hrl.reward.function import RewardFunctionError, RewardSpec, load_reward_function, read_reward


@pytest.mark.parametrize(
    "value, score", [(1, 1.0), (0.5, 0.5), (True, 1.0), (np.float32(0.25), 0.25), (Fraction(1, 4), 0.25)]
)
def test_any_real_number_is_a_score(value, score):
    assert read_reward(value) == (score, {})


def test_a_dict_holds_the_score_and_its_parts():
    value = {"score": 1, "format": True, "pred": "12", "note": None}
    assert read_reward(value) == (1.0, {"format": 1.0, "pred": "12", "note": None})


def test_none_leaves_the_sample_out():
    assert read_reward(None) == (None, {})
    assert read_reward({"score": None, "why": "no gold"}) == (None, {"why": "no gold"})


@pytest.mark.parametrize(
    "value, message",
    [
        (float("nan"), "returned nan, which is not finite"),
        (float("-inf"), "returned -inf"),
        (10**400, "returned inf"),
        ("1.0", "returned '1.0', a str"),
        ([1.0], r"returned \[1.0\], a list"),
        (1j, "a complex"),
        ({"value": 1}, "without the key 'score'; it has \\['value'\\]"),
        ({"score": 1, "part": float("nan")}, "returned as 'part' nan"),
        ({"score": "1"}, "returned as 'score' '1', a str"),
    ],
)
def test_what_is_no_reward_is_refused(value, message):
    with pytest.raises(RewardFunctionError, match=message):
        read_reward(value)


def test_a_function_is_loaded_from_its_file_with_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("BONUS = 2.0\n")
    file = tmp_path / "mine.py"
    file.write_text("from neighbour_of_reward import BONUS\ndef bonus(**kw):\n    return BONUS\n")
    assert load_reward_function(RewardSpec(str(file), "bonus"))() == 2.0


def test_a_missing_file_or_name_is_told(tmp_path):
    with pytest.raises(RewardFunctionError, match=r"no\.py does not exist"):
        load_reward_function(RewardSpec(str(tmp_path / "no.py")))
    file = tmp_path / "mine.py"
    file.write_text("def score_it(**kw):\n    return 1.0\n")
    with pytest.raises(RewardFunctionError, match="has no function 'compute_score'; it has: score_it"):
        load_reward_function(RewardSpec(str(file)))
    (tmp_path / "mine.pkl").write_bytes(b"\x80\x04.")
    with pytest.raises(RewardFunctionError, match="not a .py file"):
        load_reward_function(RewardSpec(str(tmp_path / "mine.pkl")))


def test_a_data_source_without_scorer_is_found_at_loading():
    with pytest.raises(
        RewardFunctionError, match=r"no built-in reward function for data_source 'my/set'.*custom_reward"
    ):
        load_reward_function(RewardSpec(data_sources=("bundled/addition", "my/set")))
