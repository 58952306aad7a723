"""Episodes on real engines: the same by however many, each token as the policy has it, and earlier turns in the cache.

The policy knows the tokens of all families: it samples from those that all vocabularies have, and from all stop tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hrl.config.environment import EnvironmentConfig
from hrl.episodes.episode import Episode
from hrl.episodes.play import EpisodeTask, Limits
from hrl.episodes.pool import environment_of
from hrl.episodes.rows import episode_batch
from hrl.episodes.service import EpisodeSetup
from hrl.models.source import resolve_model
from hrl.models.tokenizer import TokenIds
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.host import RolloutHost
from tests.episodes.families import FAMILIES
from tests.episodes.test_tokens import Game, user
from tests.models import tiny
from tests.runs.in_process import InProcessEpisodes
from tests.workers.asked import Actor
from tests.workers.rollout.models import SHAPE
from tests.workers.rollout.settings import engine_setup, prompt_batch, score

GAME = f"{Path(__file__).with_name('games.py')}:Game"
VOCAB = max(len(family.tokenizer) for family in FAMILIES.values())
KNOWN = min(len(family.tokenizer) for family in FAMILIES.values())
STOPS = sorted({token for family in FAMILIES.values() for token in family.stop_ids})
LIMITS = Limits(64, 160)
LONGEST = 512
EPISODES = 12
BLOCK = 32
"""Tokens of a block of vLLM's cache."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": VOCAB, "eos_token_id": 2, "pad_token_id": 2, "max_position_embeddings": LONGEST}
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    with torch.no_grad():
        # A channel that is the same everywhere: what the head has for it is a bias.
        model.model.embed_tokens.weight[:, 0] = 4.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        bias = model.lm_head.weight[:, 0]
        bias[:KNOWN], bias[KNOWN:], bias[STOPS] = 0.0, -60.0, 1.0
    model.save_pretrained(folder)
    return folder


vllm = pytest.param("vllm", marks=pytest.mark.engine)


@pytest.fixture(scope="module", params=["hf", vllm])
def hosts(request: pytest.FixtureRequest, policy: Path) -> Iterator[list[RolloutHost]]:
    tokens = TokenIds(2, tuple(STOPS), VOCAB)
    with ExitStack() as stack:
        made = [RolloutHost(engine_setup(request.param, policy, tokens, LONGEST, dtype="float32")) for _ in range(2)]
        yield [stack.enter_context(host) for host in made]


def play(hosts: Sequence[RolloutHost], **changes: Any) -> list[Episode]:
    """Plays episodes that the engines sample beside each other, as ranks do."""
    settings = EnvironmentConfig(path=GAME, num_workers=1, **{"max_turn_tokens": 8, **changes})
    path = str(resolve_model("bundled:smollm2-135m-instruct"))
    service = InProcessEpisodes(EpisodeSetup(environment_of(settings), settings, LIMITS, path, False, (2,), {}))
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


def test_two_engines_play_the_episodes_of_one_token_by_token(hosts: list[RolloutHost]) -> None:
    one, two = play(hosts[:1]), play(hosts)
    assert [episode.end for episode in one] == ["done"] * EPISODES
    for a, b in zip(one, two, strict=True):
        assert (a.key, a.messages, a.turn_rewards, a.end) == (b.key, b.messages, b.turn_rewards, b.end)
        for of_one, of_two in zip(a.rows, b.rows, strict=True):
            assert of_one.prompt_ids == of_two.prompt_ids and of_one.response_ids == of_two.response_ids
            assert (of_one.mask, of_one.turns) == (of_two.mask, of_two.turns)
            # Sums over a batch of another size are rounded otherwise; near -13, a float32 has steps of 1e-6.
            assert of_one.log_probs == pytest.approx(of_two.log_probs, abs=1e-4)
    assert len({tuple(episode.rows[0].response_ids) for episode in one}) == EPISODES, "each has seeds of its own"


class Turn(NamedTuple):
    engine: int
    context: tuple[int, ...]
    sampled: tuple[int, ...]
    cached: int


