import functools
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from hrl.reward.function import (
    BuiltIn,
    PickledFunction,
    RewardFunctionError,
    UserFile,
    is_async,
    read_reward,
    signature_problem,
)
from hrl.reward.weighted import entries_of


@pytest.mark.parametrize(
    "value, score",
    [
        *((1, 1.0), (0.5, 0.5), (True, 1.0), (Fraction(1, 4), 0.25), (Decimal("0.5"), 0.5)),
        *((np.float32(0.25), 0.25), (np.bool_(True), 1.0), (np.array(0.5), 0.5), (torch.tensor(2), 2.0)),
    ],
)
def test_any_real_number_is_a_score(value, score):
    assert read_reward(value) == (score, {})


def test_a_dict_holds_the_score_and_its_parts():
    value = {"score": 1, "format": True, "pred": "12", "note": None}
    assert read_reward(value) == (1.0, {"format": 1.0, "pred": "12", "note": None})


@pytest.mark.parametrize("steps", [[1, 0.5], (1, 0.5), np.array([1, 0.5]), torch.tensor([1.0, 0.5])])
def test_turns_have_scores_of_their_own_beside_which_that_of_the_whole_may_be_missing(steps):
    assert read_reward({"turn_scores": steps, "note": "x"}) == (0.0, {"turn_scores": [1.0, 0.5], "note": "x"})
    assert read_reward({"score": 2, "turn_scores": steps}) == (2.0, {"turn_scores": [1.0, 0.5]})
    assert read_reward({"score": 2, "turn_scores": None}) == (2.0, {})


def test_none_leaves_the_sample_out():
    assert read_reward(None) == (None, {})
    assert read_reward({"score": None, "why": "no gold"}) == (None, {"why": "no gold"})


@pytest.mark.parametrize(
    "value, message",
    [
        (float("nan"), "returned nan, which is not finite"),
        (float("-inf"), "returned -inf"),
        (10**400, "returned inf"),
        (-(10**400), "returned -inf"),
        (Fraction(-(10**400), 3), "returned -inf"),
        (Decimal("sNaN"), "returned nan"),
        ({"score": 1, "a\nb": 1.0}, r"with the key 'a\\nb', which can't name a metric"),
        ({"score": 1, " ": 1.0}, "can't name a metric"),
        (1e308, r"returned 1e\+308, which is not finite in float32"),
        (-3.5e38, "not finite in float32"),
        ({"score": 1, "part": 1e39}, "returned as 'part' 1e\\+39, which is not finite in float32"),
        ("1.0", "returned '1.0', a str"),
        ([1.0], r"returned \[1.0\], a list"),
        (np.ones(1), r"returned array\(\[1.\]\), a ndarray"),
        (1j, "a complex"),
        ({"value": 1}, "without the key 'score'; it has \\['value'\\]"),
        ({"score": 1, "part": float("nan")}, "returned as 'part' nan"),
        ({"score": "1"}, "returned as 'score' '1', a str"),
        ({"turn_scores": 1.0}, "returned as 'turn_scores' 1.0, a float, where a list of a number for each turn"),
        ({"turn_scores": {"a": 1.0}}, "where a list of a number for each turn is expected"),
        ({"turn_scores": [1.0, None]}, "returned for turn 1 of 'turn_scores' None, a NoneType"),
        ({"turn_scores": [float("nan")]}, "returned for turn 0 of 'turn_scores' nan"),
    ],
)
def test_what_is_no_reward_is_refused(value, message):
    with pytest.raises(RewardFunctionError, match=message):
        read_reward(value)


def test_a_function_is_loaded_from_its_file_with_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("BONUS = 2.0\n")
    file = tmp_path / "mine.py"
    file.write_text("from neighbour_of_reward import BONUS\ndef bonus(**kw):\n    return BONUS\n")
    assert UserFile(str(file), "bonus").load({})() == 2.0


def test_a_missing_file_or_name_is_told(tmp_path):
    with pytest.raises(RewardFunctionError, match=r"no\.py does not exist"):
        UserFile(str(tmp_path / "no.py")).load({})
    file = tmp_path / "mine.py"
    file.write_text("def score_it(**kw):\n    return 1.0\n")
    with pytest.raises(RewardFunctionError, match="has no function 'compute_score'; it has: score_it"):
        UserFile(str(file)).load({})
    (tmp_path / "mine.pkl").write_bytes(b"\x80\x04.")
    with pytest.raises(RewardFunctionError, match="not a .py file"):
        UserFile(str(tmp_path / "mine.pkl")).load({})


def test_a_data_source_without_scorer_is_found_at_loading():
    with pytest.raises(
        RewardFunctionError, match=r"no built-in reward function for data_source 'my/set'.*custom_reward"
    ):
        BuiltIn(("bundled/addition", "my/set")).load({})


def test_the_largest_float32_is_a_score():
    assert read_reward(3.4028234663852886e38)[0] == 3.4028234663852886e38


