"""Heads for tokens: attention over a packed row whose tokens lie on several ranks (DeepSpeed-Ulysses).

The ranks of a *sequence group* run one packed row together. Each has a slice of its tokens, the same number on every
rank, through all of the model that treats tokens one by one. Attention does not: before it, an all-to-all gives every
rank all tokens of the row for its share of the heads, and after it another gives the tokens back. With degree n, T
tokens and H heads::

    slice   (T / n, H, D)   --all-to-all-->   (T, H / n, D)   --attention, all-to-all-->   (T / n, H, Dv)

So attention sees the whole row, and whatever may be in a row is no concern of the exchange: prefixes and trees,
windows, chunks, caps. The end of a row is filled up to a multiple of n; what is filled in never reaches attention, and
nobody reads its results.

Key heads that are fewer than the degree, or don't divide by it, are repeated first, as few times as gives every rank a
whole number of them with the query heads that they belong to.

Jacobs et al. 2023, "DeepSpeed Ulysses: system optimizations for enabling training of extreme long sequence transformer
models", https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hrl.models.ops.layout import AttentionLayout, accumulation_dtype


@dataclass(frozen=True)
class SequenceGroup:
    """Ranks that run the same packed rows together.

    Attributes:
        processes: Their process group.
        size: How many they are: the degree.
        place: Of this rank among them, which says which slice of a row it has.
    """

    processes: dist.ProcessGroup
    size: int
    place: int


@dataclass(frozen=True)
class SlicedLayout:
    """What `AttentionLayout` is to a whole row, to one rank's slice of it.

    Attributes:
        whole: Of the row.
        group: The ranks that have it.
    """

    whole: AttentionLayout
    group: SequenceGroup

    @property
    def num_tokens(self) -> int:
        """Tokens of a slice, those that fill up the row included."""
        return -(-self.whole.num_tokens // self.group.size)

    @property
    def start(self) -> int:
        """The row's token with which this rank's slice begins."""
        return self.group.place * self.num_tokens

    @property
    def num_pairs(self) -> float:
        """Query–key pairs of each head that a rank computes, if its share of the heads were a share of the pairs."""
        return self.whole.num_pairs / self.group.size

    def full_mask(self, device: torch.device) -> Tensor:
        """Return `(1, t)` bool, all ones, always the same object; see `AttentionLayout.full_mask`."""
        tokens = self.num_tokens
        return self.whole.once("mask of a slice", lambda: torch.ones(1, tokens, dtype=torch.bool, device=device))


def to_heads(query: Tensor, key: Tensor, value: Tensor, layout: SlicedLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's tokens with all heads for all tokens with its share of the heads. One collective.

    Args:
        query: `(t, Hq, D)`, tokens of the slice.
        key: `(t, Hkv, D)`.
        value: `(t, Hkv, Dv)`.
        layout: Of the slice.

    Returns:
        `(T, Hq / n, D)`, `(T, h, D)` and `(T, h, Dv)`, tokens of the row; `Hq / n` is a multiple of `h`.

    Raises:
        ValueError: The query heads don't divide by the number of ranks.
    """
    heads, size = query.shape[1], layout.group.size
    if heads % size:
        raise ValueError(
            f"attention with {heads} query heads can't be shared by the {size} ranks of a sequence group: set "
            "ulysses_sequence_parallel_size to a divisor of the number of heads"
        )
    grouped = heads // key.shape[1]
    repeats = grouped // math.gcd(grouped, heads // size)
    if repeats > 1:
        key, value = _RepeatHeads.apply(key, repeats), _RepeatHeads.apply(value, repeats)
    return _ToHeads.apply(layout, query, key, value)


def to_tokens(out: Tensor, layout: SlicedLayout) -> Tensor:
    """Exchange all tokens with a share of the heads, `(T, Hq / n, Dv)`, for this rank's with all, `(t, Hq, Dv)`."""
    return _ToTokens.apply(layout, out)


def own_heads(of_heads: Tensor, group: SequenceGroup) -> Tensor:
    """Return this rank's share `(Hq / n,)` of numbers of the heads `(Hq,)`."""
    return of_heads.tensor_split(group.size)[group.place]


