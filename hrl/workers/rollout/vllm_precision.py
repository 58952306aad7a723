"""The arithmetic of vLLM's CPU engine in bfloat16, brought to the trainer's: residual stream and logits in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hrl.workers.ops.log_prob import allow_bf16_matmul
from hrl.workers.ops.residual import PLAIN_RESIDUAL_FAMILIES, add_and_norm


def match_trainer(model: nn.Module, model_type: str) -> None:
    """Changes a loaded model in place; nothing to do for one that computes in float32."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    if next(model.parameters()).dtype != torch.bfloat16:
        return
    # What multiplies in float32 here is the head (`head_dtype`), on numbers that are bfloat16 anyway.
    allow_bf16_matmul()
    if model_type in PLAIN_RESIDUAL_FAMILIES:
        for module in model.modules():
            if type(module) is RMSNorm:
                module._forward_method = partial(_forward, module, module._forward_method)


def _forward(norm: Any, original: Any, hidden: Tensor, residual: Tensor | None = None) -> Any:
    if residual is None:
        return original(hidden)
    return add_and_norm(hidden, residual, norm.weight, norm.variance_epsilon)
