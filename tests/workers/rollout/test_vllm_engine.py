"""The real vLLM engine with a real small model: seeds, log-probs, shared prompts, weights, life and death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from openai import AsyncOpenAI
from transformers import PreTrainedModel

from hrl.cluster.precision import fastest_dtype
from hrl.environments import Observation
from hrl.episodes.episode import Episode, EpisodeRow
from hrl.episodes.router import Router
from hrl.episodes.rows import episode_batch
from hrl.episodes.tokens import Transcript
from hrl.models.tokenizer import TokenIds, load_tokenizer
from hrl.profiling.operators import Profile
from hrl.protocol import DataProto
from hrl.routing import ROUTED_EXPERTS, is_missing
from hrl.serve.door import Door, Served
from hrl.serve.outside import OutsideCalls
from hrl.serve.policy import PolicyWords, Reading
from hrl.serve.rows import rows_of
from hrl.serve.server import DoorServer
from hrl.serve.sessions import Limits as SessionLimits
from hrl.serve.sessions import Sessions
from hrl.trainer.ppo.generation import share_known_experts
from hrl.workers.policy import Policy
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import EngineDeadError, EngineUnusableError, OnTokens, RolloutError, SampleOutput, told_on
from hrl.workers.rollout.host import LoopThread, RolloutHost
from hrl.workers.rollout.single_requests import EngineAnswer, EngineWork
from hrl.workers.rollout.vllm_engine import CPU_BLOCK_TOKENS
from hrl.workers.weight_sync.broadcast import BroadcastSender
from hrl.workers.weight_sync.sender import WeightSync
from hrl.workers.weight_sync.wire import Manifest, WeightSyncError
from tests.models import tiny
from tests.workers.asked import Actor
from tests.workers.rollout import models
from tests.workers.rollout.settings import engine_setup, prompt_batch, sample_request, sample_rows, score

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

STOP, VOCAB, P, R = 2, 49152, 64, 24
sample = partial(sample_rows, max_tokens=R)
N = 8
#: What `dtype=auto` takes here.
DTYPE = getattr(torch, fastest_dtype("cpu"))


def make_host(folder: Path | str, **changes) -> RolloutHost:
    return RolloutHost(engine_setup("vllm", folder, TokenIds(STOP, (STOP,), VOCAB), P + R, **changes))


@pytest.fixture(scope="module")
def folder() -> Path:
    from hrl.models.source import resolve_model

    return resolve_model("bundled:smollm2-135m-instruct")


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    tokenizer = load_tokenizer(folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {a} + {b}? Answer with the final number only."}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for a, b in ((2, 3), (4, 5), (7, 8), (9, 6))
    ]


@pytest.fixture(scope="module")
def others() -> frozenset[int]:
    """Children of this process that no engine of this module started: a whole Ray cluster, for instance."""
    return children()


@pytest.fixture(scope="module")
def temporary(tmp_path_factory) -> Path:
    """Where the engine of ``host`` writes temporary files."""
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def host(folder, others, temporary) -> Iterator[RolloutHost]:
    host = make_host(folder, dtype=str(DTYPE).removeprefix("torch."))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        host.start()
    with host:
        yield host


@pytest.fixture(scope="module")
def original(folder) -> PreTrainedModel:
    """The model as the engine begins with it."""
    return models.load(folder)


@pytest.fixture(scope="module")
def changed(folder) -> PreTrainedModel:
    """The same with all weights moved by a tenth."""
    return models.perturb(models.load(folder), 0.1)


@pytest.fixture(scope="module")
def sampled(host, prompts):
    return sample(host, prompt_batch(prompts, n=N, width=P))


def test_a_profile_has_what_the_engines_process_computed(host, prompts, tmp_path):
    host.start_profile()
    sample(host, prompt_batch(prompts[:1], n=2, width=P))
    (plain,) = host.stop_profile(str(tmp_path / "step_1_engine_rank_0.json.gz"), timeout_s=120)
    profile = Profile.from_plain(plain)
    assert [file.name for file in tmp_path.iterdir()] == ["step_1_engine_rank_0.json.gz"]
    assert {"matrix products", "attention", "elementwise"} <= profile.classes.keys()
    assert profile.phases["sampling"].busy > 0
    assert host.engine.processes[0]["pid"] != os.getpid() and host.start_profile() is None
    host.stop_profile(str(tmp_path / "again.json.gz"), timeout_s=120)  # a second one can be taken


def lives(pid: int) -> bool:
    """Whether a process is there and not just waiting to be buried."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children() -> frozenset[int]:
    """Pids of this process's children."""
    return frozenset(child.pid for child in psutil.Process().children())