def join_results(results: Sequence[Tensor], own: Tensor, total: int, group: SequenceGroup) -> tuple[Tensor, ...]:
    """Return the results of all ranks on each of them. One collective, and none in the backward.

    Every rank computes the same loss from them and takes the gradient of its own results alone. So over the ranks every
    result counts once.

    Args:
        results: `(M,)` or longer; what is beyond the M results of this rank was computed for company's sake.
        own: `(M,)` int64, the places of this rank's results.
        total: How many results the group has; each has one rank.
        group: The ranks.

    Returns:
        `(total,)` each.
    """
    return _Join.apply(own, total, group, *results)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: SlicedLayout, *slices: Tensor) -> tuple[Tensor, ...]:
        ctx.layout = layout
        return _tokens_for_heads(slices, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_heads_for_tokens(grads, ctx.layout)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: SlicedLayout, out: Tensor) -> Tensor:
        ctx.layout = layout
        # As attention's own result is: models take it for one block, of any shape.
        return _heads_for_tokens((out,), layout)[0].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _tokens_for_heads(grads, ctx.layout)[0]


class _RepeatHeads(torch.autograd.Function):
    """`(t, H, D)` to `(t, H * repeats, D)`, with a gradient summed in float32 as attention's own over queries is."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, repeats: int) -> Tensor:
        ctx.repeats = repeats
        return source.repeat_interleave(repeats, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        each = grad.unflatten(1, (-1, ctx.repeats))
        return each.sum(2, dtype=accumulation_dtype(grad.dtype)).to(grad.dtype), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, total: int, group: SequenceGroup, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(own)
        ctx.num_computed = len(results[0])
        mine = torch.stack([result[: len(own)] for result in results])
        # Each place is zero on all ranks but one, so a sum puts the results together without rounding.
        joined = mine.new_zeros(len(results), total).index_copy_(1, own, mine)
        dist.all_reduce(joined, group=group.processes)
        return joined.unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        beyond = ctx.num_computed - len(own)
        mine = [grad if grad is None else grad.index_select(0, own) for grad in grads]
        return (
            None,
            None,
            None,
            *(grad if grad is None or not beyond else torch.cat([grad, grad.new_zeros(beyond)]) for grad in mine),
        )


def _tokens_for_heads(slices: Sequence[Tensor], layout: SlicedLayout) -> tuple[Tensor, ...]:
    """Turn `(t, n * h, d)` into `(T, h, d)`, each tensor with heads and widths of its own."""
    size, tokens = layout.group.size, layout.num_tokens
    shapes = [(slice_.shape[1] // size, slice_.shape[2]) for slice_ in slices]
    widths = [heads * width for heads, width in shapes]
    blocks = slices[0].new_empty(size, tokens, sum(widths))  # to each rank its heads
    for block, slice_, shape in zip(blocks.split(widths, -1), slices, shapes, strict=True):
        block.unflatten(-1, shape).copy_(slice_.unflatten(1, (size, -1)).transpose(0, 1))
    row = _exchanged(blocks, layout.group).flatten(0, 1)[: layout.whole.num_tokens]
    return tuple(part.unflatten(-1, shape) for part, shape in zip(row.split(widths, -1), shapes, strict=True))


def _heads_for_tokens(parts: Sequence[Tensor], layout: SlicedLayout) -> tuple[Tensor, ...]:
    """Turn `(T, h, d)` into `(t, n * h, d)`: the reverse of `_tokens_for_heads`, with zeros where the row ends."""
    size, tokens, end = layout.group.size, layout.num_tokens, layout.whole.num_tokens
    shapes = [part.shape[1:] for part in parts]
    widths = [heads * width for heads, width in shapes]
    row = parts[0].new_empty(size * tokens, sum(widths))
    row[end:] = 0.0
    for columns, part, shape in zip(row[:end].split(widths, -1), parts, shapes, strict=True):
        columns.unflatten(-1, shape).copy_(part)
    blocks = _exchanged(row.unflatten(0, (size, tokens)), layout.group)  # from each rank its heads
    return tuple(
        block.unflatten(-1, shape).transpose(0, 1).flatten(1, 2)
        for block, shape in zip(blocks.split(widths, -1), shapes, strict=True)
    )


def _exchanged(blocks: Tensor, group: SequenceGroup) -> Tensor:
    """Send block i `(n, ...)` to rank i of the group, and return the blocks that came from each."""
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group.processes)
    return received
