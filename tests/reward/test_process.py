"""What the process of a reward function says about the function."""

import asyncio
import subprocess
import sys

import pytest

from hrl.reward import process
from hrl.reward.function import RewardFunctionError


async def _judge(solution_str: str) -> float:
    return float(len(solution_str))


def test_a_plain_function_that_returns_a_coroutine_is_told_that_it_waits_alone():
    """As a decorated judge does; only an async function's calls are awaited together."""

    def wrapper(**sample):
        return _judge(**sample)

    with asyncio.Runner() as runner, pytest.warns(UserWarning, match="wrapper returns a coroutine.*one at a time"):
        assert process._score(wrapper, {"solution_str": "four"}, runner) == {"score": 4.0, "parts": {}}


def test_scores_of_turns_stay_apart_in_an_episode_and_are_the_score_of_a_single_response():
    of_turns = {"score": 1.0, "turn_scores": [0.5, -0.25]}
    assert process._reward(of_turns, ["a", "b"]) == {
        "score": 1.0,
        "parts": {"turn_scores": 0.25},
        "turn_scores": [0.5, -0.25],
    }
    assert process._reward({"turn_scores": (2,)}, None) == {"score": 2.0, "parts": {"turn_scores": 2.0}}
    assert process._reward({"score": None, "turn_scores": [1.0]}, ["a"])["score"] is None


@pytest.mark.parametrize(("turns", "number"), [(["a", "b", "c"], 3), (None, 1), ([], 0)])
def test_another_number_of_scores_than_of_turns_is_told(turns, number):
    with pytest.raises(RewardFunctionError, match=f"returned 2 turn_scores where the sample has {number} of the pol"):
        process._reward({"turn_scores": [1.0, 2.0]}, turns)


def test_its_start_imports_no_schema_and_nothing_else_that_takes_long():
    code = "import sys, hrl.reward.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    heavy = {"hrl.config", "pydantic", "omegaconf", "yaml", "numpy", "torch", "ray", "rich", "transformers"}
    assert not heavy & set(done.stdout.split())