def engine_processes(others: frozenset[int]) -> set[int]:
    """Pids of this process's children that are not among `others`, and of everything below them."""
    started = [child for child in psutil.Process().children() if child.pid not in others]
    family = {process for child in started for process in (child, *child.children(recursive=True))}
    return {process.pid for process in family if "resource_tracker" not in " ".join(process.cmdline())}


def shared_memory_of(pids: list[int]) -> set[str]:
    """Names in /dev/shm that these processes have mapped."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line.split("/dev/shm/")[1].split()[0] for line in lines if "/dev/shm/" in line}


def score_error(host: RolloutHost, model, tokens: list[int]) -> float:
    return float((torch.tensor(score(host, tokens)) - models.token_log_probs(model, tokens)).abs().mean())


#: Answers lose their beginning as soon as they are history, as thoughts do in templates of models that reason.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.role == 'user' else m.content[3:] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="class")
def exact(folder) -> Iterator[RolloutHost]:
    with make_host(folder, dtype="float32") as host:
        host.start()
        yield host


class TestInFloat32:
    """What holds to the last bits, which in bfloat16 the number of rows that run together moves by 0.05."""

    def test_the_same_seeds_give_the_same_tokens_in_any_order_and_company(self, exact, prompts):
        batch = prompt_batch(prompts, n=N, width=P)
        order = torch.arange(len(batch) - 1, -1, -1)

        sampled = sample(exact, batch)
        again = sample(exact, batch[order])
        validation = prompt_batch(prompts[::-1], n=1, width=P)
        alone = sample(exact, validation, temperature=0.0)
        exact.begin_sampling(validation, sample_request(max_tokens=R, temperature=0.0))
        exact.begin_sampling(batch, sample_request(max_tokens=R))
        beside = sample(exact, validation, temperature=0.0), sample(exact, batch)

        assert torch.equal(again.batch["responses"], sampled.batch["responses"][order])
        torch.testing.assert_close(again.batch["rollout_log_probs"], sampled.batch["rollout_log_probs"][order])
        for one, other in zip((alone, sampled), beside, strict=True):
            assert torch.equal(one.batch["responses"], other.batch["responses"])
            # 4 rows and 36 are not multiplied by the same kernel.
            torch.testing.assert_close(
                one.batch["rollout_log_probs"], other.batch["rollout_log_probs"], atol=1e-4, rtol=0.0
            )
        assert len({tuple(row) for row in sampled.batch["responses"].tolist()}) > 0.9 * len(batch)

    def test_episodes_of_two_turns_have_the_trainers_log_probs_at_every_sampled_token(self, exact, folder):
        tokenizer = load_tokenizer(folder)
        episodes = [play_two_turns(exact, tokenizer, {}, number) for number in range(3)]
        episodes += [play_two_turns(exact, tokenizer, {"chat_template": FORGETFUL}, number) for number in range(3)]
        asked = prompt_batch([[1]] * len(episodes), n=1, width=1)
        batch = episode_batch(asked, episodes, prompt_width=60, response_width=60, pad_id=STOP)
        batch.meta_info["temperature"] = 1.0
        mask = batch.batch["response_mask"].bool()

        with tiny.world_of_one():
            config, precision = tiny.model_config(folder), tiny.fsdp_config("float32")
            policy = Actor(config, None, precision, device=torch.device("cpu"), total_steps=None)
            trainers = policy.log_probs(batch).batch["old_log_probs"]

        assert batch.non_tensor_batch["branch"].tolist() == [0] * 3 + [0, 1] * 3
        assert mask.sum() == sum(episode.metrics["sampled"] for episode in episodes)
        torch.testing.assert_close(batch.batch["rollout_log_probs"][mask], trainers[mask], atol=1e-4, rtol=0.0)
        assert not batch.batch["rollout_log_probs"][~mask].any()
        assert {*batch.batch["turn_index"][mask].tolist()} == {0, 1}


def play_two_turns(host: RolloutHost, tokenizer, template_kwargs: dict[str, str], number: int) -> Episode:
    """An episode whose environment asks back once."""
    first = Observation(messages=[{"role": "user", "content": f"What is {number} + 3?"}])
    script = Transcript(tokenizer, [STOP], template_kwargs, first=first)
    sampled = 0
    for turn in range(2):
        if turn:
            script.add_observation(Observation(messages=[{"role": "user", "content": "Sure? <|im_end|>"}]))
        sampling = SamplingParams(max_tokens=8, seed=10 * number + turn)
        output = host._control(host.engine.generate(script.context, sampling, f"turn-{number}-{turn}"), "sampling", 60)
        words = tokenizer.decode(output.token_ids, skip_special_tokens=True)
        script.add_turn(output.token_ids, output.log_probs, output.policy_version, {"content": words})
        sampled += len(output.token_ids)
    return Episode(
        (f"g{number}", 0), script.rows(), script.messages, [None, None], "done", metrics={"sampled": sampled}
    )


def test_what_an_openai_client_asks_for_becomes_rows_of_what_the_engine_sampled(host, folder):
    """Ids and log-probs as the engine gave them, and a forward over each row gives the same log-probs."""
    answered: dict[tuple[int, ...], list[SampleOutput]] = defaultdict(list)

    async def generate(ids: list[int], sampling: SamplingParams, name: str, on_tokens: OnTokens | None) -> SampleOutput:
        tell = told_on(asyncio.get_running_loop(), on_tokens)
        output = await asyncio.wrap_future(host.generate(ids, sampling, name, tell))
        answered[tuple(ids)].append(output)
        return output

    async def play() -> list[EpisodeRow]:
        words = PolicyWords(load_tokenizer(folder), Reading(stop_ids=(STOP,)), P + R)
        door = Door(Served("smollm2", SamplingParams(), P + R), words, generate, Sessions("a-key", SessionLimits()))
        async with DoorServer(door) as server, AsyncOpenAI(base_url=server.base_url, api_key="a-key") as client:
            ask = partial(client.chat.completions.create, model="smollm2", max_tokens=6)
            chat = [{"role": "user", "content": "What is 2 + 3?"}]
            first = await ask(messages=chat, seed=5, logprobs=True)
            chat += [first.choices[0].message, {"role": "user", "content": "Sure?"}]
            beside = {"return_token_ids": True}
            events = [event async for event in await ask(messages=chat, seed=6, stream=True, extra_body=beside)]
            (session,) = door.sessions
            streamed = [token for event in events for token in getattr(event.choices[0], "token_ids", None) or ()]
            assert streamed == list(session.calls[1].token_ids)
            several = await ask(messages=chat, n=2, temperature=0.7)
        words.close()
        ((output,), *_) = answered.values()
        assert [entry.logprob for entry in first.choices[0].logprobs.content] == output.log_probs
        assert len(events) > 2 and len(several.choices) == 2
        assert session.counts["calls"] == 4
        return rows_of(session.calls)

    rows = asyncio.run(play())
    assert len(rows) == 3
    left = {context: list(outputs) for context, outputs in answered.items()}
    for row in rows:
        ids = [*row.prompt_ids, *row.response_ids]
        for turn in sorted({turn for turn, trained in zip(row.turns, row.mask, strict=True) if trained}):
            places = [at for at, trained in enumerate(row.mask) if trained and row.turns[at] == turn]
            context = tuple(ids[: len(row.prompt_ids) + places[0]])
            sampled = [row.response_ids[at] for at in places], [row.log_probs[at] for at in places]
            left[context].remove(next(one for one in left[context] if (one.token_ids, one.log_probs) == sampled))
            if turn < 2:  # at temperature 1
                scored = score(host, ids)[len(context) - 1 :][: len(places)]
                assert max(abs(a - b) for a, b in zip(scored, sampled[1], strict=True)) < 0.1
    assert not any(left.values())


def test_a_response_ends_with_its_first_stop_token_or_at_the_limit(sampled):
    for row in range(len(sampled)):
        tokens = sampled.batch["responses"][row][sampled.batch["response_mask"][row].bool()].tolist()
        assert STOP not in tokens[:-1]
        assert sampled.non_tensor_batch["finish_reason"][row] == ("stop" if tokens[-1] == STOP else "length")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_differ_from_transformers_by_no_more_than_bf16_does_from_fp32(
    host, folder, original, prompts, temperature
):
    out = sample(host, prompt_batch(prompts, n=2, width=P), temperature=temperature)
    mask = out.batch["response_mask"].bool()
    ours = out.batch["rollout_log_probs"][mask]
    logits = models.response_logits(original, out)
    exact, wrong_temperature = (models.log_probs_at(logits, out, at)[mask] for at in (temperature, 1.6 - temperature))
    bf16 = models.response_log_probs(models.load(folder, torch.bfloat16), out, temperature)[mask]

    error = (ours - exact).abs().mean()

    assert error < 1.5 * (bf16 - exact).abs().mean() + 0.005
    assert abs((ours - exact).mean()) < 0.02  # no bias
    assert error < 0.3 * (ours - wrong_temperature).abs().mean()


def test_greedy_reports_the_raw_log_prob_of_the_most_likely_token(host, original, prompts):
    out = sample(host, prompt_batch(prompts, n=1, width=P), temperature=0.0)
    mask = out.batch["response_mask"].bool()

    logits = models.response_logits(original, out)
    exact = models.log_probs_at(logits, out, 1.0)[mask]

    assert (out.batch["rollout_log_probs"][mask] - exact).abs().mean() < 0.05
    assert exact.mean() > -0.7  # likely tokens
    again = sample(host, prompt_batch(prompts, n=1, width=P), temperature=0.0, step=9)
    # No seed in it. Requests that come at other times make batches of other shapes, so in bf16 a tie may break the
    # other way; what follows it has another context.
    for row, (first, second) in enumerate(zip(out.batch["responses"], again.batch["responses"], strict=True)):
        for at in (first != second).nonzero()[:1, 0].tolist():
            assert mask[row, at] and (logits[row, at, first[at]] - logits[row, at, second[at]]).abs() < 0.15


def test_the_samples_of_a_prompt_share_its_whole_blocks_already_in_their_first_wave(host, prompts):
    engine = host.engine
    fresh = [token + 1000 for token in prompts[0]]  # not in the cache yet

    async def wave() -> list[int]:
        params = [engine._vllm_params(SamplingParams(max_tokens=1, seed=seed)) for seed in range(N)]
        outputs = await asyncio.gather(*(engine._request(fresh, p, f"share-{i}") for i, p in enumerate(params)))
        return [output.num_cached_tokens for output in outputs]

    cached = host._control(wave(), "sampling", 60)

    assert len(fresh) > 32
    assert sorted(cached) == [0] + [32 * (len(fresh) // 32)] * (N - 1)


def test_pushed_weights_are_the_ones_sampled_from_and_can_be_taken_back(host, original, changed, prompts, sampled):
    tokens = sampled.batch["input_ids"][0][sampled.batch["attention_mask"][0].bool()].tolist()
    noise = score_error(host, original, tokens)
    assert score_error(host, changed, tokens) > 1

    report = host.push_weights(1, models.specs(changed, DTYPE), models.parameters(changed))

    assert report.nbytes == DTYPE.itemsize * sum(parameter.numel() for parameter in changed.parameters())
    assert report.receivers[0].read_back > 0
    assert score_error(host, changed, tokens) < max(3 * noise, 0.1)
    assert score_error(host, original, tokens) > 1
    host.push_weights(2, models.specs(original, DTYPE), models.parameters(original))
    assert score_error(host, original, tokens) == pytest.approx(noise, abs=1e-6)
    assert host.policy_version == 2


def test_after_an_optimizer_step_engine_and_trainer_agree_and_before_the_sync_they_do_not(
    host, folder, original, sampled
):
    batch = sampled[:4]
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    batch.batch["advantages"] = torch.tensor([1.0, -1.0] * 2)[:, None] * batch.batch["response_mask"]
    batch.meta_info["temperature"] = 1.0
    train = tiny.actor_config(optim=tiny.optim_config(lr=1e-4))
    precision = tiny.fsdp_config(str(DTYPE).removeprefix("torch."), model_dtype="float32")
    with tiny.world_of_one():
        policy = Actor(tiny.model_config(folder), train, precision, device=torch.device("cpu"), total_steps=None)
        at_first = difference(host, policy, batch)
        policy.learn(batch, tiny.plan_rows(batch, 1, 1).ranks[0])
        before_the_sync = difference(host, policy, batch)
        host.push_weights(31, policy.engine.param_specs(DTYPE), policy.engine.iter_full_params(DTYPE))
        after_it = difference(host, policy, batch)

    host.push_weights(32, models.specs(original, DTYPE), models.parameters(original))
    noise = 1e-4 if DTYPE.itemsize == 4 else 0.05
    assert at_first < noise and after_it < noise
    assert before_the_sync > 0.2


def difference(host: RolloutHost, policy: Policy, batch: DataProto) -> float:
    """Mean absolute difference between the engine's and the trainer's log-probs of the batch's responses."""
    trainer, trained = policy.log_probs(batch).batch["old_log_probs"], batch.batch["response_mask"].bool()
    differences = []
    for row, mask in enumerate(trained):
        tokens = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()].tolist()
        count = int(mask.sum())
        differences.append(torch.tensor(score(host, tokens)[-count:]) - trainer[row][mask])
    return float(torch.cat(differences).abs().mean())


