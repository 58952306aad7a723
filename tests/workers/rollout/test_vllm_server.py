"""vLLM's own server, run for real on a CPU: tokens, log-probs, seeds, weights, versions; one process for all tests."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hrl.config.distillation import TeacherModelConfig
from hrl.config.rollout import ServerConfig
from hrl.models.tokenizer import TokenIds
from hrl.workers.rollout.base import EngineDeadError
from hrl.workers.rollout.host import RolloutHost
from hrl.workers.rollout.scoring_server import Scores, look_at_each, opened, score_each
from hrl.workers.rollout.server_http import ServerRefusesError
from hrl.workers.weight_sync.wire import WeightSyncError
from tests.workers.rollout import models
from tests.workers.rollout.settings import engine_setup, prompt_batch, sample_rows
from tests.workers.rollout.vllm_serve import Serving, vllm_serve

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

STOP, P, R = 1, 8, 24
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], list(range(40, 48))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    # Its head is its embedding, which on a CPU a server that merely loads new weights goes on packing from the old one.
    return models.save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def serving(folder, tmp_path_factory) -> Iterator[Serving]:
    log = tmp_path_factory.mktemp("server") / "log"
    with vllm_serve(folder, log, "--skip-tokenizer-init") as serving:
        yield serving


@pytest.fixture
def make(folder, serving) -> Iterator[Callable[..., RolloutHost]]:
    opened: list[RolloutHost] = []

    def make(model: Path = folder, *, longest: int = 96, run_mark: str = "run", **settings: Any) -> RolloutHost:
        server = ServerConfig(urls=[serving.url], timeout_s=60.0, **settings)
        setup = engine_setup(
            "server", model, TokenIds(0, (STOP,), models.VOCAB), longest, dtype="float32", server=server
        )
        opened.append(RolloutHost(replace(setup, run_mark=run_mark)))
        return opened[-1]

    yield make
    for host in opened:
        host.shutdown()


@pytest.fixture
def host(make) -> RolloutHost:
    host = make()
    host.start()
    return host


def push(host: RolloutHost, model: Any, version: int):
    return host.push_weights(version, models.specs(model, torch.float32), models.parameters(model))


def sample(host: RolloutHost, n: int = 4, **changes: Any):
    return sample_rows(host, prompt_batch(PROMPTS, n=n, width=P), max_tokens=R, **changes)


def gap(model: Any, out: Any, temperature: float = 1.0) -> float:
    """The largest difference to transformers' log-probs."""
    reference, mask = models.response_log_probs(model, out, temperature), out.batch["response_mask"].bool()
    return float((reference - out.batch["rollout_log_probs"])[mask].abs().max())


def rpc(serving: Serving, method: str, *args: Any, **kwargs: Any) -> Any:
    """What anybody can have the server do."""
    body = json.dumps({"method": method, "args": args, "kwargs": kwargs}).encode()
    request = urllib.request.Request(
        f"{serving.url}/collective_rpc", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())["results"]


def test_tokens_log_probs_and_seeds_are_those_of_the_weights_that_were_sent(host, folder):
    model = models.load(folder)
    report = push(host, model, 1)
    (receiver,) = report.receivers
    assert (receiver.version, receiver.tensors, receiver.nbytes) == (1, report.tensors, report.nbytes)
    assert receiver.read_back >= 5  # norms, and the embedding: what vLLM neither fuses nor packs
    first = sample(host)
    assert gap(model, first) < 1e-4
    hot = sample(host, temperature=1.7)
    assert gap(model, hot, 1.7) < 1e-4
    again = sample(host)
    assert torch.equal(first.batch["responses"], again.batch["responses"])
    assert not torch.equal(first.batch["responses"], sample(host, step=2).batch["responses"])
    mask = first.batch["response_mask"]
    for row, reason in enumerate(first.non_tensor_batch["finish_reason"]):
        tokens = first.batch["responses"][row][mask[row].bool()].tolist()
        assert STOP not in tokens[:-1] and (reason == "stop") == (tokens[-1] == STOP) and len(tokens) <= R
    assert {"stop", "length"} >= set(first.non_tensor_batch["finish_reason"])


def test_every_sync_takes_effect_with_the_prefix_cache_dropped(host, folder):
    old, new = models.load(folder), models.perturb(models.load(folder), 0.1)
    push(host, old, 4)
    before = sample(host)  # the prompts' keys and values of the old weights are cached now
    push(host, new, 5)
    after = sample(host)
    assert gap(old, before) < 1e-4 and gap(new, after) < 1e-4 and gap(old, after) > 0.01
    assert host.policy_version == 5 and after.meta_info["policy_version"] == 5
    push(host, old, 6)
    assert torch.equal(sample(host).batch["responses"], before.batch["responses"])


def test_greedy_rows_take_the_likeliest_tokens(host, folder):
    model = models.load(folder)
    push(host, model, 1)
    out = sample(host, n=1, temperature=0.0)
    likeliest = models.response_logits(model, out).argmax(-1)
    mask = out.batch["response_mask"].bool()
    assert torch.equal(likeliest[mask], out.batch["responses"][mask]) and gap(model, out) < 1e-4


