"""One rank and groups of several are the same model: results, steps, metrics, checkpoints, full tensors.

The ranks of a sequence group have slices of the same tokens, those of a tensor group parts of the same weights.

That no gradient of any loss depends on the groups is in ``tests/workers/test_partition.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from hrl.batching.plan import BatchPlan
from hrl.batching.planner import MicroBatchLimits, Planner
from hrl.metrics import Metric, StepMetrics
from hrl.models.adapter import AdapterSource
from hrl.protocol import DataProto
from hrl.trained.replay import replay
from hrl.workers.engine.sharding import build_sequence_group
from tests.models.tiny import (
    actor_config,
    critic_config,
    fsdp_config,
    make_batch,
    model_config,
    optim_config,
    run_ranks,
    save_llama,
    save_mixture,
    save_qwen2,
    world_of_one,
)
from tests.workers.asked import Actor, Critic
from tests.workers.engine.ranks import CPU, parameters
from tests.workers.engine.sequence_memory import most_of_a_rank

pytestmark = pytest.mark.cluster

#: Micro-batches of so many tokens, whatever runs them: less than the batch has, and more than its longest row.
BUDGET = 40


ADAPTER = AdapterSource(4, 8, "all-linear", None, False, None, seed=3, merge=False)


class Layout(NamedTuple):
    """How a model lies on the ranks."""

    degree: int = 1
    fsdp_size: int = -1
    tensor: int = 1
    experts: int = 1

    @property
    def together(self) -> int:
        return self.degree * self.tensor

    def fsdp(self, dtype: str) -> Any:
        return fsdp_config(
            dtype,
            fsdp_size=self.fsdp_size,
            ulysses_sequence_parallel_size=self.degree,
            tensor_parallel_size=self.tensor,
            expert_parallel_size=self.experts,
        )

    def plan(self, batch: DataProto, ranks: int, *, update: bool) -> BatchPlan:
        limits, planner = MicroBatchLimits(BUDGET, None, "a.key", self.together), Planner(share_prefix=True)
        if update:
            return planner.update(batch, ranks, limits, mini_batch_rows=8, epochs=1)
        return planner.forward(batch, ranks, limits)


PAIRS, ALL, CUT = Layout(2), Layout(4), Layout(tensor=2)
OF_TOKENS = {"pairs": PAIRS, "all": ALL}
LAYOUTS = OF_TOKENS | {"tensor pairs": CUT}
STEPS_ALONE = {
    "pairs of replicated shards": Layout(2, fsdp_size=2),
    "replicated tensor pairs": Layout(fsdp_size=2, tensor=2),
}
EVERY = LAYOUTS | STEPS_ALONE


#: Of a mixture of experts: these lie on the ranks of a group.
OF_EXPERTS = {
    "tensor pairs": CUT,
    "experts on all": Layout(experts=4),
    "experts in pairs of slices": Layout(2, experts=2),
    "replicated experts": Layout(fsdp_size=2, experts=2),
}
#: What resumes which layout's checkpoint.
OTHERS = {
    ("all", ALL): "pairs",
    ("tensor pairs", CUT): "pairs",
    ("shards", Layout()): "tensor pairs",
    ("pairs", PAIRS): "replicated tensor pairs",
}
#: Of a mixture's checkpoints; what one rank saved is "alone".
OTHERS_OF_EXPERTS = {
    ("experts on all", OF_EXPERTS["experts on all"]): "tensor pairs",
    ("tensor pairs", CUT): "experts in pairs of slices",
    ("shards", Layout()): "experts on all",
    ("replicated experts", OF_EXPERTS["replicated experts"]): "alone",
}
#: Of an adapter's.
OTHERS_OF_ADAPTERS = {
    ("all", ALL): "tensor pairs",
    ("tensor pairs", CUT): "pairs",
    ("shards", Layout()): "all",
    ("pairs", PAIRS): "alone",
}


def mine_of(plan: BatchPlan, batch: DataProto) -> tuple[DataProto, Any]:
    """This rank's rows and its part of the plan."""
    part = dist.get_rank() // plan.ranks_each
    return batch.select_idxs(list(plan.rows[part])), plan.ranks[part]


