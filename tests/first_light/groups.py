"""Stage groups: a packed row over two cards, its tokens or the weights cut over them, and by one card alone.

With a single card the groups have one rank, which exchanges heads and sums with itself: the kernels then get their
inputs in the form in which they come out of an exchange, and nothing is said of NCCL between cards.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hrl.models.loading import prepare
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.ops.exchange import SequenceGroup
from hrl.models.ops.tensor_parallel import WeightGroup
from hrl.models.packed_model import PackedCausalLM, TokenRows, pack_micro_batch
from tests.first_light.random_model import SHAPES, config_of, random_rows
from tests.first_light.report import Findings
from tests.first_light.stages import Setup

SIZE = "tiny"
#: Largest difference of a log-prob, and of the gradient as a share of its norm, in bfloat16 and in float32.
LIMITS = {"cuda": (0.1, 3e-2), "cpu": (1e-4, 1e-5)}


def run(setup: Setup, findings: Findings) -> None:
    """Compares log-probs and gradients of slices, and of parts of weights, with those of the whole row on one card."""
    ranks = 2 if setup.device == "cpu" else min(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        # CUDA needs new processes; a CPU's ranks have imported what they need.
        method = "spawn" if setup.device == "cuda" else "fork"
        mp.start_processes(on_rank, args=(ranks, setup, folder), nprocs=ranks, start_method=method)
        found = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(ranks)]
    findings.add("ranks of the group", str(ranks))
    log_prob, gradient = LIMITS[setup.device]
    for rank, kinds in enumerate(found):
        for what, (apart, of_gradient, seconds) in zip(("a slice", "parts of weights"), kinds, strict=True):
            findings.below(f"rank {rank}, {what}: log-probs differ from the whole row's", apart, log_prob)
            findings.below(f"rank {rank}, {what}: the gradient differs, as a share of its norm", of_gradient, gradient)
            findings.add(f"rank {rank}: forward and backward of {what}", f"{1000 * seconds:.1f} ms")


def on_rank(rank: int, ranks: int, setup: Setup, folder: str) -> None:
    """One process's part; writes, of each kind of group, both differences and the seconds of its second pass."""
    device = torch.device("cuda", rank) if setup.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config_of(SIZE), attn_implementation=ATTENTION_NAME, dtype=dtype)
    prepare(model.to(device), max_model_len=8192, recompute=True)
    module = PackedCausalLM(model)
    prompt, response = (31, 17) if setup.tiny else (3001, 999)
    rows = random_rows(2, 4, prompt, response, SHAPES[SIZE][5])
    assert dist.group.WORLD is not None  # since the line above
    group = SequenceGroup(dist.group.WORLD, ranks, rank)
    whole, wanted = _results(module, rows, None, device)
    found = []
    for of_tokens in (group, None):
        if of_tokens is None:
            mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tensor",))
            module.cut(WeightGroup.of(mesh))
        _results(module, rows, of_tokens, device)
        started = time.perf_counter()
        log_probs, got = _results(module, rows, of_tokens, device)
        seconds = time.perf_counter() - started
        found.append((float((log_probs - whole).abs().max()), float((got - wanted).norm() / wanted.norm()), seconds))
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def _results(
    module: PackedCausalLM, rows: TokenRows, group: SequenceGroup | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of their mean as one vector, of all ranks that run the row."""
    module.zero_grad()
    picked = tuple(range(len(rows.prompts)))
    packed = pack_micro_batch(rows, picked, share_prefix=True, wanted="next", device=device, group=group)
    (log_probs,) = packed.join((module(packed, 1.0, False).log_prob,))
    log_probs.mean().backward()
    is_shared = group is not None or module.group is not None
    gradient = torch.cat([whole_gradient(parameter.grad, shared=is_shared) for parameter in module.parameters()])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return log_probs.detach(), gradient


def whole_gradient(gradient: Tensor, *, shared: bool) -> Tensor:
    """All of a gradient, flat, of which ranks have parts or shares."""
    if isinstance(gradient, DTensor):
        return gradient.full_tensor().float().flatten()
    total = gradient.float().flatten()
    if shared:
        dist.all_reduce(total)
    return total
