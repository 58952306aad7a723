"""Passes over a tile of float32 logits on a GPU, each in one Triton kernel; `log_prob` says what they compute.

torch's operators read and write the whole tile for every step (maximum, difference, exponential, sums): in the forward
with entropies 40 bytes a logit, 4 here. The backward moves 30 bytes by operators, and 6 here, because the gradient is
written in the dtype of the products that follow. A temperature costs operators 8 and 16 bytes more.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

# Triton reads the annotations of its functions, so those below have them for constants alone.
# mypy: disable-error-code="no-untyped-def"

#: Logits that a program holds at once.
_BLOCK = 4096
_WARPS = 8


def fold_tile(
    logits: Tensor,
    labels: Tensor,
    first: int,
    temperature: float,
    top: Tensor,
    mass: Tensor,
    first_moment: Tensor | None,
    squared_mass: Tensor | None,
    label_logit: Tensor,
) -> None:
    """Add a tile to the running sums of its rows, in place.

    Args:
        logits: `(t, v)` float32 before the temperature, rows contiguous.
        labels: `(t,)` int64, places in the vocabulary.
        first: Place in the vocabulary of the tile's first column.
        temperature: Of the sampler.
        top: `(t,)` float32, the largest logit so far.
        mass: `(t,)` float32, sum of `exp(z - top)`.
        first_moment: `(t,)` float32, sum of `exp(z - top) * z`; `None` where it is not wanted.
        squared_mass: `(t,)` float32, sum of `exp(z - top)^2`; `None` where it is not wanted.
        label_logit: `(t,)` float32, written where the label is in this tile.
    """
    rows, columns = logits.shape
    with torch.accelerator.device_index(logits.device.index):
        _fold[(rows,)](
            logits,
            logits.stride(0),
            columns,
            labels,
            first,
            float(temperature),
            top,
            mass,
            first_moment if first_moment is not None else mass,
            squared_mass if squared_mass is not None else mass,
            label_logit,
            WITH_MOMENT=first_moment is not None,
            WITH_SQUARES=squared_mass is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


def grad_of_tile(
    logits: Tensor,
    labels: Tensor,
    first: int,
    temperature: float,
    factor: float,
    softcap: float | None,
    normaliser: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the products from which a tile's logits were made, `(t, v)` in `dtype`.

    Args:
        logits: `(t, v)` float32 before the temperature, after a cap, rows contiguous.
        labels: `(t,)` int64, places in the vocabulary.
        first: Place in the vocabulary of the tile's first column.
        temperature: Of the sampler.
        factor: Slope of the tempered logits against the products, but for the cap's.
        softcap: Of the logits; `None` is no cap.
        normaliser: `(t,)` float32, log-sum-exp of the tempered logits.
        entropy: `(t,)` float32.
        grad_log_prob: `(t,)` float32, or `None` for zero.
        grad_entropy: `(t,)` float32, or `None` for zero.
        dtype: Of the result.
    """
    rows, columns = logits.shape
    out = torch.empty_like(logits, dtype=dtype)
    with torch.accelerator.device_index(logits.device.index):
        _grad[(rows, triton.cdiv(columns, _BLOCK))](
            logits,
            logits.stride(0),
            out,
            out.stride(0),
            columns,
            labels,
            first,
            float(temperature),
            float(factor),
            1.0 if softcap is None else float(softcap),
            normaliser,
            entropy,
            # A gradient may come as one number that stands for all rows, with stride 0.
            normaliser if grad_log_prob is None else grad_log_prob.contiguous(),
            normaliser if grad_entropy is None else grad_entropy.contiguous(),
            WITH_CAP=softcap is not None,
            WITH_LOG_PROB=grad_log_prob is not None,
            WITH_ENTROPY=grad_entropy is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return out


@triton.jit
def _fold(
    logits,
    stride,
    columns,
    labels,
    first,
    temperature,
    tops,
    masses,
    first_moments,
    squared_masses,
    label_logits,
    WITH_MOMENT: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run for one row."""
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    label = tl.load(labels + row) - first
    inside_tile = (label >= 0) & (label < columns)
    label_logit = tl.load(begin + label, mask=inside_tile, other=0.0) / temperature
    tl.store(label_logits + row, label_logit, mask=inside_tile)
    top = tl.load(tops + row)
    mass = tl.load(masses + row)
    moment = mass
    squares = mass
    if WITH_MOMENT:
        moment = tl.load(first_moments + row)
    if WITH_SQUARES:
        squares = tl.load(squared_masses + row)
    offsets = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        z = tl.load(begin + start + offsets, mask=inside, other=float("-inf")) / temperature
        new_top = tl.maximum(top, tl.max(z, 0))
        shrink = tl.exp(top - new_top)
        exponentials = tl.exp(z - new_top)  # 0 beyond the tile
        mass = mass * shrink + tl.sum(exponentials, 0)
        if WITH_MOMENT:
            moment = moment * shrink + tl.sum(tl.where(inside, exponentials * z, 0.0), 0)
        if WITH_SQUARES:
            squares = squares * shrink * shrink + tl.sum(exponentials * exponentials, 0)
        top = new_top
    tl.store(tops + row, top)
    tl.store(masses + row, mass)
    if WITH_MOMENT:
        tl.store(first_moments + row, moment)
    if WITH_SQUARES:
        tl.store(squared_masses + row, squares)


@triton.jit
def _grad(
    logits,
    stride,
    out,
    out_stride,
    columns,
    labels,
    first,
    temperature,
    factor,
    softcap,
    normalisers,
    entropies,
    grads_log_prob,
    grads_entropy,
    WITH_CAP: tl.constexpr,
    WITH_LOG_PROB: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run for one row and `BLOCK` columns."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < columns
    logit = tl.load(logits + row * stride + places, mask=inside, other=0.0)
    log_p = logit / temperature - tl.load(normalisers + row)
    p = tl.exp(log_p)
    grad = tl.zeros((BLOCK,), tl.float32)
    if WITH_LOG_PROB:
        from_log_prob = tl.load(grads_log_prob + row)
        label = tl.load(labels + row) - first
        grad = tl.where(places == label, from_log_prob, 0.0) - p * from_log_prob
    if WITH_ENTROPY:
        grad -= p * (log_p + tl.load(entropies + row)) * tl.load(grads_entropy + row)
    if WITH_CAP:
        slope = logit / softcap
        grad *= 1.0 - slope * slope
    grad *= factor
    tl.store(out + row * out_stride + places, grad.to(out.dtype.element_ty), mask=inside)
