"""Packed attention against the definition: one dense softmax over an explicit mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.models.ops import attention_blocks
from hrl.models.ops.attention import packed_attention
from hrl.models.ops.layout import AttentionLayout, Reach
from tests.models.ops.dense import assert_equals_dense, inputs, make_layout, make_tree

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(
    "groups",
    [[(1, [])], [(5, [])], [(4, [3, 1])], [(3, [2, 7, 1]), (6, []), (1, [1, 1])]],
    ids=["one token", "one sequence", "one group", "mixed"],
)
def test_equals_the_dense_definition(groups, window):
    assert_equals_dense(make_layout(groups), window=window)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 2), (3, 3)])
def test_any_ratio_of_query_to_key_heads(heads, kv_heads):
    assert_equals_dense(make_layout([(3, [2, 4])]), heads=heads, kv_heads=kv_heads)


GROUPS = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 12), max_size=4)), min_size=1, max_size=4)
TREES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=8)
LAYOUTS = st.one_of(GROUPS.map(make_layout), TREES.map(make_tree))


@settings(max_examples=25, deadline=None)
@given(LAYOUTS, st.one_of(st.none(), st.integers(1, 9)))
def test_equals_the_dense_definition_for_any_layout(layout, window):
    assert_equals_dense(layout, window=window)


@settings(max_examples=60, deadline=None)
@given(
    LAYOUTS,
    st.one_of(st.none(), st.integers(1, 9)),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from([None, 0.5, 3.0]),
    st.booleans(),
    st.sampled_from([(4, 2), (3, 3), (6, 1)]),
    st.sampled_from([(8, 8), (8, 5), (3, 7)]),
)
def test_soft_cap_sinks_chunks_and_unequal_widths_equal_the_dense_definition(
    layout, window, chunk, softcap, with_sinks, heads, widths
):
    assert_equals_dense(
        layout,
        window=window,
        chunk=chunk,
        softcap=softcap,
        with_sinks=with_sinks,
        heads=heads[0],
        kv_heads=heads[1],
        width=widths[0],
        value_width=widths[1],
    )


def test_a_sink_by_hand():
    """One token sees itself with score 0 beside a sink of log 3: it keeps a quarter of its value."""
    zero, value = torch.zeros(1, 1, 1), torch.full((1, 1, 1), 8.0)
    sink = torch.log(torch.tensor([3.0])).requires_grad_()
    out = packed_attention(zero, zero, value, make_layout([(1, [])]), scale=1.0, sinks=sink)
    out.sum().backward()
    assert out.item() == pytest.approx(2.0)
    assert sink.grad.item() == pytest.approx(-0.75 * 2.0)  # d(8 / (1 + e^b)) / db = -8 * 3 / 16


def test_a_soft_cap_by_hand():
    """Scores 0 and 3, capped at 1, are 0 and tanh 3."""
    query, key = torch.tensor([1.0, 1.0]).view(2, 1, 1), torch.tensor([0.0, 3.0]).view(2, 1, 1)
    value = torch.tensor([0.0, 1.0]).view(2, 1, 1)
    out = packed_attention(query, key, value, make_layout([(2, [])]), scale=1.0, softcap=1.0)
    assert out.flatten().tolist() == pytest.approx([0.0, torch.tensor(3.0).tanh().sigmoid().item()])


def test_a_chunk_by_hand():
    """With equal scores a token's output is the mean of the values it sees: from the start of its chunk to itself."""
    zero, value = torch.zeros(6, 1, 1), torch.arange(6.0).view(6, 1, 1)
    segments = make_layout([(3, [2, 1])])  # positions 0 1 2 | 3 4 | 3
    out = packed_attention(zero, zero, value, segments, scale=1.0, chunk=2)
    assert out.flatten().tolist() == pytest.approx([0, 0.5, 2, (2 + 3) / 2, 4, (2 + 5) / 2])


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 4}, {"chunk": 3}, {"sinks": True}], ids=str)
def test_a_shared_prompt_equals_a_copy_of_it_for_each_response(options):
    """Two packings of the same sequences: outputs of the responses and all gradients agree."""
    shared, apart = make_layout([(5, [3, 4])]), make_layout([(5 + 3, []), (5 + 4, [])])
    copies = torch.tensor([*range(5), 5, 6, 7, *range(5), 8, 9, 10, 11])  # tokens of `shared` in the order of `apart`
    query, key, value = inputs(12)
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(4, dtype=torch.float64).requires_grad_()
    leaves = [query, key, value, *([options["sinks"]] if "sinks" in options else [])]
    together = packed_attention(query, key, value, shared, scale=0.3, **options)[copies]
    alone = packed_attention(query[copies], key[copies], value[copies], apart, scale=0.3, **options)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(alone)
    got, want = (torch.autograd.grad((out * weight).sum(), leaves) for out in (together, alone))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_bfloat16_scores_are_not_rounded_before_the_soft_cap():
    query, key, value = (t.detach() for t in inputs(40, width=64, dtype=torch.float32))
    low = [(4 * t).bfloat16() for t in (query, key)] + [value.bfloat16()]
    segments = make_layout([(40, [])])
    got = packed_attention(*low, segments, scale=0.125, softcap=30.0)
    want = packed_attention(*(t.double() for t in low), make_layout([(40, [])]), scale=0.125, softcap=30.0)
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).abs().max() < 0.02


