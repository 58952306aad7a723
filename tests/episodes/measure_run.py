"""What a turn costs beside its engine's own time: `python -m tests.episodes.measure_run [episodes] [turns] [model]`.

Episodes of a game are played as in a run: the service is a Ray actor, this process is the rank, and vLLM samples with a
real model. Seconds of a clock are means over turns; CPU is that of whole processes while episodes are played.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import psutil
import ray

from hrl.cluster.lone_engine import lone_engine
from hrl.config.environment import EnvironmentConfig
from hrl.episodes.play import EpisodeTask, Limits
from hrl.episodes.pool import environment_of
from hrl.episodes.service import EpisodeActor, EpisodeSetup
from hrl.models.source import resolve_model
from hrl.models.tokenizer import load_tokenizer, token_ids
from hrl.trained.folders import find_trained
from hrl.trained.serving import serving_config
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import OnTokens, SampleOutput
from hrl.workers.rollout.host import RolloutHost
from tests.episodes.test_service import GAMES

TURN_TOKENS = 32
MODEL = "bundled:smollm2-135m-instruct"


class Clock:
    """How long an engine takes for each request."""

    def __init__(self, host: RolloutHost) -> None:
        self.seconds: list[float] = []
        self._generate = host.engine.generate
        host.engine.generate = self._timed  # type: ignore[method-assign]

    async def _timed(
        self, ids: list[int], sampling: SamplingParams, name: str, on_tokens: OnTokens | None = None, **more: Any
    ) -> SampleOutput:
        began = time.perf_counter()
        output = await self._generate(ids, sampling, name, on_tokens, **more)
        self.seconds.append(time.perf_counter() - began)
        return output


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(episodes: int, turns: int, model: str) -> dict[str, Any]:
    folder = resolve_model(model)
    ids = token_ids(load_tokenizer(folder), folder)
    limits = Limits(256, 256 * turns)
    settings = EnvironmentConfig(
        path=f"{GAMES}:Game", kwargs={"turns": turns}, max_turns=turns, max_turn_tokens=TURN_TOKENS, num_workers=2
    )
    roles = serving_config(find_trained(model), []).actor_rollout_ref
    setup = lone_engine(roles.model, roles.rollout, folder, ids, limits.prompt + limits.response)
    ray.init(include_dashboard=False, log_to_driver=False)
    actor = EpisodeActor(EpisodeSetup(environment_of(settings), settings, limits, str(folder), False, ids.stop, {}))
    try:
        with RolloutHost(setup) as host:
            actor.start()
            clock, rank, service = Clock(host), psutil.Process(), psutil.Process(actor.pid)
            groups = {
                "service": [service],
                "environments": service.children(recursive=True),
                "rank": [rank],
                "engine": [psutil.Process(one["pid"]) for one in getattr(host.engine, "processes", [])],
            }
            tasks = [
                EpisodeTask((f"u{place}", 0), {"prompt": []}, SamplingParams(max_tokens=limits.response), 0, 1)
                for place in range(episodes)
            ]
            before, began = {name: cpu_s(group) for name, group in groups.items()}, time.perf_counter()
            actor.begin(1, tasks, 1, None, 3600.0)
            inbox = actor.inbox(1)
            host.serve_requests(functools.partial(inbox.take, 0), inbox.give)
            played, wall_s = actor.collect(1).episodes, time.perf_counter() - began
            spent = {name: cpu_s(group) - before[name] for name, group in groups.items()}
    finally:
        actor.shutdown()
        ray.shutdown()
    number = len(clock.seconds)
    asked_s = sum(episode.engine_s for episode in played) / number
    engine_s = sum(clock.seconds) / number
    theirs = sum(spent[name] for name in ("service", "environments", "rank"))
    return {
        "episodes": episodes,
        "turns": number,
        "ended": sorted({episode.end for episode in played}),
        "wall_s": round(wall_s, 2),
        "engine_ms_per_turn": round(1e3 * engine_s, 2),
        "hand_over_ms_per_turn": round(1e3 * (asked_s - engine_s), 2),
        "environment_ms_per_turn": round(1e3 * sum(episode.environment_s for episode in played) / number, 2),
        **{f"{name}_cpu_ms_per_turn": round(1e3 * seconds / number, 2) for name, seconds in spent.items()},
        "share_of_cpu_beside_the_engine": round(theirs / (theirs + spent["engine"]), 4),
        "share_of_a_turn_that_is_hand_over": round(1 - engine_s / asked_s, 4),
    }


def main() -> None:
    given = [*sys.argv[1:], *["48", "4", MODEL][len(sys.argv) - 1 :]]
    for name, value in measure(int(given[0]), int(given[1]), given[2]).items():
        print(f"{name:36} {value}")  # noqa: T201


if __name__ == "__main__":
    main()
