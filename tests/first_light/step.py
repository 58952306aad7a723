"""Stage engine: training steps of a random model, with the share of the card's arithmetic that they use."""

from __future__ import annotations

import math
import time

import torch

from hrl.models.flops import peak_flops
from tests.first_light.random_model import SHAPES, build_engine, join_alone, one_step, random_rows
from tests.first_light.report import Findings
from tests.first_light.stages import Setup


def run(setup: Setup, findings: Findings) -> None:
    """Three steps; the first compiles and allocates, the others count."""
    device = join_alone(setup)
    size = "tiny" if setup.tiny else "1.5B"
    groups, samples, prompt, response, at_once = (2, 2, 7, 5, 2) if setup.tiny else (8, 8, 256, 512, 16)
    engine = build_engine(size, device)
    vocabulary = SHAPES[size][5]
    rows = random_rows(groups, samples, prompt, response, vocabulary)
    micro_batches = tuple(tuple(range(i, i + at_once)) for i in range(0, groups * samples, at_once))
    flops = 0.0
    for picked in micro_batches:
        packed = engine.pack(rows, picked)
        if engine.flops is not None:
            flops += engine.flops.update(packed.layout.num_tokens, packed.layout.num_pairs, packed.labels.numel())
    before = {name: parameter.detach().clone() for name, parameter in list(engine.module.named_parameters())[:3]}
    for step in (1, 2, 3):
        _wait(device)
        started = time.perf_counter()
        report = one_step(engine, rows, micro_batches)
        _wait(device)
        seconds = time.perf_counter() - started
        sound = report.applied and math.isfinite(report.grad_norm) and report.grad_norm > 0
        findings.add(f"{size}, step {step}: gradient norm", f"{report.grad_norm:.4g}", "positive, applied", sound)
        tokens = int(rows.trained.sum())
        findings.add(
            f"{size}, step {step}: {tokens} trained tokens", f"{seconds:.2f} s, {tokens / seconds:.0f} tokens/s"
        )
        peak = peak_flops(device)
        if peak is not None and flops:
            findings.add(f"{size}, step {step}: MFU", f"{flops / seconds / peak:.3f}")
    now = dict(engine.module.named_parameters())
    moved = sum(int(not torch.equal(now[name].detach(), old)) for name, old in before.items())
    findings.add("weights that moved", f"{moved} of {len(before)} tensors", "at least 1", moved > 0)
    if device.type == "cuda":
        findings.add("peak memory", f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
