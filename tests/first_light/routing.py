"""Stage routing: the experts that vLLM says its tokens went to, against those that the trainer's routers choose.

On a GPU vLLM returns them itself, with its second model runner; on a CPU, where it refuses to, hrl listens to its
routers. Either way they belong to a row's tokens one by one: moved by a token they would hardly ever be the trainer's.
Replayed in the trainer, they bring its log-probs nearer to the engine's. Samples share their prompts, so that most
prompts are found in the engine's cache.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hrl.batching.plan import MiniBatchPlan, RankPlan
from hrl.config.ppo import PPOTrainerConfig
from hrl.models.loading import ModelSource, load_causal_lm
from hrl.models.packed_model import PackedCausalLM, PackedMicroBatch, TokenRows
from hrl.models.tokenizer import TokenIds
from hrl.routing import is_missing, known_by_beginning
from hrl.workers.engine.engine import Engine
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import EngineSetup, SampleOutput
from hrl.workers.rollout.host import RolloutHost
from tests.first_light.experts import VOCABULARY, config_of
from tests.first_light.random_model import fsdp_section, join_alone
from tests.first_light.report import Findings
from tests.first_light.stages import Setup

NUM_PROMPTS, NUM_SAMPLES, PROMPT_TOKENS, MAX_TOKENS = 4, 4, 70, 40
#: Of the choices, the share that engine and trainer have in common, both in bfloat16; and at most of this share where
#: one of them is moved by a token.
LEAST_SAME, MOST_SAME_MOVED = 0.9, 0.6
#: Mean difference of a log-prob, with the engine's experts replayed.
NOISE = 0.05
TIMEOUT_S = 120.0


def run(setup: Setup, findings: Findings) -> None:
    """Samples from a random mixture, and runs what was sampled through the trainer twice."""
    device = join_alone(setup)
    folder = Path(setup.folder, "random-mixture")
    with torch.device(device):
        AutoModelForCausalLM.from_config(config_of(setup), dtype=torch.bfloat16).save_pretrained(folder)
    source = ModelSource(str(folder), {}, False, True, False, 256)
    trainer = Engine(load_causal_lm, PackedCausalLM, source, None, fsdp_section(model_dtype="bf16"), device=device)
    rows, outputs = _sampled(source, device, findings)
    lengths = [PROMPT_TOKENS + len(output.token_ids) - 1 for output in outputs]
    shape = (len(trainer.experts), config_of(setup).num_experts_per_tok)
    told = [np.zeros((0, *shape), np.uint8) if output.routed is None else output.routed for output in outputs]
    right = all(each.shape == (length, *shape) for each, length in zip(told, lengths, strict=True))
    findings.add(
        "shape of a row's experts",
        f"{told[0].shape}",
        f"{(lengths[0], *shape)}: tokens but the last, layers with experts, experts of a token",
        right,
    )
    unknown = sum(int(is_missing(each).sum()) for each in told)
    # A CPU's engine computes nothing, and so chooses nothing, for what is in its cache.
    findings.add(
        "tokens of which the engine knows no experts",
        f"{unknown} of {sum(lengths)}",
        "0" if device.type == "cuda" else "",
        unknown == 0 if device.type == "cuda" else None,
    )
    told = known_by_beginning(rows.prompts, told)
    unknown = sum(int(is_missing(each).sum()) for each in told)
    findings.add("the same, with those of rows that begin alike", f"{unknown}", "0", unknown == 0)
    if not right or unknown:
        return
    own, apart = _run(trainer, rows, outputs)
    same, moved = _same(own, told), _same([row[1:] for row in own], told)
    findings.add(
        "choices that are the trainer's too",
        f"{100 * same:.1f} %",
        f"≥ {100 * LEAST_SAME:.0f} %",
        same >= LEAST_SAME,
    )
    findings.below("the same, moved by a token, as a share of it", moved / same, MOST_SAME_MOVED)
    findings.add("log-probs differ from the engine's by the trainer's own choice, mean", f"{apart:.3g}")
    again, apart = _run(trainer, replace(rows, routed=told), outputs)
    findings.below("log-probs differ from the engine's with its experts replayed, mean", apart, NOISE)
    exact = _same(again, told)
    findings.add("choices that were replayed as told", f"{100 * exact:.2f} %", "100 %", exact == 1.0)


def _sampled(source: ModelSource, device: torch.device, findings: Findings) -> tuple[TokenRows, list[SampleOutput]]:
    """Several responses to each of several prompts, the first of each alone."""
    small = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "kv_cache_gib": 0.25, "max_num_seqs": 16}
    small |= {"enforce_eager": device.type == "cpu", "enable_rollout_routing_replay": True}
    config = PPOTrainerConfig().actor_rollout_ref.rollout.model_copy(update=small)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, VOCABULARY, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
    started = time.perf_counter()
    with RolloutHost(EngineSetup(config, source, TokenIds(pad=0, stop=(2,), vocab_size=VOCABULARY), device)) as host:
        findings.add("start", f"{time.perf_counter() - started:.1f} s")
        outputs: dict[tuple[int, int], SampleOutput] = {}
        for samples in ((0,), range(1, NUM_SAMPLES)):
            asked = {
                (prompt, sample): host.generate(
                    prompts[prompt].tolist(),
                    SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=sample),
                    f"{prompt} {sample}",
                )
                for prompt in range(NUM_PROMPTS)
                for sample in samples
            }
            outputs |= {key: future.result(TIMEOUT_S) for key, future in asked.items()}
    keys = sorted(outputs)
    lengths = np.array([len(outputs[key].token_ids) for key in keys])
    responses = np.zeros((len(keys), int(lengths.max())), np.int64)
    for row, key in enumerate(keys):
        responses[row, : lengths[row]] = outputs[key].token_ids
    trained = np.arange(responses.shape[1])[None] < lengths[:, None]
    return TokenRows([prompts[prompt] for prompt, _ in keys], responses, lengths, trained), [outputs[k] for k in keys]


def _run(trainer: Engine, rows: TokenRows, outputs: list[SampleOutput]) -> tuple[list[np.ndarray], float]:
    """The experts that tokens went to, and the mean difference of log-probs from the engine's."""
    count = len(rows.prompts)
    plan = RankPlan((MiniBatchPlan((tuple(range(count)),), int(rows.trained.sum()), count, NUM_PROMPTS),))
    routed: list[np.ndarray] = []

    def compute(packed: PackedMicroBatch) -> tuple[Tensor]:
        return (trainer.module(packed, 1.0, False).log_prob,)

    (found,) = trainer.forward(rows, plan, compute, num_outputs=1, routed=routed)
    theirs = torch.cat([torch.tensor(output.log_probs) for output in outputs])
    return routed, float((found[torch.from_numpy(rows.trained)] - theirs).abs().mean())


def _same(mine: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The share of tokens and layers with the same experts, in whatever order, as far as both rows go."""
    shorter = [min(len(one), len(other)) for one, other in zip(mine, theirs, strict=True)]
    found = [
        (np.sort(one[:count], -1) == np.sort(other[:count], -1)).all(-1).ravel()
        for one, other, count in zip(mine, theirs, shorter, strict=True)
    ]
    return float(np.concatenate(found).mean())
