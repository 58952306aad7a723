"""Log-probs and entropies against a log-softmax over all logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.algos.distillation import distillation_loss
from hrl.models.ops.log_prob import PLAIN, LogitForm, token_statistics


def logits_of(hidden, weight, bias=None, form=PLAIN):
    logits = hidden @ weight.t()
    logits = form.scale * (logits if bias is None else logits + bias)
    return logits if form.softcap is None else form.softcap * torch.tanh(logits / form.softcap)


def plain(hidden, weight, labels, temperature, bias=None, form=PLAIN):
    log_p = (logits_of(hidden, weight, bias, form) / temperature).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def inputs(tokens: int, width: int, vocabulary: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens * vocabulary)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=generator)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 23),
    chunk=st.integers(1, 200),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    weights=st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5])),
    form=st.builds(LogitForm, st.sampled_from([1.0, 0.0625, 1.7]), st.sampled_from([None, 0.8, 30.0])),
    with_bias=st.booleans(),
)
def test_values_and_gradients_for_any_tiling(tokens, vocabulary, chunk, temperature, weights, form, with_bias):
    hidden, weight, labels = inputs(tokens, 5, vocabulary)
    bias = torch.linspace(-1, 2, vocabulary, dtype=torch.float64).requires_grad_() if with_bias else None
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    scale = torch.linspace(-1.0, 2.0, tokens, dtype=torch.float64)

    def total(log_prob, entropy):
        return weights[0] * (scale * log_prob).sum() + weights[1] * (scale.flip(0) * entropy).sum()

    want = plain(hidden, weight, labels, temperature, bias, form)
    found = token_statistics(
        hidden,
        weight,
        labels,
        temperature,
        chunk=chunk,
        with_entropy=True,
        with_sum_pi_squared=True,
        bias=bias,
        form=form,
    )
    got, squares = (found.log_prob, found.entropy), found.sum_pi_squared
    probabilities = (logits_of(hidden, weight, bias, form) / temperature).softmax(-1)
    torch.testing.assert_close(squares, probabilities.square().sum(-1), rtol=1e-11, atol=1e-11)
    assert not squares.requires_grad
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    want_grads = torch.autograd.grad(total(*want), leaves)
    got_grads = torch.autograd.grad(total(*got), leaves)
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 23),
    chunk=st.integers(1, 200),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    count=st.integers(1, 5),
    with_label=st.booleans(),
    form=st.builds(LogitForm, st.sampled_from([1.0, 0.0625, 1.7]), st.sampled_from([None, 0.8, 30.0])),
)
def test_other_tokens_and_the_likeliest_for_any_tiling(tokens, vocabulary, chunk, temperature, count, with_label, form):
    """Divergences over the teacher's likeliest tokens: values, and gradients of hidden states and weight."""
    hidden, weight, labels = inputs(tokens, 5, vocabulary)
    teacher, count = 0.7 * weight.detach().flip(0), min(count, vocabulary)
    log_q = (logits_of(hidden.detach(), teacher, form=form) / temperature).log_softmax(-1)
    options = {"chunk": chunk, "with_entropy": False, "form": form}
    top = token_statistics(hidden.detach(), teacher, labels, temperature, num_top=count, **options)
    want = log_q.topk(count, -1).values
    torch.testing.assert_close(top.top_log_prob, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(log_q.gather(1, top.top_ids), want, rtol=1e-11, atol=1e-11)
    log_p = (logits_of(hidden, weight, form=form) / temperature).log_softmax(-1)
    at = log_p.gather(1, top.top_ids)
    found = token_statistics(hidden, weight, labels, temperature, at=top.top_ids, **options)
    torch.testing.assert_close(found.log_prob_at, at, rtol=1e-11, atol=1e-11)
    for name in ("reverse_kl_topk", "forward_kl_topk"):
        label = log_p.gather(1, labels[:, None]).sum() * with_label
        expected = distillation_loss(name, at, want).sum() + label
        got = distillation_loss(name, found.log_prob_at, want).sum() + found.log_prob.sum() * with_label
        grads = [torch.autograd.grad(value, [hidden, weight], retain_graph=True) for value in (got, expected)]
        for mine, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


def test_a_hand_computed_case():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0], [2.0]]) * torch.log(torch.tensor(2.0))
    log_prob, entropy, *_ = token_statistics(hidden, weight, torch.tensor([1]), 1.0, chunk=2, with_entropy=True)
    assert log_prob.item() == pytest.approx(torch.log(torch.tensor(2 / 7)).item())  # probabilities 1/7, 2/7, 4/7
    want = -sum(p * torch.log(torch.tensor(p)).item() for p in (1 / 7, 2 / 7, 4 / 7))
    assert entropy.item() == pytest.approx(want, rel=1e-6)


