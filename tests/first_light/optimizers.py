"""Stage optimizers: steps of every optimizer on the device against the same on a CPU, their times and their state."""

from __future__ import annotations

import importlib.util
import time

import torch
from torch import Tensor, nn

from hrl.workers.engine.adafactor import Adafactor
from hrl.workers.engine.adamw import AdamW
from hrl.workers.engine.adamw_8bit import AdamW8bit
from hrl.workers.engine.muon import Muon
from hrl.workers.engine.update_rule import UpdateRule
from tests.first_light.random_model import SHAPES, build_engine, join_alone, one_step, random_rows
from tests.first_light.report import Findings
from tests.first_light.stages import Setup

BETAS, DECAY, RATE = (0.9, 0.99), 0.1, 0.02
#: How far weights may lie from a CPU's after three steps, as a share of the way that they went. Muon's products are
#: bfloat16, and a moment of eight bits may round to the neighbour.
LIMITS = {"adamw": 1e-4, "adafactor": 1e-4, "muon": 3e-2, "adamw8bit": 1e-2}
#: Bytes of state that each may have for a weight of a large matrix, and the packages that it needs.
MOST_BYTES = {"adamw": 8.0, "adafactor": 0.1, "muon": 4.01, "adamw8bit": 2.1}
NEEDS = {"adamw8bit": "torchao"}


def run(setup: Setup, findings: Findings) -> None:
    """Compares and times each rule alone, then takes a step of a model with it."""
    device = join_alone(setup)
    shapes = [(96, 128), (128, 512), (512,)] if setup.tiny else [(1024, 1024), (1024, 4096), (4096,)]
    for name, limit in LIMITS.items():
        package = NEEDS.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            findings.add(name, f"not tried: {package} is not installed")
            continue
        start, wanted, _, _ = _moved(name, shapes, torch.device("cpu"))
        _, got, seconds, state_bytes = _moved(name, shapes, device)
        way = torch.cat([(one - other).flatten() for one, other in zip(wanted, start, strict=True)]).norm()
        apart = torch.cat([(one - other).flatten() for one, other in zip(got, wanted, strict=True)]).norm()
        findings.below(f"{name}: weights differ from a CPU's, as a share of their way", float(apart / way), limit)
        weights = sum(tensor.numel() for tensor in start)
        findings.add(f"{name}: a step of {weights / 1e6:.1f}e6 weights", f"{1000 * seconds:.1f} ms")
        each = state_bytes / weights
        # Small matrices have large scales and no codes.
        bound = None if setup.tiny else each <= MOST_BYTES[name]
        findings.add(f"{name}: state of a weight", f"{each:.2f} bytes", f"≤ {MOST_BYTES[name]:g}", bound)
        _step_of_a_model(name, device, findings)


def _moved(
    name: str, shapes: list[tuple[int, ...]], device: torch.device
) -> tuple[list[Tensor], list[Tensor], float, int]:
    """Weights before and after three steps, on the CPU; seconds of the last; bytes of state."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    weights = [nn.Parameter(tensor.clone().to(device)) for tensor in start]
    rule = _rule(name, {weight: str(index) for index, weight in enumerate(weights)}, device)
    seconds = 0.0
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(device)
        _wait(device)
        started = time.perf_counter()
        rule.step(RATE)
        _wait(device)
        seconds = time.perf_counter() - started
    state = sum(tensor.nbytes for tensors in rule.state.values() for tensor in tensors.values())
    return start, [weight.detach().cpu() for weight in weights], seconds, state


def _rule(name: str, names: dict[nn.Parameter, str], device: torch.device) -> UpdateRule:
    given = {"weight_decay": DECAY, "device": device, "seed": 0}
    if name == "adafactor":
        return Adafactor(names, **given)
    if name == "muon":
        return Muon(names, [names[weight] for weight in names if weight.dim() == 2], betas=BETAS, **given)
    return (AdamW8bit if name == "adamw8bit" else AdamW)(names, betas=BETAS, **given)


def _step_of_a_model(name: str, device: torch.device, findings: Findings) -> None:
    engine = build_engine("tiny", device, optimizer=name)
    rows = random_rows(2, 2, 7, 5, SHAPES["tiny"][5])
    before = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    report = one_step(engine, rows, ((0, 1), (2, 3)))
    now = dict(engine.module.named_parameters())
    moved = sum(int(not torch.equal(now[name].detach(), old)) for name, old in before.items())
    findings.add(
        f"{name}: weights of a model that moved",
        f"{moved} of {len(before)} tensors",
        "all, applied",
        report.applied and moved == len(before),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
