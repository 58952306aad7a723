"""Rollout settings for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hrl.batching.plan import RankPlan
from hrl.config.rollout import RolloutConfig, ValKwargsConfig, WeightSyncConfig
from hrl.models.loading import ModelSource
from hrl.models.tokenizer import TokenIds
from hrl.protocol import DataProto
from hrl.workers.requests import SampleRequest, SamplingParams
from hrl.workers.rollout.base import EngineSetup
from hrl.workers.rollout.host import OnSample, RolloutHost

CPU = torch.device("cpu")


def rollout_config(name: str, **changes: Any) -> RolloutConfig:
    """`actor_rollout_ref.rollout`, small."""
    values: dict[str, Any] = {
        "name": name,
        "n": 1,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.3,
        "kv_cache_gib": 0.25,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "enforce_eager": True,
        "enable_rollout_routing_replay": False,
        "log_prob_use_dynamic_bsz": True,
        "log_prob_max_token_len_per_gpu": 16384,
        "log_prob_micro_batch_size_per_gpu": None,
        "val_kwargs": ValKwargsConfig(do_sample=False),
        "weight_sync": WeightSyncConfig(bucket_mb=32, timeout_s=60.0),
    }
    return RolloutConfig(**(values | changes))


def engine_setup(
    name: str,
    folder: Path | str,
    tokens: TokenIds,
    max_model_len: int,
    *,
    device: torch.device = CPU,
    num_threads: int | None = None,
    override_config: Mapping[str, Any] | None = None,
    **changes: Any,
) -> EngineSetup:
    """What an engine is opened with; `changes` are of `rollout_config`."""
    source = ModelSource.to_look_at(
        Path(folder), override_config or {}, trust_remote_code=False, max_model_len=max_model_len
    )
    return EngineSetup(rollout_config(name, **changes), source, tokens, device, num_threads, run_mark="run")


def prompt_batch(prompts: list[list[int]], n: int, width: int) -> DataProto:
    """Each prompt n times, left-padded to `width` with token 0."""
    rows = len(prompts) * n
    ids = torch.zeros(rows, width, dtype=torch.int64)
    mask = torch.zeros(rows, width, dtype=torch.int64)
    for row in range(rows):
        prompt = prompts[row // n]
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return DataProto.from_dict(
        tensors={"prompts": ids, "attention_mask": mask},
        non_tensors={
            "uid": np.array([f"group-{row // n}" for row in range(rows)], dtype=object),
            "sample_index": np.array([row % n for row in range(rows)], dtype=object),
        },
    )


def sample_rows(
    host: RolloutHost,
    batch: DataProto,
    on_sample: OnSample | None = None,
    *,
    max_tokens: int,
    step: int = 1,
    with_greedy: bool = False,
    timeout_s: float = 600.0,
    **sampling: Any,
) -> DataProto:
    """One response per row, as a driver would ask for it; `sampling` are fields of `SamplingParams`."""
    request = sample_request(max_tokens=max_tokens, step=step, with_greedy=with_greedy, **sampling)
    request = replace(request, with_experts=host.engine.setup.config.enable_rollout_routing_replay)
    return host.generate_sequences(batch, request, on_sample, timeout_s=timeout_s)


def sample_request(
    *, max_tokens: int, step: int = 1, with_greedy: bool = False, **sampling: Any
) -> SampleRequest[RankPlan]:
    """What `sample_rows` asks for."""
    return SampleRequest(
        plan=RankPlan(()),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        seed=1,
        step=step,
        with_greedy=with_greedy,
        reward_round=None,
    )


def score(host: RolloutHost, token_ids: list[int]) -> list[float]:
    """Log-probs of tokens 1, 2, … given those before them, at temperature 1, as the engine's model has them."""
    scoring = _score_by_vllm if host.engine.own_process else _score_by_transformers
    return host._running().run(scoring(host.engine, token_ids), timeout_s=120, what="scoring")


async def _score_by_transformers(engine: Any, token_ids: list[int]) -> list[float]:
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        log_probs = engine._model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist()


async def _score_by_vllm(engine: Any, token_ids: list[int]) -> list[float]:
    from vllm import SamplingParams as Params
    from vllm.sampling_params import RequestOutputKind

    # As an argument: the constructor then keeps the request from the prefix cache, whose tokens have no logits.
    params = Params(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    flat = (await engine._request(token_ids, params, f"score-{id(params)}")).prompt_logprobs
    return [flat.logprobs[start] for start in flat.start_indices[1:]]