@pytest.mark.parametrize("hosts", [vllm], indirect=True)
def test_a_later_turn_computes_no_whole_block_of_the_turns_before_it_again(
    hosts: list[RolloutHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to the engine that has them, and its context begins with exactly what was computed there."""
    turns: list[Turn] = []
    for number, host in enumerate(hosts):

        def recorded(prompt: Any, *args: Any, engine: int = number, request: Any = host.engine._request) -> Any:
            async def one() -> Any:
                output = await request(prompt, *args)
                turns.append(
                    Turn(
                        engine,
                        (*prompt["prompt_token_ids"],),
                        (*output.outputs[0].token_ids,),
                        output.num_cached_tokens,
                    )
                )
                return output

            return one()

        monkeypatch.setattr(host.engine, "_request", recorded)
    play(hosts, max_turn_tokens=24)

    later = [turn for turn in turns if before(turn, turns) is not None]
    # The others follow a turn whose end the template writes with another token, in a branch.
    assert len(turns) == 3 * EPISODES and len(later) >= EPISODES and {turn.engine for turn in later} == {0, 1}
    for turn in later:
        earlier = before(turn, turns)
        assert earlier is not None and earlier.engine == turn.engine
        computed = len(earlier.context) + len(earlier.sampled) - 1  # the last one was sampled, and never read
        assert turn.cached >= computed // BLOCK * BLOCK
    assert any(turn.cached >= 2 * BLOCK for turn in later)


def before(turn: Turn, turns: Sequence[Turn]) -> Turn | None:
    """The turn that this one follows in its episode."""
    ahead = [other for other in turns if turn.context[: len(other.context) + len(other.sampled)] == joined(other)]
    return max(ahead, key=lambda other: len(other.context), default=None)


def joined(turn: Turn) -> tuple[int, ...]:
    return turn.context + turn.sampled


def test_every_sampled_token_was_sampled_in_its_context_with_the_log_prob_of_engine_and_trainer(
    hosts: list[RolloutHost], policy: Path
) -> None:
    """In every family, with thoughts in the history and without: rows of one branch and of several."""
    games = [Game.of(name, user("Go!"), has_tools=False) for name in FAMILIES for _ in range(2)]
    for turn in range(3):
        asked = [
            hosts[place % 2].generate(game.context, SamplingParams(max_tokens=6, seed=place), f"turn {turn} of {place}")
            for place, game in enumerate(games)
        ]
        for place, (game, answer) in enumerate(zip(games, asked, strict=True)):
            output = answer.result(120)
            words = game.family.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            thought = {"reasoning_content": "Hm."} if place % 2 else {}
            game.sample(output.token_ids, {"role": "assistant", "content": words, **thought}, output.log_probs)
            if turn < 2:
                game.hear(*user(f"And {turn + place}?"))
    episodes = []
    for place, game in enumerate(games):
        game.check()
        rows = game.transcript.rows()
        episodes.append(Episode((f"{game.family.name}-{place}", 0), rows, game.transcript.messages, [None] * 3, "done"))
        for row in rows:
            scored = [math.nan, *score(hosts[0], [*row.prompt_ids, *row.response_ids])][len(row.prompt_ids) :]
            trained = [at for at, mask in enumerate(row.mask) if mask]
            assert [scored[at] for at in trained] == pytest.approx([row.log_probs[at] for at in trained], abs=2e-4)

    batch = episode_batch(
        prompt_batch([[1]] * len(games), n=1, width=1), episodes, prompt_width=256, response_width=256, pad_id=2
    )
    batch.meta_info["temperature"] = 1.0
    mask = batch.batch["response_mask"].bool()
    with tiny.world_of_one():
        config, precision = tiny.model_config(policy, max_model_len=LONGEST), tiny.fsdp_config("float32")
        trainer = Actor(config, None, precision, device=torch.device("cpu"), total_steps=None)
        trainers = trainer.log_probs(batch).batch["old_log_probs"]
    torch.testing.assert_close(batch.batch["rollout_log_probs"][mask], trainers[mask], atol=2e-4, rtol=0.0)
    assert mask.sum() == sum(len(turn.ids) for game in games for turn in game.turns)
    branched = {game.family.name for game in games if len(game.transcript.rows()) > 1}
    assert {"deepseek_r1", "gpt_oss"} <= branched < FAMILIES.keys()
