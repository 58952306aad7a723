"""Gradients of every registered loss on a tiny sharded model, for any cut. Spawned ranks import this.

A gradient is linear in the loss. So the entries ``every`` below, sums over all members of a registry with coefficients
of their own, depend on the cut as soon as one member does, and a step costs the same for all members as for one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from hrl.algos.aggregation import AGGREGATION_MODES, Counts
from hrl.algos.bypass import LOSS_TYPES
from hrl.algos.kl import KL_ESTIMATORS
from hrl.algos.policy_losses import POLICY_LOSSES, PolicyLossInput, PolicyLossOutput
from hrl.algos.preference import (
    LABELLED_LOSSES,
    PAIR_LOSSES,
    REWARD_MODEL_LOSSES,
    SFT_LOSSES,
    LabelledOptions,
    PairOptions,
)
from hrl.algos.registry import Registry, pair_loss_traits
from hrl.algos.token_selection import TOKEN_SELECTORS, select_tokens
from hrl.algos.value_loss import VALUE_LOSSES
from hrl.batching.plan import BatchPlan, MiniBatchPlan, RankPlan
from hrl.batching.planner import MicroBatchLimits, Planner
from hrl.columns import object_column
from hrl.config.distillation import DistillationLossConfig
from hrl.models.ops.divergence import TeacherHead
from hrl.protocol import DataProto
from hrl.workers.engine.optim import StepReport
from hrl.workers.requests import TEACHER_IDS, TEACHER_LOG_PROBS, TEACHER_STATES, OldLogProbs
from tests.algos.batches import ACTOR
from tests.models.tiny import (
    RESPONSE_WIDTH,
    SHAPE,
    actor_config,
    critic_config,
    fsdp_config,
    make_batch,
    model_config,
)
from tests.models.trees import tree_batch
from tests.processes.warm import METHOD, warm_context
from tests.workers import padded
from tests.workers.asked import Actor, Critic, learn_answers, learn_labelled, learn_pairs, learn_scores

CPU = torch.device("cpu")


class World(NamedTuple):
    """How many ranks there are, and how many of them run their rows together."""

    ranks: int
    degree: int = 1

    @property
    def groups(self) -> int:
        """Ranks, or groups of them, with rows of their own."""
        return self.ranks // self.degree


ALONE, TOGETHER = World(1), World(2, degree=2)
CUTS = {ALONE: (1, 2, 3, 8), World(2): (2, 8), World(4): (1, 3), TOGETHER: (8,), World(4, 2): (8,), World(4, 4): (3,)}
"""Numbers of micro-batches by world. Eight pairs of rows leave some empty from 8 on two ranks and from 3 on four."""
DTYPES = {
    ALONE: ("float64", "float32"),
    World(2): ("float64", "float32"),
    World(4): ("float64",),
    TOGETHER: ("float64", "float32"),
    World(4, 2): ("float64",),
    World(4, 4): ("float64",),
}
"""By world. In float32 only sums that were rounded on the way are of interest, and two ranks have all of them."""
EVERY = "every"
DISTILLATIONS = ("k2", "reverse_kl_topk", "forward_kl_topk", "reverse_kl", "forward_kl")
TEMPERATURE = 0.8
SMALL = SHAPE | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
TIMEOUT = timedelta(seconds=600)

Gradients = dict[str, Tensor]


# ------------------------------------------------------------------------------------------- all members at once


def every_mode(row_sums: Tensor, row_tokens: Tensor, counts: Counts, norm: float | None) -> Tensor:
    """All registered aggregation modes, weighted 1, 1/2, 1/3, ..."""
    return _weighted([mode(row_sums, row_tokens, counts, norm) for mode in members(AGGREGATION_MODES).values()])


def every_policy_loss(inp: PolicyLossInput, config: Any) -> PolicyLossOutput:
    """All registered policy losses, likewise; they share one choice of tokens."""
    return PolicyLossOutput(_weighted([loss(inp, config).loss_mat for loss in members(POLICY_LOSSES).values()]), {})


def every_value_loss(vpreds: Tensor, values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """All registered value losses, likewise."""
    losses = [loss(vpreds, values, returns, cliprange)[0] for loss in members(VALUE_LOSSES).values()]
    return _weighted(losses), torch.zeros_like(returns, dtype=torch.bool)


def _every_of(registry: Registry[Any, Any]) -> Callable[[Tensor], Tensor]:
    return lambda values: _weighted([member(values) for member in members(registry).values()])


def _weighted(terms: list[Tensor]) -> Tensor:
    return torch.stack([term / (1 + i) for i, term in enumerate(terms)]).sum(0)


REGISTRIES: list[tuple[Registry[Any, Any], Callable[..., Any]]] = [
    (AGGREGATION_MODES, every_mode),
    (POLICY_LOSSES, every_policy_loss),
    (VALUE_LOSSES, every_value_loss),
    *((registry, _every_of(registry)) for registry in (KL_ESTIMATORS, SFT_LOSSES, REWARD_MODEL_LOSSES)),
]


def members(registry: Registry[Any, Any]) -> dict[str, Any]:
    """All entries but ``every`` and aliases."""
    first = {id(entry): name for name, entry in reversed([*registry.items()])}
    return {name: entry for name, entry in registry.items() if name != EVERY and first[id(entry)] == name}


@contextlib.contextmanager
def every_registered() -> Iterator[None]:
    """The entries ``every`` are there inside the block."""
    for registry, entry in REGISTRIES:
        registry[EVERY] = entry
    try:
        yield
    finally:
        for registry, _ in REGISTRIES:
            del registry[EVERY]


def save_small_llama(folder: Path) -> Path:
    """A random Llama of one layer."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL | {"num_key_value_heads": 1})).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------- cuts


