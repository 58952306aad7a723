"""A trainer beside an engine: what it sends, what the engine has sampled, and how far its log-probs are apart."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hrl.batching.plan import MiniBatchPlan, RankPlan
from hrl.models.loading import ModelSource, load_causal_lm
from hrl.models.packed_model import PackedCausalLM, PackedMicroBatch, TokenRows
from hrl.workers.engine.engine import Engine
from hrl.workers.requests import SamplingParams, Training
from hrl.workers.rollout.host import RolloutHost
from hrl.workers.weight_sync.sender import SyncReport
from tests.first_light.random_model import fsdp_section, optim_section

NUM_SAMPLES, PROMPT_TOKENS, MAX_TOKENS = 8, 32, 32
NOISE = 0.05
"""Mean difference of a log-prob between trainer and engine, both in bfloat16."""
TIMEOUT_S = 200.0


def sampled(host: RolloutHost, name: str, max_tokens: int = MAX_TOKENS) -> tuple[TokenRows, list[list[float]]]:
    """Responses to one prompt, and their log-probs by the engine."""
    prompt = list(range(5, 5 + PROMPT_TOKENS))
    sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens)
    asked = [host.generate(prompt, replace(sampling, seed=seed), f"{name} {seed}") for seed in range(NUM_SAMPLES)]
    outputs = [future.result(TIMEOUT_S) for future in asked]
    lengths = np.array([len(output.token_ids) for output in outputs])
    responses = np.zeros((NUM_SAMPLES, int(lengths.max())), np.int64)
    for row, output in enumerate(outputs):
        responses[row, : lengths[row]] = output.token_ids
    trained = np.arange(responses.shape[1])[None] < lengths[:, None]
    rows = TokenRows([np.array(prompt)] * NUM_SAMPLES, responses, lengths, trained)
    return rows, [list(output.log_probs) for output in outputs]


def learner(source: ModelSource, device: torch.device, rate: float) -> Engine:
    """A model that two steps of AdamW move."""
    training = Training(optim=optim_section("adamw", rate), grad_clip=1.0, total_steps=2, seed=0, run_folder=None)
    return Engine(load_causal_lm, PackedCausalLM, source, training, fsdp_section(), device=device)


def synced(host: RolloutHost, trainer: Engine, version: int) -> tuple[SyncReport, float]:
    """A weight sync in bfloat16, and its seconds."""
    started = time.perf_counter()
    sync = host.push_weights(
        version,
        trainer.param_specs(torch.bfloat16),
        trainer.iter_full_params(torch.bfloat16),
        trainer.frozen_names(),
    )
    assert sync is not None, "nobody else sends them"
    return sync, time.perf_counter() - started


def apart(trainer: Engine, rows: TokenRows, log_probs: list[list[float]]) -> float:
    """Mean difference of the trainer's and the engine's log-probs of the same tokens."""
    count = len(rows.prompts)
    plan = RankPlan((MiniBatchPlan((tuple(range(count)),), int(rows.trained.sum()), count, 1),))

    def compute(packed: PackedMicroBatch) -> tuple[Tensor]:
        return (trainer.module(packed, 1.0, False).log_prob,)

    (found,) = trainer.forward(rows, plan, compute, num_outputs=1)
    own = torch.cat([torch.tensor(row) for row in log_probs])
    return float((found[torch.from_numpy(rows.trained)] - own).abs().mean())
