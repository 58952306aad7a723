"""Tiny random models whose layers carry a state along the row, one for each kind of state that transformers has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tests.models.tiny import SHAPE

_NUMBERS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BASE = SHAPE | _NUMBERS
_WITHOUT_ATTENTION = {name: SHAPE[name] for name in ("vocab_size", "hidden_size", "initializer_range")}
_LINEAR_FIRST = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}

#: Family → what differs from a Llama of these sizes.
HYBRIDS: dict[str, dict[str, Any]] = {
    # Gated delta net beside a mixture of experts; its dense sister; another form of both.
    "qwen3_next": _BASE | _LINEAR_FIRST | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16, "head_dim": 8},
    "qwen3_5_text": _BASE | _LINEAR_FIRST | _DELTA | {"head_dim": 8},
    "kimi_linear": _BASE | _LINEAR_FIRST | _EXPERTS | {
        "num_key_value_heads": 4, "linear_num_heads": 2, "linear_head_dim": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "mlp_layer_types": ["dense", "sparse"],
    },
    "minimax": _BASE | _LINEAR_FIRST | {"block_size": 8, "head_dim": 8, "num_local_experts": 4},
    # Mamba-2, beside attention in one layer, and alone; Mamba; gated linear recurrence; short convolutions.
    "falcon_h1": _BASE | _SSM | {"mamba_n_heads": 4, "mamba_d_ssm": 32},
    "granitemoehybrid": _BASE | _LINEAR_FIRST | _SSM | {"num_local_experts": 4},
    "mamba2": _WITHOUT_ATTENTION | _NUMBERS | {
        "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8,
    },
    "mamba": _WITHOUT_ATTENTION | _NUMBERS | {"num_hidden_layers": 2, "state_size": 8},
    "recurrent_gemma": {key: value for key, value in _BASE.items() if key != "max_position_embeddings"} | {
        "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64,
    },
    "lfm2": _BASE | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}  # fmt: skip


def save_hybrid(folder: Path, family: str, *, tokenizer: PreTrainedTokenizerBase | None = None, **changes: Any) -> Path:
    """A random model in a folder, with a tokenizer whose vocabulary it has, or without any."""
    torch.manual_seed(0)
    fields = HYBRIDS[family] | changes
    if tokenizer is not None:
        ends = {
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id or 0,
            "bos_token_id": None,
        }
        fields |= ends | {"vocab_size": len(tokenizer)}
        if "max_position_embeddings" in fields:
            fields["max_position_embeddings"] = 256
        tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).save_pretrained(folder)
    return folder


def log_probs_alone(model: PreTrainedModel, out: TensorDict, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each sampled row, the sampler's log-probs and those of transformers, which reads the row by itself."""
    width = out["prompts"].shape[1]
    for row in range(len(out["prompts"])):
        prompt = out["prompts"][row][out["attention_mask"][row, :width].bool()]
        answer = out["responses"][row][out["response_mask"][row].bool()]
        with torch.no_grad():
            logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        own = (logits.float() / temperature).log_softmax(-1).gather(1, answer[:, None])[:, 0]
        yield out["rollout_log_probs"][row, : len(answer)], own
