"""The real vLLM engine beside a trainer on one GPU: it gives its memory away, takes it back in two stages, and gets its
weights by CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from hrl.models.tokenizer import TokenIds
from hrl.workers.rollout.base import EngineUnusableError
from hrl.workers.rollout.host import RolloutHost
from tests.workers.rollout import models
from tests.workers.rollout.settings import engine_setup, prompt_batch, sample_rows, score

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.engine]

CUDA = torch.device("cuda", 0)
STOP, VOCAB, P, R = 2, 49152, 64, 24
sample = partial(sample_rows, max_tokens=R)
TOKENS = TokenIds(STOP, (STOP,), VOCAB)
PROMPTS = [[1, 4093, 198, 1780], [1, 788, 253, 1675, 30], [1, 2683]]
GIB = 2**30


@pytest.fixture(scope="module")
def folder() -> Path:
    from hrl.models.source import resolve_model

    return resolve_model("bundled:smollm2-135m-instruct")


@pytest.fixture(scope="module")
def host(folder) -> Iterator[RolloutHost]:
    torch.cuda.set_device(CUDA)
    setup = engine_setup("vllm", folder, TOKENS, P + R, device=CUDA, gpu_memory_utilization=0.4)
    with RolloutHost(setup) as host:
        yield host


@pytest.fixture(scope="module")
def original(folder):
    return models.load(folder, torch.bfloat16).to(CUDA)


def greedy(host: RolloutHost) -> torch.Tensor:
    return sample(host, prompt_batch(PROMPTS, n=1, width=P), temperature=0.0).batch["responses"]


def push(host: RolloutHost, version: int, model) -> None:
    report = host.push_weights(version, models.specs(model, torch.bfloat16), models.parameters(model))
    assert [receiver.version for receiver in report.receivers] == [version]


def free_gib() -> float:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(CUDA)[0] / GIB


def score_error(host: RolloutHost, model, tokens: list[int]) -> float:
    exact = model(input_ids=torch.tensor([tokens], device=CUDA)).logits[0, :-1].float().log_softmax(-1)
    exact = exact.gather(-1, torch.tensor(tokens[1:], device=CUDA)[:, None])[:, 0].cpu()
    return float((torch.tensor(score(host, tokens)) - exact).abs().mean())


def test_sleep_gives_memory_back_and_the_two_stages_of_waking_take_it_again(host, original):
    assert host.engine.supports_sleep
    push(host, 1, original)
    before, awake = greedy(host), free_gib()

    host.sleep()
    asleep = free_gib()
    assert asleep - awake > 4
    with pytest.raises(EngineUnusableError, match="sleep level 2"):
        greedy(host)

    host.wake(("weights",))
    half = free_gib()
    assert awake + 2 < half < asleep  # the cache is still away
    push(host, 2, original)
    host.wake(("kv_cache",))

    assert abs(free_gib() - awake) < 1
    assert torch.equal(greedy(host), before) and host.policy_version == 2


@torch.no_grad()
def test_weights_by_cuda_ipc_are_the_ones_sampled_from(host, folder, original):
    tokens = [*PROMPTS[1], *greedy(host)[1].tolist()]
    changed = models.perturb(models.load(folder, torch.bfloat16), 0.1).to(CUDA)
    noise = score_error(host, original, tokens)

    push(host, 3, changed)
    assert score_error(host, changed, tokens) < max(3 * noise, 0.1)
    assert score_error(host, original, tokens) > 1
    push(host, 4, original)
    assert score_error(host, original, tokens) == pytest.approx(noise, abs=1e-3)


@torch.no_grad()
def test_an_engine_that_quantises_to_fp8_samples_from_the_weights_it_was_sent(folder, original):
    tokens = [1, 788, 253, 1675, 30, 216, 34]
    changed = models.perturb(models.load(folder, torch.bfloat16), 0.1).to(CUDA)
    changes = {"gpu_memory_utilization": 0.3, "engine_kwargs": {"vllm": {"quantization": "fp8"}}}
    with RolloutHost(engine_setup("vllm", folder, TOKENS, P + R, device=CUDA, **changes)) as quantised:
        noise = score_error(quantised, original, tokens)
        for version, model in ((1, changed), (2, original)):
            quantised.sleep()
            quantised.wake(("weights",))
            push(quantised, version, model)
            quantised.wake(("kv_cache",))
            assert score_error(quantised, model, tokens) < max(3 * noise, 0.3)
        assert score_error(quantised, changed, tokens) > 1


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_log_probs_under_drafts_are_those_of_the_policy_also_after_a_sync(folder, original, temperature):
    """By whichever of vLLM's runners this version has for the card."""
    changed = models.perturb(models.load(folder, torch.bfloat16), 0.1).to(CUDA)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    changes = {"gpu_memory_utilization": 0.3, "engine_kwargs": {"vllm": {"speculative_config": drafts}}}
    with RolloutHost(engine_setup("vllm", folder, TOKENS, P + R, device=CUDA, **changes)) as drafting:
        for version, model in ((1, changed), (2, original)):
            push(drafting, version, model)
            out = sample(drafting, prompt_batch([[1, 5, 6, 7] * 4], n=8, width=P), temperature=temperature)
            logits = models.response_logits(model, out.to(CUDA)).cpu()
            exact = models.log_probs_at(logits, out.to("cpu"), temperature or 1.0)
            mask = out.batch["response_mask"].bool()
            assert (out.batch["rollout_log_probs"] - exact)[mask].abs().mean() < 0.1
            counts = drafting.take_counts()
            assert 0 <= counts["rollout/accepted_tokens"] <= counts["rollout/draft_tokens"]
