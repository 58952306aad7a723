"""What the process of a reward function says about the function."""

import asyncio
import subprocess
import sys

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


def test_its_start_imports_no_schema_and_nothing_else_that_takes_long():
    code = "import sys, hrl.reward.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"hrl.config", "pydantic", "omegaconf", "yaml", "numpy", "torch", "ray", "rich", "transformers"}
    assert not heavy & set(done.stdout.split())
