"""RMSNorm in one differentiable operator.

transformers' forward is six tensor operations, which keep float32 copies of their input for the backward; on a CPU the
norms of a small model then cost as much as its attention. Here the input and one number per token are kept. On a GPU
torch has one kernel for the forward and one for the backward of the part before the weight.

The order of roundings is that of transformers and vLLM: normalise in float32, round to the weight's dtype, then scale.
So the result has the weight's dtype, even if the residual stream that comes in is wider.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hrl.models.ops.layout import accumulation_dtype

#: Rows handled at once on a CPU.
CPU_ROWS = 512


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `weight * hidden / sqrt(mean(hidden^2) + eps)` over the last dimension.

    Args:
        hidden: `(..., H)`.
        weight: `(H,)`.
        eps: Added to the mean square.

    Returns:
        `(..., H)` in the dtype of `weight`.
    """
    return by_torch(hidden, weight, eps) if hidden.is_cuda else _RmsNorm.apply(hidden, weight, eps)


def by_torch(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do as `rms_norm`, by the operator that is one kernel on a GPU.

    It is given no weight: it would round once, after the weight, and not before as well.
    """
    return functional.rms_norm(hidden, hidden.shape[-1:], None, eps).to(weight.dtype) * weight


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        scale = torch.empty(len(rows), 1, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
        out = torch.empty_like(rows, dtype=weight.dtype)
        for part in _parts(rows):
            wide = rows[part].to(scale.dtype, copy=True)
            mean_square = torch.linalg.vecdot(wide, wide).div_(wide.shape[1])
            scale[part, 0] = torch.rsqrt(mean_square.add_(eps))
            torch.mul(wide.mul_(scale[part]).to(weight.dtype), weight, out=out[part])
        ctx.save_for_backward(hidden, weight, scale)
        return out.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight, scale = ctx.saved_tensors
        rows, grad_rows = hidden.reshape(-1, hidden.shape[-1]), grads[0].reshape(-1, hidden.shape[-1])
        wide_weight = weight.to(scale.dtype)
        grad_weight = torch.zeros_like(wide_weight) if ctx.needs_input_grad[1] else None
        grad_hidden = torch.empty_like(rows)
        for part in _parts(rows):
            normal = rows[part].to(scale.dtype, copy=True).mul_(scale[part])
            grad = grad_rows[part].to(scale.dtype, copy=True)
            if grad_weight is not None:
                grad_weight += torch.linalg.vecdot(grad, normal, dim=0)
            grad.mul_(wide_weight)
            along = torch.linalg.vecdot(grad, normal).div_(-rows.shape[1]).unsqueeze(-1)
            grad_hidden[part] = torch.addcmul(grad, normal, along).mul_(scale[part])
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden.view(hidden.shape), of_weight, None


def _parts(rows: Tensor) -> list[slice]:
    """Return runs of rows: on a CPU so short that their float32 copies stay in a core's cache, else all rows."""
    size = CPU_ROWS if rows.device.type == "cpu" else len(rows)
    return [slice(start, start + size) for start in range(0, len(rows), size)]


def use_fused_rms_norms(model: nn.Module) -> int:
    """Let every RMSNorm of a transformers model run this operator, if its class gives the same numbers.

    Returns:
        The number of modules that were replaced.
    """
    # Families differ: some scale by `1 + weight`.
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    plain = {kind for kind in {type(norm) for norm in norms} if _is_plain_rms_norm(kind)}
    replaced = [norm for norm in norms if type(norm) in plain]
    for norm in replaced:
        norm.forward = _forward_of(norm)
    return len(replaced)


def _forward_of(module: nn.Module) -> Any:
    def forward(hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, module.weight, module.variance_epsilon)

    return forward


def _is_plain_rms_norm(kind: type[nn.Module]) -> bool:
    try:
        probe = kind(16, eps=1e-3)
    except TypeError:
        return False
    if not hasattr(probe, "variance_epsilon") or set(dict(probe.named_parameters())) != {"weight"}:
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        probe.weight.copy_(torch.randn(16, generator=generator))
        hidden = torch.randn(5, 16, generator=generator)
        return torch.allclose(
            probe(hidden), rms_norm(hidden, probe.weight, probe.variance_epsilon), rtol=1e-5, atol=1e-6
        )