def columns(plan: BatchPlan, batch: DataProto, compute: Any) -> dict[str, torch.Tensor]:
    """What was computed of the whole batch, from the first rank of each group."""
    mine, own = mine_of(plan, batch)
    found = compute(mine, own).batch
    part = dist.get_rank() // plan.ranks_each
    is_first = dist.get_rank() % plan.ranks_each == 0
    whole = {}
    for name, column in found.items():
        table = torch.zeros(len(batch), *column.shape[1:])
        if is_first:
            table[list(plan.rows[part])] = column
        if dist.get_world_size() > 1:
            dist.all_reduce(table)
        whole[name] = table
    return whole


def learner(path: Path, layout: Layout, dtype: str, folder: Path | None = None, **changes: Any) -> Actor:
    """A policy whose gradients are clipped and whose layers run again in the backward pass."""
    actor = actor_config(grad_clip=0.1, entropy_coeff=0.05, loss_agg_mode="seq-mean-token-mean", **changes)
    del actor.optim.total_training_steps  # which is no key of the section that stands for it in a run
    model = model_config(path, enable_gradient_checkpointing=True)
    return Actor(model, actor, layout.fsdp(dtype), device=CPU, total_steps=10, run_folder=folder)


def results(path: Path, layout: Layout, dtype: str) -> dict[str, torch.Tensor]:
    """Log-probs, entropies and sums of squares of a policy, values and scores of a critic."""
    batch, ranks = make_batch(), dist.get_world_size()
    plan = layout.plan(batch, ranks, update=False)
    policy = learner(path, layout, dtype)
    critic = Critic(model_config(path), critic_config(), layout.fsdp(dtype), device=CPU, total_steps=10)
    torch.nn.init.constant_(critic.engine.module.model.score.weight, 0.1)
    asked = {"with_entropy": True, "with_sum_pi_squared": True}
    return (
        columns(plan, batch, lambda rows, own: policy.log_probs(rows, own, **asked))
        | columns(plan, batch, critic.values)
        | columns(plan, batch, critic.scores)
    )


def trained(path: Path, layout: Layout, folder: Path) -> dict[str, Any]:
    """Two updates of two steps each: metrics of all ranks that answer, what is saved after the first, full tensors."""
    batch, ranks = make_batch(), dist.get_world_size()
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"]
    plan = layout.plan(batch, ranks, update=True)
    policy = learner(path, layout, "float64", optim=optim_config(lr_warmup_steps=6))
    mine, own = mine_of(plan, batch)
    policy.learn(mine, own)
    policy.engine.save(folder)
    metrics = policy.learn(mine, own)
    return {
        "metrics": {name: [metric.kind, metric.value, metric.count] for name, metric in metrics.items()},
        "parameters": parameters(policy),
        "sent": dict(policy.engine.iter_full_params(torch.float32)),
    }


def adapter_learns(
    path: Path, layout: Layout, folder: Path | None = None, *, adapter: AdapterSource = ADAPTER
) -> Actor:
    """A policy whose adapter took two steps, from a checkpoint on if there is one."""
    batch, ranks = make_batch(), dist.get_world_size()
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"]
    config = actor_config(optim=optim_config(lr=3e-2))
    policy = Actor(model_config(path, adapter=adapter), config, layout.fsdp("float64"), device=CPU, total_steps=10)
    if folder is not None:
        policy.engine.load(folder)
    policy.learn(*mine_of(layout.plan(batch, ranks, update=True), batch))
    return policy


