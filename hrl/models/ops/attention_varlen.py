"""Packed attention by the variable-length kernels of a GPU: flash-attn's where installed, else torch's own.

Inputs that the kernels don't take are brought into a form that they do take: values narrower than queries (MLA) are
padded with zeros, head widths are padded to a multiple of 8, and key and value heads are repeated where torch's
function has no grouped queries (2.11). No kernel has sinks. But the backward of flash attention needs only the output
and the log-sum-exp of the scores; given those of the softmax *with* the sink, it computes the gradients of that softmax
(formulas in `attention_blocks`).
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hrl.models.ops.attention_blocks import Scoring
from hrl.models.ops.layout import AttentionLayout, accumulation_dtype, to_device

#: The widest head that the kernels take, and the multiple that a width must be.
MAX_HEAD_WIDTH = 256
HEAD_WIDTH_STEP = 8
#: Compute capability of the oldest cards on which the kernels run.
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class VarlenIndex:
    """The same segments in the form of variable-length attention kernels.

    Queries stay where they are in the row. Keys are gathered: prefix and segment of each query run, one after the
    other. These kernels align their causal mask to the last query and the last key, as a prefix needs it. A query run
    is a segment, or the part of one that lies in one chunk.

    Attributes:
        query_offsets: `(runs + 1,)` int32.
        key_offsets: `(runs + 1,)` int32.
        max_query: The longest query run, in tokens.
        max_key: The most keys of a run.
        key_index: `(sum of key lengths,)` int64 tokens of the row; `None` where the keys are the queries.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    max_query: int
    max_key: int
    key_index: Tensor | None

    @property
    def runs(self) -> tuple[Tensor, Tensor, int, int]:
        """Offsets and longest runs, in the order in which every kernel takes them."""
        return self.query_offsets, self.key_offsets, self.max_query, self.max_key


def varlen_index(layout: AttentionLayout, device: torch.device, chunk: int | None = None) -> VarlenIndex:
    """Return the segments of a packed row as the kernels take them, which all layers share.

    Args:
        layout: The row.
        device: Of the result.
        chunk: Tokens see only their own chunk of this many tokens; `None` is one chunk.
    """
    return layout.once(("varlen", chunk), lambda: _varlen_index(layout, device, chunk))


def _varlen_index(layout: AttentionLayout, device: torch.device, chunk: int | None) -> VarlenIndex:
    query_length: list[int] = []
    keys: list[np.ndarray] = []
    for _, length, prefix, seen in layout.segments():
        position, end = prefix, prefix + length
        while position < end:
            first = 0 if chunk is None else position // chunk * chunk
            after = end if chunk is None else min(end, first + chunk)
            query_length.append(after - position)
            keys.append(seen[first:after])
            position = after
    key_length = [len(part) for part in keys]
    key_index = np.concatenate(keys)
    is_identity = len(key_index) == layout.num_tokens and bool((key_index == np.arange(len(key_index))).all())
    return VarlenIndex(
        query_offsets=_offsets(query_length, device),
        key_offsets=_offsets(key_length, device),
        max_query=max(query_length),
        max_key=max(key_length),
        key_index=None if is_identity else to_device([torch.from_numpy(key_index)], device)[0],
    )


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    return to_device([torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))], device)[0]