def test_a_round_that_ends_while_calls_are_sampled_leaves_an_engine_that_takes_new_weights_at_once(
    host, folder, original, changed, monkeypatch
):
    """No block of the cache stays with what was cancelled: vLLM drops its cache only if none is held.

    Calls from outside of a run are cancelled with the round and sampled anew in the next one; a turn whose episode met
    its deadline is withdrawn, and never answered.
    """
    cancelled: list[str] = []
    generate = host.engine._generate

    async def watched(*args: Any) -> SampleOutput:
        try:
            return await generate(*args)
        except asyncio.CancelledError:
            cancelled.append(args[2])
            raise

    monkeypatch.setattr(host.engine, "_generate", watched)
    story = load_tokenizer(folder).encode("Once upon a time there was a ship that sailed from the harbour")
    sampling = [SamplingParams(max_tokens=P + R - len(story), seed=seed) for seed in range(4)]
    router, driver = Router(), LoopThread("driver")
    outside = OutsideCalls(router)
    calls = [driver.submit(outside.generate(story, one, f"call {one.seed}")) for one in sampling]

    async def play(*, waits: bool) -> None:
        router.open(1)
        late = asyncio.create_task(router.generate(story, sampling[0], "late", "a turn that is too slow"))
        await router.generate(story, SamplingParams(max_tokens=2, seed=9), "played", "a turn")
        late.cancel()
        while not cancelled:
            await asyncio.sleep(0.005)
        if waits:
            await asyncio.gather(*map(asyncio.wrap_future, calls))
        router.close()

    async def take() -> EngineWork | None:
        return await asyncio.wrap_future(driver.submit(router.next_work(0)))

    async def give(answers: list[EngineAnswer]) -> None:
        router.answered(answers)

    served = {41: changed, 42: original}
    try:
        for version, model in served.items():
            playing = driver.submit(play(waits=version == 42))
            count = host.serve_requests(take, lambda answers: driver.submit(give(answers)) and None, timeout_s=60.0)
            playing.result(10)
            host.sleep()
            report = host.push_weights(version, models.specs(model, DTYPE), models.parameters(model))
            assert report.receivers[0].read_back > 0 and count > 0
            assert version == 42 or (len(cancelled) > 1 and not all(call.done() for call in calls))
            cancelled.clear()
        answers = [call.result(0) for call in calls]
    finally:
        driver.stop()

    assert not router._waiting and router.outstanding_tokens == [0]
    assert 41 in {answer.policy_version for answer in answers}, "what the first round cancelled"
    for answer in answers:
        model = served.get(answer.policy_version, original)
        exact = models.token_log_probs(model, story + answer.token_ids)[len(story) - 1 :]
        assert (torch.tensor(answer.log_probs) - exact).abs().mean() < 0.1