def test_weights_pass_through_a_folder_too(make, folder, tmp_path):
    model = models.perturb(models.load(folder), 0.1)
    host = make(weights_folder=str(tmp_path))
    host.start()
    for version in (1, 2):
        push(host, models.perturb(model, 0.05), version)
        assert gap(model, sample(host)) < 1e-4
    assert len(list(tmp_path.iterdir())) == 1
    host.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_a_sync_that_breaks_on_the_way_leaves_the_old_weights(host, folder):
    old, new = models.load(folder), models.perturb(models.load(folder), 0.1)
    push(host, old, 1)
    before = sample(host)

    def breaks():
        for number, item in enumerate(models.parameters(new)):
            if number == 3:
                raise ValueError("the trainer failed")
            yield item

    with pytest.raises(ValueError, match="the trainer failed"):
        host.push_weights(2, models.specs(new, torch.float32), breaks())
    assert host.policy_version == 1
    assert torch.equal(sample(host).batch["responses"], before.batch["responses"])
    push(host, new, 2)
    assert gap(new, sample(host)) < 1e-4


def test_another_runs_weights_are_not_taken_for_this_ones(host, make, folder, serving):
    model = models.load(folder)
    push(host, model, 1)
    other = make(run_mark="another run")
    other.start()
    push(other, models.perturb(models.load(folder), 0.1), 1)  # of the same number
    with pytest.raises(EngineDeadError, match=f"{serving.url} does not hold weights that this run has sent"):
        sample(host)
    push(host, model, 2)  # whose turn it is now
    assert gap(model, sample(host)) < 1e-4
    with pytest.raises(EngineDeadError, match="does another run use it"):
        sample(other)


def test_weights_that_come_by_another_way_are_found(host, folder, serving):
    model = models.perturb(models.load(folder), 0.1)
    push(host, model, 1)
    assert gap(model, sample(host)) < 1e-4
    rpc(serving, "reload_weights")  # of the folder, as anybody can who reaches the server
    with pytest.raises(EngineDeadError, match=f"{serving.url} does not hold weights that this run has sent"):
        sample(host, step=2)
    push(host, model, 2)
    assert gap(model, sample(host)) < 1e-4


def test_weights_of_another_model_are_refused_at_the_look_and_at_the_sync(make, host, tmp_path, serving):
    wide = models.SHAPE | {"vocab_size": 96, "hidden_size": 32}
    from transformers import LlamaConfig, LlamaForCausalLM

    other = LlamaForCausalLM(LlamaConfig(**wide, tie_word_embeddings=True)).eval()
    other.save_pretrained(tmp_path)
    with pytest.raises(
        ServerRefusesError, match=f"{serving.url} does not fit this run: .*vocab_size=128, and .* has 96"
    ):
        make(tmp_path).start()
    with pytest.raises(ServerRefusesError, match="its longest sequence is 96, and the run's 400"):
        make(longest=400).start()
    with pytest.raises(WeightSyncError, match=serving.url):
        push(host, other, 1)
    LlamaConfig(**models.SHAPE, tie_word_embeddings=True, hidden_act="gelu").save_pretrained(tmp_path)
    with pytest.raises(
        ServerRefusesError, match="does not fit this run: its model .* has hidden_act=silu, and .* has gelu. Start it"
    ):
        make(tmp_path).start()


def test_it_scores_a_text_as_a_teacher_does(host, folder, serving):
    """Log-probs of the weights that it holds, at a temperature of 1, however it was asked to sample."""
    model, texts = models.perturb(models.load(folder), 0.1), [(prompt, 1) for prompt in PROMPTS]
    push(host, model, 1)

    async def scores(num_top: int) -> list[Scores]:
        teacher = opened(TeacherModelConfig(), [serving.url], vocabulary=models.VOCAB, timeout_s=60.0, most_at_once=8)
        async with teacher as servers:
            assert await look_at_each(servers, 32) == [f"{folder}, 96 tokens"]
            return await score_each(servers, texts, num_top)

    for prompt, found in zip(PROMPTS, asyncio.run(scores(4)), strict=True):
        rows = model(input_ids=torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        own = rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(found.log_probs), own, atol=1e-4, rtol=0.0)
        top = rows.topk(4)
        torch.testing.assert_close(torch.from_numpy(found.top_log_probs), top.values, atol=1e-4, rtol=0.0)
        assert torch.equal(torch.from_numpy(found.top_ids).long(), top.indices)
    with pytest.raises(ServerRefusesError, match=f"{serving.url}/v1/completions answered 400.* allowed: 20"):
        asyncio.run(scores(21))


def test_a_server_that_was_started_again_has_the_runs_weights_after_the_next_sync(host, folder, serving):
    """The last test: it ends the server, twice."""
    old, new = models.load(folder), models.perturb(models.load(folder), 0.1)
    push(host, old, 1)
    serving.end(signal.SIGKILL)
    serving.start()  # with its folder's weights, which are those of version 1, and which it does not say
    with pytest.raises(EngineDeadError, match=f"{serving.url} does not hold weights that this run has sent"):
        sample(host)
    push(host, new, 2)
    out = sample(host)
    assert gap(new, out) < 1e-4 and out.meta_info["policy_version"] == 2
    serving.end(signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=f"no server of rollout.server.urls is left .*{serving.url}"):
        sample(host)