def adapted(path: Path, layout: Layout, folder: Path) -> dict[str, torch.Tensor]:
    """Log-probs of a policy, and of its reference without its adapter, after two steps; what is sent, and saved."""
    batch, ranks = make_batch(), dist.get_world_size()
    sent: dict[str, torch.Tensor] = {}
    for how, adapter in {"alone": ADAPTER, "merged": replace(ADAPTER, merge=True)}.items():
        policy = adapter_learns(path, layout, adapter=adapter)
        sent |= {f"{how} {name}": tensor for name, tensor in policy.engine.iter_full_params(torch.float64)}
    policy.engine.save(folder)
    plan = layout.plan(batch, ranks, update=False)
    with_it = columns(plan, batch, policy.log_probs)
    without = columns(plan, batch, partial(policy.log_probs, without_adapter=True))
    return with_it | {f"{name} without": column for name, column in without.items()} | parameters(policy) | sent


def resumed(path: Path, layout: Layout, folder: Path) -> dict[str, torch.Tensor]:
    """The second of the two updates, from what was saved after the first."""
    batch, ranks = make_batch(), dist.get_world_size()
    policy = learner(path, layout, "float64", optim=optim_config(lr_warmup_steps=6))
    policy.engine.load(folder)
    policy.learn(*mine_of(layout.plan(batch, ranks, update=True), batch))
    return parameters(policy)


def skipped(path: Path, layout: Layout, folder: Path, **asked: Any) -> None:
    """Learn from a batch of which a row's advantages are infinite, and keep it as a run does."""
    batch = make_batch()
    batch.batch["advantages"][3, 0] = float("inf")
    plan = layout.plan(batch, dist.get_world_size(), update=True)
    learner(path, layout, "float32", folder).learn(*mine_of(plan, batch), **asked)


def on_rank(rank: int, llama: Path, qwen2: Path, mixture: Path, single: Path, root: Path) -> dict[str, Any]:
    """All that the tests want to know of four ranks."""
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        folder = root / name
        found[name] = {"llama": results(llama, layout, "float64"), "qwen2": results(qwen2, layout, "float32")}
        found[name] |= {"trained": trained(llama, layout, folder / "state"), "resumed": resumed(llama, layout, single)}
    found["adapted"] = {name: adapted(llama, layout, root / "adapter" / name) for name, layout in LAYOUTS.items()}
    for (name, layout), folder in OTHERS_OF_ADAPTERS.items():
        found[f"{name} resumed with an adapter"] = parameters(adapter_learns(llama, layout, root / "adapter" / folder))
    for name, layout in STEPS_ALONE.items():
        found[name] = {"trained": trained(llama, layout, root / name / "state")}
    for name, layout in OF_EXPERTS.items():
        found[f"{name} of a mixture"] = trained(mixture, layout, root / "mixtures" / name)
    for (name, layout), folder in OTHERS_OF_EXPERTS.items():
        found[f"{name} resumed of a mixture"] = resumed(mixture, layout, root / "mixtures" / folder)
    skipped(llama, PAIRS, root / "skipped" / "llama")
    for name, layout in {"tensor pairs": CUT, "replicated experts": OF_EXPERTS["replicated experts"]}.items():
        skipped(mixture, layout, root / "skipped" / name, router_aux_loss_coef=0.5)
    for (name, layout), folder in OTHERS.items():
        found[f"{name} resumed"] = resumed(llama, layout, root / folder / "state")
    try:
        build_sequence_group(CPU, 3)
    except ValueError as error:
        found["refused"] = str(error)
    return found


