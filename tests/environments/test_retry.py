"""An environment that asks again until an answer is right."""

import itertools

import pytest

from hrl.data.tasks.reasoning_gym import reasoning_gym_rows
from hrl.environments.interface import Action
from hrl.environments.loading import EnvironmentMaker, EnvironmentSpec
from hrl.environments.retry import RetryEnvironment

ROW = {
    "data_source": "numeric",
    "prompt": [{"role": "user", "content": "6 * 7?"}],
    "reward_model": {"ground_truth": "42"},
}


def played(environment, row, *answers: str):
    environment.reset(row, 1)
    return [environment.step(Action(answer, turn=turn)) for turn, answer in enumerate(answers)]


def test_a_wrong_answer_is_told_and_a_right_one_ends_the_episode_with_what_is_left():
    first, second, last = played(RetryEnvironment(discount=0.5), ROW, "40", "41", "42")
    assert (first.observation, first.reward, first.done) == ("That is not right. Try again.", 0.0, False)
    assert not second.done
    assert (last.reward, last.done, last.metrics) == (0.25, True, {"right": 1.0, "answers": 3.0})
    (at_once,) = played(RetryEnvironment(discount=0.5), ROW, "The answer is 42.")
    assert at_once.reward == 1.0 and at_once.metrics["answers"] == 1


def test_the_last_attempt_ends_it_whatever_it_is_worth():
    *_, last = played(RetryEnvironment(attempts=2, feedback="No."), ROW, "40", "41")
    assert (last.reward, last.done, last.metrics["right"]) == (0.0, True, 0.0)


def test_a_dataset_of_reasoning_gym_is_scored_by_its_own_scorer():
    (row,) = itertools.islice(reasoning_gym_rows("chain_sum?size=1&seed=3"), 1)
    environment = EnvironmentMaker(EnvironmentSpec.of("retry", {"attempts": 2})).make()
    right = row["reward_model"]["ground_truth"]
    answer = right["answer"] if isinstance(right, dict) else right
    assert environment.reset(row, 1) == row["prompt"]
    assert not environment.step(Action("-1")).done
    last = environment.step(Action(str(answer)))
    assert (last.done, last.reward) == (True, 1.0)


def test_reasoning_that_was_cut_off_is_no_answer():
    environment = RetryEnvironment()
    environment.reset(ROW, 1)
    cut = environment.step(Action("<think>42? 6 * 7 is 42", reasoning="42? 6 * 7 is 42", finish_reason="length"))
    assert (cut.reward, cut.done, cut.metrics["right"]) == (0.0, False, 0.0)
    said = environment.step(Action("<think>Hm.</think>42", content="42", reasoning="Hm."))
    assert (said.reward, said.done) == (1.0, True)


@pytest.mark.parametrize("kwargs", [{"attempts": 0}, {"discount": 1.5}])
def test_arguments_that_make_no_sense_are_refused(kwargs):
    with pytest.raises(ValueError, match=r"at least one attempt, and a discount from 0 to 1"):
        RetryEnvironment(**kwargs)
