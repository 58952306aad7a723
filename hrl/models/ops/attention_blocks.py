"""Packed attention in stacked blocks, on any device and with every option.

Query runs of similar size are stacked and computed as one batched product, block by block, with a backward of our own:
for the short segments of language-model reinforcement learning torch's CPU backward takes about five times as long.
Scores exist for one block at a time, in the forward and again in the backward.

A soft-cap (Gemma 2) turns scores `s` into `s' = cap * tanh(s / cap)`, whose slope is `1 - (s' / cap)^2`. A sink
(gpt-oss) is one more term in each head's softmax denominator, without a value: with `l` the log-sum-exp of the scores
and `b` the sink, the output is scaled by `exp(l - l')`, where `l' = log(exp(l) + exp(b))`, and

- `p_k = exp(s_k - l')`, so that every formula of the backward holds with `l'` in place of `l`;
- `d out / d b = -exp(b - l') * out`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hrl.models.ops.layout import AttentionLayout, Reach, accumulation_dtype, to_device

#: Queries per block on a CPU: a causal block needs only the keys up to its last query.
MAX_BLOCK_QUERIES = 128
#: Query × key pairs of one stacked block on a CPU; times the heads, the scores held at once.
MAX_BLOCK_PAIRS = 1 << 19
#: A stack may waste at most this share of its pairs on padding.
MAX_PADDING_SHARE = 0.25
#: Position of a padded key: later than every query.
ABSENT = 1 << 40


@dataclass(frozen=True)
class Scoring:
    """From queries and keys to scores.

    Attributes:
        scale: Factor of the products.
        reach: How far back a token sees.
        softcap: Scores are `softcap * tanh(scores / softcap)`; `None` leaves them.
    """

    scale: float
    reach: Reach = field(default_factory=Reach)
    softcap: float | None = None


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layout: AttentionLayout, scoring: Scoring
) -> Tensor:
    """Attend: `(T, Hq, D)`, `(T, Hkv, D)`, `(T, Hkv, Dv)` and, with sinks, `(Hq,)` to `(T, Hq, Dv)`."""
    return _BlockAttention.apply(query, key, value, sinks, layout, scoring)


def _stack(source: Tensor, index: Tensor) -> Tensor:
    """Gather `(T, H, D)` by `(N, L)` into `(N, H, L, D)`."""
    return source.index_select(0, index.reshape(-1)).view(*index.shape, *source.shape[1:]).transpose(1, 2)


def _fold(stacked: Tensor, kv_heads: int) -> Tensor:
    """Turn `(N, Hq, Q, D)` into `(N, Hkv, G * Q, D)`: the G query heads of a key head become more queries of it."""
    count, heads, queries, width = stacked.shape
    return stacked.reshape(count, kv_heads, heads // kv_heads * queries, width)


def _rows(folded: Tensor, block: Block, heads: int) -> Tensor:
    """Return the block's real queries `(n, Hq, D)` from `(N, Hkv, G * Q, D)`."""
    count, _, _, width = folded.shape
    rows = folded.reshape(count, heads, -1, width).transpose(1, 2).flatten(0, 1)
    return rows.index_select(0, block.out_source)


def _bias(block: Block, layout: AttentionLayout, reach: Reach, repeats: int, like: Tensor) -> Tensor:
    """Return `(N, 1, G * Q, K)`: 0 where the key is visible, -inf elsewhere."""

    def make() -> Tensor:
        hidden = ~block.visible(reach).repeat(1, repeats, 1)[:, None]
        return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)

    return layout.once(("bias", id(block), reach, repeats, like.dtype, like.device), make)


def _has_kernel(query: Tensor, scoring: Scoring) -> bool:
    """Return whether torch's CPU kernel computes these scores."""
    return query.device.type == "cpu" and scoring.softcap is None


