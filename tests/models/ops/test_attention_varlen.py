"""The variable-length kernels of a GPU: what is asked of them, on stand-ins and, where there is one, on the GPU."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from hrl.models.ops import attention_varlen
from hrl.models.ops.attention import packed_attention
from hrl.models.ops.attention_blocks import Scoring
from hrl.models.ops.attention_varlen import has_kernel, varlen_attention, varlen_index
from hrl.models.ops.layout import Reach
from tests.models.ops.dense import assert_equals_dense, dense, inputs, make_layout, make_tree

CPU = torch.device("cpu")


def test_varlen_index_gathers_prefix_and_segment():
    index = varlen_index(make_layout([(3, [2, 1]), (2, [])]), CPU)
    assert index.query_offsets.tolist() == [0, 3, 5, 6, 8]
    assert index.key_offsets.tolist() == [0, 3, 8, 12, 14]
    assert index.key_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert (index.max_query, index.max_key) == (3, 5)
    assert varlen_index(make_layout([(3, []), (2, [])]), CPU).key_index is None


def test_varlen_index_gathers_the_whole_path_of_a_segment():
    index = varlen_index(make_tree([(4, 0, 0), (2, 0, 3), (2, 1, 4)]), CPU)
    assert index.query_offsets.tolist() == [0, 4, 6, 8]
    assert index.key_offsets.tolist() == [0, 4, 9, 15]
    assert index.key_index.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2, 4, 6, 7]
    assert (index.max_query, index.max_key) == (4, 6)


def test_gathered_rows_sum_their_gradient_in_float32():
    source = torch.ones(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([0] * 301 + [1])
    attention_varlen._GatherRows.apply(source, index).sum().backward()
    assert source.grad.flatten().tolist() == [300.0, 1.0]  # 301 rounded once; a bfloat16 sum of ones stops at 256


def test_a_chunk_is_a_run_of_its_own():
    index = varlen_index(make_layout([(3, [2, 1])]), CPU, 2)  # positions 0 1 2 | 3 4 | 3
    assert index.query_offsets.tolist() == [0, 2, 3, 4, 5, 6]
    assert index.key_offsets.tolist() == [0, 2, 3, 5, 6, 8]
    assert index.key_index.tolist() == [0, 1, 2, 2, 3, 4, 2, 5]
    assert (index.max_query, index.max_key) == (2, 2)


# ---------------------------------------------------------------------------------------------- stand-in kernels


def scores_of_run(query, key, scale, left, softcap=0.0):
    """`(H, q, k)` as the kernels define them: causal from the last query and key backwards, `left` keys before."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    last = torch.arange(query.shape[0])[:, None] + key.shape[0] - query.shape[0]
    position = torch.arange(key.shape[0])[None]
    hidden = (position > last) | ((position < last - left) if left >= 0 else torch.zeros(1, dtype=torch.bool))
    return scores.masked_fill(hidden, -torch.inf)


def runs(query, key, query_offsets, key_offsets):
    query_at, key_at = query_offsets.tolist(), key_offsets.tolist()
    assert query_at[-1] == query.shape[0] and key_at[-1] == key.shape[0]
    for i in range(len(query_at) - 1):
        yield slice(query_at[i], query_at[i + 1]), slice(key_at[i], key_at[i + 1])


def kernel(query, key, value, query_offsets, key_offsets, max_query, max_key, scale, left, softcap=0.0):
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "one width"
    assert query.shape[-1] % 8 == 0, "a multiple of 8"
    assert query_offsets.dtype == key_offsets.dtype == torch.int32
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    outs, normalisers = [], []
    for q, k in runs(query, key, query_offsets, key_offsets):
        assert q.stop - q.start <= max_query and k.stop - k.start <= max_key
        scores = scores_of_run(query[q], key[k], scale, left, softcap)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[k]))
        normalisers.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(normalisers, 1)


def varlen_of_torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert query.shape[1] == key.shape[1], "2.11 documents equal heads"
    assert window_size[1] == 0
    return kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size[0])[0]


def varlen_of_torch_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False, **rest
):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size[0])[0]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    **rest,
):
    assert causal and not rest
    return kernel(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window_size[0], softcap
    )[0]


