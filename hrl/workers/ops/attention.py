"""Attention over a packed row, registered with transformers under one name, ``hrl_packed``.

A model loaded with ``attn_implementation=ATTENTION_NAME`` takes its layout as ``packing=AttentionLayout(...)`` through
the keyword arguments of its forward. On CUDA the variable-length kernels run (flash-attn where installed, else torch's
own); on a CPU similar query runs are stacked and go through torch's flash kernel, with a backward written here: for the
short segments of language-model reinforcement learning torch's own CPU backward takes about five times as long.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hrl.workers.ops.layout import AttentionLayout, Block

#: The name under which transformers knows this attention.
ATTENTION_NAME = "hrl_packed"


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of every segment of ``layout`` to its prefix and itself.

    Args:
        query: ``(T, Hq, D)``.
        key: ``(T, Hkv, D)``, ``Hq`` a multiple of ``Hkv``.
        value: ``(T, Hkv, D)``.
        layout: which token attends to which.
        scale: factor of the scores, usually ``D ** -0.5``.
        window: sliding window in tokens; ``None`` is no window.

    Returns:
        ``(T, Hq, D)``.
    """
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen_attention(query, key, value, layout, scale, window)
    return _StackedAttention.apply(query, key, value, layout, scale, window)


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: AttentionLayout | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Adapter to transformers' attention interface; shapes ``(1, heads, T, D)`` in, ``(1, T, heads, D)`` out."""
    name = type(module).__name__
    if packing is None:
        raise ValueError(
            f"{name} ran without its packing: this model was loaded for packed training, call it through its engine"
        )
    unsupported = [key for key in ("softcap", "s_aux", "position_bias") if kwargs.get(key) is not None]
    if dropout > 0:
        unsupported.append("attention_dropout (set it to 0 with model.override_config)")
    if unsupported:
        raise ValueError(f"{name} wants {', '.join(unsupported)}, which packed attention does not have")
    if query.shape[0] != 1 or query.shape[2] != packing.num_tokens:
        raise ValueError(f"packed attention wants (1, heads, {packing.num_tokens}, D), got {tuple(query.shape)}")
    out = packed_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        packing,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
    )
    return out[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, transformers_attention)


# ---------------------------------------------------------------------------------------------- CUDA


@cache
def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


class _GatherRows(torch.autograd.Function):
    """``source[index]`` whose gradient sums in float32: a prompt token gathers one term from each of its responses."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.like = source.new_empty(0)
        ctx.tokens = source.shape[0]
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = torch.zeros((ctx.tokens, *grads[0].shape[1:]), dtype=torch.float32, device=grads[0].device)
        return total.index_add_(0, index, grads[0].float()).to(ctx.like.dtype), None


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float, window: int | None
) -> Tensor:
    index = layout.varlen(query.device)
    if index.key_index is not None:
        key, value = _GatherRows.apply(key, index.key_index), _GatherRows.apply(value, index.key_index)
    left = -1 if window is None else window - 1
    if _has_flash_attn():
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            query,
            key,
            value,
            index.query_offsets,
            index.key_offsets,
            index.max_query,
            index.max_key,
            softmax_scale=scale,
            causal=True,
            window_size=(left, 0),
        )
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        index.query_offsets,
        index.key_offsets,
        index.max_query,
        index.max_key,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )


# ---------------------------------------------------------------------------------------------- everywhere else


def _stack(source: Tensor, index: Tensor) -> Tensor:
    """``(T, H, D)`` gathered by ``(N, L)`` into ``(N, H, L, D)``."""
    return source.index_select(0, index.reshape(-1)).view(*index.shape, *source.shape[1:]).transpose(1, 2)


def _fold(stacked: Tensor, kv_heads: int) -> Tensor:
    """``(N, Hq, Q, D)`` to ``(N, Hkv, G * Q, D)``: the query heads of one key head become more queries of it."""
    count, heads, queries, width = stacked.shape
    return stacked.reshape(count, kv_heads, heads // kv_heads * queries, width)


def _bias(block: Block, layout: AttentionLayout, window: int | None, repeats: int, like: Tensor) -> Tensor:
    """``(N, 1, G * Q, K)``: 0 where the key is visible, -inf elsewhere. Made once per block, used by every layer."""
    name = f"bias/{id(block)}/{window}/{repeats}/{like.dtype}/{like.device}"
    if name not in layout._cache:
        hidden = ~block.visible(window).repeat(1, repeats, 1)[:, None]
        bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        layout._cache[name] = bias.masked_fill_(hidden, -torch.inf)
    return layout._cache[name]  # type: ignore[return-value]


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output ``(N, H, Q, D)`` and log-sum-exp of the scores ``(N, H, Q)``."""
    if query.device.type == "cpu":
        # The public function does not return the log-sum-exp that the backward needs.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias, scale=scale
        )
    scores = torch.matmul(query, key.transpose(-1, -2)).mul_(scale).add_(bias)
    normaliser = scores.logsumexp(-1)
    return torch.matmul(torch.exp(scores - normaliser[..., None]), value), normaliser


