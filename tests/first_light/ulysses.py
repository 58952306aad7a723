"""Stage ulysses: an optimizer step of two ranks that run each row together, against one in which each has its own rows.

Stage `groups` has the kernels of a slice; here the exchanges of heads run between those of FSDP2, in the same step, as
in a training run. NCCL takes no two ranks of one card, so this needs two.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from hrl.models.packed_model import TokenRows
from tests.first_light.groups import LIMITS
from tests.first_light.random_model import SHAPES, build_engine, one_step_with_gradient, random_rows, timed_step
from tests.first_light.report import Findings
from tests.first_light.stages import Setup

RANKS = 2


def run(setup: Setup, findings: Findings) -> None:
    """Start the ranks, and report what they found."""
    if setup.device == "cuda" and torch.cuda.device_count() < RANKS:
        findings.add("a sequence group over NCCL", f"not tried: {torch.cuda.device_count()} card")
        return
    with tempfile.TemporaryDirectory() as folder:
        # CUDA needs new processes; a CPU's ranks have imported what they need.
        method = "spawn" if setup.device == "cuda" else "fork"
        mp.start_processes(on_rank, args=(setup, folder), nprocs=RANKS, start_method=method)
        found = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(RANKS)]
    _, gradient = LIMITS[setup.device]
    for rank, figures in enumerate(found):
        findings.below(f"rank {rank}: the gradient differs, as a share of its norm", figures["gradient"], gradient)
        findings.below(f"rank {rank}: its norm differs, as a share", figures["norm"], gradient)
        for what in ("own rows", "rows together"):
            seconds, peak = figures[what]
            findings.add(f"rank {rank}: a step with {what}", f"{seconds:.2f} s, peak {peak / 2**30:.2f} GiB")
        findings.add(
            f"rank {rank}: exchange of heads, there and back",
            f"{figures['exchange'] / 1e9:.1f} GB/s",
        )


def on_rank(rank: int, setup: Setup, folder: str) -> None:
    """One process's part; writes differences, seconds and bytes."""
    on_card = setup.device == "cuda"
    device = torch.device("cuda", rank) if on_card else torch.device("cpu")
    if on_card:
        torch.cuda.set_device(device)
    # FSDP2 sums what decides about a step over the host's processes too.
    backend = "cpu:gloo,cuda:nccl" if on_card else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    size = "tiny" if setup.tiny else "1.5B"
    samples, prompt, response = (4, 31, 17) if setup.tiny else (8, 3001, 999)
    rows = random_rows(1, samples, prompt, response, SHAPES[size][5])
    # Of one prompt, so that the slices of all rows together begin and end within rows.
    every = tuple(range(samples))
    own = every[rank * samples // RANKS : (rank + 1) * samples // RANKS]
    found: dict[str, tuple[float, int] | float] = {}
    found["own rows"], norm, wanted = _step(size, device, rows, (own,), 1)
    found["rows together"], together, got = _step(size, device, rows, (every,), RANKS)
    found["gradient"] = float((got - wanted).norm() / wanted.norm())
    found["norm"] = abs(together - norm) / norm
    found["exchange"] = _exchange(device, 1 << (12 if setup.tiny else 26))
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def _step(
    size: str, device: torch.device, rows: TokenRows, micro_batches: tuple[tuple[int, ...], ...], degree: int
) -> tuple[tuple[float, int], float, Tensor]:
    """Seconds and peak of a second step; norm and all of the gradient of the first."""
    dtype = "bf16" if device.type == "cuda" else "fp32"
    engine = build_engine(size, device, sequence_group=degree, dtype=dtype)
    report, gradient = one_step_with_gradient(engine, rows, micro_batches)
    seconds, peak = timed_step(engine, rows, micro_batches, device)
    del engine
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return (seconds, peak), report.grad_norm, gradient


def _exchange(device: torch.device, count: int) -> float:
    """Bytes that a rank sends in a second, in exchanges of so many bfloat16 numbers."""
    numbers = torch.zeros(count, dtype=torch.bfloat16, device=device).view(torch.uint8)
    out = torch.empty_like(numbers)
    dist.all_to_all_single(out, numbers)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(4):
        dist.all_to_all_single(out, numbers)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 4 * numbers.nbytes * (RANKS - 1) / RANKS / (time.perf_counter() - started)
