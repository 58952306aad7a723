"""The arithmetic of a bfloat16 engine, made the trainer's: logits in float32, on a CPU the residual stream too."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hrl.models.ops.log_prob import allow_bf16_matmul
from hrl.models.ops.residual import PLAIN_RESIDUAL_FAMILIES, add_and_norm
from hrl.workers.rollout.vllm_versions import has_head_dtype

#: Rows of logits computed at once, one number for all batches: for other shapes kernels sum in another order, and a
#: token's logits must not depend on how many other requests run, or a seed would not give the same tokens again.
HEAD_ROWS = 32


def match_trainer(model: nn.Module, model_type: str) -> None:
    """Change a loaded model in place; nothing to do for one that computes in float32."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    if next(model.parameters()).dtype != torch.bfloat16:
        return
    # What multiplies in float32 here is the head (`head_dtype`), on numbers that are bfloat16 anyway.
    allow_bf16_matmul()
    head: Any = getattr(model, "logits_processor", None)
    if head is not None:
        head._apply_head = _apply_head
    if model_type in PLAIN_RESIDUAL_FAMILIES:
        for module in model.modules():
            if type(module) is RMSNorm:
                module._forward_method = partial(_forward, module, module._forward_method)


def use_float32_head(model: nn.Module) -> None:
    """Has a vLLM whose generating models know no `head_dtype` compute logits in float32 too; changes nothing in others.

    Args:
        model: A loaded model. Models that compute in float32 and heads in another dtype than the model's stay as
            they are.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    for module in model.modules():
        if isinstance(module, LogitsProcessor) and not has_head_dtype(module):
            module._get_logits = partial(_get_logits, module, module._get_logits)


def _get_logits(head: Any, original: Any, hidden: Tensor, lm_head: nn.Module, bias: Tensor | None) -> Tensor | None:
    if hidden.dtype == torch.float32 or lm_head.weight.dtype != hidden.dtype:
        logits: Tensor | None = original(hidden, lm_head, bias)
        return logits
    # What vLLM does after its projection: gather the vocabulary's shards, cut off its padding.
    gathered = head._gather_logits(_apply_head(lm_head, hidden, bias))
    return None if gathered is None else gathered[..., : head.org_vocab_size]


def _forward(norm: Any, original: Any, hidden: Tensor, residual: Tensor | None = None) -> Any:
    if residual is None:
        return original(hidden)
    return add_and_norm(hidden, residual, norm.weight, norm.variance_epsilon)


def _apply_head(head: nn.Module, hidden: Tensor, bias: Tensor | None) -> Tensor:
    """Float32 logits `(t, V)` of `hidden (t, H)`, in place of vLLM's projection."""
    wide_bias = None if bias is None else bias.float()
    if hidden.is_cuda:  # summed up in float32 without a float32 copy of the weight
        logits = torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
        return logits if wide_bias is None else logits.add_(wide_bias)
    weight = head.weight.float()
    blocks = functional.pad(hidden.float(), (0, 0, 0, -len(hidden) % HEAD_ROWS)).split(HEAD_ROWS)
    return torch.cat([functional.linear(block, weight, wide_bias) for block in blocks])[: len(hidden)]
