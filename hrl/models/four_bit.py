"""Frozen linear layers whose weights are held in 4 bits: the base of a QLoRA run.

A weight is NF4, NormalFloat of 4 bits (Dettmers et al. 2023, "QLoRA", arXiv:2305.14314, section 3): of each block of 64
weights of a row the largest magnitude is kept, and of each weight which of 16 values, the quantiles of a normal
distribution, is nearest to its share of that. bitsandbytes has the arithmetic, on CPUs and GPUs.

Its layer (`Linear4bit`) is not used, because its blocks run on from row to row, and what belongs to them lies beside
the parameter, where FSDP2 does not see it. Here codes and magnitudes of a row are the bytes of one row of one
parameter, which is sharded, gathered and checked like any other. Where a layer's inputs are a multiple of 64, as they
are in published models, the numbers are those of bitsandbytes' layer.

Weights are bfloat16 before they become NF4, whatever the dtype of products. So a block's magnitude is one of bfloat16,
which makes 4.25 bits a weight, and what was rounded once stays what it is when it is rounded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hrl.errors import HrlError
from hrl.models.adapter import decoder_linears, name_without

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Weights of a row that share a magnitude.
BLOCK = 64
#: Bytes of a block: two codes each, and the magnitude.
BLOCK_BYTES = BLOCK // 2 + 2
#: What a weight takes.
BYTES_PER_WEIGHT = BLOCK_BYTES / BLOCK
_KIND = "nf4"
#: Dtypes that bitsandbytes computes.
_KERNELS = (torch.float32, torch.bfloat16, torch.float16)


class FourBitError(HrlError, RuntimeError):
    """Weights can't be held in 4 bits here; says why, and the way out."""


@contextmanager
def _tables_in_float32() -> Iterator[None]:
    """Let bitsandbytes make its tables in float32, inside the block, whatever the default dtype is.

    It makes the bounds between the 16 values with the default dtype and keeps them. vLLM loads a model with that set to
    the model's: with bounds in bfloat16 one weight in 250 became its neighbour, and log-probs moved by 0.1.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def quantised(weight: Tensor) -> Tensor:
    """Return a weight `(out, in)` as NF4: a row of codes and magnitudes each, `(out, bytes)` uint8.

    Raises:
        FourBitError: bitsandbytes is not installed, or does not run on the weight's device.
    """
    rows, width = weight.shape
    padded = functional.pad(weight.to(torch.bfloat16), (0, -width % BLOCK)).contiguous()
    try:
        with _tables_in_float32():
            from bitsandbytes.functional import quantize_4bit

            codes, state = quantize_4bit(padded, blocksize=BLOCK, quant_type=_KIND)
    except (ImportError, NotImplementedError, RuntimeError, OSError) as error:
        raise FourBitError(
            f"load_in_4bit=true needs bitsandbytes, which can't round weights on {weight.device} ({error}): install "
            "hrl[bitsandbytes] in a version for this device, or set load_in_4bit=false"
        ) from error
    magnitudes = state.absmax.view(rows, -1).to(torch.bfloat16)
    return torch.cat([codes.view(rows, -1), magnitudes.view(torch.uint8)], 1)


def dequantised(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the weight `(out, in)` that `quantised` gave these bytes for, its products rounded once.

    Args:
        packed: `(out, bytes)`.
        width: in.
        dtype: Of the result.
    """
    rows, blocks = len(packed), packed.shape[1] // BLOCK_BYTES
    if packed.is_meta:
        return torch.empty(rows, width, dtype=dtype, device=packed.device)
    with _tables_in_float32():
        from bitsandbytes.functional import QuantState, dequantize_4bit

    end = blocks * (BLOCK // 2)
    magnitudes = packed[:, end:].contiguous().view(torch.bfloat16).float().flatten()
    state = QuantState(
        magnitudes,
        shape=torch.Size((rows, blocks * BLOCK)),
        dtype=dtype if dtype in _KERNELS else torch.float32,
        blocksize=BLOCK,
        quant_type=_KIND,
    )
    with _tables_in_float32():
        weight: Tensor = dequantize_4bit(packed[:, :end].contiguous().view(-1, 1), state)
    return weight[:, :width].to(dtype)


def rounded(weight: Tensor) -> Tensor:
    """Return the numbers that a weight `(out, in)` is in 4 bits, in float32."""
    return dequantised(quantised(weight), weight.shape[1], torch.float32)


class _Product(torch.autograd.Function):
    """`x Wᵀ + b` with a frozen W in 4 bits, which is there in full only while it multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.width = x.shape[-1]
        return functional.linear(x, dequantised(packed, x.shape[-1], x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (packed,) = ctx.saved_tensors
        return grad @ dequantised(packed, ctx.width, grad.dtype), None, None


class Linear4bit(nn.Module):
    """A frozen linear layer in 4 bits.

    Args:
        linear: What it takes the place of; without storage, this one has none either.
        device: Where its weight is rounded; the result is where the weight was.

    Attributes:
        weight: `(out, bytes)` uint8, see `quantised`.
        bias: As it was, frozen.
    """

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        if weight.is_meta:
            size = -(-self.in_features // BLOCK) * BLOCK_BYTES
            packed = torch.empty(self.out_features, size, dtype=torch.uint8, device=weight.device)
        else:
            packed = quantised(weight.to(device)).to(weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `(..., out)` for `(..., in)`."""
        found: Tensor = _Product.apply(x, self.weight, self.bias)
        return found

    def extra_repr(self) -> str:
        """Return its sizes, for `print`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {_KIND}"


def hold_in_4bit(model: PreTrainedModel, device: torch.device) -> None:
    """Hold the linear layers of a model's text decoder in 4 bits: those that could have an adapter.

    Embedding, heads, norms, the experts of a mixture, which are one tensor per layer, and towers stay as they are.

    Args:
        model: With or without storage, and with its adapter, if it gets one.
        device: Where weights are rounded. It has to be of the same kind in all processes of a run.

    Raises:
        FourBitError: See `quantised`.
    """
    for name, linear in decoder_linears(model).items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Linear4bit(linear, device))


def layers_in_4bit(module: nn.Module) -> Iterator[tuple[str, Linear4bit]]:
    """Yield the name of each weight that is held in 4 bits, and its layer."""
    yield from ((f"{n}.weight", each) for n, each in module.named_modules() if isinstance(each, Linear4bit))


def names_to_hold(model: PreTrainedModel) -> list[str]:
    """Return the names in memory, without an adapter, of the weights that `hold_in_4bit` would round."""
    return [name_without(f"{name}.weight") for name in decoder_linears(model)]