def one_by_one(folder: Path) -> Path:
    """A mixture whose experts multiply one after the other: torch's grouped product has no float64."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"experts_implementation": "eager"}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("groups")
    return {
        "llama": save_llama(root / "llama"),
        "qwen2": save_qwen2(root / "qwen2", window=4),
        "mixture": one_by_one(save_mixture(root / "mixture", "qwen3_moe")),
        "single": root / "single",
        "root": root,
    }


@pytest.fixture(scope="module", autouse=True)
def one(folders: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """What one rank computes; its world stays for the tests."""
    with world_of_one():
        yield {
            "llama": results(folders["llama"], Layout(), "float64"),
            "qwen2": results(folders["qwen2"], Layout(), "float32"),
            "trained": trained(folders["llama"], Layout(), folders["single"]),
            "adapted": adapted(folders["llama"], Layout(), folders["root"] / "adapter" / "alone"),
            "mixture": trained(folders["mixture"], Layout(), folders["root"] / "mixtures" / "alone"),
        }


@pytest.fixture(scope="module")
def four(folders: dict[str, Path], one: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of four ranks computes."""
    arguments = (folders[name] for name in ("llama", "qwen2", "mixture", "single", "root"))
    return run_ranks(4, folders["root"] / "ranks", on_rank, *arguments)


