"""What packed attention means, written down densely."""

from __future__ import annotations

import numpy as np
import torch

from hrl.models.ops.attention import packed_attention
from hrl.models.ops.layout import AttentionLayout


def make_layout(groups: list[tuple[int, list[int]]]) -> AttentionLayout:
    """`[(prompt length, [response lengths])]` as segments; a group without responses is a plain sequence."""
    length, prefix_start, prefix_length, position = [], [], [], 0
    for prompt, responses in groups:
        start = position
        for index, tokens in enumerate([prompt, *responses]):
            length.append(tokens)
            prefix_start.append(start)
            prefix_length.append(prompt if index else 0)
            position += tokens
    return AttentionLayout(np.array(length), np.array(prefix_start), np.array(prefix_length))


def visible(segments: AttentionLayout, window: int | None, chunk: int | None) -> torch.Tensor:
    """`(T, T)` bool: every token of a segment sees prefix and segment up to itself, within window and chunk."""
    tokens = segments.num_tokens
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    position = segments.position_ids().tolist()
    for start, length, prefix_start, prefix in zip(
        segments.start, segments.length, segments.prefix_start, segments.prefix_length, strict=True
    ):
        seen = [*range(prefix_start, prefix_start + prefix), *range(start, start + length)]
        for token in range(start, start + length):
            for other in seen:
                near = window is None or position[other] > position[token] - window
                together = chunk is None or position[other] // chunk == position[token] // chunk
                mask[token, other] = position[other] <= position[token] and near and together
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