def has_kernel(query: Tensor, value: Tensor, sinks: Tensor | None, scoring: Scoring) -> bool:
    """Return whether a variable-length kernel can compute this."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16) or not _runs_flash(query.device):
        return False
    if max(query.shape[-1], value.shape[-1]) > MAX_HEAD_WIDTH:
        return False
    # torch's kernels have no soft-cap, and sinks are computed with torch's kernels.
    return scoring.softcap is None or (sinks is None and _flash_attn_has("softcap"))


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layout: AttentionLayout, scoring: Scoring
) -> Tensor:
    """Attend: `(T, Hq, D)`, `(T, Hkv, D)`, `(T, Hkv, Dv)` and, with sinks, `(Hq,)` to `(T, Hq, Dv)`."""
    index = varlen_index(layout, query.device, scoring.reach.chunk)
    width = value.shape[-1]
    query, key, value = _one_width(query, key, value)
    if index.key_index is not None:
        key, value = _GatherRows.apply(key, index.key_index), _GatherRows.apply(value, index.key_index)
    if sinks is not None:
        key, value = _repeat_heads_unless_grouped(query, key, value)
        out = _SinkAttention.apply(
            query.contiguous(), key.contiguous(), value.contiguous(), sinks, index, scoring.scale, _left(scoring)
        )
    elif _has_flash_attn():
        out = _flash_attn(query, key, value, index, scoring)
    else:
        out = _torch_varlen(query, key, value, index, scoring)
    return out if out.shape[-1] == width else out[..., :width]


def _left(scoring: Scoring) -> int:
    """Return the number of keys that a query sees before itself, as the kernels count them; -1 is all."""
    return -1 if scoring.reach.window is None else scoring.reach.window - 1


def _one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad all with zeros to one width that the kernels take. Zeros change neither scores nor outputs."""
    width = -(-max(tensor.shape[-1] for tensor in tensors) // HEAD_WIDTH_STEP) * HEAD_WIDTH_STEP
    return tuple(x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1])) for x in tensors)


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, index: VarlenIndex, scoring: Scoring) -> Tensor:
    options = {} if scoring.softcap is None else {"softcap": scoring.softcap}
    return _flash_attn_function()(
        query,
        key,
        value,
        *index.runs,
        softmax_scale=scoring.scale,
        causal=True,
        window_size=(_left(scoring), 0),
        **options,
    )


def _torch_varlen(query: Tensor, key: Tensor, value: Tensor, index: VarlenIndex, scoring: Scoring) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    key, value = _repeat_heads_unless_grouped(query, key, value)
    options = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
    return varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        *index.runs,
        scale=scoring.scale,
        window_size=(_left(scoring), 0),
        **options,
    )


def _repeat_heads_unless_grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values, with one head per query head where torch's function needs that (before 2.12)."""
    from torch.nn.attention.varlen import varlen_attn

    repeats = query.shape[1] // key.shape[1]
    if repeats == 1 or _has_keyword(varlen_attn, "enable_gqa"):
        return key, value
    return key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)


@cache
def _runs_flash(device: torch.device) -> bool:
    """Return whether the card is new enough for flash attention."""
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


@cache
def _has_keyword(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


@cache
def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def _flash_attn_function() -> Callable[..., Tensor]:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def _flash_attn_has(keyword: str) -> bool:
    return _has_flash_attn() and _has_keyword(_flash_attn_function(), keyword)


class _GatherRows(torch.autograd.Function):
    """`source[index]` with a gradient summed in float32: a prompt token gets one term from each of its responses."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.like = source.new_empty(0)
        ctx.tokens = source.shape[0]
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = accumulation_dtype(ctx.like.dtype)
        total = torch.zeros((ctx.tokens, *grads[0].shape[1:]), dtype=wide, device=grads[0].device)
        return total.index_add_(0, index, grads[0].to(wide)).to(ctx.like.dtype), None


class _SinkAttention(torch.autograd.Function):
    """Causal variable-length attention with one sink per query head, by the kernels behind torch's `varlen_attn`.

    The public function drops the gradient of the log-sum-exp, so forward and backward are called one by one.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, index: VarlenIndex, scale: float, left: int
    ) -> Tensor:
        out, normaliser, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            *index.runs,
            0.0,
            left < 0,
            return_debug_mask=False,
            scale=scale,
            window_size_left=left,
            window_size_right=0,
        )
        with_sink = torch.logaddexp(normaliser, sinks.to(normaliser.dtype)[:, None])  # (Hq, T) float32
        out = out * torch.exp(normaliser - with_sink).t()[..., None].to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, with_sink, rng_state, unused)
        ctx.index, ctx.scale, ctx.left = index, scale, left
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, normaliser, rng_state, unused = ctx.saved_tensors
        grad, index = grads[0].contiguous(), ctx.index
        grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            normaliser,
            *index.runs,
            0.0,
            ctx.left < 0,
            rng_state,
            unused,
            scale=ctx.scale,
            window_size_left=ctx.left,
            window_size_right=0,
        )
        wide = normaliser.dtype
        common = (grad.to(wide) * out).sum(-1).t()  # (Hq, T)
        grad_sinks = -(torch.exp(sinks.to(wide)[:, None] - normaliser) * common).sum(1)
        return grad_query, grad_key, grad_value, grad_sinks.to(sinks.dtype), None, None, None
