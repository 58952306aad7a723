"""Rotary frequencies that do not depend on what else is in the batch.

Two kinds of RoPE choose their frequencies in the forward pass, by the longest position in it: LongRoPE (Phi-3-128k,
Phi-4-mini) has one set below and one above the length of its pre-training, dynamic NTK scaling has one for each length.
In a packed row the longest position may belong to another sequence, so a sequence's log-probs would depend on its
neighbours.

vLLM decides once, when it starts: LongRoPE's long set where `max_model_len` is above the pre-training length, and for
dynamic scaling the frequencies at `max_position_embeddings`. A run knows its longest sequence, for which its engine is
opened. So every forward here is told that this longest position is present.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def fix_rope_frequencies(model: nn.Module, max_length: int) -> None:
    """Let the model's rotary embeddings choose their frequencies as for a sequence of `max_length` tokens.

    Args:
        model: A transformers model.
        max_length: The longest sequence of the run in tokens, for which the engine is opened.
    """
    for module in model.modules():
        kinds = [kind for kind in _rope_types(module) if kind == "longrope" or "dynamic" in kind]
        if kinds:
            module.forward = _at_length(module.forward, max_length)
            logger.info("%s: %s RoPE as for %d tokens", type(model).__name__, " and ".join(kinds), max_length)


def require_long_factors(model: nn.Module) -> None:
    """Refuse a LongRoPE whose forward ignores the factors that were chosen for the length, as PhiMoE's does.

    transformers' decorator puts the chosen frequencies into `inv_freq`. A forward that takes others trains with short
    factors beyond the pre-training length, where vLLM samples with long ones.

    Args:
        model: On the CPU, after `fix_rope_frequencies`.

    Raises:
        ValueError: Names the class and the way out.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        cos, sin = module(torch.zeros(1), torch.tensor([[0, 1]]))
        chosen = module.inv_freq.float()
        used = torch.atan2(sin, cos)[0, 1, : len(chosen)].float()  # the angle at position 1, at most 1 radian
        if not torch.allclose(used, chosen, rtol=1e-3, atol=1e-6):
            raise ValueError(
                f"{type(module).__name__} keeps LongRoPE's short factors in sequences longer than "
                "original_max_position_embeddings, where vLLM takes the long ones: keep the run's longest sequence "
                "(prompt and response) within that length"
            )


def _rope_types(module: nn.Module) -> list[str]:
    """Return the RoPE types that transformers' decorator of rotary embeddings reads, one for each kind of layer."""
    own = getattr(module, "rope_type", None)
    return list(own.values()) if isinstance(own, dict) else [own] if isinstance(own, str) else []


def _at_length(forward: Callable[..., Any], max_length: int) -> Callable[..., Any]:
    @functools.wraps(forward)
    def with_last_position(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), max_length - 1)
        cos, sin = forward(x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
        return cos[..., :-1, :], sin[..., :-1, :]

    return with_last_position
