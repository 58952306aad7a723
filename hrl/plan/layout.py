"""Search for the layout with the shortest step that fits: how ranks sample, and how they train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

from hrl.config.section import ACTOR
from hrl.config.variant import BUDGET, with_values
from hrl.plan.cost import together_s
from hrl.plan.step import CostModel, StepCost

_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
TENSOR_PARALLEL = f"{_ROLLOUT}.tensor_model_parallel_size"
REQUESTS = f"{_ROLLOUT}.max_num_seqs"
ENGINE_SHARE = f"{_ROLLOUT}.gpu_memory_utilization"
SHARDS = f"{ACTOR}.fsdp_config.fsdp_size"
SLEEPS = f"{_ROLLOUT}.free_cache_engine"
PARAM_OFFLOAD, OPTIMIZER_OFFLOAD = (f"{ACTOR}.fsdp_config.{name}_offload" for name in ("param", "optimizer"))
RECOMPUTE = f"{_MODEL}.enable_gradient_checkpointing"
_CRITIC = "critic.model"

_LIKE_THE_ACTOR = {
    SHARDS: (f"{_CRITIC}.fsdp_config.fsdp_size",),
    RECOMPUTE: (f"{_CRITIC}.enable_gradient_checkpointing",),
    OPTIMIZER_OFFLOAD: (f"{_CRITIC}.fsdp_config.optimizer_offload",),
    PARAM_OFFLOAD: (
        f"{_CRITIC}.fsdp_config.param_offload",
        "actor_rollout_ref.ref.fsdp_config.param_offload",
    ),
}
"""Key of the actor → those of models beside it, which are laid out as the actor is if they are as given."""

_WORTH_A_CHANGE = 0.005
"""Share of a step that a key has to save to be worth setting."""

LEFT_FREE = 0.08
"""Share of a GPU's memory that a layout leaves free: the ledger counts tensors, not what is lost between them."""

Changes = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Layout:
    """A layout and its cost.

    Attributes:
        changes: Keys that differ from those given → values.
        model: The model of cost of the changed configuration.
        cost: What its step takes.
    """

    changes: Changes
    model: CostModel
    cost: StepCost


def best_layout(model: CostModel) -> Layout | None:
    """Return the layout with the shortest step of those that fit, and of nearly equal ones that with fewest changes.

    What an engine does and what a learner does cost time apart from each other, and share a device's memory: so the
    two are ranked apart, and their pairs tried in the order of their sum until one fits.
    """
    samplers = [each for each in _ranked(model, _sampling(model), of_engines=True) if _engine_fits(model, each.changes)]
    if not samplers:
        return None
    least = min(samplers, key=lambda each: with_changes(model, each.changes).engine_bytes)
    trainers = [
        each
        for each in _ranked(model, _training(model), of_engines=False)
        if _fits(with_changes(model, least.changes + each.changes))
    ]
    pairs = sorted(product(samplers, trainers), key=lambda pair: pair[0].seconds + pair[1].seconds)
    for sampler, trainer in pairs:
        changes = sampler.changes + trainer.changes
        changed = with_changes(model, changes)
        if _fits(changed):
            return Layout(changes, changed, changed.cost())
    return None


def _fits(model: CostModel) -> bool:
    return model.misfit(leaving=0.0 if model.hardware.is_cpu else LEFT_FREE) is None


def _engine_fits(model: CostModel, changes: Changes) -> bool:
    return with_changes(model, changes).engine_misfit() is None


def with_changes(model: CostModel, changes: Changes) -> CostModel:
    """Return the model of a configuration with other values; budgets that followed the actor's still do."""
    return replace(model, config=with_values(model.config, dict(changes)))


class _Candidate(NamedTuple):
    """Changes, and the seconds of the phases that they concern, with a small charge for each change."""

    seconds: float
    changes: Changes


def _ranked(model: CostModel, candidates: Iterable[Changes], *, of_engines: bool) -> list[_Candidate]:
    """Return candidates for the engines or for the learners, the quickest first."""
    charge = _WORTH_A_CHANGE * model.cost().seconds
    ranked = []
    for changes in candidates:
        whole = (*changes, *_of_other_models(model, changes))
        phases = with_changes(model, whole).phases(of_engines=of_engines)
        ranked.append(_Candidate(together_s(phases) + charge * len(changes), whole))
    return sorted(ranked, key=lambda candidate: candidate.seconds)


def _of_other_models(model: CostModel, changes: Changes) -> Iterator[tuple[str, Any]]:
    """Yield the changes by which critic and reference follow the actor."""
    config = model.config
    for key, value in changes:
        for other in _LIKE_THE_ACTOR.get(key, ()):
            is_built = config.needs_critic if other.startswith(_CRITIC) else config.runs_reference
            if is_built and attrgetter(other)(config) == attrgetter(key)(config):
                yield other, value


def _sampling(model: CostModel) -> Iterator[Changes]:
    """Yield layouts of the engines."""
    hardware, shape, ranks = model.hardware, model.shapes["actor"], model.ranks("rollout")
    inside = min(hardware.per_machine, ranks)
    heads, groups = shape.heads, shape.size.kv_heads
    widths = [
        width
        for width in (1, 2, 4, 8)
        if inside % width == 0 and heads % width == 0 and (groups % width == 0 or width % groups == 0)
    ]
    shares: tuple[float, ...] = () if hardware.is_cpu else (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    requests = (256, 512, 1024)
    yield from _choices(model, {TENSOR_PARALLEL: widths, REQUESTS: requests, ENGINE_SHARE: shares})


def _training(model: CostModel) -> Iterator[Changes]:
    """Yield layouts of the learners."""
    hardware, data, ranks = model.hardware, model.config.data, model.ranks("actor")
    longest = data.max_prompt_length + data.max_response_length
    least = max(each.budget_for(longest) for each in model.config.micro_batches().values())
    budgets = [budget for budget in (4096, 8192, 16384, 32768, 65536) if budget >= least]
    groups = [-1, *(size for size in (1, 8, 16, 32, 64, 128) if size < ranks and ranks % size == 0)]
    offloads: tuple[tuple[bool, bool], ...] = ((False, False),)
    if not hardware.is_cpu:
        offloads = ((False, False), (False, True), (True, True))
    for params, moments in offloads:
        keys: dict[str, Sequence[Any]] = {BUDGET: budgets, SHARDS: groups, RECOMPUTE: (True, False)}
        offload = {PARAM_OFFLOAD: (params,), OPTIMIZER_OFFLOAD: (moments,)} if not hardware.is_cpu else {}
        if not hardware.is_cpu and model.shares_devices:
            keys[SLEEPS] = (True, False)
        yield from _choices(model, {**keys, **offload}, keep=hardware.is_cpu)


def _choices(model: CostModel, keys: Mapping[str, Sequence[Any]], *, keep: bool = True) -> Iterator[Changes]:
    """Yield every combination of values, as the keys whose value is not the given one.

    Args:
        model: Of the given configuration.
        keys: Key → values to try.
        keep: Try the given value of each key too.
    """
    given = {key: attrgetter(key)(model.config) for key in keys}
    offers = [
        list(dict.fromkeys([given[key], *values] if keep or len(values) != 1 else values))
        for key, values in keys.items()
    ]
    for values in product(*offers):
        yield tuple((key, value) for key, value in zip(keys, values, strict=True) if value != given[key])