def distance(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of the tensor that is furthest off."""
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_log_probs_entropies_values_and_scores_are_those_of_one_rank(one, four, layout, family):
    assert len(one[family]) == 5 and all(column.any() for column in one[family].values())
    for rank in four:  # each has put the parts together
        assert distance(rank[layout][family], one[family]) <= 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adapter_learns_and_is_switched_off_as_on_one_rank(one, four, layout):
    with_it, without, *_ = one["adapted"].values()
    alone = [name for name in one["adapted"] if name.startswith("alone ")]
    assert len(alone) == 2 * 7 * 2 and all(".lora_" in name for name in alone), "two of each layer, and nothing else"
    assert (with_it - without).abs().max() > 1e-3, "the adapter has to have learnt something"
    for rank in four:
        assert distance(rank["adapted"][layout], one["adapted"]) <= 1e-9


@pytest.mark.parametrize("layout", EVERY)
def test_steps_are_clipped_and_taken_as_on_one_rank(one, four, layout):
    grad_norm = one["trained"]["metrics"]["actor/grad_norm"]
    assert grad_norm[1] / grad_norm[2] > 0.1, "the gradients have to be clipped"
    for rank in four:
        assert distance(rank[layout]["trained"]["parameters"], one["trained"]["parameters"]) <= 1e-9
        assert distance(rank[layout]["trained"]["sent"], one["trained"]["sent"]) <= 1e-6


@pytest.mark.parametrize("layout", OF_EXPERTS)
def test_a_mixtures_experts_learn_on_several_ranks_what_they_learn_on_one(one, four, layout):
    """Routers compute in float32, so gradients round differently from about the eighth digit on."""
    for rank in four:
        mine = rank[f"{layout} of a mixture"]
        assert distance(mine["parameters"], one["mixture"]["parameters"]) <= 1e-7
        assert distance(mine["sent"], one["mixture"]["sent"]) <= 1e-6


@pytest.mark.parametrize("layout", EVERY)
def test_metrics_of_the_ranks_that_answer_are_those_of_one_rank(one, four, layout):
    def merged(ranks: list[dict[str, Any]]) -> dict[str, float]:
        step = StepMetrics()
        step.observe(*({name: Metric(*metric) for name, metric in rank["metrics"].items()} for rank in ranks))
        return dict(step)

    answering = [rank[layout]["trained"] for rank in four[:: EVERY[layout].together]]
    mine, theirs = merged(answering), merged([one["trained"]])
    assert mine.keys() == theirs.keys() and len(mine) > 10
    # What takes time differs, so do the last bits of weights; of several ranks a percentile is the largest of theirs.
    for name in theirs.keys() - {"perf/mfu/actor", "actor/weights_checksum", "rollout/logprob_diff_p99"}:
        assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_one_rank_saved_is_continued_by_groups(one, four, layout):
    for rank in four:
        assert distance(rank[layout]["resumed"], one["trained"]["parameters"]) <= 1e-9


@pytest.mark.parametrize("saved", ["pairs", "tensor pairs"])
def test_what_groups_saved_is_continued_by_one_rank(folders, one, four, saved):
    alone = resumed(folders["llama"], Layout(), folders["root"] / saved / "state")
    assert distance(alone, one["trained"]["parameters"]) <= 1e-9


@pytest.mark.parametrize("other", [name for name, _ in OTHERS])
def test_what_groups_saved_is_continued_in_another_layout(one, four, other):
    for rank in four:
        assert distance(rank[f"{other} resumed"], one["trained"]["parameters"]) <= 1e-9


@pytest.mark.parametrize("other", [name for name, _ in OTHERS_OF_EXPERTS])
def test_a_mixtures_experts_are_continued_in_another_layout(one, four, other):
    for rank in four:
        assert distance(rank[f"{other} resumed of a mixture"], one["mixture"]["parameters"]) <= 1e-7


@pytest.fixture(scope="module")
def adapter_went_on(folders: dict[str, Path], one: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What one rank has learnt after four steps without a checkpoint between them."""
    batch = make_batch()
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"]
    policy = adapter_learns(folders["llama"], Layout())
    policy.learn(*mine_of(Layout().plan(batch, 1, update=True), batch))
    return parameters(policy)


@pytest.mark.parametrize("other", [name for name, _ in OTHERS_OF_ADAPTERS])
def test_an_adapter_is_continued_in_another_layout(one, four, adapter_went_on, other):
    before = {name: one["adapted"][name] for name in adapter_went_on}
    assert distance(before, adapter_went_on) > 1e-3, "the second update has to move it"
    for rank in four:
        assert distance(rank[f"{other} resumed with an adapter"], adapter_went_on) <= 1e-9


@pytest.mark.parametrize("saved", ["tensor pairs", "experts in pairs of slices"])
def test_what_expert_groups_saved_is_continued_by_one_rank(folders, one, four, saved):
    alone = resumed(folders["mixture"], Layout(), folders["root"] / "mixtures" / saved)
    assert distance(alone, one["mixture"]["parameters"]) <= 1e-7


def test_what_groups_saved_of_an_adapter_is_continued_by_one_rank(folders, four, adapter_went_on):
    alone = adapter_learns(folders["llama"], Layout(), folders["root"] / "adapter" / "tensor pairs")
    assert distance(parameters(alone), adapter_went_on) <= 1e-9


@pytest.mark.parametrize(
    ("model", "name", "ranks"),
    [("llama", "llama", 2), ("mixture", "tensor pairs", 2), ("mixture", "replicated experts", 4)],
)
def test_a_skipped_batch_is_kept_once_for_each_group_and_computed_again_by_one_rank(folders, four, model, name, ranks):
    """With the loss that balances the load of a mixture's experts."""
    files = sorted((folders["root"] / "skipped" / name / "nonfinite").glob("*.json"))
    assert [file.name for file in files] == [f"step_7_rank_{rank}.actor-0.json" for rank in range(ranks)]
    whole = replay(files, model=str(folders[model]))
    assert any(math.isfinite(each.recorded) for each in whole.micro_batches) or model == "llama"
    assert whole.has_all_ranks and {uid for each in whole.micro_batches for uid in each.uids} <= {"g0", "g1", "g2"}
    for each in whole.micro_batches:
        assert each.loss == pytest.approx(each.recorded, rel=1e-4, nan_ok=True)


def test_what_a_rank_holds_of_a_long_row_falls_with_the_degree(tmp_path):
    for kept in most_of_a_rank(tmp_path / "memory", 768).values():
        assert kept[2] < 0.6 * kept[1] and kept[4] < 0.65 * kept[2], kept


def test_ranks_that_make_no_groups_are_refused_by_the_key(four):
    for rank in four:
        assert rank["refused"] == "fsdp_config.ulysses_sequence_parallel_size=3 does not divide the 4 ranks of the pool"
