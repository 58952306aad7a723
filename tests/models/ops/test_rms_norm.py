"""The fused RMSNorm against its definition and against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from hrl.models.ops import rms_norm as module
from hrl.models.ops.rms_norm import by_torch, rms_norm, use_fused_rms_norms


@pytest.mark.parametrize("rows_at_once", [2, 512])
def test_gradients_are_those_of_the_definition(rows_at_once, monkeypatch):
    monkeypatch.setattr(module, "CPU_ROWS", rows_at_once)
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    want = weight * hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(rms_norm(hidden, weight, 1e-5), want, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda h, w: rms_norm(h, w, 1e-5), (hidden, weight))


def test_bfloat16_rounds_as_transformers_does():
    norm = LlamaRMSNorm(64).bfloat16()
    nn.init.normal_(norm.weight)
    hidden = torch.randn(700, 64).bfloat16()
    assert torch.equal(rms_norm(hidden, norm.weight, norm.variance_epsilon), norm(hidden))


def test_inputs_are_left_alone():
    hidden, weight = torch.randn(3, 8), torch.randn(8)
    kept = hidden.clone()
    rms_norm(hidden, weight, 1e-6)
    assert torch.equal(hidden, kept)


def test_only_norms_with_the_same_numbers_are_replaced():
    plain, other = nn.ModuleList([LlamaRMSNorm(8), Qwen2RMSNorm(8)]), GemmaRMSNorm(8)
    assert use_fused_rms_norms(nn.ModuleList([plain, other, nn.LayerNorm(8)])) == 2
    nn.init.normal_(other.weight)
    hidden = torch.randn(2, 8)
    want = hidden / (hidden.square().mean(-1, keepdim=True) + other.eps).sqrt() * (1 + other.weight)
    torch.testing.assert_close(other(hidden), want)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.float32, torch.bfloat16)])
def test_what_a_gpu_runs_has_the_same_numbers(dtypes):
    hidden = torch.randn(700, 64).to(dtypes[0]).requires_grad_()
    weight = torch.randn(64).to(dtypes[1]).requires_grad_()
    got, want = by_torch(hidden, weight, 1e-5), rms_norm(hidden, weight, 1e-5)
    assert got.dtype == want.dtype == dtypes[1]
    torch.testing.assert_close(got, want, rtol=1e-6 if dtypes[1] == torch.float32 else 0.0, atol=0.0)
    grad = torch.randn(700, 64).to(dtypes[1])
    gradients = [torch.autograd.grad(out, (hidden, weight), grad) for out in (got, want)]
    for mine, theirs in zip(*gradients, strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < (1e-6 if torch.bfloat16 not in dtypes else 1e-2), float(error)


@pytest.mark.gpu
def test_a_gpu_normalises_in_one_kernel_each_way():
    hidden, weight = (torch.randn(*shape).bfloat16().cuda().requires_grad_() for shape in ((300, 896), (896,)))
    grad, seen = torch.randn(300, 896).bfloat16().cuda(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    with Watch():
        out = rms_norm(hidden, weight, 1e-6)
        got = torch.autograd.grad(out, (hidden, weight), grad)
    assert seen.count("_fused_rms_norm") == seen.count("_fused_rms_norm_backward") == 1 and "rsqrt" not in seen
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    want_out = exact[1] * exact[0] * torch.rsqrt(exact[0].square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-2, atol=1e-4)
    for mine, theirs in zip(got, torch.autograd.grad(want_out, exact, grad.double()), strict=True):
        assert (mine.double() - theirs).norm() < 1e-2 * theirs.norm()
