"""Where programs play episodes: real processes for environments, and an engine that says what it is told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hrl.config.environment import EnvironmentConfig
from hrl.episodes.episode import Episode
from hrl.episodes.play import EpisodeTask, Limits, Player, PlaySetup
from hrl.episodes.pool import EnvironmentPool, environment_of
from hrl.serve.agents import AgentDoor
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import SampleOutput
from hrl.workers.rollout.host import LoopThread
from tests.serve.doors import Engine, echo, tokenizer_with_merges


class Stage:
    """A pool of one process for the environment that `path` names, on a loop of its own.

    Attributes:
        asked: What the door of the last episodes has counted.
    """

    def __init__(self, path: str, **changes: Any) -> None:
        self.loop = LoopThread("stage")
        self._settings = EnvironmentConfig(path=path, num_workers=1, memory_limit_gib=None, **changes)
        self.asked: Counter[str] | None = None
        self.pool = EnvironmentPool(environment_of(self._settings), self._settings)

    def __enter__(self) -> Stage:
        self.loop.run(self.pool.start(), timeout_s=60, what="the start")
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.run(self.pool.close(), timeout_s=60, what="the end")
        self.loop.stop()

    def play(
        self,
        kind: str | None = None,
        *,
        num_episodes: int = 1,
        say: Callable[[str], str] = echo,
        question: str = "abc",
        answer: str = "",
        limits: tuple[int, int] = (200, 300),
        max_tokens: int = 1000,
        **changes: Any,
    ) -> tuple[list[Episode], Engine]:
        """Episodes of an agent, and the engine that has answered."""
        tokenizer = tokenizer_with_merges()
        engine = Engine(tokenizer, say, delay_s=0.005)
        settings = self._settings.model_copy(update=changes)
        playing = PlaySetup(tokenizer, (tokenizer.eos_token_id,), {}, settings, Limits(*limits))
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": question}], "answer": answer}
        if kind is not None:  # an argument of the function that makes it
            row["env_kwargs"] = {"kind": kind}

        async def generate(
            ids: list[int], sampling: SamplingParams, episode: Any, what: str, *, experts_from: int | None, **_: Any
        ) -> SampleOutput:
            assert episode[0] == "uid" and "of episode (uid uid, sample" in what and experts_from is None
            return await engine.generate(ids, sampling, what)

        async def run() -> list[Episode]:
            agents = AgentDoor(playing, SimpleNamespace(generate=generate))
            player = Player(playing, self.pool, generate, agents)
            sampling = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=max_tokens)
            tasks = [EpisodeTask(("uid", i), row, sampling, run_seed=1, step=2) for i in range(num_episodes)]
            try:
                return [await player.play(task) for task in tasks]
            finally:
                self.asked = agents.new_counts()
                await agents.close()

        return self.loop.run(run(), timeout_s=60, what="the episodes"), engine
