"""Environments in processes of their own: what they give comes back, and what goes wrong stays with its episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from hrl.config.environment import EnvironmentConfig
from hrl.environments.interface import Action
from hrl.environments.loading import EnvironmentSpec
from hrl.episodes.pool import (
    EnvironmentPool,
    LiveEnvironment,
)

WORLDS = str(Path(__file__).with_name("worlds.py"))


def settings(**changes: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**{"num_workers": 1, "step_timeout_s": 20.0, "memory_limit_gib": 2.0} | changes)


def pool_of(name: str = "Echo", kwargs: dict[str, Any] | None = None, **changes: Any) -> EnvironmentPool:
    return EnvironmentPool(EnvironmentSpec.of(f"{WORLDS}:{name}", kwargs), settings(**changes))


def with_pool(play: Callable[[EnvironmentPool], Coroutine[Any, Any, None]], pool: EnvironmentPool) -> None:
    async def run() -> None:
        async with asyncio.timeout(120), pool:
            await play(pool)

    asyncio.run(run())


async def plays_right(environment: LiveEnvironment) -> bool:
    """Whether an episode of `Echo` goes as it must."""
    first = await environment.reset()
    results = [await environment.step(Action(text)) for text in ("a", "b")]
    await environment.close()
    contents = [first.messages[0]["content"], results[0].observation.messages[0]["content"]]
    return contents == ["hello x 7", "1: a"] and [(r.reward, r.done) for r in results] == [(0.5, False), (1.0, True)]


@pytest.mark.parametrize("name", ["Echo", "AsyncEcho"])
def test_an_episode_comes_back_as_the_class_has_it(name):
    async def play(pool):
        assert await plays_right(pool.open("e", {"name": "x"}, 7))

    with_pool(play, pool_of(name))