def aten_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, *, return_debug_mask, scale, **window):
    left = window["window_size_left"]
    assert dropout == 0.0 and not return_debug_mask and is_causal == (left < 0) and window["window_size_right"] == 0
    with torch.no_grad():
        out, normaliser = kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale, left)
    return out, normaliser, torch.zeros(2), torch.zeros(0), torch.zeros(0)


def aten_backward(
    grad, q, k, v, out, normaliser, cu_q, cu_k, max_q, max_k, dropout, is_causal, rng, unused, *, scale, **window
):
    """Flash attention's backward (Dao et al. 2022, algorithm 4): it believes the output and log-sum-exp it is given."""
    repeats = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for rows, keys in runs(q, k, cu_q, cu_k):
        scores = scores_of_run(q[rows], wide_k[keys], scale, window["window_size_left"])
        probs = torch.exp(scores - normaliser[:, rows, None])
        delta = (grad[rows] * out[rows]).sum(-1).t()[..., None]
        grad_scores = probs * (torch.einsum("qhd,khd->hqk", grad[rows], wide_v[keys]) - delta) * scale
        grad_q[rows] += torch.einsum("hqk,khd->qhd", grad_scores, wide_k[keys])
        grad_k[keys] += torch.einsum("hqk,qhd->khd", grad_scores, q[rows])
        grad_v[keys] += torch.einsum("hqk,qhd->khd", probs, grad[rows])
    fold = (k.shape[0], k.shape[1], repeats, k.shape[2])
    return grad_q, grad_k.view(fold).sum(2), grad_v.view(fold).sum(2)


@pytest.fixture(params=["torch 2.11", "torch 2.12", "flash-attn"])
def kernels(request, monkeypatch):
    """Stand-ins in the place of every kernel, in float64, so that the plumbing is seen and not rounding."""
    of_torch = varlen_of_torch_2_11 if request.param == "torch 2.11" else varlen_of_torch_2_12
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_torch)
    monkeypatch.setattr(attention_varlen, "_has_flash_attn", lambda: request.param == "flash-attn")
    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward, raising=False)
    return request.param


def attend(query, key, value, segments, *, scale, sinks, window, chunk, softcap):
    return varlen_attention(query, key, value, sinks, segments, Scoring(scale, Reach(window, chunk), softcap))


SHAPES = [
    {"heads": 4, "kv_heads": 4},
    {"heads": 4, "kv_heads": 2},
    {"heads": 6, "kv_heads": 1, "width": 5},
    {"heads": 2, "kv_heads": 2, "width": 24, "value_width": 16},
    {"heads": 4, "kv_heads": 2, "width": 8, "value_width": 13},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        make_layout([(5, [])]),
        make_layout([(3, [2, 7, 1]), (6, []), (1, [1, 1])]),
        make_tree([(6, 0, 0), (2, 0, 3), (4, 1, 4), (1, 2, 8), (3, 2, 2), (5, 0, 0), (1, 5, 5)]),
    ],
    ids=["one sequence", "mixed", "tree"],
)
def test_the_kernels_are_asked_for_the_definition(kernels, shape, layout):
    for with_sinks, reach in itertools.product([False, True], [{}, {"window": 3}, {"chunk": 3}]):
        assert_equals_dense(layout, attend=attend, with_sinks=with_sinks, **reach, **shape)


@pytest.mark.parametrize("kernels", ["flash-attn"], indirect=True)
def test_flash_attn_is_handed_the_soft_cap(kernels):
    assert_equals_dense(make_layout([(3, [2, 7])]), attend=attend, softcap=0.7, window=4)
    assert_equals_dense(make_tree([(6, 0, 0), (2, 0, 3), (4, 1, 4)]), attend=attend, softcap=0.7, window=4)


def on_gpu(width: int, dtype=torch.bfloat16):
    return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(5, 4, width), device=torch.device("cuda", 0))


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(attention_varlen, "_runs_flash", lambda device: True)


@pytest.mark.parametrize("kernels", ["flash-attn", "torch 2.12"], indirect=True)
def test_what_no_kernel_computes_is_left_to_the_blocks(kernels, ampere):
    plain, capped = Scoring(0.1), Scoring(0.1, softcap=30.0)
    assert has_kernel(on_gpu(256), on_gpu(128), None, plain)
    assert has_kernel(on_gpu(64), on_gpu(64), torch.zeros(4), plain)
    assert has_kernel(on_gpu(64), on_gpu(64), None, capped) == (kernels == "flash-attn")
    assert not has_kernel(on_gpu(64), on_gpu(64), torch.zeros(4), capped)
    assert not has_kernel(on_gpu(264), on_gpu(64), None, plain)
    assert not has_kernel(on_gpu(64, torch.float32), on_gpu(64, torch.float32), None, plain)
    assert not has_kernel(torch.zeros(5, 4, 64, dtype=torch.bfloat16), on_gpu(64), None, plain)


