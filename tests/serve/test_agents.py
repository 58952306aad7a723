"""Programs that speak nothing but OpenAI's protocol play episodes; what they asked for are the episodes' rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hrl.config.environment import EnvironmentConfig
from hrl.episodes.episode import Episode
from hrl.episodes.play import EpisodeTask, Limits, Player
from hrl.episodes.pool import EnvironmentPool, spec_of
from hrl.serve.agents import AgentDoor
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import SampleOutput, sample_seed
from hrl.workers.rollout.host import LoopThread
from tests.serve.doors import Engine, echo, tokenizer_with_merges
from tests.serve.test_openai_client import require_sampled

AGENTS = Path(__file__).with_name("agents.py")
LIMITS = Limits(200, 300)


def settings(**changes: Any) -> EnvironmentConfig:
    return EnvironmentConfig(path=f"{AGENTS}:agent", num_workers=1, memory_limit_gib=None, **changes)


class Stage:
    """A pool whose processes make any agent, on a loop of its own."""

    def __init__(self, **changes: Any) -> None:
        self.loop = LoopThread("stage")
        self._settings = settings(kwargs={"kind": "Plain"}, **changes)
        self.pool = EnvironmentPool(spec_of(self._settings), self._settings)

    def __enter__(self) -> Stage:
        self.loop.run(self.pool.start(), timeout_s=60, what="the start")
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.run(self.pool.close(), timeout_s=60, what="the end")
        self.loop.stop()

    def play(
        self, name: str, *, num_episodes: int = 1, limits: Limits = LIMITS, **changes: Any
    ) -> tuple[list[Episode], Engine]:
        """Episodes of an agent, and the engine that has answered."""
        tokenizer = tokenizer_with_merges()
        engine = Engine(tokenizer, echo, delay_s=0.005)
        words = (tokenizer, (tokenizer.eos_token_id,), {}, self._settings.model_copy(update=changes), limits)
        row = {"prompt": [{"role": "user", "content": "abc"}], "env_kwargs": {"kind": name}}

        async def generate(ids: list[int], sampling: SamplingParams, episode: Any, what: str) -> SampleOutput:
            assert episode[0] == "uid" and "of episode (uid uid, sample" in what
            return await engine.generate(ids, sampling, what)

        async def run() -> list[Episode]:
            agents = AgentDoor(*words, generate)
            player = Player(*words, self.pool, generate, agents)
            sampling = SamplingParams(temperature=0.7, top_p=0.9)
            tasks = [EpisodeTask(("uid", i), row, sampling, run_seed=1, step=2) for i in range(num_episodes)]
            try:
                return [await player.play(task) for task in tasks]
            finally:
                await agents.close()

        return self.loop.run(run(), timeout_s=60, what="the episodes"), engine


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(step_timeout_s=30.0) as one:
        yield one


def test_a_program_plays_an_episode_with_the_sampling_of_the_run(stage: Stage):
    (episode,), engine = stage.play("Plain")
    assert (episode.end, episode.error, episode.num_turns) == ("done", None, 2)
    assert episode.turn_rewards == [None, float(len("MORE"))]
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "user", "assistant"]
    require_sampled(list(episode.rows), engine)
    assert len(episode.rows) == 1
    samplings = [sampling for _, _, sampling in engine.record]
    assert {(one.temperature, one.top_p) for one in samplings} == {(0.7, 0.9)}
    assert [one.seed for one in samplings] == [sample_seed(1, 2, "uid", 0), sample_seed(1, 2, "uid", 0, 1)]
    assert episode.metrics["agent/overridden"] == 2.0


def test_agents_at_the_same_time_are_branches(stage: Stage):
    (episode,), engine = stage.play("Several")
    require_sampled(list(episode.rows), engine)
    assert len(episode.rows) == 2 and episode.num_turns == 3
    assert episode.turn_rewards == [None, None, 0.5] and episode.metrics["agents"] == 3.0


@pytest.mark.parametrize(
    ("limits", "max_turns", "end"),
    [(Limits(200, 300), 3, "max_turns"), (Limits(60, 40), 50, "max_tokens"), (Limits(10, 300), 3, "max_tokens")],
)
def test_a_limit_ends_a_program_that_would_go_on(stage: Stage, limits: Limits, max_turns: int, end: str):
    (episode,), engine = stage.play("Endless", limits=limits, max_turns=max_turns)
    if limits.prompt < 20:
        assert episode.end == "failed" and "without asking" in str(episode.error)
        return
    assert episode.end == end and episode.error is None
    require_sampled(list(episode.rows), engine)
    assert all(
        len(row.prompt_ids) <= limits.prompt and len(row.response_ids) <= limits.response for row in episode.rows
    )
    assert episode.turn_rewards == [None] * episode.num_turns


def test_a_program_that_hangs_is_cut_off_with_what_it_has_asked_for(stage: Stage):
    (episode,), engine = stage.play("Hanging", episode_timeout_s=1.0)
    assert episode.end == "deadline" and episode.num_turns == 1
    require_sampled(list(episode.rows), engine)


def test_a_program_may_take_longer_than_a_step():
    with Stage(step_timeout_s=0.5) as stage:
        (episode,), _ = stage.play("Slow")
    assert (episode.end, episode.turn_rewards) == ("done", [1.0])


@pytest.mark.parametrize(
    ("name", "error"), [("Silent", "without asking the policy"), ("Failing", "ValueError: no luck")]
)
def test_a_program_that_fails_is_an_episode_that_failed(stage: Stage, name: str, error: str):
    (episode,), _ = stage.play(name)
    assert episode.end == "failed" and error in str(episode.error)


def test_the_key_of_an_episode_is_good_for_it_alone(stage: Stage):
    episodes, _ = stage.play("Thief", num_episodes=3)
    assert [episode.metrics["refused"] for episode in episodes] == [0.0, 1.0, 2.0]
    assert len({episode.metrics["pid"] for episode in episodes}) == 1
