"""What the spawned ranks of the tests run. Functions only: a spawned process imports this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from hrl.batching.plan import MiniBatchPlan, RankPlan
from hrl.models.adapter import AdapterSource
from hrl.protocol import DataProto
from hrl.workers.engine import engine
from hrl.workers.engine.adamw import AdamW
from hrl.workers.engine.checksum import WeightsDifferError
from hrl.workers.engine.host_memory import HostCopies
from hrl.workers.engine.optim import StepReport
from tests.models.tiny import (
    actor_config,
    fsdp_config,
    make_batch,
    model_config,
    optim_config,
    plan_rows,
)
from tests.workers.asked import Actor, Critic

CPU = torch.device("cpu")
CHECKED_DTYPES = ("float32", "bfloat16", "float64")


def flip(module: torch.nn.Module, name: str, bit: int) -> None:
    """Flip a bit of the first element of this rank's part of a parameter."""
    parameter = module.get_parameter(name).detach()
    shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    shard.view(-1)[:1].view(torch.uint8)[bit // 8] ^= 1 << bit % 8


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of a possibly sharded tensor."""
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()


def gradients(model: Actor | Critic, batch: Any, plan: Any, **asked: Any) -> dict[str, torch.Tensor]:
    """Full gradients of the plan's only mini-batch, as they are before clipping; the weights stay."""
    optimizer, found = model.engine.optimizer, {}
    apply = optimizer.step

    def look(loss: torch.Tensor, *, fill_missing: bool = False) -> StepReport:
        for parameter, name in optimizer.names.items():
            found[name] = full(parameter.grad)
        optimizer.zero_grad()
        return StepReport(0.0, 0.0, applied=True)

    optimizer.step = look
    model.learn(batch, plan, **asked)
    optimizer.step = apply
    return found


def parameters(model: Actor | Critic) -> dict[str, torch.Tensor]:
    """Full parameters."""
    return {name: full(p.detach()) for name, p in model.engine.module.named_parameters()}


def policy_of(
    path: Path,
    dtype: str = "float64",
    *,
    share_prefix: bool = True,
    checkpointing: bool = False,
    adapter: AdapterSource | None = None,
    **actor: Any,
):
    """A trained policy."""
    model = model_config(path, share_prefix=share_prefix, enable_gradient_checkpointing=checkpointing, adapter=adapter)
    return Actor(model, actor_config(**actor), fsdp_config(dtype), device=CPU, total_steps=10)


def shared_and_unshared_gradients(rank: int, path: Path, world_size: int) -> dict[str, Any]:
    """The actor's gradients with and without shared prompts and empty micro-batches, on this number of ranks."""
    actor = {"entropy_coeff": 0.05, "use_kl_loss": True, "loss_agg_mode": "seq-mean-token-mean"}
    batch, found = make_batch(), {}
    for share_prefix, cuts in ((True, ((1, False), (3, True))), (False, ((1, False),))):
        policy = policy_of(path, share_prefix=share_prefix, **actor)
        for micro_batches, empty in cuts:
            plan = plan_rows(batch, world_size, micro_batches, empty=empty)
            mine = batch.select_idxs(list(plan.rows[rank]))
            name = f"ranks={world_size} micro={micro_batches} empty={empty} shared={share_prefix}"
            found[name] = gradients(policy, mine, plan.ranks[rank])
    return found


def one_sided_gradients(rank: int, path: Path, world_size: int) -> dict[str, torch.Tensor]:
    """All trained rows on rank 0; the other rank has no row at all and only joins the collectives."""
    batch = make_batch()
    mini_batch = plan_rows(batch, 1, 2).ranks[0].mini_batches[0]
    mine = batch.select_idxs(list(range(len(batch))) if rank == 0 else [])
    cuts = mini_batch.micro_batches if rank == 0 else ((),) * len(mini_batch.micro_batches)
    plan = RankPlan((MiniBatchPlan(cuts, mini_batch.num_tokens, mini_batch.num_sequences, mini_batch.num_groups),))
    return gradients(policy_of(path, share_prefix=True), mine, plan)


def train_and_save(rank: int, path: Path, folder: Path, world_size: int) -> dict[str, Any]:
    """Two steps, save and export, two more steps: parameters after each half, and what else a resume must give."""
    policy, mine, plan = _resumable(rank, path, world_size)
    for _ in range(2):
        policy.learn(mine, plan)
    torch.manual_seed(100 + rank)
    policy.engine.save(folder / "state")
    policy.engine.export_hf(folder / "hf")
    saved = parameters(policy)
    return {"saved": saved} | _continue(policy, mine, plan)


def load_and_train(rank: int, path: Path, folder: Path, world_size: int) -> dict[str, Any]:
    """A fresh policy resumes from ``folder`` and takes two more steps."""
    policy, mine, plan = _resumable(rank, path, world_size)
    policy.engine.load(folder / "state")
    return {"saved": parameters(policy)} | _continue(policy, mine, plan)


def _resumable(rank: int, path: Path, world_size: int) -> tuple[Actor, DataProto, RankPlan]:
    batch = make_batch()
    plan = plan_rows(batch, world_size, 2)
    policy = policy_of(path, optim=optim_config(lr_warmup_steps=6))
    return policy, batch.select_idxs(list(plan.rows[rank])), plan.ranks[rank]


def _continue(policy: Actor, batch: DataProto, plan: RankPlan) -> dict[str, Any]:
    random = torch.rand(1)
    rates = [policy.learn(batch, plan)["actor/lr"].result() for _ in range(2)]
    return {"after": parameters(policy), "rates": rates, "random": random}


def offloading_changes_nothing(rank: int, path: Path, folder: Path, adapter: AdapterSource | None = None) -> bool:
    """Whether two steps, a checkpoint loaded where it lies, and a third give the weights of a policy that stays."""
    batch = make_batch()
    plan = plan_rows(batch, 2, 2)
    mine, found = batch.select_idxs(list(plan.rows[rank])), []
    for way in ("stays", "moves", "steps on the host"):
        with pytest.MonkeyPatch.context() as patch:
            if way == "steps on the host":
                # FSDP2's own way, which a GPU takes with pinned memory.
                patch.setattr(engine, "offload_policy", lambda *_: CPUOffloadPolicy(pin_memory=False))
            policy = policy_of(path, "float32", checkpointing=True, adapter=adapter)
        if way == "moves":
            policy.engine.host_copies = HostCopies(policy.engine.module, CPU)
            policy.engine.optimizer.rule = AdamW(
                policy.engine.optimizer.names,
                betas=(0.9, 0.999),
                weight_decay=0.01,
                device=CPU,
                offload=True,
            )
        policy.engine.offload()
        policy.learn(mine, plan.ranks[rank])
        policy.engine.save(folder / way)
        policy.learn(mine, plan.ranks[rank])
        policy.engine.load(folder / way)
        policy.learn(mine, plan.ranks[rank])
        found.append(parameters(policy) | dict(policy.engine.iter_full_params(torch.bfloat16)))
    return all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def rounded_weights(rank: int) -> torch.Tensor:
    """bfloat16 weights in shards of unequal size after two steps of AdamW on one gradient; gathered."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(33, 64, generator=generator).bfloat16() for _ in range(2))
    weight = torch.nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
    adamw = AdamW({weight: "w"}, betas=(0.9, 0.99), weight_decay=0.0, device=CPU)
    for _ in range(2):
        weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        adamw.step(1e-3)
    return full(weight.detach())


def checksums(rank: int, path: Path) -> dict[str, Any]:
    """The checksum of shards, of bfloat16 shards and of replicas; and what is said when rank 1's replica changes."""
    found: dict[str, Any] = {dtype: policy_of(path, dtype).engine.weights_checksum() for dtype in CHECKED_DTYPES}
    model = model_config(path)
    replicas = Actor(model, actor_config(), fsdp_config("float32", fsdp_size=1), device=CPU, total_steps=10)
    found["replicas"] = replicas.engine.weights_checksum()
    if rank == 1:
        flip(replicas.engine.module, "model.model.norm.weight", bit=22)
    try:
        replicas.engine.weights_checksum()
    except WeightsDifferError as error:
        found["error"] = str(error)
    return found


def skip_a_step(rank: int, path: Path, run_folder: Path, world_size: int) -> None:
    """Learn from a batch of which the last row's advantages are infinite, and keep it as a run does."""
    batch = make_batch()
    batch.batch["advantages"][-1, 0] = float("inf")
    plan = plan_rows(batch, world_size, 2)
    actor = actor_config()
    del actor.optim.total_training_steps  # which is no key of the section that stands for it in a run
    policy = Actor(model_config(path), actor, fsdp_config("float32"), device=CPU, total_steps=10, run_folder=run_folder)
    policy.learn(batch.select_idxs(list(plan.rows[rank])), plan.ranks[rank])


def everything_on_two_ranks(
    rank: int, path: Path, mixture: Path, gemma3: Path, untied: Path, single: Path, double: Path
) -> dict[str, Any]:
    """All that the tests want to know of two ranks, in one start of two processes."""
    policy = policy_of(path, "float32")
    rounded = dict(policy.engine.iter_full_params(torch.bfloat16))
    return {
        "gradients": shared_and_unshared_gradients(rank, path, 2),
        "one_sided": one_sided_gradients(rank, path, 2),
        "specs_match": all(
            (spec.dtype, spec.shape) == (rounded[spec.name].dtype, tuple(rounded[spec.name].shape))
            for spec in policy.engine.param_specs(torch.bfloat16)
        ),
        "full": rounded,
        "mixture": dict(policy_of(mixture, "float32").engine.iter_full_params(torch.float32)),
        "straight": train_and_save(rank, path, double, 2),
        "resumed": load_and_train(rank, path, double, 2),
        "from_one_rank": load_and_train(rank, path, single, 2),
        "offloading_changes_nothing": offloading_changes_nothing(rank, path, double.with_name("moved")),
        "rounded": rounded_weights(rank),
        "checksums": checksums(rank, path),
        "skipped": skip_a_step(rank, path, double.with_name("skipped"), 2),
        "untied": one_sided_gradients(rank, untied, 2),
        "frozen": sorted(policy_of(gemma3, "float32").engine.frozen_names()),
    }
