"""Stage memory: how far up a model of 7B parameters fits one card, rung by rung, each peak against the arithmetic.

The arithmetic is this file's own: ``hrl.preflight.memory_ledger``, which `hrl check` goes by, reads the configuration
and so needs pydantic, and this stage has to run where torch and transformers are all there is.

A rung that the arithmetic does not expect to fit is not tried: a card out of memory would take the later stages along.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from torch import Tensor

from hrl.batching.plan import MiniBatchPlan, RankPlan
from hrl.models.packed_model import PackedMicroBatch, TokenRows
from hrl.workers.engine.engine import Engine
from tests.first_light.random_model import SHAPES, build_engine, join_alone, num_parameters, one_step, random_rows
from tests.first_light.report import Findings
from tests.first_light.stages import Setup

GIB = 2**30
#: Activations, logits, kernels' workspaces and the CUDA context, beside what is counted per parameter.
MARGIN_BYTES = 5 * GIB
#: What FSDP gathers on one rank: every parameter once more in bfloat16; more than enough where it is layer by layer.
_CAST_BYTES = 2


@dataclass(frozen=True)
class Rung:
    """One way to hold a model.

    Attributes:
        name: for the table.
        masters: dtype of the weights that are stored.
        trained: a step is made; otherwise a forward.
        param_offload: weights lie on the host between steps.
        optimizer_offload: moments do.
        offload_policy: weights, gradients and moments always do, and the step is made there.
        bytes_per_parameter: expected on the card at the peak.
    """

    name: str
    masters: str
    trained: bool
    param_offload: bool
    optimizer_offload: bool
    offload_policy: bool
    bytes_per_parameter: float


RUNGS = (
    Rung("forward, bfloat16 weights", "bf16", False, False, False, False, 2 + _CAST_BYTES),
    Rung("forward, float32 weights", "fp32", False, False, False, False, 4 + _CAST_BYTES),
    Rung("step, float32, moments offloaded", "fp32", True, True, True, False, 4 + 4 + _CAST_BYTES),
    Rung("step, float32, all on the host", "fp32", True, False, False, True, _CAST_BYTES),
    Rung("step, float32, all on the card", "fp32", True, False, False, False, 4 + 4 + 8),
)


def expected_bytes(rung: Rung, parameters: int) -> float:
    """Of one rank on one card, without the margin."""
    return rung.bytes_per_parameter * parameters


def fits(rung: Rung, parameters: int, free_bytes: float) -> bool:
    """Whether the arithmetic lets the rung be tried."""
    return expected_bytes(rung, parameters) + MARGIN_BYTES <= free_bytes


def run(setup: Setup, findings: Findings) -> None:
    """All rungs that fit, for every size: the largest that trains is what the card is good for."""
    device = join_alone(setup)
    for size in ("tiny",) if setup.tiny else ("1.5B", "3B", "7B"):
        parameters = num_parameters(size)
        for rung in RUNGS:
            what = f"{size} ({parameters / 1e9:.2f}e9 parameters), {rung.name}"
            free = float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float("inf")
            if not fits(rung, parameters, free):
                need = (expected_bytes(rung, parameters) + MARGIN_BYTES) / GIB
                findings.add(what, f"not tried: {need:.1f} GiB expected, {free / GIB:.1f} free")
                continue
            peak, after = _climb(size, rung, device)
            expected = expected_bytes(rung, parameters)
            over = None if device.type == "cpu" else peak <= expected + MARGIN_BYTES
            findings.add(what, f"peak {peak / GIB:.2f} GiB", f"≤ {(expected + MARGIN_BYTES) / GIB:.2f} GiB", over)
            findings.add(f"{what}: left between steps", f"{after / GIB:.2f} GiB")


def _climb(size: str, rung: Rung, device: torch.device) -> tuple[float, float]:
    """Bytes at the peak of a step or forward, and those left on the card after it; 0 on a CPU."""
    on_card = device.type == "cuda"
    engine = build_engine(
        size,
        device,
        masters=rung.masters,
        trained=rung.trained,
        param_offload=rung.param_offload,
        optimizer_offload=rung.optimizer_offload,
        offload_policy=rung.offload_policy,
    )
    rows = random_rows(1, 2, 64, 64, SHAPES[size][5])
    if on_card:
        torch.cuda.reset_peak_memory_stats(device)
    if rung.trained:
        with engine.resident():
            one_step(engine, rows, ((0, 1),))
    else:
        _forward(engine, rows)
    peak = float(torch.cuda.max_memory_allocated(device)) if on_card else 0.0
    after = float(torch.cuda.memory_allocated(device)) if on_card else 0.0
    del engine
    gc.collect()
    if on_card:
        torch.cuda.empty_cache()
    return peak, after


def _forward(engine: Engine, rows: TokenRows) -> None:
    def log_probs(packed: PackedMicroBatch) -> tuple[Tensor]:
        return (engine.module(packed, 1.0, False).log_prob,)

    plan = RankPlan((MiniBatchPlan(((0, 1),), int(rows.trained.sum()), 2, 1),))
    engine.forward(rows, plan, log_probs, num_outputs=1)
