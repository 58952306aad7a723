"""What an episode's seconds are: its environment's, not those of an engine that is busy."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from hrl.config.environment import EnvironmentConfig
from hrl.environments.interface import Action, Observation, StepResult
from hrl.episodes.clock import EpisodeClock
from hrl.episodes.episode import Episode
from hrl.episodes.play import EpisodeTask, Limits, Player, PlaySetup
from hrl.serve.agents import AgentDoor
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import SampleOutput
from tests.episodes.families import FAMILIES
from tests.episodes.skipped_time import run_at_once

TOKENIZER = FAMILIES["smollm2"].tokenizer
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
TASK = EpisodeTask(("uid", 0), {"prompt": []}, SamplingParams(max_tokens=1000), run_seed=1, step=2)


class World:
    """Three turns, of which each takes so many seconds."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def open(self, *_: Any) -> World:
        return self

    async def reset(self) -> Observation:
        return Observation(messages=[{"role": "user", "content": "?"}])

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(self._step_s)
        return StepResult(Observation(messages=[{"role": "user", "content": "!"}]), done=action.turn == 2)

    async def close(self) -> None:
        pass


class Engine:
    """Takes so many seconds for each turn."""

    def __init__(self, turn_s: float) -> None:
        self._turn_s, self.num_withdrawn = turn_s, 0

    async def generate(self, *_: Any, **__: Any) -> SampleOutput:
        try:
            await asyncio.sleep(self._turn_s)
        except asyncio.CancelledError:
            self.num_withdrawn += 1
            raise
        return SampleOutput([5, STOP], [-0.5, -0.5], "stop", 0)


def played(step_s: float, engine: Engine, batch_ends_at: float = math.inf) -> Episode:
    setup = PlaySetup(TOKENIZER, (STOP,), {}, EnvironmentConfig(episode_timeout_s=5.0), Limits(99, 999))
    return run_at_once(_played(Player(setup, World(step_s), engine.generate), batch_ends_at))


async def _played(player: Player, batch_ends_at: float) -> Episode:
    return await player.play(TASK, batch_ends_at)


@pytest.mark.parametrize(
    ("step_s", "turn_s", "end", "num_turns"),
    [(1.5, 0.0, "done", 3), (1.5, 1000.0, "done", 3), (2.0, 0.0, "deadline", 3), (2.6, 1000.0, "deadline", 2)],
)
def test_an_engine_that_is_busy_ends_no_episode_and_an_environment_that_takes_long_does(
    step_s: float, turn_s: float, end: str, num_turns: int
) -> None:
    episode = played(step_s, Engine(turn_s))
    assert (episode.end, len(episode.texts)) == (end, num_turns)


@pytest.mark.parametrize(("ends_at", "num_turns"), [(50.0, 0), (150.0, 1)])
def test_the_end_of_the_batch_counts_the_engines_time_and_withdraws_what_is_asked(
    ends_at: float, num_turns: int
) -> None:
    engine = Engine(100.0)
    episode = played(1.0, engine, ends_at)
    assert (episode.end, len(episode.texts), engine.num_withdrawn) == ("deadline", num_turns, 1)


def test_requests_at_the_same_time_let_the_clock_stand_until_the_last_is_answered() -> None:
    async def ask(clock: EpisodeClock, after_s: float, for_s: float) -> None:
        await asyncio.sleep(after_s)
        with clock.standing():
            await asyncio.sleep(for_s)

    async def seconds_until_cut_off() -> float:
        clock = EpisodeClock(5.0)
        with pytest.raises(TimeoutError):
            async with clock.running():
                await asyncio.gather(ask(clock, 1.0, 10.0), ask(clock, 3.0, 4.0), ask(clock, 8.0, 5.0))
                await asyncio.sleep(100.0)
        assert clock.is_over
        return asyncio.get_running_loop().time()

    assert run_at_once(seconds_until_cut_off()) == pytest.approx(5.0 + 12.0), "it stands from 1 to 13"


def test_calls_of_a_program_let_the_clock_of_its_episode_stand() -> None:
    engine = Engine(1000.0)
    setup = PlaySetup(TOKENIZER, (STOP,), {}, EnvironmentConfig(), Limits(99, 999))

    async def asked() -> bool:
        clock = EpisodeClock(5.0)
        door = AgentDoor(setup, SimpleNamespace(generate=engine.generate))  # type: ignore[arg-type]
        generate = door._session(TASK, clock).generate
        assert generate is not None
        async with clock.running():
            await generate([1], TASK.sampling, "call", None)
        return clock.is_over

    assert run_at_once(asked()) is False
