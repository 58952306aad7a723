"""The same seed gives the same episodes, by however many real engines they are sampled."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hrl.config.environment import EnvironmentConfig
from hrl.episodes.episode import Episode
from hrl.episodes.play import EpisodeTask, Limits
from hrl.episodes.pool import environment_of
from hrl.episodes.service import EpisodeSetup
from hrl.models.source import resolve_model
from hrl.models.tokenizer import TokenIds
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.host import RolloutHost
from tests.episodes.families import FAMILIES
from tests.runs.in_process import InProcessEpisodes
from tests.workers.rollout.models import SHAPE
from tests.workers.rollout.settings import engine_setup

GAME = f"{Path(__file__).with_name('games.py')}:Game"
TOKENIZER = FAMILIES["smollm2"].tokenizer
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
LIMITS = Limits(64, 160)
EPISODES = 12


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": len(TOKENIZER), "eos_token_id": STOP, "pad_token_id": STOP}
    LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.engine)])
def hosts(request: pytest.FixtureRequest, policy: Path) -> Iterator[list[RolloutHost]]:
    tokens = TokenIds(STOP, (STOP,), len(TOKENIZER))
    longest = LIMITS.prompt + LIMITS.response
    with ExitStack() as stack:
        made = [RolloutHost(engine_setup(request.param, policy, tokens, longest, dtype="float32")) for _ in range(2)]
        yield [stack.enter_context(host) for host in made]


def play(hosts: Sequence[RolloutHost]) -> list[Episode]:
    """Plays episodes that the engines sample beside each other, as ranks do."""
    settings = EnvironmentConfig(path=GAME, num_workers=1, max_turn_tokens=8)
    path = str(resolve_model("bundled:smollm2-135m-instruct"))
    service = InProcessEpisodes(EpisodeSetup(environment_of(settings), settings, LIMITS, path, False, (STOP,), {}))
    sampling = SamplingParams(max_tokens=1000)
    asked = [EpisodeTask((f"u{place // 2}", place % 2), {"prompt": []}, sampling, 1, 2) for place in range(EPISODES)]
    service.start()
    try:
        service.begin(1, asked, len(hosts), None, math.inf)
        inbox = service.inbox(1)
        with ThreadPoolExecutor(len(hosts)) as ranks:
            serving = [
                ranks.submit(host.serve_requests, functools.partial(inbox.take, place), inbox.give, timeout_s=60.0)
                for place, host in enumerate(hosts)
            ]
            answered = [one.result() for one in serving]
        assert all(answered), "each engine has sampled some"
        return list(service.collect(1).episodes)
    finally:
        service.shutdown()


@pytest.mark.timeout(300)
def test_two_engines_play_the_episodes_of_one_token_by_token(hosts: list[RolloutHost]) -> None:
    one, two = play(hosts[:1]), play(hosts)
    assert [episode.end for episode in one] == ["done"] * EPISODES
    for a, b in zip(one, two, strict=True):
        assert (a.key, a.messages, a.turn_rewards, a.end) == (b.key, b.messages, b.turn_rewards, b.end)
        (of_one,), (of_two,) = a.rows, b.rows
        assert of_one.prompt_ids == of_two.prompt_ids and of_one.response_ids == of_two.response_ids
        assert (of_one.mask, of_one.turns) == (of_two.mask, of_two.turns)
        # Sums over a batch of another size are rounded otherwise; near -13, a float32 has steps of 1e-6.
        assert of_one.log_probs == pytest.approx(of_two.log_probs, abs=1e-4)
    assert len({tuple(episode.rows[0].response_ids) for episode in one}) == EPISODES, "each has seeds of its own"