def deal(batch: DataProto, world: World, micro_batches: int) -> BatchPlan:
    """Pairs of rows (2i, 2i + 1) in a random order dealt to the ranks, and each rank's to its micro-batches."""
    trained = batch.batch["response_mask"]
    counts = (int(trained.sum()), int(trained.any(1).sum()), len(batch) // 2)
    pairs = np.random.default_rng(micro_batches).permutation(len(batch) // 2)
    rows, ranks = [], []
    for rank in range(world.groups):
        mine = pairs[rank :: world.groups]
        rows.append(tuple(int(row) for pair in mine for row in (2 * pair, 2 * pair + 1)))
        cuts = np.array_split(np.arange(2 * len(mine)).reshape(-1, 2), micro_batches)
        ranks.append(RankPlan((MiniBatchPlan(tuple(tuple(map(int, cut.ravel())) for cut in cuts), *counts),)))
    return BatchPlan(tuple(rows), tuple(ranks), world.degree)


def deal_to_others(batch: DataProto, world: World, micro_batches: int) -> BatchPlan:
    """Likewise, and the last of several ranks, or groups of them, has no row."""
    if world.groups == 1:
        return deal(batch, world, micro_batches)
    few = deal(batch, World((world.groups - 1) * world.degree, world.degree), micro_batches)
    (mini_batch,) = few.ranks[0].mini_batches
    idle = RankPlan((replace(mini_batch, micro_batches=((),) * micro_batches),))
    return BatchPlan((*few.rows, ()), (*few.ranks, idle), world.degree)


def plan_tree(batch: DataProto, world: World, micro_batches: int) -> BatchPlan:
    """As the driver plans rows that form trees: under a budget that asks for about so many micro-batches."""
    lengths = batch.batch["attention_mask"].sum(1)
    budget = int(lengths.max() + lengths.sum() // (3 * micro_batches * world.groups))
    limits = MicroBatchLimits(budget, None, "", world.degree)
    plan = Planner(share_prefix=True).update(batch, world.ranks, limits, mini_batch_rows=len(batch), epochs=1)
    assert all(rank.is_tree for rank in plan.ranks)
    return plan


# ------------------------------------------------------------------------------------------- losses


class Models:
    """One actor and one critic of a dtype, told anew which loss they have."""

    def __init__(self, path: Path, dtype: str, degree: int = 1) -> None:
        model = model_config(path, share_prefix=True)
        fsdp = fsdp_config(dtype, ulysses_sequence_parallel_size=degree)
        self.actor = Actor(model, actor_config(), fsdp, device=CPU, total_steps=10)
        self.critic = Critic(model, critic_config(), fsdp, device=CPU, total_steps=10)
        torch.nn.init.constant_(self.critic.engine.module.model.score.weight, padded.HEAD)


Update = Callable[[DataProto, RankPlan], Any]


@dataclass(frozen=True)
class Subject:
    """One loss on one batch.

    Attributes:
        batch: all its rows.
        update: the model that takes a step, and how it does.
        plain: the gradients by a padded forward of the whole batch.
        cut: the plan for a world, of about so many micro-batches.
    """

    batch: DataProto
    update: Callable[[Models], tuple[Actor | Critic, Update]]
    plain: Callable[[padded.Plain], Gradients]
    cut: Callable[[DataProto, World, int], BatchPlan] = deal


def policy_subject(
    loss: str,
    *,
    still: bool = False,
    bypass: Any | None = None,
    gate_closed: bool = False,
    is_tree: bool = False,
    **changes: Any,
) -> Subject:
    """A policy loss under an actor's configuration; ``still`` leaves only what is added to it."""
    config = SimpleNamespace(**vars(actor_config()) | vars(deepcopy(ACTOR)) | {"loss_agg_mode": EVERY} | changes)
    config.policy_loss.loss_mode = loss
    batch = batch_for("clip_cov" if loss == EVERY else loss, is_tree)
    if still:
        batch.batch["advantages"].zero_()
    asked: dict[str, Any] = {"correction": bypass}
    if bypass is not None:
        batch.batch["rollout_log_probs"] = batch.batch["ref_log_prob"]
        asked["old_log_probs"] = OldLogProbs.COLUMN if gate_closed else OldLogProbs.SAMPLER

    def update(models: Models) -> tuple[Actor, Update]:
        models.actor.loss = config
        return models.actor, partial(models.actor.learn, **asked)

    cut = plan_tree if is_tree else deal
    return Subject(batch, update, lambda plain: padded.policy_gradients(plain, batch, config, **asked), cut)


def distillation_subject(loss_mode: str) -> Subject:
    """A divergence from a teacher, and nothing else."""
    settings = DistillationLossConfig(loss_mode=loss_mode, topk=5, use_task_rewards=False)
    config = SimpleNamespace(**vars(actor_config()) | {"loss_agg_mode": EVERY})
    batch = batch_for("vanilla")
    columns, mask = batch.batch, batch.batch["response_mask"].bool()
    generator = torch.Generator().manual_seed(1)
    shape = (*mask.shape, SHAPE["vocab_size"])
    # Numbers of float32, which is what travels.
    head: TeacherHead | None = None
    if settings.traits.reads_all:
        states, weight = (torch.randn(*sizes, 3, generator=generator).double() for sizes in (mask.shape, shape[-1:]))
        teacher, head = (states @ weight.t() / TEMPERATURE).log_softmax(-1), TeacherHead(weight)
        batch.non_tensor_batch[TEACHER_STATES] = object_column(
            [states[row][mask[row]].float().numpy() for row in range(len(batch))]
        )
    else:
        teacher = torch.randn(shape, generator=generator).mul(0.5).log_softmax(-1).double()
    columns["ref_log_prob"] = teacher.gather(-1, columns["responses"].unsqueeze(-1))[..., 0]
    top = teacher.topk(settings.topk, -1)
    for name, column in ((TEACHER_LOG_PROBS, top.values.float()), (TEACHER_IDS, top.indices.int())):
        batch.non_tensor_batch[name] = object_column([column[row][mask[row]].numpy() for row in range(len(batch))])

    def update(models: Models) -> tuple[Actor, Update]:
        models.actor.loss, models.actor.teacher_head = config, head
        return models.actor, partial(models.actor.learn, distillation=settings)

    def plain(model: padded.Plain) -> Gradients:
        return padded.distillation_gradients(model, batch, teacher, settings, config)

    return Subject(batch, update, plain, deal_to_others)


def kl_subject(kind: str) -> Subject:
    return policy_subject("vanilla", still=True, use_kl_loss=True, kl_loss_type=kind, kl_loss_coef=1.0)


def bypass_subject(loss_type: str, *, gate_closed: bool = False) -> Subject:
    """The sampler's log-probs as the old ones, weights and rejection decided by the policy in training."""
    weights = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False}
    rejection = {"rollout_rs": "token_k1,seq_mean_k2", "rollout_rs_threshold": "0.4_2.5,0.5"}
    settings = SimpleNamespace(loss_type=loss_type, **weights, **rejection)
    return policy_subject("vanilla", bypass=settings, gate_closed=gate_closed)


def value_subject(name: str, mode: str = EVERY, is_tree: bool = False) -> Subject:
    config, batch = critic_config(loss_agg_mode=mode), batch_for("vanilla", is_tree)

    def update(models: Models) -> tuple[Critic, Update]:
        models.critic.loss = config
        return models.critic, partial(models.critic.learn, loss_name=name)

    cut = plan_tree if is_tree else deal
    return Subject(batch, update, lambda plain: padded.value_gradients(plain, batch, config, name), cut)


def as_pairs(batch: DataProto) -> DataProto:
    """Rows 2i and 2i + 1 are the chosen and the rejected answer of pair i."""
    count = len(batch)
    batch.non_tensor_batch["uid"] = np.array([f"{row // 2}" for row in range(count)], dtype=object)
    batch.batch["is_chosen"] = torch.arange(count) % 2 == 0
    batch.batch["ref_sequence_log_prob"] = (batch.batch["ref_log_prob"] * batch.batch["response_mask"]).sum(-1)
    batch.batch["margin"] = 0.1 * torch.arange(count).double()
    return batch


def pair_subject(name: str) -> Subject:
    batch = as_pairs(make_batch(num_groups=4, samples=4, temperature=TEMPERATURE))
    # IPO's gradient has the factor `c - r - 1 / (2 beta)`, of which a larger beta leaves so little that it shows how
    # float32 rounds a log-prob, and not how a batch is cut.
    constants = {"beta": 0.1 if name == "ipo" else 0.4, "label_smoothing": 0.1, "target_margin": 0.3}
    read = {constant: value for constant, value in constants.items() if getattr(pair_loss_traits(name), constant, True)}
    options = PairOptions(**read)
    return Subject(
        batch,
        lambda models: (models.actor, partial(learn_pairs, models.actor, loss_type=name, options=options)),
        lambda plain: padded.preference_gradients(plain, batch, name, options),
    )


def labelled_subject(name: str) -> Subject:
    batch = as_pairs(make_batch(num_groups=4, samples=4, temperature=TEMPERATURE))
    batch.batch["is_desirable"] = torch.arange(len(batch)) % 3 == 0
    asked = {"baseline": 0.6, "options": LabelledOptions(0.4, 1.3, 0.7)}
    return Subject(
        batch,
        lambda models: (models.actor, partial(learn_labelled, models.actor, loss_type=name, **asked)),
        lambda plain: padded.labelled_gradients(plain, batch, name, **asked),
    )


def supervised_subject(name: str, mode: str = EVERY) -> Subject:
    batch = batch_for("vanilla")
    return Subject(
        batch,
        lambda models: (models.actor, partial(learn_answers, models.actor, loss_type=name, loss_agg_mode=mode)),
        lambda plain: padded.supervised_gradients(plain, batch, name, mode),
    )


def reward_model_subject(name: str) -> Subject:
    batch = as_pairs(make_batch(num_groups=4, samples=4, temperature=TEMPERATURE))
    return Subject(
        batch,
        lambda models: (models.critic, partial(learn_scores, models.critic, loss_type=name)),
        lambda plain: padded.reward_model_gradients(plain, batch, name),
    )


def whole() -> dict[str, Subject]:
    """Every loss with every mode, as sums where they go by one path. In all cuts, on all worlds."""
    kl = {"use_kl_loss": True, "kl_loss_type": EVERY, "kl_loss_coef": 0.7}
    return (
        {"policy": policy_subject(EVERY, entropy_coeff=0.3, **kl)}
        | {f"bypass {loss_type}": bypass_subject(loss_type) for loss_type in LOSS_TYPES}
        | {"bypass, gate closed": bypass_subject("ppo_clip", gate_closed=True)}
        | {"value": value_subject(EVERY), "supervised": supervised_subject(EVERY)}
        | {f"pair {name}": pair_subject(name) for name in members(PAIR_LOSSES)}
        | {f"labelled {name}": labelled_subject(name) for name in members(LABELLED_LOSSES)}
        | {"reward model": reward_model_subject(EVERY)}
        | {f"distillation {mode}": distillation_subject(mode) for mode in DISTILLATIONS}
        | {"policy of a tree": policy_subject(EVERY, is_tree=True, entropy_coeff=0.3, **kl)}
        | {"value of a tree": value_subject(EVERY, is_tree=True)}
    )


def single() -> dict[str, Subject]:
    """Every loss by itself with all modes, and every mode by itself with one loss: they say which member is wrong."""
    kinds = [kind + plus for kind in members(KL_ESTIMATORS) for plus in ("", "+")]
    modes = list(members(AGGREGATION_MODES))
    return (
        {f"policy {name}": policy_subject(name) for name in members(POLICY_LOSSES)}
        | {f"policy vanilla, {mode}": policy_subject("vanilla", loss_agg_mode=mode) for mode in modes}
        | {f"kl {kind}": kl_subject(kind) for kind in kinds}
        | {"entropy": policy_subject("vanilla", still=True, entropy_coeff=1.0)}
        | {f"value {name}": value_subject(name) for name in members(VALUE_LOSSES)}
        | {f"supervised {name}": supervised_subject(name) for name in members(SFT_LOSSES)}
        | {f"reward model {name}": reward_model_subject(name) for name in members(REWARD_MODEL_LOSSES)}
    )


def batch_for(loss: str, is_tree: bool = False) -> DataProto:
    """A ragged batch with every column that a policy or value loss reads."""
    batch = make_batch(num_groups=4, samples=4, temperature=TEMPERATURE)
    if is_tree:
        batch = episodes_like(batch)
    columns = batch.batch
    generator = torch.Generator().manual_seed(0)
    columns["rollout_is_weights"] = 0.2 + torch.rand(columns["advantages"].shape, generator=generator).double()
    if loss in TOKEN_SELECTORS:  # chosen over the whole batch, before it is cut
        columns["selected_tokens"] = select_tokens(
            loss, columns["old_log_probs"], columns["advantages"], columns["response_mask"], ACTOR, generator
        )
    return batch


def episodes_like(batch: DataProto) -> DataProto:
    """Rows that form trees in two groups, with the numbers of another batch's tokens, again where those end."""
    tree = tree_batch(seed=1, num_rows=len(batch), longest=16)
    tree.non_tensor_batch["uid"] = np.array([f"g{row % 2}" for row in range(len(batch))], dtype=object)
    width = tree.batch["responses"].shape[1]
    for name in ("advantages", "ref_log_prob", "old_log_probs", "values", "returns"):
        tree.batch[name] = batch.batch[name].repeat(1, -(-width // RESPONSE_WIDTH))[:, :width].contiguous()
    tree.meta_info.update(batch.meta_info)
    return tree


# ------------------------------------------------------------------------------------------- gradients


def local_gradients(model: Actor | Critic, update: Update, batch: DataProto, plan: RankPlan) -> Gradients:
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


def references(path: Path) -> dict[str, Gradients]:
    """Full gradients of every loss in float64, by a padded forward."""
    plain = padded.Plain(path)
    return {name: subject.plain(plain) for name, subject in (whole() | single()).items()}


def squared_errors(models: Models, subject: Subject, cut: int, rank: int, world: World, reference: Gradients) -> Tensor:
    """Squared distance ``(P,)`` of this rank's shard of every parameter's gradient from its part of the reference."""
    plan, group = subject.cut(subject.batch, world, cut), rank // world.degree
    model, update = subject.update(models)
    mine = subject.batch.select_idxs(list(plan.rows[group]))
    found = local_gradients(model, update, mine, plan.ranks[group])
    assert found.keys() == reference.keys()
    errors = []
    for parameter, full in reference.items():
        shards = full.chunk(world.ranks)
        expected = shards[rank] if rank < len(shards) else full[:0]
        errors.append((found[parameter].double() - expected).square().sum())
    return torch.stack(errors)


def cases(world: World) -> Iterator[tuple[str, Subject, int]]:
    """Loss and number of micro-batches."""
    for name, subject in whole().items():
        yield from ((name, subject, cut) for cut in CUTS[world])
    if world == ALONE:
        for index, (name, subject) in enumerate(single().items()):
            yield name, subject, CUTS[ALONE][index % len(CUTS[ALONE])]


def errors_of_rank(rank: int, world: World, path: Path, folder: Path, dtype: str) -> dict[str, Tensor]:
    """Squared errors by loss and cut."""
    models, expected = Models(path, dtype, world.degree), torch.load(folder / "references.pt", weights_only=True)
    return {
        f"{name}, {cut} micro-batches": squared_errors(models, subject, cut, rank, world, expected[name])
        for name, subject, cut in cases(world)
    }


# ------------------------------------------------------------------------------------------- worlds


def in_worlds(rank: int, worlds: tuple[World, ...], path: Path, folder: Path) -> None:
    """One process's part in one world after the other."""
    torch.set_num_threads(1)
    disable_progress_bar()
    for world in (world for world in worlds if rank < world.ranks):
        name = f"{world.ranks}-{world.degree}"
        store = dist.FileStore(os.path.join(folder, f"store-{name}"), world.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world.ranks, timeout=TIMEOUT)
        try:
            with every_registered():
                found = {dtype: errors_of_rank(rank, world, path, folder, dtype) for dtype in DTYPES[world]}
        finally:
            dist.destroy_process_group()
        torch.save(found, folder / f"errors-{name}-{rank}.pt")


def run_worlds(worlds: tuple[World, ...], path: Path, folder: Path) -> dict[tuple[World, str], dict[str, Tensor]]:
    """Squared errors ``(P,)`` by loss and cut, over all ranks of each world."""
    warm_context()
    most = max(world.ranks for world in worlds)
    mp.start_processes(in_worlds, args=(worlds, path, folder), nprocs=most, start_method=METHOD)
    errors: dict[tuple[World, str], dict[str, Tensor]] = {}
    for world in worlds:
        files = [folder / f"errors-{world.ranks}-{world.degree}-{rank}.pt" for rank in range(world.ranks)]
        ranks = [torch.load(file, weights_only=True) for file in files]
        for dtype in DTYPES[world]:
            errors[world, dtype] = {case: sum(rank[dtype][case] for rank in ranks) for case in ranks[0][dtype]}
    return errors
