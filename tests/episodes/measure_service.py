"""What a turn of an episode costs beside its engine.

`python -m tests.episodes.measure_service [episodes] [turns] [words]`.

Episodes of a game that does next to nothing run at the same time, through templates, parser, router and environment
processes; the engine is scripted, answers 30 tokens after 0.2 s, and computes nothing. The game answers with two
numbers and so many words. Seconds are of CPU, but for the longest time in which the event loop did nothing else.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from typing import Any

import psutil

from hrl.config.environment import EnvironmentConfig
from hrl.episodes.play import EpisodeTask, Limits
from hrl.episodes.pool import environment_of
from hrl.episodes.service import EpisodeService, EpisodeSetup
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import SampleOutput
from hrl.workers.rollout.single_requests import serve_requests
from tests.episodes.families import FAMILIES
from tests.episodes.test_service import GAMES

FAMILY = FAMILIES["smollm2"]
ANSWER = [*FAMILY.ids("I guess that it is the number ")[:29]]


class Engine:
    """Answers the same after a while."""

    policy_version = 0

    async def generate(self, prompt: list[int], sampling: SamplingParams, request_id: str, **_: Any) -> SampleOutput:
        await asyncio.sleep(0.2)
        ids = [*ANSWER, FAMILY.stop_ids[0]]
        return SampleOutput(ids, [-0.5] * len(ids), "stop", 0)


async def look(held: list[float]) -> None:
    """Note for how long others held the loop, over and over."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        held.append(time.perf_counter() - began - 0.001)


async def measure(episodes: int, turns: int, words: int) -> dict[str, Any]:
    kwargs = {"turns": turns, "words": words}
    settings = EnvironmentConfig(path=f"{GAMES}:Game", kwargs=kwargs, max_turns=turns, num_workers=2)
    limits = Limits(200, (200 + 8 * words) * turns)
    service = EpisodeService(
        EpisodeSetup(environment_of(settings), settings, limits, "", False, (FAMILY.stop_ids[0],), {})
    )
    await service.start()
    held: list[float] = []
    looking = asyncio.create_task(look(held))
    this = psutil.Process()
    before = this.memory_info().rss
    children = [child for child in this.children(recursive=True) if "environment_process" in " ".join(child.cmdline())]
    cpu = time.process_time(), sum(sum(child.cpu_times()[:2]) for child in children)
    began = time.perf_counter()
    sampling = SamplingParams(max_tokens=10_000)
    asked = [EpisodeTask((f"u{place}", 0), {"prompt": []}, sampling, 0, 1) for place in range(episodes)]
    await service.begin(1, asked, 2)
    engines = [
        serve_requests(
            Engine(),
            lambda place=place: service.next_work(1, place),
            lambda answers: asyncio.ensure_future(service.answered(answers)),
            len(FAMILY.tokenizer),
        )
        for place in range(2)
    ]
    await asyncio.gather(*engines)
    played = (await service.collect(1)).episodes
    wall_s = time.perf_counter() - began
    number = sum(episode.num_turns for episode in played)
    own_s = time.process_time() - cpu[0]
    theirs_s = sum(sum(child.cpu_times()[:2]) for child in children) - cpu[1]
    looking.cancel()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    await service.close()
    return {
        "turns": number,
        "wall_s": round(wall_s, 2),
        "service_ms_per_turn": round(1e3 * own_s / number, 3),
        "environment_ms_per_turn": round(1e3 * theirs_s / number, 3),
        "longest_hold_ms": round(1e3 * max(held)),
        "service_kib_per_episode": round((peak - before) / 1024 / episodes, 1),
    }


def main() -> None:
    import hrl.episodes.service as module

    module.load_tokenizer = lambda *_, **__: FAMILY.tokenizer  # type: ignore[assignment]
    given = [int(text) for text in sys.argv[1:]]
    episodes, turns, words = (*given, *(1000, 6, 0)[len(given) :])
    print(asyncio.run(measure(episodes, turns, words)))  # noqa: T201


if __name__ == "__main__":
    main()
