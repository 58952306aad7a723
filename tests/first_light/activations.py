"""Stage activations: a step whose layers' inputs wait in pinned host memory, against one that keeps them on the card.

The gradient has to be the same, and the peak lower by what the layers hand on, but for two of them. What the pinned
memory really takes is a figure: torch's allocator may round each tensor up to a power of two.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch
from torch import Tensor

from hrl.workers.engine.activations import ActivationOffload
from tests.first_light.random_model import (
    SHAPES,
    build_engine,
    join_alone,
    one_step_with_gradient,
    random_rows,
    timed_step,
)
from tests.first_light.report import Findings
from tests.first_light.stages import Setup

GIB = 2**30
#: How far the gradient may be apart, as a share of its norm: on a card its sums have no fixed order.
LIMITS = {"cuda": 1e-2, "cpu": 0.0}
#: Of what should leave the card, the share by which the peak has to fall; the rest is the allocator's.
LEAST_SHARE = 0.8


class _Found(NamedTuple):
    """Of an engine: the gradient of its first step, and of its second the seconds and the bytes at the peak."""

    gradient: Tensor
    seconds: float
    peak: int


def run(setup: Setup, findings: Findings) -> None:
    """Take two steps each way, of two micro-batches each: in the second one's backward all is there at once."""
    device = join_alone(setup)
    size = "tiny" if setup.tiny else "1.5B"
    rows_at_once, prompt, response = (2, 7, 5) if setup.tiny else (16, 1024, 1024)
    stayed = _steps(size, device, rows_at_once, prompt, response, offload=False)
    before = _pinned_bytes(device)
    left = _steps(size, device, rows_at_once, prompt, response, offload=True)
    apart = (left.gradient - stayed.gradient).norm() / stayed.gradient.norm()
    findings.below("the gradient differs, as a share of its norm", float(apart), LIMITS[device.type])
    findings.add("a step", f"{left.seconds:.2f} s, with all on the card {stayed.seconds:.2f} s")
    hidden, _, layers, *_ = SHAPES[size]
    # A prompt is shared by its samples, and of a response the last token never enters.
    tokens = prompt + rows_at_once * (response - 1)
    leaves = (layers - 2) * tokens * hidden * 2
    saved = stayed.peak - left.peak
    findings.add(
        "peak on the card is lower by",
        f"{saved / GIB:.3f} GiB, {left.peak / GIB:.2f} in place of {stayed.peak / GIB:.2f}",
        f"≥ {LEAST_SHARE * leaves / GIB:.3f} GiB",
        saved >= LEAST_SHARE * leaves if device.type == "cuda" else None,
    )
    findings.add(
        "pinned host memory at most",
        f"{(_pinned_bytes(device) - before) / GIB:.3f} GiB",
        f"{layers * tokens * hidden * 2 / GIB:.3f} GiB are in it",
    )


def _steps(size: str, device: torch.device, rows_at_once: int, prompt: int, response: int, *, offload: bool) -> _Found:
    engine = build_engine(size, device, activation_offload=offload)
    if offload and device.type == "cpu":  # where an engine leaves them, as there is nothing to gain
        ActivationOffload(device, least_bytes=0).attach(engine.module)
    rows = random_rows(2, rows_at_once, prompt, response, SHAPES[size][5])
    micro_batches = (tuple(range(rows_at_once)), tuple(range(rows_at_once, 2 * rows_at_once)))
    _, gradient = one_step_with_gradient(engine, rows, micro_batches)
    seconds, peak = timed_step(engine, rows, micro_batches, device)
    del engine
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return _Found(gradient, seconds, peak)


def _pinned_bytes(device: torch.device) -> int:
    """The most that torch has pinned of the host's memory so far."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.peak"]) if device.type == "cuda" else 0