def test_weights_broadcast_from_elsewhere_are_the_ones_sampled_from(host, original, changed, sampled):
    tokens = sampled.batch["input_ids"][0][sampled.batch["attention_mask"][0].bool()].tolist()
    noise = score_error(host, original, tokens)
    manifest = Manifest.build(models.specs(original, DTYPE), 64 << 20)
    sender = BroadcastSender(manifest, 1, device=torch.device("cpu"), timeout_s=60)
    sync = WeightSync(manifest, sender, timeout_s=60)

    with ThreadPoolExecutor(1) as pool:
        for version, model in ((21, changed), (22, original)):
            received = pool.submit(host.receive_weights, version, manifest, sender.handle())
            report = sync.push(version, models.parameters(model))
            assert received.result(60)[0].nbytes == report.nbytes
            assert score_error(host, model, tokens) < max(3 * noise, 0.1)
            assert host.policy_version == version
    sync.close()
    assert len(manifest.buckets) > 3


def test_the_output_head_follows_its_tied_embedding(host, folder, original, sampled):
    tokens = sampled.batch["input_ids"][0][sampled.batch["attention_mask"][0].bool()].tolist()
    assert original.config.tie_word_embeddings
    changed = models.perturb(models.load(folder), 0.3, only="embed_tokens")

    host.push_weights(3, models.specs(changed, DTYPE), models.parameters(changed))
    with_new_head = score_error(host, changed, tokens)
    host.push_weights(4, models.specs(original, DTYPE), models.parameters(original))

    stale_head = models.load(folder)
    stale_head.model.embed_tokens.weight = torch.nn.Parameter(changed.model.embed_tokens.weight.detach().clone())
    stale_head.lm_head.weight = torch.nn.Parameter(original.lm_head.weight.detach().clone())
    a_stale_head_would_be_off_by = (
        (models.token_log_probs(stale_head, tokens) - models.token_log_probs(changed, tokens)).abs().mean()
    )
    assert with_new_head < 0.2 * a_stale_head_would_be_off_by


