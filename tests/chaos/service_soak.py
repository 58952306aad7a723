"""Thousands of batches of episodes in some minutes, for nothing is sampled or trained: `soak.services` judges them.

Ray keeps a record of the last calls in each of its processes, of bounded length. The service of rewards has all of its
own after some 14,000 calls, 450 batches of those below, which a run that trains does not come to within hours.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Iterator

from hrl.config.environment import EnvironmentConfig
from hrl.config.reward import RewardConfig
from hrl.episodes.play import EpisodeTask, Limits
from hrl.episodes.pool import environment_of
from hrl.episodes.service import EpisodeActor, EpisodeSetup
from hrl.models.tokenizer import load_tokenizer
from hrl.reward.actor import RewardActor
from hrl.reward.function import UserFile
from hrl.reward.pool import RewardRow
from hrl.reward.spec import RewardSpec
from hrl.single_controller.ray_cluster import ray_cluster
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import SampleOutput
from hrl.workers.rollout.single_requests import serve_requests
from tests.chaos.environments import WORLDS
from tests.chaos.small import runner
from tests.chaos.soak import sample, told

PROMPTS, SAMPLES = 16, 2
#: A tool that raises, and an environment, in each batch.
WHATS = ("raise", "step: raise", *[""] * (PROMPTS - 2))
#: A process has as many threads as calls have ever met in it, which chance would decide: in the first batches all do.
MEETINGS = 5
SAMPLING = SamplingParams(max_tokens=100)


class Engine:
    """Answers at once, with the same few tokens."""

    policy_version = 0

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    async def generate(self, prompt: list[int], sampling: SamplingParams, request_id: str, **_: object) -> SampleOutput:
        """Answer."""
        return SampleOutput([*self._ids], [-0.5] * len(self._ids), "length", self.policy_version)


def batches(number: int) -> Iterator[int]:
    """Play and score batches of episodes of three turns, and yield the number of each when it is over."""
    made = runner()
    settings = EnvironmentConfig(path=f"{WORLDS}:Varied", tool_parser="hermes")
    tokenizer = load_tokenizer(str(made.model), trust_remote_code=False)
    stop = tokenizer.eos_token_id
    words = [*tokenizer("I add it")["input_ids"]][:3]
    draw = random.Random(0)
    with ray_cluster("local", num_cpus=2, object_store_bytes=100 << 20):
        rewards = RewardActor(RewardSpec(UserFile(str(made.reward))), RewardConfig())
        setup = EpisodeSetup(
            environment_of(settings), settings, Limits(128, 200), str(made.model), False, (stop,), {}, rewards.handle
        )
        episodes = EpisodeActor(setup)
        rewards.start()
        episodes.start()
        for batch in range(number):
            keys = [(f"u{place}", sample) for place in range(PROMPTS) for sample in range(SAMPLES)]
            text = " ".join(["and"] * draw.randint(1, 60))
            rewards.begin(batch, [RewardRow(key, "soak", "", {"index": 1}, {"prompt": text}) for key in keys])
            tasks = [EpisodeTask(key, _row(int(key[0][1:]), text, batch), SAMPLING, 0, batch) for key in keys]
            episodes.begin(batch, tasks, 1, batch, 600.0)
            inbox = episodes.inbox(batch)
            serving = serve_requests(Engine(words), lambda inbox=inbox: inbox.take(0), inbox.give, len(tokenizer))
            asyncio.run(serving)
            played = episodes.collect(batch).episodes
            failed = [episode.error for episode in played if episode.end == "failed"]
            if len(failed) != (0 if batch < MEETINGS else SAMPLES):
                raise AssertionError(f"batch {batch}: {len(failed)} episodes failed: {failed[:1]}")
            rewards.collect(batch, 60.0)
            yield batch
        episodes.shutdown()
        rewards.shutdown()


def _row(place: int, text: str, batch: int) -> dict[str, object]:
    what = "meet" if batch < MEETINGS else WHATS[place]
    return {"prompt": [{"role": "user", "content": text}], "what": what, "data_source": "soak"}


if __name__ == "__main__":
    sys.stdout.write(told([sample(os.getpid()) for _ in batches(int(sys.argv[2]))]))