def _scores(query: Tensor, key: Tensor, scoring: Scoring) -> Tensor:
    """Return scores `(N, H, Q, K)` before the mask, in the accumulation dtype."""
    wide = accumulation_dtype(query.dtype)
    if _has_kernel(query, scoring):
        return torch.matmul(query, key.transpose(-1, -2)).to(wide).mul_(scoring.scale)
    # Scores rounded to bfloat16 would be off by up to 0.06 at 16. The kernel does not round them, so neither do we.
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(-1, -2)).mul_(scoring.scale)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    return scores


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return the output `(N, H, Q, Dv)` and the log-sum-exp of the scores `(N, H, Q)`."""
    if not _has_kernel(query, scoring):
        scores = _scores(query, key, scoring).add_(bias)
        normaliser = scores.logsumexp(-1)
        return torch.matmul(scores.sub_(normaliser[..., None]).exp_().to(value.dtype), value), normaliser
    width = value.shape[-1]
    if width != query.shape[-1]:  # the kernel takes one width; zeros change neither scores nor outputs
        widest = max(width, query.shape[-1])
        query, key, value = (functional.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    # The public function does not return the log-sum-exp that the backward needs.
    out, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scoring.scale
    )
    return out[..., :width], normaliser


def _sink_per_query(sinks: Tensor, kv_heads: int, queries: int, dtype: torch.dtype) -> Tensor:
    """Return `(Hkv, G * Q)`, the sink of each folded query, from `(Hq,)`."""
    return sinks.to(dtype)[:, None].expand(-1, queries).reshape(kv_heads, -1)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layout: AttentionLayout,
        scoring: Scoring,
    ) -> Tensor:
        heads, kv_heads = query.shape[1], key.shape[1]
        out = query.new_empty(*query.shape[:2], value.shape[2])
        normalisers = []
        for block in stacked_blocks(layout, query.device):
            bias = _bias(block, layout, scoring.reach, heads // kv_heads, query)
            q = _fold(_stack(query, block.query_index), kv_heads)
            k, v = _stack(key, block.key_index), _stack(value, block.key_index)
            folded, normaliser = _attend(q, k, v, bias, scoring)
            if sinks is not None:
                sink = _sink_per_query(sinks, kv_heads, block.query_index.shape[1], normaliser.dtype)
                before, normaliser = normaliser, torch.logaddexp(normaliser, sink)
                folded = folded * torch.exp(before - normaliser)[..., None].to(folded.dtype)
            normalisers.append(normaliser)
            out.index_copy_(0, block.out_target, _rows(folded, block, heads))
        ctx.save_for_backward(query, key, value, sinks, out, *normalisers)
        ctx.layout, ctx.scoring = layout, scoring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, *normalisers = ctx.saved_tensors
        grad, layout, scoring = grads[0], ctx.layout, ctx.scoring
        heads, kv_heads = query.shape[1], key.shape[1]
        repeats, wide = heads // kv_heads, accumulation_dtype(query.dtype)
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros(key.shape, dtype=wide, device=key.device)
        grad_value = torch.zeros(value.shape, dtype=wide, device=value.device)
        grad_sinks = torch.zeros(heads, dtype=wide, device=query.device) if sinks is not None else None
        # Per query, the part of the softmax gradient that is common to all keys: sum over D of grad * out.
        common = (grad.to(wide) * out).sum(-1, keepdim=True)
        for block, normaliser in zip(stacked_blocks(layout, query.device), normalisers, strict=True):
            bias = _bias(block, layout, scoring.reach, repeats, query)
            q, g = (_fold(_stack(x, block.query_index), kv_heads) for x in (query, grad))
            shared = _fold(_stack(common, block.query_index), kv_heads)
            k, v = _stack(key, block.key_index), _stack(value, block.key_index)
            probs = _scores(q, k, scoring)
            slope = None if scoring.softcap is None else 1.0 - (probs / scoring.softcap).square()
            probs = probs.add_(bias).sub_(normaliser[..., None]).exp_()
            grad_scores = torch.matmul(g, v.transpose(-1, -2)).to(wide).sub_(shared).mul_(probs).mul_(scoring.scale)
            if slope is not None:
                grad_scores.mul_(slope)
            grad_scores, probs = grad_scores.to(query.dtype), probs.to(query.dtype)
            _zero_padding(block, repeats, grad_scores, probs)
            grad_query.index_copy_(0, block.out_target, _rows(torch.matmul(grad_scores, k), block, heads))
            keys = block.key_index.reshape(-1)
            for total, weights, rows_in in ((grad_key, grad_scores, q), (grad_value, probs, g)):
                part = torch.matmul(weights.transpose(-1, -2), rows_in).transpose(1, 2).flatten(0, 1)
                total.index_add_(0, keys, part.to(wide))
            if sinks is not None and grad_sinks is not None:
                sink = _sink_per_query(sinks, kv_heads, block.query_index.shape[1], wide)
                share = torch.exp(sink - normaliser)[..., None].mul_(shared)
                grad_sinks -= _rows(share, block, heads).sum((0, 2))
        return (
            grad_query,
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            None if grad_sinks is None else grad_sinks.to(sinks.dtype),
            None,
            None,
        )


def _zero_padding(block: Block, repeats: int, *weights: Tensor) -> None:
    """Zero the weights of padded queries, which stand for token 0 and would count its gradient again."""
    if block.out_source.numel() == block.query_index.numel():
        return
    real = torch.zeros(block.query_index.numel(), dtype=torch.bool, device=block.query_index.device)
    real.index_fill_(0, block.out_source, True)
    padded = ~real.view(block.query_index.shape).repeat(1, repeats)[:, None, :, None]
    for weight in weights:
        weight.masked_fill_(padded, 0.0)


# ---- blocks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Query runs of similar size, stacked with padding so that they run as one batched product.

    Attributes:
        query_index: `(N, Q)` int64 tokens of the row; padding repeats token 0.
        key_index: `(N, K)` int64 tokens of the row; padding repeats token 0.
        query_position: `(N, Q)` int64 positions in the sequence; padding is later than every key.
        key_position: `(N, K)` int64; padding is `ABSENT`.
        out_source: `(n,)` int64 flat positions in `(N, Q)` that hold real queries.
        out_target: `(n,)` int64 the tokens of the row these are.
    """

    query_index: Tensor
    key_index: Tensor
    query_position: Tensor
    key_position: Tensor
    out_source: Tensor
    out_target: Tensor

    def to(self, device: torch.device) -> Block:
        """Return the same block on `device`."""
        return Block(*to_device([getattr(self, f.name) for f in fields(self)], device))

    def visible(self, reach: Reach) -> Tensor:
        """Return `(N, Q, K)` bool: the key is at or before the query, and within its reach."""
        query, key = self.query_position[:, :, None], self.key_position[:, None, :]
        mask = key <= query
        # A padded query would see no key, and its softmax would be undefined. It sees all; nobody reads its result.
        if reach.window is not None:
            mask &= (key > query - reach.window) | (query >= ABSENT - 1)
        if reach.chunk is not None:
            mask &= (key // reach.chunk == query // reach.chunk) | (query >= ABSENT - 1)
        return mask


def stacked_blocks(layout: AttentionLayout, device: torch.device) -> list[Block]:
    """Return the query runs of a packed row in blocks, which all layers share."""
    return layout.once("blocks", lambda: [block.to(device) for block in _stack_blocks(_query_runs(layout))])


@dataclass(frozen=True)
class _QueryRun:
    """At most `MAX_BLOCK_QUERIES` consecutive queries of a segment with the keys they can see."""

    start: int
    length: int
    first_position: int
    keys: np.ndarray


def _query_runs(layout: AttentionLayout) -> list[_QueryRun]:
    runs = []
    for start, length, prefix, keys in layout.segments():
        for offset in range(0, length, MAX_BLOCK_QUERIES):
            count = min(MAX_BLOCK_QUERIES, length - offset)
            runs.append(_QueryRun(start + offset, count, prefix + offset, keys[: prefix + offset + count]))
    return runs


def _stack_blocks(runs: list[_QueryRun]) -> list[Block]:
    """Group runs of similar shape, largest first, within the limits on padding and on size."""
    ordered = sorted(runs, key=lambda run: (len(run.keys), run.length), reverse=True)
    blocks: list[Block] = []
    stack: list[_QueryRun] = []
    queries = keys = used = 0
    for run in ordered:
        wide, long = max(queries, run.length), max(keys, len(run.keys))
        pairs = wide * long * (len(stack) + 1)
        used_with = used + run.length * len(run.keys)
        if stack and (pairs > MAX_BLOCK_PAIRS or used_with < (1 - MAX_PADDING_SHARE) * pairs):
            blocks.append(_pad(stack, queries, keys))
            stack, wide, long, used_with = [], run.length, len(run.keys), run.length * len(run.keys)
        stack.append(run)
        queries, keys, used = wide, long, used_with
    blocks.append(_pad(stack, queries, keys))
    return blocks


def _pad(stack: list[_QueryRun], queries: int, keys: int) -> Block:
    query_index = np.zeros((len(stack), queries), np.int64)
    key_index = np.zeros((len(stack), keys), np.int64)
    query_position = np.full((len(stack), queries), ABSENT - 1, np.int64)
    key_position = np.full((len(stack), keys), ABSENT, np.int64)
    real = np.zeros((len(stack), queries), bool)
    for row, run in enumerate(stack):
        query_index[row, : run.length] = np.arange(run.start, run.start + run.length)
        query_position[row, : run.length] = np.arange(run.first_position, run.first_position + run.length)
        key_index[row, : len(run.keys)] = run.keys
        key_position[row, : len(run.keys)] = np.arange(len(run.keys))
        real[row, : run.length] = True
    source = np.flatnonzero(real.reshape(-1))
    return Block(
        *map(
            torch.from_numpy,
            (query_index, key_index, query_position, key_position, source, query_index.reshape(-1)[source]),
        )
    )