def verls(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return 1.0


def keyword_only(*, data_source, solution_str, ground_truth, extra_info):
    return 1.0


async def asynchronous(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


class Judge:
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
        return weight


class AsyncJudge:
    async def __call__(self, **row):
        return 1.0


def of_columns(response, answer, level=0):
    return 1.0


def trl_like(completions, **kwargs):
    return [1.0]


def by_position(data_source, solution_str, /, ground_truth, extra_info=None):
    return 1.0


@pytest.mark.parametrize(
    "function, kwargs",
    [
        (verls, {"anything": 1}),
        (keyword_only, {}),
        (asynchronous, {}),
        (Judge(), {"weight": 2.0}),
        (AsyncJudge(), {"weight": 2.0}),
        (functools.partial(verls, bonus=1), {}),
        (dict, {}),
        (of_columns, {}),
        (lambda solution_str: 1.0, {}),
    ],
)
def test_what_can_be_called_as_rewards_are_fits(function, kwargs):
    assert signature_problem(function, kwargs) is None


@pytest.mark.parametrize(
    "function, kwargs, problem",
    [
        (
            asynchronous,
            {"url": "x"},
            "does not take url of reward_kwargs. It is asynchronous(data_source, solution_str",
        ),
        (
            trl_like,
            {},
            "needs completions, which nothing gives (one `response` at a time for TRL's completions): name a",
        ),
        (lambda answer, level: 1.0, {}, "needs level, which nothing gives"),
        (lambda answer: 1.0, {}, "takes neither response nor solution_str, so it would score every response alike"),
        (by_position, {}, "takes data_source, solution_str by position only"),
        (Judge(), {"wieght": 1}, "does not take wieght"),
        (verls, {"solution_str": "x"}, "gets solution_str with every sample; take it out of reward_kwargs"),
        (lambda solution, truth: 1.0, {}, "needs solution, truth, which nothing gives"),
    ],
)
def test_what_cannot_is_told_without_calling_it(function, kwargs, problem):
    assert problem in signature_problem(function, kwargs)


def test_a_wrapper_that_hides_what_its_function_takes_is_told_before_it_is_called(tmp_path):
    decorated = "def timed(function):\n{}    def wrapper(*args, **kwargs):\n        return function(*args, **kwargs)\n"
    decorated += "    return wrapper\n@timed\ndef compute_score(response, answer):\n    return 1.0\n"
    file = tmp_path / "mine.py"
    file.write_text(decorated.format(""))
    with pytest.raises(RewardFunctionError, match=r"mine\.py is \*args, \*\*kwargs, .*@functools\.wraps\(function\)"):
        UserFile(str(file)).load({})
    file.write_text("import functools\n" + decorated.format("    @functools.wraps(function)\n"))
    assert UserFile(str(file)).load({})("", "") == 1.0


def test_a_function_may_take_any_column_of_its_rows():
    assert signature_problem(lambda response, level: 1.0, {}, ["level", "prompt"]) is None
    assert signature_problem(lambda response, levle: 1.0, {}, ["level"]).endswith(
        "may take any of data_source, response, solution_str, answer, ground_truth, extra_info, turns, conversation, "
        "pictures, level by name, or **kwargs"
    )
    assert "gets level with every sample" in signature_problem(verls, {"level": 3}, ["level"])


def test_a_signature_that_does_not_fit_is_found_at_loading(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(solution_str, level):\n    return 1.0\n")
    with pytest.raises(RewardFunctionError, match=r"mine\.py needs level, which nothing gives: "):
        UserFile(str(file)).load({})
    assert UserFile(str(file)).load({}, ["level"])("", 1) == 1.0


def test_async_functions_are_told_from_others():
    assert all(map(is_async, (asynchronous, AsyncJudge(), functools.partial(asynchronous, extra_info=None))))
    assert not any(map(is_async, (verls, Judge(), AsyncJudge, functools.partial(verls))))


@pytest.mark.parametrize(
    ("function", "meant"),
    [
        (lambda response, anwser: 1.0, r"needs anwser, which nothing gives \(did you mean answer\?\): name a column"),
        (lambda response, levle: 1.0, r"\(did you mean level\?\)"),
        (lambda completions, **kwargs: [1.0], r"\(one `response` at a time for TRL's completions\)"),
        (lambda prompts, completions: [1.0], r"one `prompt` at a time for TRL's prompts; one `response` at a time"),
        (lambda response, zzz: 1.0, r"needs zzz, which nothing gives: name a column"),
    ],
)
def test_a_name_that_nothing_gives_has_the_nearest_one_and_trls_names_have_ours(function, meant):
    with pytest.raises(RewardFunctionError, match=meant):
        PickledFunction.of(function, columns=("level",))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([1.0, 0.0], "a function scores one response, and is called once for each"),
        (np.ones(2), "a function scores one response"),
        ((value for value in [1.0]), "write `return` in place of `yield`"),
    ],
)
def test_a_value_that_is_no_reward_is_told_with_what_was_meant(value, why):
    with pytest.raises(RewardFunctionError, match=why):
        read_reward(value)


@pytest.mark.parametrize("reward", [3, object()])
def test_what_cannot_be_called_is_refused_as_a_reward(reward):
    with pytest.raises(RewardFunctionError, match="which can't be called; give a function, an object with `__call__`"):
        entries_of(reward)


def test_a_partial_is_named_after_its_function():
    def graded(response, most):
        return float(len(response) <= most)

    assert "graded of" in PickledFunction.of(functools.partial(graded, most=3)).title
