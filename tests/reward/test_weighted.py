"""Several reward functions as one."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial

import pytest

from hrl.reward.function import PickledFunction, RewardFunctionError, is_async, signature_problem
from hrl.reward.pool import RewardPool, RewardRow
from hrl.reward.spec import RewardSpec
from hrl.reward.weighted import entries_of, weighted_sum
from tests.reward.given import correct
from tests.reward.settings import reward


def as_one(rewards):
    return weighted_sum({name: (function, weight) for name, function, weight in entries_of(rewards)})


def brief(response, **sample):
    return {"score": 1.0 - len(response) / 10, "length": len(response), "kind": sample["kind"]}


async def silent_about_words(solution_str):
    await asyncio.sleep(0)
    return None if solution_str.isalpha() else 2.0


def test_the_sum_is_weighted_and_every_score_is_a_part():
    one = as_one([(correct, 1.0), (brief, 0.5)])
    assert one(response="four", answer="four", kind="word") == {
        "score": pytest.approx(1.0 + 0.5 * 0.6),
        "correct": 1.0,
        "brief": pytest.approx(0.6),
        "brief/length": 4,
        "brief/kind": "word",
    }


def test_scores_of_turns_are_added_up_turn_by_turn():
    def steps(response):
        return {"score": 1.0, "turn_scores": [1.0, 2.0]}

    def form(response):
        return {"turn_scores": [4.0, 0.0]}

    def silent(response):
        return {"score": None, "turn_scores": [9.0, 9.0]}

    assert as_one([(steps, 1.0), (form, 0.5), (silent, 1.0)])(response="x") == {
        "score": 1.0,
        "turn_scores": [3.0, 2.0],
        "steps": 1.0,
        "steps/turn_scores": 3.0,
        "form": 0.0,
        "form/turn_scores": 4.0,
        "silent": None,
        "silent/turn_scores": 18.0,
    }
    with pytest.raises(RewardFunctionError, match="steps returned 2 turn_scores and short 1, of the same turns"):
        as_one([steps, named("short", lambda response: {"turn_scores": [1.0]})])(response="x")


def named(name, function):
    function.__name__ = name
    return function


def test_a_named_function_may_have_no_weight_as_in_yaml():
    numeric, alone = entries_of(["numeric", {"name": "length", "most": 3, "weight": 0}]), entries_of([("numeric", 0)])
    assert [entry.weight for entry in (*numeric, *alone)] == [1.0, 0.0, 0.0]
    assert numeric[1].kwargs == {"most": 3}


def test_a_function_without_a_say_is_left_out_and_a_sample_without_any_is():
    one = as_one([correct, silent_about_words])
    assert is_async(one) and not is_async(as_one([correct]))
    said = asyncio.run(one(response="a", answer="a", solution_str="a"))
    assert said == {"score": 1.0, "correct": 1.0, "silent_about_words": None}
    alone = as_one([(silent_about_words, 3.0)])
    assert asyncio.run(alone(solution_str="a"))["score"] is None
    assert asyncio.run(alone(solution_str="4"))["score"] == 6.0


def test_it_takes_what_its_functions_take():
    assert signature_problem(as_one([correct, silent_about_words]), {}) is None
    assert "needs level" in signature_problem(as_one([correct, lambda response, level: 1.0]), {})
    needed = inspect.signature(as_one([lambda response, level=1: 1.0, correct])).parameters
    assert needed["level"].default == 1 and needed["answer"].default is inspect.Parameter.empty


def test_it_is_scored_in_processes_like_any_other():
    function = PickledFunction.of(as_one([(correct, 1.0), (lambda response: 0.25, 2.0)]))
    with RewardPool(RewardSpec(function), reward(timeout_s=5.0)) as pool:
        outcome = pool.submit(RewardRow(0, "s", "4"), "4", "sample").result(20)
    assert outcome.score == 1.5 and dict(outcome.parts) == {"correct": 1.0, "lambda": 0.25}


@pytest.mark.parametrize(
    "rewards, message",
    [
        ([], "empty"),
        ([(correct, "much")], "reward 0 is .*give a function, .*or a pair"),
        (["corect"], r"(?s)reward 0 is no entry of reward.functions.*names 'corect'"),
        ([3], "reward 0 is 3; give a function"),
        ((correct, 1.0), r"the reward is a pair; put function and weight into a list: \[\(function, weight\)\]"),
        (("numeric", 2), "the reward is a pair; put"),
        ([(correct, float("nan"))], "reward 0 has the weight nan; give a finite number"),
        (["numeric", (correct, -float("inf"))], "reward 1 has the weight -inf; give a finite number"),
        ([("numeric", float("inf"))], "reward 0 has the weight inf; give a finite number"),
        ([(correct, 10**400)], "give a finite number"),
        ([correct, (correct, 2.0)], "two rewards are named correct"),
    ],
)
def test_what_cannot_be_summed_is_refused(rewards, message):
    with pytest.raises(RewardFunctionError, match=message):
        entries_of(rewards)


def test_without_acc_the_function_that_read_the_answer_says_what_is_right_and_not_the_sum():
    def numeric(response):
        return {"score": float("12" in response), "pred": response[-2:]}

    def penalty(response):
        return -0.05

    one = as_one([(numeric, 1.0), (lambda response: 1.0, 1.0)])
    assert [(one(response=text)["score"], one(response=text)["acc"]) for text in ("12", "13")] == [(2, 1), (1, 0)]
    less = as_one([penalty, (numeric, 1.0)])
    assert (less(response="12")["score"], less(response="12")["acc"]) == (0.95, 1.0)
    assert "acc" not in as_one([penalty, (lambda response: 1.0, 1.0)])(response="12"), "nobody has read an answer"
    assert "acc" not in as_one(numeric)(response="12"), "the score says it already"


def test_the_first_acc_and_pred_keep_their_names_because_validation_counts_by_them():
    one = as_one([brief, (lambda response: {"score": 1.0, "acc": 0.0, "pred": "x"}, 1.0), (graded, 1.0)])
    parts = one(response="four", kind="word")
    assert (parts["acc"], parts["pred"]) == (0.0, "x")
    assert (parts["graded/acc"], parts["graded/pred"]) == (1.0, "y")


def graded(response):
    return {"score": 0.0, "acc": True, "pred": "y"}


def test_the_function_that_returns_no_reward_is_named():
    def texts(response):
        return response

    with pytest.raises(RewardFunctionError, match="texts returned 'x', a str"):
        as_one([correct, texts])(response="x", answer="x")


def test_a_function_of_several_cannot_have_the_name_of_their_sum():
    def score(response):
        return 1.0

    with pytest.raises(RewardFunctionError, match="is named score, as their sum is"):
        as_one([(score, 0.5), (lambda response: 4.0, 0.25)])
    assert [name for name, *_ in entries_of(score)] == ["score"]  # alone it is no sum


@pytest.mark.parametrize("name", ["acc", "pred"])
def test_a_function_of_several_cannot_have_the_name_of_a_part_that_validation_reads(name):
    def other(response):
        return 0.5

    other.__name__ = name
    with pytest.raises(RewardFunctionError, match=f"is named {name}, as the part by which validation counts"):
        as_one([graded, other])  # whose `acc` and `pred` it would overwrite
    assert [part for part, *_ in entries_of([(other, 2.0)])] == [name]


def test_lambdas_and_partials_have_names_of_their_own():
    def graded(response, most):
        return float(len(response) <= most)

    named = entries_of([lambda response: 1.0, partial(graded, most=3), lambda response: 2.0])
    assert [name for name, *_ in named] == ["lambda", "graded", "lambda_2"]
    with pytest.raises(RewardFunctionError, match=r"two rewards are named graded.*Give one of them another name"):
        entries_of([graded, partial(graded, most=3)])


def test_a_sum_without_the_part_of_a_judge_that_failed_is_no_reward():
    def asked(response):
        return {"score": None, "failure": "503"} if response == "x" else 0.5

    both = as_one([(asked, 1.0), (lambda response: 1.0, 1.0)])
    assert both(response="y")["score"] == 1.5
    assert both(response="x") == {"asked": None, "asked/failure": "503", "lambda": 1.0, "score": None}