@pytest.mark.parametrize("fault", ["missing", "extra", "renamed", "corrupted"])
def test_a_bad_sync_is_named_and_the_old_version_goes_on_being_served(
    host, original, changed, prompts, sampled, fault, monkeypatch
):
    specs = models.specs(original, DTYPE)
    host.push_weights(5, specs, models.parameters(original))
    tokens = sampled.batch["input_ids"][0][sampled.batch["attention_mask"][0].bool()].tolist()
    scored = score(host, tokens)
    sent = list(models.parameters(changed))
    transport = host._sync._transport
    message = {
        "missing": r"end before 'model\.norm\.weight'",
        "extra": "'lm_head.bias', which is not in the manifest",
        "renamed": r"'layers\.3\.x' where 'model",
        "corrupted": r"checksum of 'model\.layers\.7\.mlp\.up_proj\.weight'",
    }[fault]
    if fault == "missing":
        sent = sent[:-1]
    elif fault == "extra":
        sent.append(("lm_head.bias", torch.zeros(3)))
    elif fault == "renamed":
        sent[20] = ("layers.3.x", sent[20][1])
    else:
        spec = next(spec for spec in host._sync.manifest.pieces if spec.name == "model.layers.7.mlp.up_proj.weight")
        monkeypatch.setattr(transport, "publish", lambda index: transport.buffer(index)[spec.offset].bitwise_xor_(1))

    with pytest.raises(WeightSyncError, match=message):
        host.push_weights(6, specs, iter(sent))

    assert score(host, tokens) == scored
    again = sample(host, prompt_batch(prompts, n=1, width=P))
    assert again.meta_info["policy_version"] == 5


