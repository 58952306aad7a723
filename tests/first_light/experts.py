"""Stage experts: a mixture's grouped products against a loop, choices that are replayed, experts on several cards.

In every comparison the experts that tokens chose the first time are replayed: another rounding of a router's input
would otherwise send some tokens elsewhere, and say nothing of the products.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hrl.models.experts import GROUPED
from hrl.models.loading import prepare
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.ops.tensor_parallel import WeightGroup
from hrl.models.packed_model import PackedCausalLM, TokenRows, pack_micro_batch
from hrl.routing import routing_dtype
from tests.first_light.groups import LIMITS, whole_gradient
from tests.first_light.random_model import random_rows
from tests.first_light.report import Findings
from tests.first_light.stages import Setup

VOCABULARY = 512


def run(setup: Setup, findings: Findings) -> None:
    """Starts as many ranks as there are cards, at most two, and reports what they found."""
    ranks = 2 if setup.device == "cpu" else min(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        # CUDA needs new processes; a CPU's ranks have imported what they need.
        method = "spawn" if setup.device == "cuda" else "fork"
        mp.start_processes(on_rank, args=(ranks, setup, folder), nprocs=ranks, start_method=method)
        found = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(ranks)]
    findings.add("ranks that share the experts", str(ranks))
    log_prob, gradient = LIMITS[setup.device]
    for rank, figures in enumerate(found):
        for what in ("grouped products", "experts on all ranks"):
            apart, of_gradient, seconds = figures[what]
            findings.below(f"rank {rank}, {what}: log-probs differ from a loop's on one card", apart, log_prob)
            findings.below(f"rank {rank}, {what}: the gradient differs, as a share of its norm", of_gradient, gradient)
            findings.add(f"rank {rank}: forward and backward of {what}", f"{1000 * seconds:.1f} ms")
        findings.add(f"rank {rank}: forward and backward of a loop", f"{1000 * figures['loop']:.1f} ms")
        replayed, own = figures["replay"]
        findings.add(
            f"rank {rank}: choices of another router that are replayed as recorded",
            f"{100 * replayed:.2f} %, by itself {100 * own:.0f} %",
            "100 %, and fewer by itself",
            replayed == 1.0 and own < 1.0,
        )


def config_of(setup: Setup) -> Qwen3MoeConfig:
    """Two layers of a published mixture, or of a tiny one."""
    hidden, inner, heads, experts = (64, 32, 2, 8) if setup.tiny else (2048, 768, 32, 128)
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        moe_intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        num_experts=experts,
        num_experts_per_tok=2 if setup.tiny else 8,
        norm_topk_prob=True,
        max_position_embeddings=8192,
    )


def on_rank(rank: int, ranks: int, setup: Setup, folder: str) -> None:
    """One process's part; writes differences, shares and seconds."""
    device = torch.device("cuda", rank) if setup.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config_of(setup), attn_implementation=ATTENTION_NAME, dtype=dtype)
    prepare(model.to(device), max_model_len=8192, recompute=True)
    module = PackedCausalLM(model)
    prompt, response = (31, 17) if setup.tiny else (1001, 499)
    each = 4
    rows = random_rows(ranks, each, prompt, response, VOCABULARY)
    pass_of = _Pass(module, rows, tuple(range(rank * each, (rank + 1) * each)), device)
    recorded = pass_of.record()
    model.set_experts_implementation("eager")
    pass_of.results(recorded)
    whole, wanted, loop = pass_of.results(recorded)
    model.set_experts_implementation(GROUPED)
    pass_of.results(recorded)
    found: dict[str, tuple[float, ...] | float] = {"loop": loop}
    found["grouped products"] = _apart(pass_of.results(recorded), whole, wanted)
    with _other_routers(module, model):
        found["replay"] = (
            float((pass_of.record(recorded) == recorded).float().mean()),
            float((pass_of.record() == recorded).float().mean()),
        )
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("experts",))
    module.share_out_experts(WeightGroup.of(mesh))
    pass_of.results(recorded)
    found["experts on all ranks"] = _apart(pass_of.results(recorded), whole, wanted)
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def _apart(got: tuple[Tensor, Tensor, float], whole: Tensor, wanted: Tensor) -> tuple[float, float, float]:
    log_probs, gradient, seconds = got
    return float((log_probs - whole).abs().max()), float((gradient - wanted).norm() / wanted.norm()), seconds


@contextmanager
def _other_routers(module: PackedCausalLM, model: nn.Module) -> Iterator[None]:
    """Inside the block, routers have moved as by an update."""
    routers = [layer.router for layer in module.experts.layers if layer.router is not None]
    before = [{name: p.detach().clone() for name, p in router.named_parameters()} for router in routers]
    with torch.no_grad():
        for router in routers:
            for parameter in router.parameters():
                parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))
    try:
        yield
    finally:
        for router, old in zip(routers, before, strict=True):
            router.load_state_dict(old, strict=False)


class _Pass:
    """The rows of this rank through a model."""

    def __init__(self, module: PackedCausalLM, rows: TokenRows, picked: tuple[int, ...], device: torch.device) -> None:
        self._module = module
        self._packed = pack_micro_batch(
            rows, picked, share_prefix=True, wanted="next", device=device, with_routing=True
        )

    @torch.no_grad()
    def record(self, replayed: Tensor | None = None) -> Tensor:
        """The experts that all tokens went to, `(T, L, K)`."""
        with self._module.experts.following(self._routing(replayed)) as routing:
            self._module(self._packed, 1.0, False)
        assert routing is not None, "the model has experts"
        return routing.stacked(routing_dtype(self._module.experts.num_experts))

    def results(self, replayed: Tensor) -> tuple[Tensor, Tensor, float]:
        """Log-probs of this rank's rows, the gradient of all ranks' means as one vector, and seconds."""
        self._module.zero_grad()
        _wait(self._packed.input_ids.device)
        started = time.perf_counter()
        with self._module.experts.following(self._routing(replayed)):
            log_probs = self._module(self._packed, 1.0, False).log_prob
            log_probs.mean().backward()
        _wait(self._packed.input_ids.device)
        seconds = time.perf_counter() - started
        gradients = [
            whole_gradient(torch.zeros_like(p) if p.grad is None else p.grad, shared=True)
            for p in self._module.parameters()
        ]
        return log_probs.detach(), torch.cat(gradients), seconds

    def _routing(self, replayed: Tensor | None) -> object:
        known = self._packed.routing
        assert known is not None, "it was asked for"
        return known if replayed is None else replace(known, replayed=replayed, has_missing=False, is_known=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
