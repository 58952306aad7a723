"""Stochastic rounding on a GPU in one Triton kernel; `optim` says what it computes, and does so by operators elsewhere.

The hash of an element takes some twenty operators, which move 200 bytes an element. The kernel moves 6.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

# Triton reads the annotations of its functions, so the one below has them for constants alone.
# mypy: disable-error-code="no-untyped-def"

_BLOCK = 1024


def round_run(wide: Tensor, out: Tensor, key: int, low: int) -> None:
    """Round float32 numbers `(n,)` to bfloat16 in `out (n,)`, both contiguous, by the hash of their places.

    Args:
        wide: The numbers.
        out: Is written.
        key: Of the hash, a signed word.
        low: Place of `wide[0]`, a signed word; the places of all n are words.
    """
    with torch.accelerator.device_index(wide.device.index):
        _round[(triton.cdiv(wide.numel(), _BLOCK),)](wide, out, wide.numel(), key, low, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["key", "low"])
def _round(wide, out, count, key, low, BLOCK: tl.constexpr):
    """Run for `BLOCK` numbers."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    bits = tl.load(wide + places, mask=inside, other=0.0).to(tl.uint32, bitcast=True)
    word = low.to(tl.uint32) + places.to(tl.uint32)
    word ^= key.to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    chance = (word ^ (word >> 16)) & 0xFFFF
    # A bfloat16 is the upper half of a float32. What is not finite is cut, and a NaN, whose upper half may be that of
    # infinity, keeps one bit of its fraction.
    is_finite = (bits & 0x7F800000) != 0x7F800000
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    half = (bits + tl.where(is_finite, chance, 0)) >> 16
    half = tl.where(is_nan, half | 0x40, half)
    tl.store(out + places, half.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
