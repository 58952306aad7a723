"""Models without a checkpoint, and packed rows for them: nothing is read from a disk or a network."""

from __future__ import annotations

import copy
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from hrl.batching.plan import MiniBatchPlan
from hrl.models.dtypes import dtype_of
from hrl.models.loading import Loaded, prepare
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.packed_model import PackedCausalLM, TokenRows
from hrl.workers.engine.engine import Engine
from hrl.workers.requests import Training
from tests.first_light.stages import Setup

#: Shapes of published models of the Qwen2.5 family: (hidden, inner, layers, heads, key heads, vocabulary, tied).
SHAPES = {
    "tiny": (128, 128, 2, 4, 2, 512, True),  # heads of 32, the narrowest that vLLM takes on a CPU
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}


def config_of(size: str) -> Qwen2Config:
    """The configuration of a shape."""
    hidden, inner, layers, heads, key_heads, vocabulary, tied = SHAPES[size]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
    )


def num_parameters(size: str) -> int:
    """Weights of a shape, tied ones once."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config_of(size)).parameters())


def join_alone(setup: Setup) -> torch.device:
    """A world of this process; returns its device."""
    device = torch.device("cuda", 0) if setup.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, device_id=None if device.type == "cpu" else device
    )
    torch.manual_seed(0)
    return device


def build_engine(
    size: str,
    device: torch.device,
    *,
    masters: str = "fp32",
    trained: bool = True,
    param_offload: bool = False,
    optimizer_offload: bool = False,
    offload_policy: bool = False,
    activation_offload: bool = False,
    sequence_group: int = 1,
    dtype: str = "bf16",
    max_model_len: int = 8192,
    optimizer: str = "adamw",
) -> Engine:
    """A training engine around a random model, the same on every call, computing in bfloat16 unless told otherwise."""
    torch.manual_seed(0)

    def load(source: object, dtype: torch.dtype, *, meta: bool) -> Loaded:
        config = config_of(size)
        with torch.device("meta" if meta else device):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=ATTENTION_NAME, dtype=dtype_of(masters)
            )
        model._weight_conversions = []  # those of a checkpoint that was read
        prepare(model, max_model_len=max_model_len, recompute=True)
        return Loaded(model, config)

    return Engine(
        load,
        PackedCausalLM,
        SimpleNamespace(
            share_prefix=True,
            adapter=None,
            enable_activation_offload=activation_offload,
            shows_pictures=False,
            freeze_vision_tower=False,
            packs_rows=True,
        ),
        Training(optim=optim_section(optimizer), grad_clip=1.0, total_steps=1, seed=0, run_folder=None)
        if trained
        else None,
        fsdp_section(
            dtype=dtype,
            model_dtype=masters,
            ulysses_sequence_parallel_size=sequence_group,
            param_offload=param_offload,
            optimizer_offload=optimizer_offload,
            offload_policy=offload_policy,
        ),
        device=device,
    )


def optim_section(name: str = "adamw", lr: float = 1e-6) -> SimpleNamespace:
    """An `optim` with a constant rate."""
    return SimpleNamespace(
        name=name,
        lr=lr,
        betas=[0.9, 0.999],
        weight_decay=0.01,
        lr_warmup_steps=0,
        lr_warmup_steps_ratio=0.0,
        lr_scheduler_type="constant",
        min_lr_ratio=0.0,
    )


def fsdp_section(**changes: Any) -> SimpleNamespace:
    """An `fsdp_config` that computes in bfloat16."""
    base = {
        "dtype": "bf16",
        "model_dtype": "fp32",
        "reshard_after_forward": True,
        "fsdp_size": -1,
        "ulysses_sequence_parallel_size": 1,
        "tensor_parallel_size": 1,
        "expert_parallel_size": 1,
        "param_offload": False,
        "optimizer_offload": False,
        "offload_policy": False,
    }
    return SimpleNamespace(**(base | changes))


def random_rows(groups: int, samples: int, prompt_tokens: int, response_tokens: int, vocabulary: int) -> TokenRows:
    """Groups of samples that share their prompt, every response of full length."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, vocabulary, prompt_tokens) for _ in range(groups)]
    count = groups * samples
    return TokenRows(
        [prompts[row // samples] for row in range(count)],
        draw.integers(0, vocabulary, (count, response_tokens)),
        np.full(count, response_tokens),
        np.ones((count, response_tokens), bool),
    )


def one_step(engine: Engine, rows: TokenRows, micro_batches: tuple[tuple[int, ...], ...]) -> Any:
    """A policy-gradient step with advantages of ±1; returns the optimizer's report."""
    tokens = int(rows.trained.sum())
    plan = MiniBatchPlan(micro_batches, tokens, len(rows.prompts), len(rows.prompts))

    def loss_of(picked: tuple[int, ...]) -> Tensor:
        packed = engine.pack(rows, picked)
        (flat,) = packed.join((engine.module(packed, 1.0, False).log_prob,))
        log_probs = packed.unpack(flat)
        signs = torch.tensor([1.0 if row % 2 else -1.0 for row in picked], device=log_probs.device)
        return -(signs[:, None] * log_probs).sum() / tokens

    return engine.step(plan, loss_of)


def timed_step(
    engine: Engine, rows: TokenRows, micro_batches: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[float, int]:
    """The seconds of an optimizer step, and the bytes at its peak on a card; 0 on a CPU."""
    on_card = device.type == "cuda"
    if on_card:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    one_step(engine, rows, micro_batches)
    if on_card:
        torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) if on_card else 0
    return time.perf_counter() - started, peak


def one_step_with_gradient(
    engine: Engine, rows: TokenRows, micro_batches: tuple[tuple[int, ...], ...]
) -> tuple[Any, Tensor]:
    """The same, and the clipped gradient of all ranks as one vector on the host."""
    optimizer = engine.optimizer
    assert optimizer is not None, "the engine learns"
    rule, parts = optimizer.rule, list[Tensor]()
    own = rule.step

    def step(lr: float) -> None:
        for parameter in optimizer.parameters:
            assert isinstance(parameter.grad, DTensor), "it is sharded"
            parts.append(parameter.grad.full_tensor().float().flatten().cpu())
        own(lr)

    rule.step = step  # type: ignore[method-assign]
    try:
        report = one_step(engine, rows, micro_batches)
    finally:
        rule.step = own  # type: ignore[method-assign]
    return report, torch.cat(parts)
