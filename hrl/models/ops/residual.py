"""A residual stream in float32 beside products in bfloat16, on a CPU, where both trainer and sampler can have it.

Every layer adds to the residual stream. In bfloat16 each of these sums is rounded to 8 bits, and the errors of all
layers reach the head: they are most of the difference between a trainer's and a sampler's log-probs. In float32 the
stream costs a few bytes per token, and the matrix products stay in bfloat16, because each norm rounds its result.

On a GPU vLLM adds and normalises in one fused kernel with a bfloat16 stream. A float32 stream in the trainer alone
would be more exact but further from the sampler, whose distribution the trainer has to know. So on a GPU the trainer
rounds where vLLM does: after each sum, to bfloat16, as transformers does anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: `model_type` of families in which only additions and RMSNorms touch the stream, in transformers and in vLLM.
PLAIN_RESIDUAL_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

_NARROW = (torch.bfloat16, torch.float16)


def widen_residual(model: Any, device: str = "cpu") -> bool:
    """Let the residual stream of a transformers model on a CPU begin in float32; sums then stay in float32.

    Its norms must return their weight's dtype, see `hrl.models.ops.rms_norm`.

    Args:
        model: In bfloat16 or another dtype; a stream in float32 stays as it is.
        device: Type of the device where that is done; `meta` shows what a CPU would hold.

    Returns:
        Whether that was done. It is enough in `PLAIN_RESIDUAL_FAMILIES`; other models keep their stream.
    """
    if model.config.model_type not in PLAIN_RESIDUAL_FAMILIES:
        return False
    stream = _WideStream(device)
    model.get_input_embeddings().register_forward_hook(stream.widen)
    model.base_model.rotary_emb.register_forward_hook(stream.keep_narrow)
    return True


class _WideStream:
    """Hooks at the two places of a forward pass where the width of the stream matters."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._dtype = torch.float32

    def widen(self, module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        """Return the embeddings, with which the stream begins, in float32."""
        self._dtype = embedded.dtype
        return embedded.float() if embedded.device.type == self._device and embedded.dtype in _NARROW else embedded

    def keep_narrow(self, module: nn.Module, args: Any, rotary: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return sines and cosines in the dtype of queries and keys, not in that of the stream."""
        return tuple(part.to(self._dtype) for part in rotary)


def add_and_norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream in float32 and normalise the sum, for samplers that fuse the two (no gradients).

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
