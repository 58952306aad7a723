"""Parameters that training on text cannot move: the towers of multimodal models, for pictures and sound.

No gradient from text reaches them. They are frozen at load: they have no moments, and no sync sends them, because the
engine has them from the model's folder. The export includes them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from hrl.models.head import forward_replaced, last_hidden_states
from hrl.models.ops.layout import AttentionLayout

logger = logging.getLogger(__name__)

#: Number of tokens, enough to see what text passes through.
_TOKENS = 2


def unreachable_parameters(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the parameters, outside the text decoder and the heads, that text does not reach.

    Two tokens run through everything but the decoder, whose forward is replaced meanwhile. Then autograd knows the
    parameters on which the decoder's input depends, and those that are applied to its output. This takes next to no
    time, whatever the model's size, and no list of names. Parameters inside the decoder count as reached: an expert
    that these tokens do not visit may be visited by others.

    Args:
        model: From `load_causal_lm` or `load_scalar_model`, with storage, without which some models do not run.
    """
    named = dict(model.named_parameters())
    decoder = model.get_decoder()
    inside = {id(p) for module in (decoder, *_heads(model)) for p in module.parameters()}
    outside = [name for name, parameter in named.items() if id(parameter) not in inside]
    if not outside:
        return ()
    try:
        hidden = _run_around(model, decoder)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        # This costs only memory: what gets no gradient is not moved.
        logger.warning(
            "%s does not run without its decoder (%s: %s), so the parameters that text cannot move are not known: they "
            "have optimizer state and are synced",
            type(model).__name__,
            type(error).__name__,
            error,
        )
        return ()
    if not hidden.requires_grad:
        return tuple(outside)
    gradients = torch.autograd.grad(hidden.sum(), [named[name] for name in outside], allow_unused=True)
    return tuple(name for name, gradient in zip(outside, gradients, strict=True) if gradient is None)


def freeze(model: PreTrainedModel, names: Collection[str]) -> None:
    """Freeze these parameters and log it."""
    if not names:
        return
    frozen = [model.get_parameter(name).requires_grad_(False) for name in names]
    modules = set(frozen_modules(model))
    logger.info(
        "%s: text gives no gradient to %s (%.1f million weights): frozen, without optimizer state, not synced",
        type(model).__name__,
        ", ".join(name for name, module in model.named_modules() if module in modules),
        sum(parameter.numel() for parameter in frozen) / 1e6,
    )


def frozen_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules that have parameters and train none of them."""
    for child in module.children():
        flags = {parameter.requires_grad for parameter in child.parameters()}
        if flags == {False}:
            yield child
        elif flags:
            yield from frozen_modules(child)


def _heads(model: PreTrainedModel) -> list[nn.Module]:
    """Return the embedding and the heads, whose weights `hrl.models.packed_model` uses."""
    heads = (model.get_input_embeddings(), model.get_output_embeddings(), getattr(model, "score", None))
    return [head for head in heads if head is not None]


def _run_around(model: PreTrainedModel, decoder: nn.Module) -> Tensor:
    """Return the last hidden states `(1, 2, H)` of two tokens, with a stand-in for the decoder."""
    width, device = model.config.get_text_config().hidden_size, model.device

    def stand_in(*args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        """Return zeros that depend on every input."""
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        hidden = torch.zeros(1, _TOKENS, width, dtype=model.dtype, device=device)
        for tensor in inputs:
            hidden = hidden + 0.0 * tensor.sum()
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    layout = AttentionLayout(np.array([_TOKENS]), np.array([0]), np.array([0]))
    positions = torch.arange(_TOKENS, device=device)[None]
    with forward_replaced(decoder, stand_in), torch.enable_grad():
        return last_hidden_states(model, torch.zeros_like(positions), positions, layout)
