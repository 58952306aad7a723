"""Which engine a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hrl.workers.rollout.base import RolloutEngine


def build_engine(
    config: Any,
    *,
    model_path: str,
    stop_token_ids: tuple[int, ...],
    vocab_size: int,
    max_model_len: int,
    device: torch.device,
    num_threads: int | None,
    trust_remote_code: bool,
    override_config: Mapping[str, Any],
    visible_devices: str | None,
    sleeps: bool,
) -> RolloutEngine:
    """Make the engine that `rollout.name` names, without starting it.

    Raises:
        ValueError: An unknown name.
    """
    extra = dict(config.engine_kwargs.get(config.name) or {})
    match config.name:
        case "vllm":
            from hrl.workers.rollout.vllm_engine import VllmEngine, VllmOptions

            return VllmEngine(
                VllmOptions(
                    model_path=model_path,
                    device_type=device.type,
                    max_model_len=max_model_len,
                    stop_token_ids=stop_token_ids,
                    num_threads=num_threads,
                    dtype=config.dtype,
                    tensor_parallel_size=config.tensor_model_parallel_size,
                    gpu_memory_utilization=config.gpu_memory_utilization,
                    kv_cache_gib=config.kv_cache_gib,
                    max_num_seqs=config.max_num_seqs,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                    enforce_eager=config.enforce_eager,
                    enable_chunked_prefill=config.enable_chunked_prefill,
                    enable_prefix_caching=config.enable_prefix_caching,
                    sleeps=sleeps,
                    trust_remote_code=trust_remote_code,
                    override_config=override_config,
                    visible_devices=visible_devices,
                    engine_kwargs=extra,
                )
            )
        case "hf":
            from hrl.workers.rollout.hf_engine import HfEngine

            return HfEngine(
                model_path,
                stop_token_ids=stop_token_ids,
                dtype=getattr(torch, config.dtype),
                device=device,
                max_num_seqs=config.max_num_seqs,
                max_model_len=max_model_len,
                trust_remote_code=trust_remote_code,
                override_config=override_config,
                **extra,
            )
        case "scripted":
            from hrl.workers.rollout.scripted import Script, ScriptedEngine

            return ScriptedEngine(Script(**extra), stop_token_ids=stop_token_ids, vocab_size=vocab_size)
        case other:
            raise ValueError(f"unknown rollout engine {other!r}; known: vllm, hf, scripted")
