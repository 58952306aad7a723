"""A residual stream in float32 beside products in bfloat16, where trainer and sampler can both have it: on a CPU.

Every layer adds to the residual stream; in bfloat16 each of these sums is rounded to 8 bits, and the rounding errors of
all layers arrive at the head. They are the largest part of what a trainer and a sampler disagree on. In float32 the
stream costs a few bytes per token, and the matrix products stay in bfloat16: each norm rounds what it hands on.

On a GPU vLLM adds and normalises in one fused kernel whose stream is bfloat16. A wide stream in the trainer alone would
be nearer to the truth and further from the sampler, and it is the sampler's distribution that the trainer has to know.
So there the trainer rounds where vLLM rounds: after each sum, to bfloat16, which is what transformers does by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: `model_type` of families in which nothing but additions and RMSNorms touches the stream, in transformers and vLLM.
PLAIN_RESIDUAL_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

_NARROW = (torch.bfloat16, torch.float16)


def widen_residual(model: Any) -> bool:
    """Let the residual stream of a transformers model on a CPU begin in float32; sums then stay there.

    Its norms must return their weight's dtype, see `hrl.models.ops.rms_norm`.

    Returns:
        Whether the model is of a family in which that is all there is to do. Others keep the stream that they have.
    """
    if model.config.model_type not in PLAIN_RESIDUAL_FAMILIES:
        return False
    stream = _WideStream()
    model.get_input_embeddings().register_forward_hook(stream.widen)
    model.base_model.rotary_emb.register_forward_hook(stream.keep_narrow)
    return True


class _WideStream:
    """The two places of a forward pass that the width of the stream would change."""

    def __init__(self) -> None:
        self._dtype = torch.float32

    def widen(self, module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        """Return where the stream begins."""
        self._dtype = embedded.dtype
        return embedded.float() if embedded.device.type == "cpu" and embedded.dtype in _NARROW else embedded

    def keep_narrow(self, module: nn.Module, args: Any, rotary: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Sines and cosines follow the stream's dtype; queries and keys, which they multiply, don't."""
        return tuple(part.to(self._dtype) for part in rotary)


def add_and_norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream in float32 and normalises the sum, for samplers that fuse the two (no gradients).

    Args:
        hidden: `(..., H)`, what a layer adds.
        residual: `(..., H)`, the stream so far.
        weight: `(H,)` of the norm.
        eps: Added to the mean square.

    Returns:
        The normalised sum in `hidden`'s dtype and the new stream in float32, both `(..., H)`.
    """
    stream = residual.float() + hidden
    scale = torch.rsqrt(torch.linalg.vecdot(stream, stream).div_(stream.shape[-1]).add_(eps)).unsqueeze(-1)
    return (stream * scale).to(hidden.dtype) * weight, stream