def test_a_flash_attn_without_soft_cap_is_not_asked_for_it(monkeypatch, ampere):
    monkeypatch.setattr(attention_varlen, "_has_flash_attn", lambda: True)
    old = SimpleNamespace(flash_attn_varlen_func=lambda q, k, v, window_size: None)
    monkeypatch.setitem(sys.modules, "flash_attn", old)
    assert not has_kernel(on_gpu(64), on_gpu(64), None, Scoring(0.1, softcap=30.0))


@pytest.mark.parametrize("capability, runs", [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)])
def test_a_card_before_ampere_takes_the_blocks(capability, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention_varlen, "_runs_flash", attention_varlen._runs_flash.__wrapped__)
    assert has_kernel(on_gpu(64), on_gpu(64), None, Scoring(0.1)) == runs


# ---------------------------------------------------------------------------------------------- torch's own, on meta


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torchs_kernels_are_differentiable_on_meta_tensors(shape, with_sinks):
    """Forward and backward through the functions that run on CUDA, by their meta implementations: shapes and dtypes."""
    segments = make_layout([(3, [2, 7, 1]), (6, [])])
    query, key, value = (t.detach().bfloat16().to("meta").requires_grad_() for t in inputs(19, **shape))
    sinks = torch.empty(query.shape[1], dtype=torch.bfloat16, device="meta", requires_grad=True) if with_sinks else None
    out = attend(query, key, value, segments, scale=0.1, sinks=sinks, window=4, chunk=None, softcap=None)
    assert out.is_meta and out.dtype == torch.bfloat16
    assert out.shape == (*query.shape[:2], value.shape[2]) and out.stride(-1) == 1
    leaves = [t for t in (query, key, value, sinks) if t is not None]
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape and grad.dtype == leaf.dtype and grad.is_meta


# ---------------------------------------------------------------------------------------------- real kernels


def low_and_dense(segments, options, **shape):
    """bfloat16 leaves on the GPU, and the definition over the same numbers in float64."""
    sinks = options.pop("sinks", False)
    query, key, value = (t.detach().bfloat16() for t in inputs(segments.num_tokens, dtype=torch.float32, **shape))
    tensors = [query, key, value, torch.linspace(-2, 2, query.shape[1]).bfloat16() if sinks else None]
    low = [t if t is None else t.cuda().requires_grad_() for t in tensors]
    truth = [t if t is None else t.double().requires_grad_() for t in tensors]
    return low, truth, dense(*truth, segments, 0.125, **options)


OPTIONS = [{}, {"window": 5}, {"chunk": 16}, {"sinks": True}, {"sinks": True, "window": 8}, {"softcap": 2.0}]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 8, "kv_heads": 8, "width": 64},
        {"heads": 8, "kv_heads": 2, "width": 128},
        {"heads": 4, "kv_heads": 4, "width": 192, "value_width": 128},
        {"heads": 4, "kv_heads": 2, "width": 36},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "segments",
    [
        make_layout([(37, [20, 5, 33]), (64, [])]),
        make_tree([(57, 0, 0), (25, 0, 37), (33, 1, 40), (5, 2, 70), (9, 0, 57)]),
    ],
    ids=["prompts", "tree"],
)
def test_cuda_agrees_with_the_definition(options, shape, segments):
    options = dict(options)
    low, truth, want = low_and_dense(segments, options, **shape)
    query, key, value, sinks = low
    got = packed_attention(query, key, value, segments, scale=0.125, sinks=sinks, **options)
    torch.testing.assert_close(got.double().cpu(), want, rtol=2e-2, atol=2e-2)
    weight = torch.randn_like(want).bfloat16().double()
    got_grads = torch.autograd.grad((got * weight.cuda()).sum(), [t for t in low if t is not None])
    want_grads = torch.autograd.grad((want * weight).sum(), [t for t in truth if t is not None])
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        assert (mine.double().cpu() - theirs).norm() <= 2e-2 * theirs.norm() + 1e-3


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
