"""What the process of a reward function says about the function."""

import asyncio

import pytest

from hrl.reward import process


async def _judge(solution_str: str) -> float:
    return float(len(solution_str))


def test_a_plain_function_that_returns_a_coroutine_is_told_that_it_waits_alone():
    """As a decorated judge does; only an async function's calls are awaited together."""

    def wrapper(**sample):
        return _judge(**sample)

    with asyncio.Runner() as runner, pytest.warns(UserWarning, match="wrapper returns a coroutine.*one at a time"):
        assert process._score(wrapper, {"solution_str": "four"}, runner) == {"score": 4.0, "parts": {}}
