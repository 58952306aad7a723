"""Gradient checkpointing for models in evaluation mode.

transformers' own switch is tied to `module.training`, and so are dropout, layer drop and router noise, of which the
sampler has none. A policy here stays in evaluation mode, whatever it does, and its layers are recomputed all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute_layers(model: nn.Module) -> int:
    """Let every decoder layer keep its inputs only, and compute its activations again in the backward pass.

    The wrapped function is `forward`, inside the hooks of FSDP: a layer's parameters are gathered once for its
    recomputation and its gradient.

    Returns:
        How many layers are recomputed.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = _recomputed(layer.forward)
    return len(layers)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing in evaluation mode draws random numbers, so there is no generator to rewind.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
