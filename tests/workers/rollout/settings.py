"""Rollout settings for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hrl.protocol import DataProto


def rollout_config(name: str, **changes: Any) -> SimpleNamespace:
    """`actor_rollout_ref.rollout`, small."""
    values: dict[str, Any] = {
        "name": name,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "seed": 1,
        "dtype": "bfloat16",
        "tensor_model_parallel_size": 1,
        "gpu_memory_utilization": 0.3,
        "kv_cache_gib": 0.25,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "max_model_len": None,
        "enforce_eager": True,
        "free_cache_engine": True,
        "sleep_level": 2,
        "enable_chunked_prefill": None,
        "enable_prefix_caching": True,
        "engine_kwargs": {},
        "val_kwargs": SimpleNamespace(n=1, do_sample=False, temperature=0.0, top_p=1.0, top_k=-1),
        "weight_sync": SimpleNamespace(bucket_mb=32, timeout_s=60.0),
    }
    return SimpleNamespace(**(values | changes))


def prompt_batch(prompts: list[list[int]], n: int, width: int, step: int = 1, **meta: Any) -> DataProto:
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
        meta_info={"step": step, "validate": False, **meta},
    )