class _StackedAttention(torch.autograd.Function):
    """Attention block by block. Scores exist for one block at a time, in the forward and again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: AttentionLayout,
        scale: float,
        window: int | None,
    ) -> Tensor:
        kv_heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        normalisers = []
        for block in layout.blocks(query.device):
            bias = _bias(block, layout, window, repeats, query)
            q = _fold(_stack(query, block.query_index), kv_heads)
            k, v = _stack(key, block.key_index), _stack(value, block.key_index)
            folded, normaliser = _attend(q, k, v, bias, scale)
            normalisers.append(normaliser)
            rows = folded.reshape(len(q), query.shape[1], -1, query.shape[2]).transpose(1, 2).flatten(0, 1)
            out.index_copy_(0, block.out_target, rows.index_select(0, block.out_source))
        ctx.save_for_backward(query, key, value, out, *normalisers)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *normalisers = ctx.saved_tensors
        grad = grads[0]
        layout, kv_heads, repeats = ctx.layout, key.shape[1], query.shape[1] // key.shape[1]
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros(key.shape, dtype=wide, device=key.device)
        grad_value = torch.zeros(value.shape, dtype=wide, device=value.device)
        # Per query, the part of the softmax gradient that is common to all keys: sum over D of grad * out.
        common = (grad.to(wide) * out).sum(-1, keepdim=True)
        for block, normaliser in zip(layout.blocks(query.device), normalisers, strict=True):
            bias = _bias(block, layout, ctx.window, repeats, query)
            q, g = (_fold(_stack(x, block.query_index), kv_heads) for x in (query, grad))
            shared = _fold(_stack(common, block.query_index), kv_heads)
            k, v = _stack(key, block.key_index), _stack(value, block.key_index)
            probs = torch.matmul(q, k.transpose(-1, -2)).to(wide).mul_(ctx.scale).add_(bias)
            probs = probs.sub_(normaliser[..., None]).exp_()
            grad_scores = torch.matmul(g, v.transpose(-1, -2)).to(wide).sub_(shared).mul_(probs).mul_(ctx.scale)
            grad_scores, probs = grad_scores.to(query.dtype), probs.to(query.dtype)
            _zero_padding(block, repeats, grad_scores, probs)
            rows = torch.matmul(grad_scores, k).reshape(len(q), query.shape[1], -1, query.shape[2])
            rows = rows.transpose(1, 2).flatten(0, 1).index_select(0, block.out_source)
            grad_query.index_copy_(0, block.out_target, rows)
            keys = block.key_index.reshape(-1)
            for total, weights, rows_in in ((grad_key, grad_scores, q), (grad_value, probs, g)):
                part = torch.matmul(weights.transpose(-1, -2), rows_in).transpose(1, 2).flatten(0, 1)
                total.index_add_(0, keys, part.to(wide))
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _zero_padding(block: Block, repeats: int, *weights: Tensor) -> None:
    """Takes padded queries out of the sums over queries. They stand for token 0 and would count its gradient again."""
    if block.out_source.numel() == block.query_index.numel():
        return
    real = torch.zeros(block.query_index.numel(), dtype=torch.bool, device=block.query_index.device)
    real[block.out_source] = True
    padded = ~real.view(block.query_index.shape).repeat(1, repeats)[:, None, :, None]
    for weight in weights:
        weight.masked_fill_(padded, 0.0)
