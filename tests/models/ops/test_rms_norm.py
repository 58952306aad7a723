"""The fused RMSNorm against its definition and against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from hrl.models.ops import rms_norm as module
from hrl.models.ops.rms_norm import rms_norm, use_fused_rms_norms


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