def test_a_cap_comes_after_bias_and_scale_and_before_the_temperature():
    """Products 0 and 1, bias 0 and 1, scale 3, cap 2, temperature 0.5: logits 0 and 2 tanh 3, over a half."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0]])
    log_prob, *_ = token_statistics(
        hidden,
        weight,
        torch.tensor([0]),
        0.5,
        chunk=1,
        with_entropy=False,
        bias=torch.tensor([0.0, 1.0]),
        form=LogitForm(scale=3.0, softcap=2.0),
    )
    capped = 2 * math.tanh(3 * 2 / 2)
    assert log_prob.item() == pytest.approx(-math.log(1 + math.exp(capped / 0.5)), rel=1e-6)


def test_entropy_is_only_there_when_asked_for():
    hidden, weight, labels = inputs(3, 4, 7)
    log_prob, entropy, squares, *_ = token_statistics(hidden, weight, labels, 1.0, chunk=64, with_entropy=False)
    assert entropy is None and squares is None
    torch.testing.assert_close(log_prob, plain(hidden, weight, labels, 1.0)[0])


def test_huge_logits_do_not_overflow():
    hidden, weight, labels = inputs(4, 4, 9, torch.float32)
    big = (hidden.detach() * 1e3).requires_grad_()
    log_prob, entropy, *_ = token_statistics(big, weight, labels, 1.0, chunk=8, with_entropy=True)
    torch.testing.assert_close(log_prob, plain(big, weight, labels, 1.0)[0], rtol=1e-4, atol=1e-2)
    (log_prob.sum() + entropy.sum()).backward()
    assert torch.isfinite(big.grad).all() and torch.isfinite(entropy).all()


def test_bfloat16_accumulates_in_float32():
    hidden, weight, labels = (t.detach() if t.is_floating_point() else t for t in inputs(50, 32, 500, torch.float32))
    low = [t.bfloat16().requires_grad_() for t in (hidden, 0.1 * weight)]
    log_prob, *_ = token_statistics(*low, labels, 1.0, chunk=1000, with_entropy=False)
    want, _ = plain(*(t.detach().float() for t in low), labels, 1.0)
    assert log_prob.dtype == torch.float32
    assert (log_prob - want).abs().max() < 1e-4  # a product with a bfloat16 result is off by 0.01
    log_prob.sum().backward()
    assert low[0].grad.dtype == low[1].grad.dtype == torch.bfloat16


def test_a_label_outside_the_vocabulary_is_no_number():
    hidden, weight, _ = inputs(2, 4, 7)
    log_prob, *_ = token_statistics(hidden, weight, torch.tensor([3, 7]), 1.0, chunk=64, with_entropy=False)
    assert torch.isfinite(log_prob[0]) and torch.isnan(log_prob[1])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_the_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match="temperature"):
        token_statistics(*inputs(2, 4, 7), temperature, chunk=64, with_entropy=False)


def test_shapes_must_fit():
    hidden, weight, labels = inputs(2, 4, 7)
    with pytest.raises(ValueError, match="a bias"):
        token_statistics(hidden, weight, labels, 1.0, chunk=64, with_entropy=False, bias=torch.zeros(6))
    with pytest.raises(ValueError, match="don't fit"):
        token_statistics(hidden, weight[:, :3], labels, 1.0, chunk=64, with_entropy=False)


def test_the_largest_tensor_is_a_tile(monkeypatch):
    hidden, weight, labels = inputs(64, 8, 1000, torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() is not None:
                    largest = max(largest, tensor.untyped_storage().nbytes() // tensor.element_size())
            return out

    with Watch():
        log_prob, entropy, *_ = token_statistics(hidden, weight, labels, 1.0, chunk=2048, with_entropy=True)
        (log_prob.sum() + entropy.sum()).backward()
    assert largest <= max(2048, weight.numel())


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_bfloat16_on_a_gpu_agrees_with_float64_and_holds_a_tile(temperature):
    tokens, width, vocabulary, chunk = 2048, 256, 32000, 1 << 22
    hidden, weight, labels = inputs(tokens, width, vocabulary, torch.float32)
    low = [t.detach().mul(0.1).bfloat16().cuda().requires_grad_() for t in (hidden, weight)]
    labels, scale = labels.cuda(), torch.linspace(-1.0, 2.0, tokens, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()

    log_prob, entropy, *_ = token_statistics(*low, labels, temperature, chunk=chunk, with_entropy=True)
    grads = torch.autograd.grad((scale * log_prob + 0.5 * entropy).sum(), low)
    peak = torch.cuda.max_memory_allocated() - held

    exact = [t.detach().double().requires_grad_() for t in low]
    want_log_prob, want_entropy = plain(*exact, labels, temperature)
    want_grads = torch.autograd.grad((scale * want_log_prob + 0.5 * want_entropy).sum(), exact)
    assert log_prob.dtype == entropy.dtype == torch.float32 and grads[0].dtype == torch.bfloat16
    # Products of bfloat16 numbers are exact in float32: what is left is the order of the sums.
    torch.testing.assert_close(log_prob.double(), want_log_prob, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-4, atol=1e-3)
    for mine, theirs in zip(grads, want_grads, strict=True):
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error < 2e-2, float(error)
    all_logits = 4 * tokens * vocabulary
    assert peak < all_logits, f"{peak >> 20} MiB at once, the logits alone have {all_logits >> 20}"