def test_a_model_with_another_set_of_tensors_is_refused_by_name(host, original):
    host.push_weights(7, models.specs(original, DTYPE), models.parameters(original))
    host._sync.close()
    host._sync = None

    with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight' is missing"):
        host.push_weights(8, models.specs(original, DTYPE)[:-1], list(models.parameters(original))[:-1])

    host._sync = None
    host.push_weights(9, models.specs(original, DTYPE), models.parameters(original))


def test_an_engine_leaves_no_file_where_its_processes_met(host, temporary):
    assert host.engine.processes
    assert list(temporary.glob("vllm_dist_*")) == []
    assert not any(path.is_socket() for path in temporary.rglob("*"))


def test_an_idle_engine_uses_no_cpu(host):
    engine = psutil.Process(host.engine.processes[0]["pid"])
    time.sleep(1.5)
    before = sum(engine.cpu_times()[:2])
    time.sleep(2.0)

    assert sum(engine.cpu_times()[:2]) - before < 0.2


def test_one_process_is_the_whole_engine_and_uses_every_core(host, others):
    assert engine_processes(others) == {host.engine.processes[0]["pid"]}
    assert host.engine.processes[0]["threads"] == len(os.sched_getaffinity(0))


def test_two_tensor_parallel_processes_in_fp32_match_transformers_closely_and_die_together(tmp_path):
    """fp32 leaves no rounding to hide behind: what is reported is the log-prob at the sampling temperature.

    A mixture of experts, which vLLM, transformers and the checkpoint each keep in another form; its routers' choices
    are returned, but for what was in the cache: a whole block of the first prompt, of all samples but one.
    """
    folder = models.save_tiny_mixture(tmp_path)
    others = children()
    changes = {"dtype": "float32", "tensor_model_parallel_size": 2, "kv_cache_gib": 0.1}
    changes |= {"enable_rollout_routing_replay": True}
    prompts, width = [list(range(5, 45)), [8]], 40
    with RolloutHost(engine_setup("vllm", folder, TokenIds(0, (1,), models.VOCAB), width + R, **changes)) as host:
        pids = [process["pid"] for process in host.engine.processes]
        assert len(set(pids)) == 2 and engine_processes(others) > set(pids)
        changed = models.load(folder)
        for version in (0, 1):
            out = sample(host, prompt_batch(prompts, n=4, width=width), temperature=0.7)
            mask = out.batch["response_mask"].bool()
            lacking = [int(is_missing(row).sum()) for row in out.non_tensor_batch[ROUTED_EXPERTS]]
            assert sorted(lacking) == [0] * 5 + [CPU_BLOCK_TOKENS] * 3
            share_known_experts(out)
            for row, theirs in zip(
                out.non_tensor_batch[ROUTED_EXPERTS], models.routed_experts(changed, out), strict=True
            ):
                assert np.array_equal(np.sort(row, -1), np.sort(theirs, -1))
            expected = models.response_log_probs(changed, out, 0.7)
            assert out.meta_info["policy_version"] == version
            assert (out.batch["rollout_log_probs"] - expected)[mask].abs().mean() < 1e-3
            if version == 0:
                changed = models.perturb(changed, 0.5)
                report = host.push_weights(1, models.specs(changed, torch.float32), models.parameters(changed))
                assert len(report.receivers) == 2

        os.kill(pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match=f"pid {pids[0]}, {pids[1]}"):
            while time.monotonic() - started < 60:
                sample(host, prompt_batch([[5, 6, 7]], n=4, width=8), timeout_s=60)
        assert time.monotonic() - started < 30
        with pytest.raises((EngineDeadError, RolloutError, WeightSyncError)):
            host.push_weights(2, models.specs(changed, torch.float32), models.parameters(changed))

    assert not any(lives(pid) for pid in pids)