@pytest.mark.parametrize("reach", [{"window": 0}, {"chunk": 0}, {"window": -1}])
def test_a_reach_is_at_least_one_token(reach):
    with pytest.raises(ValueError, match="at least 1"):
        Reach(**reach)


def test_long_segments_are_cut_into_blocks_without_changing_a_number(monkeypatch):
    monkeypatch.setattr(attention_blocks, "MAX_BLOCK_QUERIES", 4)
    monkeypatch.setattr(attention_blocks, "MAX_BLOCK_PAIRS", 64)
    segments = make_layout([(9, [11, 2, 5]), (13, [])])
    assert len(attention_blocks.stacked_blocks(segments, CPU)) > 5
    assert_equals_dense(segments)
    assert_equals_dense(make_layout([(9, [11, 2, 5]), (13, [])]), window=6)
    assert_equals_dense(make_layout([(9, [11, 2, 5]), (13, [])]), chunk=5, softcap=2.0, with_sinks=True)


def test_blocks_stay_within_the_limits_on_padding_and_size():
    rng = np.random.default_rng(0)
    segments = make_layout([(int(rng.integers(1, 300)), list(rng.integers(1, 400, 8))) for _ in range(12)])
    covered = []
    for block in attention_blocks.stacked_blocks(segments, CPU):
        count, queries = block.query_index.shape
        keys = block.key_index.shape[1]
        assert queries <= attention_blocks.MAX_BLOCK_QUERIES
        assert count == 1 or count * queries * keys <= attention_blocks.MAX_BLOCK_PAIRS
        real = (block.query_position < attention_blocks.ABSENT - 1).sum(1) * (
            block.key_position < attention_blocks.ABSENT
        ).sum(1)
        assert real.sum() >= (1 - attention_blocks.MAX_PADDING_SHARE) * count * queries * keys
        covered += block.out_target.tolist()
    assert sorted(covered) == list(range(segments.num_tokens))


def test_a_group_of_equal_shape_is_two_calls():
    assert len(attention_blocks.stacked_blocks(make_layout([(45, [21] * 8)] * 16), CPU)) == 2


def test_position_ids_of_each_response_start_at_the_prompt_length():
    segments = make_layout([(3, [2, 1]), (2, [])])
    assert segments.position_ids().tolist() == [0, 1, 2, 3, 4, 3, 0, 1]
    assert segments.num_pairs == 6 + (2 * 3 + 3) + (3 + 1) + 3


#: p0 p1 a0 a1 | b0 b1 after p0 p1 a0 | c0 c1 after p0 p1 a0 b0 | d0 after the whole first
DEEP = make_tree([(4, 0, 0), (2, 0, 3), (2, 1, 4), (1, 0, 4)])


def test_a_path_follows_its_parents_up_to_where_each_was_left():
    assert [path.tolist() for path in DEEP.paths()] == [
        [0, 1, 2, 3],
        [0, 1, 2, 4, 5],
        [0, 1, 2, 4, 6, 7],
        [*range(4), 8],
    ]
    assert DEEP.position_ids().tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 4]
    assert DEEP.num_pairs == 10 + (2 * 3 + 3) + (2 * 4 + 3) + 5


def test_attention_in_a_deep_tree_by_hand():
    """With equal scores a token's output is the mean of the values it sees; with a window of 2, of the last two."""
    zero, value = torch.zeros(9, 1, 1), torch.arange(9.0).view(9, 1, 1)
    out = packed_attention(zero, zero, value, DEEP, scale=1.0).flatten().tolist()
    assert out == pytest.approx([0, 0.5, 1, 1.5, 7 / 4, 12 / 5, 13 / 5, 20 / 6, 14 / 5])
    near = packed_attention(zero, zero, value, DEEP, scale=1.0, window=2).flatten().tolist()
    assert near == pytest.approx([0, 0.5, 1.5, 2.5, 3, 4.5, 5, 6.5, 5.5])


def test_empty_segments_are_refused():
    with pytest.raises(ValueError, match="no empty ones"):
        AttentionLayout(np.array([3, 0]), np.array([0, 0]), np.array([0, 3]))


@pytest.mark.parametrize(
    ("parent", "prefix", "message"),
    [
        ([0, 1, 0], [0, 3, 0], "earlier segment"),
        ([0, -1, 0], [0, 3, 0], "earlier segment"),
        ([0, 0, 2], [0, 0, 1], "earlier segment"),
        ([0, 0, 1], [0, 2, 5], "beginning of its parent's path"),
        ([0, 0, 0], [0, -1, 0], "beginning of its parent's path"),
    ],
)
def test_a_prefix_is_the_beginning_of_an_earlier_path(parent, prefix, message):
    with pytest.raises(ValueError, match=message):
        AttentionLayout(np.array([3, 2, 2]), np.array(parent), np.array(prefix))
    AttentionLayout(np.array([3, 2, 2]), np.array([7, 0, 1]), np.array([0, 2, 4]))
