"""Packed attention against the definition: one dense softmax over an explicit mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.workers.ops import attention, layout
from hrl.workers.ops.attention import packed_attention, transformers_attention
from hrl.workers.ops.layout import AttentionLayout

CPU = torch.device("cpu")


def make_layout(groups: list[tuple[int, list[int]]]) -> AttentionLayout:
    """``[(prompt length, [response lengths])]`` as segments; a group without responses is a plain sequence."""
    length, prefix_start, prefix_length, position = [], [], [], 0
    for prompt, responses in groups:
        start = position
        for index, tokens in enumerate([prompt, *responses]):
            length.append(tokens)
            prefix_start.append(start)
            prefix_length.append(prompt if index else 0)
            position += tokens
    return AttentionLayout(np.array(length), np.array(prefix_start), np.array(prefix_length))


def dense(query, key, value, segments: AttentionLayout, scale: float, window: int | None):
    """The definition: every token of a segment sees prefix and segment up to itself."""
    tokens = segments.num_tokens
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    position = torch.from_numpy(segments.position_ids())
    for start, length, prefix_start, prefix in zip(
        segments.start, segments.length, segments.prefix_start, segments.prefix_length, strict=True
    ):
        seen = [*range(prefix_start, prefix_start + prefix), *range(start, start + length)]
        for token in range(start, start + length):
            for other in seen:
                near = window is None or position[other] > position[token] - window
                mask[token, other] = bool(position[other] <= position[token] and near)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def inputs(tokens: int, heads: int = 4, kv_heads: int = 2, width: int = 8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, h, width, generator=generator, dtype=dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def assert_equals_dense(segments: AttentionLayout, window: int | None = None, **shape) -> None:
    tensors = inputs(segments.num_tokens, **shape)
    weight = torch.randn_like(tensors[0])
    want = dense(*tensors, segments, 0.3, window)
    want_grads = torch.autograd.grad((want * weight).sum(), tensors)
    got = packed_attention(*tensors, segments, scale=0.3, window=window)
    got_grads = torch.autograd.grad((got * weight).sum(), tensors)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(
    "groups",
    [[(1, [])], [(5, [])], [(4, [3, 1])], [(3, [2, 7, 1]), (6, []), (1, [1, 1])]],
    ids=["one token", "one sequence", "one group", "mixed"],
)
def test_equals_the_dense_definition(groups, window):
    assert_equals_dense(make_layout(groups), window)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 2), (3, 3)])
def test_any_ratio_of_query_to_key_heads(heads, kv_heads):
    assert_equals_dense(make_layout([(3, [2, 4])]), heads=heads, kv_heads=kv_heads)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 12), max_size=4)), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_equals_the_dense_definition_for_any_layout(groups, window):
    assert_equals_dense(make_layout(groups), window)


def test_long_segments_are_cut_into_blocks_without_changing_a_number(monkeypatch):
    monkeypatch.setattr(layout, "MAX_BLOCK_QUERIES", 4)
    monkeypatch.setattr(layout, "MAX_BLOCK_PAIRS", 64)
    segments = make_layout([(9, [11, 2, 5]), (13, [])])
    assert len(segments.blocks(CPU)) > 5
    assert_equals_dense(segments)
    assert_equals_dense(make_layout([(9, [11, 2, 5]), (13, [])]), window=6)


def test_blocks_stay_within_the_limits_on_padding_and_size():
    rng = np.random.default_rng(0)
    segments = make_layout([(int(rng.integers(1, 300)), list(rng.integers(1, 400, 8))) for _ in range(12)])
    covered = []
    for block in segments.blocks(CPU):
        count, queries = block.query_index.shape
        keys = block.key_index.shape[1]
        assert queries <= layout.MAX_BLOCK_QUERIES
        assert count == 1 or count * queries * keys <= layout.MAX_BLOCK_PAIRS
        real = (block.query_position < layout.ABSENT - 1).sum(1) * (block.key_position < layout.ABSENT).sum(1)
        assert real.sum() >= (1 - layout.MAX_PADDING_SHARE) * count * queries * keys
        covered += block.out_target.tolist()
    assert sorted(covered) == list(range(segments.num_tokens))


def test_a_group_of_equal_shape_is_two_calls():
    assert len(make_layout([(45, [21] * 8)] * 16).blocks(CPU)) == 2


def test_position_ids_of_each_response_start_at_the_prompt_length():
    segments = make_layout([(3, [2, 1]), (2, [])])
    assert segments.position_ids().tolist() == [0, 1, 2, 3, 4, 3, 0, 1]
    assert segments.num_pairs == 6 + (2 * 3 + 3) + (3 + 1) + 3


def test_varlen_index_gathers_prefix_and_segment():
    index = make_layout([(3, [2, 1]), (2, [])]).varlen(torch.device("cpu"))
    assert index.query_offsets.tolist() == [0, 3, 5, 6, 8]
    assert index.key_offsets.tolist() == [0, 3, 8, 12, 14]
    assert index.key_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert (index.max_query, index.max_key) == (3, 5)
    assert make_layout([(3, []), (2, [])]).varlen(torch.device("cpu")).key_index is None


def test_gathered_rows_sum_their_gradient_in_float32():
    source = torch.ones(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([0] * 301 + [1])
    attention._GatherRows.apply(source, index).sum().backward()
    assert source.grad.flatten().tolist() == [300.0, 1.0]  # 301 rounded once; a bfloat16 sum of ones stops at 256


def test_empty_segments_are_refused():
    with pytest.raises(ValueError, match="no empty ones"):
        AttentionLayout(np.array([3, 0]), np.array([0, 0]), np.array([0, 3]))


def test_the_adapter_names_what_it_does_not_have():
    module, x = torch.nn.Identity(), torch.randn(1, 2, 3, 4)
    segments = make_layout([(3, [])])
    with pytest.raises(ValueError, match="without its packing"):
        transformers_attention(module, x, x, x, None)
    with pytest.raises(ValueError, match="softcap"):
        transformers_attention(module, x, x, x, None, packing=segments, softcap=30.0)
    with pytest.raises(ValueError, match="attention_dropout"):
        transformers_attention(module, x, x, x, None, packing=segments, dropout=0.1)
    with pytest.raises(ValueError, match=r"\(1, heads, 3, D\)"):
        transformers_attention(module, x[:, :, :2], x, x, None, packing=segments)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5])
def test_cuda_kernels_agree_with_the_cpu(window):
    segments = make_layout([(37, [20, 5, 33]), (64, [])])
    tensors = inputs(segments.num_tokens, width=64, dtype=torch.float32)
    want = dense(*tensors, segments, 0.125, window)
    want_grads = torch.autograd.grad(want.square().sum(), tensors)
    on_gpu = [t.detach().cuda().bfloat16().requires_grad_() for t in tensors]
    got = packed_attention(*on_gpu, segments, scale=0.125, window=window)
    got_grads = torch.autograd.grad(got.float().square().sum(), on_gpu)
    torch.testing.assert_close(got.float().cpu(), want, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(mine.float().cpu(), theirs, rtol=5e-2, atol=1e-1)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2)], ids=["every head its own keys", "grouped queries"])
def test_cuda_kernels_agree_with_sdpa_over_whole_sequences(heads, kv_heads):
    """Shared prompts against what they stand for: each response behind a copy of its prompt."""
    groups = [(129, [64, 1, 200]), (33, [17, 17])]
    segments = make_layout(groups)
    query, key, value = (
        t.detach().cuda().bfloat16().requires_grad_()
        for t in inputs(segments.num_tokens, heads, kv_heads, width=64, dtype=torch.float32)
    )
    got = packed_attention(query, key, value, segments, scale=0.125)

    want, position = torch.empty_like(got), 0
    for prompt, responses in groups:
        shared = range(position, position + prompt)
        position += prompt
        for tokens in responses:
            own = range(position, position + tokens)
            position += tokens
            rows = torch.tensor([*shared, *own], device="cuda")
            q, k, v = (t[rows].transpose(0, 1)[None] for t in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=0.125, enable_gqa=heads != kv_heads
            )
            # A prompt's rows are the same in every copy of it: the last one's stay, and so does their gradient.
            want = want.index_copy(0, rows, out[0].transpose(0, 1))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)

    weight = torch.randn_like(got)
    got_grads = torch.autograd.grad((got * weight).sum(), (query, key, value))
    want_grads = torch.autograd.grad((want * weight).sum(), (query, key, value))
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-2)
