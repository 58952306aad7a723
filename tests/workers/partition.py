"""Gradients of every registered loss on a tiny sharded model, for any cut. Spawned ranks import this.

A gradient is linear in the loss. So the entries ``every`` below, sums over all members of a registry with coefficients
of their own, depend on the cut as soon as one member does, and a step costs the same for all members as for one.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from hrl.algos.aggregation import AGGREGATION_MODES, Counts
from hrl.algos.kl import KL_ESTIMATORS
from hrl.algos.policy_losses import POLICY_LOSSES, PolicyLossInput, PolicyLossOutput
from hrl.algos.preference import PAIR_LOSSES
from hrl.algos.token_selection import TOKEN_SELECTORS, select_tokens
from hrl.batching import BatchPlan, MiniBatchPlan, RankPlan
from hrl.protocol import DataProto
from hrl.workers.engine.optim import StepReport
from hrl.workers.offline import update_preference, update_reward_model, update_supervised
from hrl.workers.policy import Policy
from hrl.workers.value_model import ValueModel
from tests.algos.batches import ACTOR
from tests.workers.engine.tiny import SHAPE, actor_config, critic_config, fsdp_config, make_batch, model_config

CPU = torch.device("cpu")
CUTS = (1, 2, 3, 8)
EVERY = "every"
CONSTANT = "seq-mean-token-sum-norm"
SMALL = SHAPE | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TIMEOUT = timedelta(seconds=120)


def every_mode(row_sums: Tensor, row_tokens: Tensor, counts: Counts, norm: float | None) -> Tensor:
    """All registered aggregation modes, weighted 1, 1/2, 1/3, ..."""
    shares = [AGGREGATION_MODES[name](row_sums, row_tokens, counts, norm) for name in members(AGGREGATION_MODES)]
    return sum(share / (1 + i) for i, share in enumerate(shares))


def every_policy_loss(inp: PolicyLossInput, config: Any) -> PolicyLossOutput:
    """All registered policy losses, likewise; they share one choice of tokens."""
    outputs = [POLICY_LOSSES[name](inp, config) for name in members(POLICY_LOSSES)]
    return PolicyLossOutput(sum(output.loss_mat / (1 + i) for i, output in enumerate(outputs)), {})


def every_kl(difference: Tensor) -> Tensor:
    """All registered KL estimators, likewise."""
    return sum(KL_ESTIMATORS[name](difference) / (1 + i) for i, name in enumerate(members(KL_ESTIMATORS)))


REGISTRIES = {every_mode: AGGREGATION_MODES, every_policy_loss: POLICY_LOSSES, every_kl: KL_ESTIMATORS}


def members(registry: dict[str, Any]) -> list[str]:
    """Names of all entries but ``every`` and aliases."""
    first = {id(entry): name for name, entry in reversed(registry.items())}
    return [name for name, entry in registry.items() if name != EVERY and first[id(entry)] == name]


@contextlib.contextmanager
def every_registered() -> Iterator[None]:
    """The entries ``every`` are there inside the block."""
    for entry, registry in REGISTRIES.items():
        registry[EVERY] = entry
    try:
        yield
    finally:
        for registry in REGISTRIES.values():
            del registry[EVERY]


def save_small_llama(folder: Path) -> Path:
    """A random Llama of one layer."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL | {"num_key_value_heads": 1})).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------- cuts


