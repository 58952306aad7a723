"""Stage ops: what CUDA computes against plain float32 formulas, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hrl.models.ops.attention import packed_attention
from hrl.models.ops.layout import AttentionLayout
from hrl.models.ops.log_prob import default_chunk, token_statistics
from hrl.models.ops.rms_norm import rms_norm
from tests.first_light.report import Findings
from tests.first_light.stages import Setup

#: Relative to the largest element of the reference: three units in the last place of bfloat16.
BOUND = 3 * 2**-8


def run(setup: Setup, findings: Findings) -> None:
    """Attention with shared prompts, grouped heads, windows and sinks; log-probs and entropies; RMS norm."""
    device = torch.device(setup.device)
    torch.manual_seed(0)
    length, heads, width = (40, 4, 16) if setup.tiny else (700, 16, 128)
    for name, key_heads, options in (
        ("attention", heads, {}),
        ("attention, grouped heads", heads // 4, {}),
        ("attention, window of 33", heads // 4, {"window": 33}),
        ("attention, sinks", heads // 4, {"sinks": torch.randn(heads, device=device)}),
        ("attention, 96 wide", heads // 4, {"width": 96}),
    ):
        _attention(findings, device, name, length, heads, key_heads, options.pop("width", width), options)
    tokens, hidden, vocabulary = (12, 32, 100) if setup.tiny else (2048, 2048, 151936)
    _log_prob(findings, device, tokens, hidden, vocabulary)
    _rms_norm(findings, device, tokens, hidden)


def _attention(
    findings: Findings,
    device: torch.device,
    name: str,
    length: int,
    heads: int,
    key_heads: int,
    width: int,
    options: dict[str, Any],
) -> None:
    layout = shared_prompt(length)
    total = layout.num_tokens
    shapes = ((total, heads, width), (total, key_heads, width), (total, key_heads, width))
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    scale = width**-0.5

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(query, key, value, layout, scale=scale, **options)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return reference_attention(query, key, value, layout, scale, **options)

    _compare(findings, name, kernel, plain, inputs)
    findings.add(f"{name}: {total} tokens, forward and backward", _milliseconds(device, kernel, inputs))


def shared_prompt(length: int) -> AttentionLayout:
    """A prompt of ``length`` tokens with three responses, and a sequence of its own."""
    lengths = np.array([length, length // 2, 3, length // 3, length])
    return AttentionLayout(lengths, np.zeros(5, np.int64), np.array([0, length, length, length, 0]))


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Dense float32 softmax over a mask that is made token by token."""
    device, total = query.device, layout.num_tokens
    visible = np.zeros((total, total), bool)
    for _, size, prefix, sequence in layout.segments():
        for place in range(prefix, prefix + size):
            first = 0 if window is None else max(0, place - window + 1)
            visible[sequence[place], sequence[first : place + 1]] = True
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (query, key, value))
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    scores = (q @ k.transpose(1, 2)) * scale
    scores = scores.masked_fill(~torch.from_numpy(visible).to(device), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, total, 1)], -1)
    weights = scores.softmax(-1)[..., :total]
    return (weights @ v).transpose(0, 1)


def _log_prob(findings: Findings, device: torch.device, tokens: int, hidden: int, vocabulary: int) -> None:
    states = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, hidden, device=device, dtype=torch.bfloat16) * hidden**-0.5
    labels = torch.randint(0, vocabulary, (tokens,), device=device)

    def kernel(states: Tensor, weight: Tensor) -> Tensor:
        found = token_statistics(states, weight, labels, 0.7, chunk=default_chunk(device), with_entropy=True)
        return torch.stack([found.log_prob, found.entropy])

    def plain(states: Tensor, weight: Tensor) -> Tensor:
        logs = (states.float() @ weight.float().t() / 0.7).log_softmax(-1)
        return torch.stack([logs.gather(1, labels[:, None])[:, 0], -(logs.exp() * logs).sum(-1)])

    _compare(findings, "log-probs and entropies", kernel, plain, [states, weight])
    findings.add(f"log-probs: {tokens} tokens, {vocabulary} words", _milliseconds(device, kernel, [states, weight]))


def _rms_norm(findings: Findings, device: torch.device, tokens: int, hidden: int) -> None:
    states = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    weight = torch.randn(hidden, device=device, dtype=torch.bfloat16)

    def plain(states: Tensor, weight: Tensor) -> Tensor:
        wide = states.float()
        return weight.float() * wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    _compare(findings, "RMS norm", lambda states, weight: rms_norm(states, weight, 1e-6), plain, [states, weight])


def _compare(
    findings: Findings, name: str, kernel: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    """Result and gradients, each against the same formula in float32."""
    ours, theirs = ([x.detach().clone().requires_grad_() for x in inputs] for _ in range(2))
    out, expected = kernel(*ours), plain(*theirs)
    upstream = torch.randn(expected.shape, device=expected.device)
    out.backward(upstream.to(out.dtype))
    expected.backward(upstream)
    findings.below(f"{name}: result", difference(out, expected), BOUND)
    worst = max(difference(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
    findings.below(f"{name}: gradients", worst, BOUND)


def difference(found: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference, relative to the largest expected element."""
    assert found is not None
    assert expected is not None
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).abs().max() / expected.abs().max())


def _milliseconds(device: torch.device, kernel: Callable[..., Tensor], inputs: list[Tensor]) -> str:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    best = float("inf")
    for _ in range(4):
        _wait(device)
        started = time.perf_counter()
        kernel(*leaves).float().sum().backward()
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return f"{1000 * best:.2f} ms"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
