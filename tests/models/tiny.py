"""Tiny models, batches and worlds for the tests of everything that runs a model."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from hrl.batching.plan import BatchPlan, MiniBatchPlan, RankPlan
from hrl.protocol import DataProto
from tests.processes.warm import METHOD, warm_context

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
PROMPT_WIDTH, RESPONSE_WIDTH = 9, 7


def save_llama(folder: Path, *, tied: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A random Llama in a folder."""
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).to(dtype).save_pretrained(folder)
    return folder


def save_qwen2(folder: Path, *, window: int | None = None) -> Path:
    """A random Qwen2 (biased projections, untied head) whose second layer may have a sliding window."""
    torch.manual_seed(1)
    options = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False, **options)).save_pretrained(folder)
    return folder


def save_mixture(folder: Path, family: str) -> Path:
    """A random mixture of four experts: in memory one tensor a layer, in the folder one for each expert."""
    torch.manual_seed(2)
    if family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4))
    else:
        options = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **options, norm_topk_prob=True))
    model.save_pretrained(folder)
    return folder


def save_gemma3(folder: Path) -> Path:
    """A random Gemma 3 with its vision tower, which text does not pass through."""
    torch.manual_seed(4)
    text = SHAPE | {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=58,
        eoi_token_index=59,
        image_token_index=60,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def model_config(path: Path, **changes: Any) -> SimpleNamespace:
    """`actor_rollout_ref.model` with defaults for tests."""
    base = {
        "path": str(path),
        "share_prefix": True,
        "enable_gradient_checkpointing": False,
        "recompute_num_layers": None,
        "enable_activation_offload": False,
        "override_config": {},
        "trust_remote_code": False,
        "max_model_len": 128,
        "adapter": None,
        "shows_pictures": False,
        "freeze_vision_tower": False,
        "packs_rows": True,
    }
    return SimpleNamespace(**(base | changes))


def fsdp_config(dtype: str = "float64", **changes: Any) -> SimpleNamespace:
    """An `fsdp_config` with one dtype for storage and compute."""
    base = {
        "dtype": dtype,
        "model_dtype": dtype,
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


def optim_config(**changes: Any) -> SimpleNamespace:
    """An `optim` with a constant rate."""
    base = {
        "name": "adamw",
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "weight_decay": 0.01,
        "lr_warmup_steps": 0,
        "lr_warmup_steps_ratio": 0.0,
        "lr_scheduler_type": "constant",
        "min_lr_ratio": 0.0,
        "total_training_steps": -1,
    }
    return SimpleNamespace(**(base | changes))


def actor_config(**changes: Any) -> SimpleNamespace:
    """`actor_rollout_ref.actor`."""
    base = {
        "optim": optim_config(),
        "grad_clip": 1.0,
        "use_kl_loss": False,
        "kl_loss_type": "low_var_kl",
        "kl_loss_coef": 0.1,
        "entropy_coeff": 0.0,
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": None,
        "policy_loss": SimpleNamespace(loss_mode="vanilla"),
    }
    return SimpleNamespace(**(base | changes))


def critic_config(**changes: Any) -> SimpleNamespace:
    """`critic`."""
    base = {
        "optim": optim_config(),
        "grad_clip": 1.0,
        "cliprange_value": 0.5,
        "loss_agg_mode": "token-mean",
    }
    return SimpleNamespace(**(base | changes))


def as_batch(
    rng: np.random.Generator,
    prompts: np.ndarray,
    responses: np.ndarray,
    attention: np.ndarray,
    trained: np.ndarray,
    samples: int,
    temperature: float,
) -> DataProto:
    """Rows of so many samples a prompt, with drawn columns of what an update reads."""
    noise = [torch.from_numpy(rng.normal(size=responses.shape)) for _ in range(4)]
    return DataProto.from_dict(
        tensors={
            "prompts": torch.from_numpy(prompts),
            "responses": torch.from_numpy(responses),
            "attention_mask": torch.from_numpy(attention),
            "response_mask": torch.from_numpy(trained),
            "advantages": noise[0],
            "ref_log_prob": -4.0 + 0.3 * noise[1],
            "old_log_probs": -4.0 + 0.3 * noise[2],
            "values": noise[3],
            "returns": noise[0] + 1.0,
        },
        non_tensors={"uid": np.array([f"g{row // samples}" for row in range(len(prompts))], dtype=object)},
        meta_info={"temperature": temperature},
    )


def make_batch(num_groups: int = 3, samples: int = 4, *, temperature: float = 1.0, seed: int = 0) -> DataProto:
    """Ragged groups with everything that is awkward: an empty response, one of one token, masked tokens inside."""
    rng = np.random.default_rng(seed)
    count, width = num_groups * samples, PROMPT_WIDTH + RESPONSE_WIDTH
    prompts = np.zeros((count, PROMPT_WIDTH), np.int64)
    responses = np.zeros((count, RESPONSE_WIDTH), np.int64)
    attention, trained = np.zeros((count, width), np.int64), np.zeros((count, RESPONSE_WIDTH), np.int64)
    for group in range(num_groups):
        length = int(rng.integers(2, PROMPT_WIDTH + 1))
        prompt = rng.integers(0, VOCAB, length)
        for row in range(group * samples, (group + 1) * samples):
            size = {0: 0, 1: 1}.get(row, int(rng.integers(2, RESPONSE_WIDTH + 1)))
            prompts[row, PROMPT_WIDTH - length :] = prompt
            responses[row, :size] = rng.integers(0, VOCAB, size)
            attention[row, PROMPT_WIDTH - length : PROMPT_WIDTH + size] = 1
            trained[row, :size] = 1
            if row % 3 == 2:  # a tool's token: read by the model, not trained on
                trained[row, size // 2] = 0
    return as_batch(rng, prompts, responses, attention, trained, samples, temperature)


def plan_rows(batch: DataProto, world_size: int, micro_batches: int, *, empty: bool = False) -> BatchPlan:
    """Rows dealt out round-robin, each rank's cut into equal runs; `empty` appends a micro-batch of no rows."""
    trained = batch.batch["response_mask"]
    sequences = trained.any(1)
    groups = {uid for uid, real in zip(batch.non_tensor_batch["uid"], sequences.tolist(), strict=True) if real}
    counts = (int(trained.sum()), int(sequences.sum()), len(groups))
    rows = tuple(tuple(range(rank, len(batch), world_size)) for rank in range(world_size))
    ranks = []
    for mine in rows:
        cuts = [tuple(map(int, part)) for part in np.array_split(np.arange(len(mine)), micro_batches)]
        ranks.append(RankPlan((MiniBatchPlan((*cuts, *([()] if empty else [])), *counts),)))
    return BatchPlan(rows, tuple(ranks))


def trim(batch: DataProto, row: int) -> tuple[torch.Tensor, int, np.ndarray]:
    """`(1, L)` tokens of one row without padding, its prompt's length, and its trained response columns."""
    mask = batch.batch["attention_mask"][row].bool()
    tokens = torch.cat([batch.batch["prompts"][row], batch.batch["responses"][row]])[mask]
    prompt_length = int(mask[:PROMPT_WIDTH].sum())
    return tokens[None], prompt_length, np.flatnonzero(batch.batch["response_mask"][row].numpy())


def plain_log_probs(model: PreTrainedModel, batch: DataProto, temperature: float) -> torch.Tensor:
    """`(B, R)` by the definition: one unpadded forward per row, log-softmax of all logits. Carries gradients."""
    out = torch.zeros(len(batch), RESPONSE_WIDTH, dtype=model.dtype)
    for row in range(len(batch)):
        tokens, prompt_length, columns = trim(batch, row)
        log_probs = (model(tokens).logits[0] / temperature).log_softmax(-1)
        for column in columns.tolist():
            position = prompt_length + column
            out[row, column] = log_probs[position - 1, tokens[0, position]]
    return out


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    """A gloo world of this process alone, without a port."""
    disable_progress_bar()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank_main(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *args), os.path.join(folder, f"result-{rank}.pt"))
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs `function(rank, *args)` in `world_size` new processes; what each returned (tensors, numbers)."""
    folder.mkdir(parents=True)
    main = functools.partial(_rank_main, folder=str(folder), function=function, args=args)
    warm_context()
    mp.start_processes(_call, args=(world_size, main), nprocs=world_size, start_method=METHOD)
    return [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in range(world_size)]


def _call(rank: int, world_size: int, main: Callable[..., None]) -> None:
    main(rank, world_size)