def deal(batch: DataProto, world_size: int, micro_batches: int) -> BatchPlan:
    """Pairs of rows (2i, 2i + 1) in a random order dealt to the ranks, and each rank's to its micro-batches."""
    trained = batch.batch["response_mask"]
    counts = (int(trained.sum()), int(trained.any(1).sum()), len(batch) // 2)
    pairs = np.random.default_rng(micro_batches).permutation(len(batch) // 2)
    rows, ranks = [], []
    for rank in range(world_size):
        mine = pairs[rank::world_size]
        rows.append(tuple(int(row) for pair in mine for row in (2 * pair, 2 * pair + 1)))
        cuts = np.array_split(np.arange(2 * len(mine)).reshape(-1, 2), micro_batches)
        ranks.append(RankPlan((MiniBatchPlan(tuple(tuple(map(int, cut.ravel())) for cut in cuts), *counts),)))
    return BatchPlan(tuple(rows), tuple(ranks))


def pair_by_pair(batch: DataProto) -> BatchPlan:
    """The reference: one rank, nothing packed beside anything but its pair."""
    return deal(batch, 1, len(batch) // 2)


# ------------------------------------------------------------------------------------------- losses


class Models:
    """One actor and one critic of a dtype, told anew which loss they have."""

    def __init__(self, path: Path, dtype: str, *, share_prefix: bool) -> None:
        model, fsdp = model_config(path, share_prefix=share_prefix), fsdp_config(dtype)
        self.actor = Policy(model, actor_config(), fsdp, device=CPU, total_steps=10)
        self.critic = ValueModel(model, critic_config(), fsdp, device=CPU, total_steps=10)
        with torch.no_grad():  # at zero, as it starts, a head passes no gradient to the backbone
            self.critic.engine.module.model.score.weight.fill_(0.1)


def actor_with(**changes: Any) -> SimpleNamespace:
    """An actor's configuration under which every loss has something to clip."""
    return actor_config(
        **{**vars(ACTOR), "loss_agg_mode": EVERY, "policy_loss": deepcopy(ACTOR.policy_loss), **changes}
    )


Update = Callable[[DataProto, RankPlan], Any]
Subject = Callable[[Models, DataProto], tuple[Policy | ValueModel, DataProto, Update]]
"""Which model takes a step on which batch, and how."""


def policy_subject(name: str, mode: str = EVERY) -> Subject:
    def prepare(models: Models, batch: DataProto) -> tuple[Policy, DataProto, Update]:
        models.actor.config = actor_with(loss_agg_mode=mode)
        models.actor.config.policy_loss.loss_mode = name
        return models.actor, batch, models.actor.update

    return prepare


def without_policy_loss(**changes: Any) -> Subject:
    def prepare(models: Models, batch: DataProto) -> tuple[Policy, DataProto, Update]:
        models.actor.config = actor_with(**changes)
        models.actor.config.policy_loss.loss_mode = "vanilla"
        still = deepcopy(batch)
        still.batch["advantages"] = torch.zeros_like(still.batch["advantages"])
        return models.actor, still, models.actor.update

    return prepare


def value_subject(models: Models, batch: DataProto) -> tuple[ValueModel, DataProto, Update]:
    models.critic.config = critic_config(loss_agg_mode=EVERY)
    return models.critic, batch, models.critic.update


def as_pairs(batch: DataProto) -> DataProto:
    """Rows 2i and 2i + 1 are the chosen and the rejected answer of pair i."""
    count = len(batch)
    batch.non_tensor_batch["uid"] = np.array([f"{row // 2}" for row in range(count)], dtype=object)
    batch.batch["is_chosen"] = torch.arange(count) % 2 == 0
    batch.batch["ref_sequence_log_prob"] = (batch.batch["ref_log_prob"] * batch.batch["response_mask"]).sum(-1)
    batch.batch["margin"] = 0.1 * torch.arange(count).double()
    return batch


def pair_subject(name: str) -> Subject:
    def prepare(models: Models, batch: DataProto) -> tuple[Policy, DataProto, Update]:
        margin = {"target_margin": 0.3} if name == "simpo" else {}
        batch.meta_info["preference"] = {"loss_type": name, "beta": 0.4, "label_smoothing": 0.1, **margin}
        return models.actor, as_pairs(batch), partial(update_preference, models.actor.engine)

    return prepare


def supervised_subject(mode: str) -> Subject:
    def prepare(models: Models, batch: DataProto) -> tuple[Policy, DataProto, Update]:
        batch.meta_info["loss_agg_mode"] = mode
        return models.actor, batch, partial(update_supervised, models.actor.engine)

    return prepare


def reward_model_subject(models: Models, batch: DataProto) -> tuple[ValueModel, DataProto, Update]:
    return models.critic, as_pairs(batch), partial(update_reward_model, models.critic.engine)


def everything(models: Models, batch: DataProto) -> tuple[Policy, DataProto, Update]:
    """All policy losses, all KL estimators and the entropy in one step."""
    models.actor.config = actor_with(
        use_kl_loss=True, kl_loss_type=EVERY, kl_loss_coef=1.0, entropy_coeff=0.3, loss_agg_mode=EVERY
    )
    models.actor.config.policy_loss.loss_mode = EVERY
    return models.actor, batch, models.actor.update


WHOLE: dict[str, Subject] = {"everything": everything, "value": value_subject}
"""Run with every number of micro-batches."""


def single() -> dict[str, Subject]:
    """Every registered loss, with all modes at once; and each mode alone, with PPO's loss. One cut each, in turn."""
    kinds = [kind + plus for kind in members(KL_ESTIMATORS) for plus in ("", "+")]
    return (
        {f"policy {name}": policy_subject(name) for name in members(POLICY_LOSSES)}
        | {f"policy vanilla, {mode}": policy_subject("vanilla", mode) for mode in members(AGGREGATION_MODES)}
        | {f"kl {kind}": without_policy_loss(use_kl_loss=True, kl_loss_type=kind, kl_loss_coef=1.0) for kind in kinds}
        | {"entropy": without_policy_loss(entropy_coeff=1.0)}
        | {f"pair {name}": pair_subject(name) for name in members(PAIR_LOSSES)}
        | {f"supervised, {mode}": supervised_subject(mode) for mode in members(AGGREGATION_MODES) if mode != CONSTANT}
        | {"reward model": reward_model_subject}
    )


def batch_for(name: str, seed: int) -> DataProto:
    """A ragged batch with every column that a loss reads."""
    batch = make_batch(num_groups=3, samples=4, seed=seed)
    columns = batch.batch
    generator = torch.Generator().manual_seed(seed)
    columns["rollout_is_weights"] = 0.2 + torch.rand(columns["advantages"].shape, generator=generator).double()
    loss = name.removeprefix("policy ") if name != "everything" else "clip_cov"
    if loss in TOKEN_SELECTORS:  # chosen over the whole batch, before it is cut
        columns["selected_tokens"] = select_tokens(
            loss, columns["old_log_probs"], columns["advantages"], columns["response_mask"], ACTOR, generator
        )
    return batch


# ------------------------------------------------------------------------------------------- gradients


def local_gradients(model: Policy | ValueModel, update: Update, batch: DataProto, plan: RankPlan) -> dict[str, Tensor]:
    """This rank's shards of the gradients of the plan's only mini-batch, before clipping; the weights stay."""
    optimizer, found = model.engine.optimizer, {}
    apply = optimizer.step

    def look(loss: Tensor, *, fill_missing: bool = False) -> StepReport:
        for parameter, name in optimizer.names.items():
            found[name] = parameter.grad.to_local().clone()
        optimizer.zero_grad()
        return StepReport(0.0, 0.0, applied=True)

    optimizer.step = look
    try:
        update(batch, plan)
    finally:
        optimizer.step = apply
    return found


def run(models: Models, name: str, plan_of: Callable[[DataProto], BatchPlan], rank: int) -> dict[str, Tensor]:
    """Gradients of one loss under one plan."""
    model, batch, update = (WHOLE | single())[name](models, batch_for(name, seed=0))
    plan = plan_of(batch)
    return local_gradients(model, update, batch.select_idxs(list(plan.rows[rank])), plan.ranks[rank])


def references(path: Path, dtype: str) -> dict[str, dict[str, Tensor]]:
    """Full gradients of every loss on one rank, pair by pair, no prompt shared."""
    models = Models(path, dtype, share_prefix=False)
    return {name: run(models, name, pair_by_pair, 0) for name in WHOLE | single()}


def squared_errors(
    models: Models, name: str, cut: int, rank: int, world_size: int, reference: dict[str, Tensor]
) -> float:
    """Squared distance of this rank's shards from its part of the reference, over the reference's squared norm."""
    found = run(models, name, lambda batch: deal(batch, world_size, cut), rank)
    error = 0.0
    for parameter, full in reference.items():
        shards = full.chunk(world_size)
        mine = shards[rank] if rank < len(shards) else full[:0]
        error += float((found[parameter] - mine).double().square().sum())
    return error / sum(float(full.double().square().sum()) for full in reference.values())


ALONE_IN = {1: ("float64", "float32"), 2: ("float32",), 4: ("float64",)}
"""Ranks: the precisions in which every loss is also run by itself. What is whole runs in both on all of them."""


def cases(world_size: int, dtype: str) -> Iterator[tuple[str, int]]:
    """Loss and number of micro-batches."""
    yield from ((name, cut) for name in WHOLE for cut in CUTS)
    if dtype in ALONE_IN[world_size]:
        turn = world_size + len(dtype)
        yield from ((name, CUTS[(turn + index) % len(CUTS)]) for index, name in enumerate(single()))


def errors_of_rank(rank: int, world_size: int, path: Path, folder: Path, dtype: str) -> dict[str, float]:
    """Squared relative errors by loss and cut."""
    models = Models(path, dtype, share_prefix=True)
    expected = torch.load(folder / f"{dtype}.pt", weights_only=True)
    return {
        f"{name}, {cut} micro-batches": squared_errors(models, name, cut, rank, world_size, expected[name])
        for name, cut in cases(world_size, dtype)
    }


# ------------------------------------------------------------------------------------------- worlds


def in_worlds(rank: int, sizes: tuple[int, ...], path: Path, folder: Path, dtypes: tuple[str, ...]) -> None:
    """One process's part in one world after the other."""
    torch.set_num_threads(1)
    disable_progress_bar()
    for size in (size for size in sizes if rank < size):
        store = dist.FileStore(os.path.join(folder, f"store-{size}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        try:
            with every_registered():
                found = {dtype: errors_of_rank(rank, size, path, folder, dtype) for dtype in dtypes}
        finally:
            dist.destroy_process_group()
        torch.save(found, folder / f"errors-{size}-{rank}.pt")


def _fork_ranks(_: int, sizes: tuple[int, ...], *args: Any) -> None:
    """Torch and transformers are imported once; the ranks are forks of a process that has run nothing yet."""
    mp.start_processes(in_worlds, args=(sizes, *args), nprocs=max(sizes), start_method="fork")


def run_worlds(
    sizes: tuple[int, ...], path: Path, folder: Path, dtypes: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """Relative error by dtype and by loss, cut and ranks, over all ranks of worlds of these sizes."""
    mp.spawn(_fork_ranks, args=(sizes, path, folder, dtypes), nprocs=1)
    errors: dict[str, dict[str, float]] = {}
    for size in sizes:
        ranks = [torch.load(folder / f"errors-{size}-{rank}.pt", weights_only=True) for rank in range(size)]
        for dtype in dtypes:
            for case in ranks[0][dtype]:
                total = math.sqrt(sum(rank[dtype][case] for rank in ranks))
                errors.setdefault(dtype, {})[f"{case}, {size} ranks"] = total
    return errors