def test_a_model_that_does_not_load_is_an_error_that_leaves_nothing(tmp_path):
    folder = models.save_tiny_llama(tmp_path)
    (folder / "model.safetensors").write_bytes(b"torn")
    others = children()

    with pytest.raises(RolloutError, match=r"the vLLM engine for .* did not start"):
        make_host(folder).start()

    assert engine_processes(others) == set()


def own_an_engine(folder: str) -> None:
    """The body of a process that will be killed."""
    host = make_host(folder, tensor_model_parallel_size=2, kv_cache_gib=0.1)
    host.start()
    model = models.load(folder)
    host.push_weights(1, models.specs(model, torch.bfloat16), models.parameters(model))
    sys.stdout.write(f"pids {' '.join(str(process['pid']) for process in host.engine.processes)}\n")
    sys.stdout.flush()
    time.sleep(600)


def test_engine_processes_and_memory_go_with_an_owner_that_is_killed(tmp_path):
    folder = models.save_tiny_llama(tmp_path)
    code = f"from tests.workers.rollout.test_vllm_engine import own_an_engine; own_an_engine({str(folder)!r})"
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as owner:
        lines = iter(owner.stdout.readline, "")
        line = next((line for line in lines if line.startswith("pids ")), None)
        assert line is not None, "the engine did not start"
        pids = [int(pid) for pid in line.split()[1:]]
        segments = shared_memory_of([*pids, owner.pid])
        assert len(pids) == 2 and segments

        owner.kill()

    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and (any(map(lives, pids)) or segments & set(os.listdir("/dev/shm"))):
        time.sleep(0.1)
    assert not any(map(lives, pids))
    assert not segments & set(os.listdir("/dev/shm"))


def test_a_half_written_engine_refuses_to_sample_until_a_good_sync(host, original, prompts, monkeypatch):
    """Against the odds of the staged transport: the commit itself fails, after some layers were written."""
    specs = models.specs(original, torch.bfloat16)
    short = [spec for spec in specs if spec[0] != "model.layers.5.self_attn.k_proj.weight"]
    weights = [(name, tensor) for name, tensor in models.parameters(original) if name in {spec[0] for spec in short}]
    # The engine process would compare with its last good sync: make it forget that one.
    host._control(host.engine._call("hrl_join"), "joining again", 60)
    host._sync = None

    with pytest.raises(WeightSyncError, match=r"layers\.5\.self_attn\.qkv_proj|layers\.5\.self_attn\.k_proj"):
        host.push_weights(10, short, iter(weights))
    with pytest.raises(EngineUnusableError, match="sync weights before sampling"):
        sample(host, prompt_batch(prompts, n=1, width=P))

    host._sync = None
    host.push_weights(11, specs, models.parameters(original))
    out = sample(host, prompt_batch(prompts, n=1, width=P))
    assert out.meta_info["policy_version"] == 11
