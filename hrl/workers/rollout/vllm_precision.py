"""The arithmetic of vLLM's CPU engine in bfloat16, brought to the trainer's: residual stream and logits in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hrl.workers.ops.log_prob import allow_bf16_matmul
from hrl.workers.ops.residual import PLAIN_RESIDUAL_FAMILIES, add_and_norm

#: Rows of logits computed at once, one number for all batches: for other shapes kernels sum in another order, and a
#: token's logits must not depend on how many other requests run, or a seed would not give the same tokens again.
HEAD_ROWS = 32


def match_trainer(model: nn.Module, model_type: str) -> None:
    """Changes a loaded model in place; nothing to do for one that computes in float32."""
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


def _forward(norm: Any, original: Any, hidden: Tensor, residual: Tensor | None = None) -> Any:
    if residual is None:
        return original(hidden)
    return add_and_norm(hidden, residual, norm.weight, norm.variance_epsilon)


def _apply_head(head: nn.Module, hidden: Tensor, bias: Tensor | None) -> Tensor:
    """Float32 logits ``(t, V)`` of ``hidden (t, H)``, in place of vLLM's projection."""
    weight = head.weight.float()
    wide_bias = None if bias is None else bias.float()
    blocks = functional.pad(hidden.float(), (0, 0, 0, -len(hidden) % HEAD_ROWS)).split(HEAD_ROWS)
    return torch.cat([functional.linear(block, weight, wide_bias) for block in blocks])[: len(hidden)]
