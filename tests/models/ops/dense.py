"""What packed attention means, written down densely."""

from __future__ import annotations

import numpy as np
import torch

from hrl.models.ops.attention import packed_attention
from hrl.models.ops.layout import AttentionLayout


def make_layout(groups: list[tuple[int, list[int]]]) -> AttentionLayout:
    """`[(prompt length, [response lengths])]` as segments; a group without responses is a plain sequence."""
    length, parent, prefix_length = [], [], []
    for prompt, responses in groups:
        start = len(length)
        for index, tokens in enumerate([prompt, *responses]):
            length.append(tokens)
            parent.append(start)
            prefix_length.append(prompt if index else 0)
    return AttentionLayout(np.array(length), np.array(parent), np.array(prefix_length))


def make_tree(segments: list[tuple[int, int, int]]) -> AttentionLayout:
    """`[(length, parent, prefix length)]`; parents and prefixes that can't be are made such that they can."""
    length, parents, prefixes = [], [], []
    for tokens, parent, prefix in segments:
        before = parent % len(length) if length else 0
        parents.append(before)
        prefixes.append(prefix % (prefixes[before] + length[before] + 1) if length else 0)
        length.append(tokens)
    return AttentionLayout(np.array(length), np.array(parents), np.array(prefixes))


def sequence_of(segments: AttentionLayout, segment: int) -> list[int]:
    """The tokens of the row that a segment's last token sees: its parent's first ones, then its own."""
    start, prefix = int(segments.length[:segment].sum()), int(segments.prefix_length[segment])
    own = list(range(start, start + int(segments.length[segment])))
    return (sequence_of(segments, int(segments.parent[segment]))[:prefix] if prefix else []) + own


def visible(segments: AttentionLayout, window: int | None, chunk: int | None) -> torch.Tensor:
    """`(T, T)` bool: every token of a segment sees prefix and segment up to itself, within window and chunk."""
    tokens = segments.num_tokens
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for segment in range(len(segments.length)):
        seen = sequence_of(segments, segment)
        for position in range(int(segments.prefix_length[segment]), len(seen)):
            for other in range(position + 1):
                near = window is None or other > position - window
                together = chunk is None or other // chunk == position // chunk
                mask[seen[position], seen[other]] = near and together
    return mask


def dense(query, key, value, sinks, segments: AttentionLayout, scale: float, *, window=None, chunk=None, softcap=None):
    """The definition: one softmax over an explicit mask; a sink is one more column, whose weight is thrown away."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(segments, window, chunk).to(scores.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, value)


def inputs(tokens: int, heads: int = 4, kv_heads: int = 2, width: int = 8, value_width=None, dtype=torch.float64):
    """Random queries, keys and values, the same for the same arguments."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width or width))
    return [torch.randn(tokens, *shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def assert_equals_dense(
    segments: AttentionLayout,
    *,
    attend=packed_attention,
    with_sinks=False,
    window=None,
    chunk=None,
    softcap=None,
    **shape,
) -> None:
    """Output and all gradients of `attend` in float64 against the definition."""
    query, key, value = inputs(segments.num_tokens, **shape)
    sinks = torch.linspace(-2, 2, query.shape[1], dtype=torch.float64).requires_grad_() if with_sinks else None
    leaves = [t for t in (query, key, value, sinks) if t is not None]
    reach = {"window": window, "chunk": chunk, "softcap": softcap}
    want = dense(query, key, value, sinks, segments, 0.3, **reach)
    got = attend(query, key, value, segments, scale=0.3, sinks=sinks, **reach)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    weight = torch.randn_like(want)
    want_grads = torch.autograd.grad((want * weight).sum(), leaves)
    got_grads = torch.autograd.grad((got * weight).sum(), leaves)
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)
