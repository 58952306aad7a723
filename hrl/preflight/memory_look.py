"""The preflight check of memory: compare every phase's needs with the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path

import psutil
import torch

from hrl.cluster.precision import with_dtypes
from hrl.config.actor import ActorConfig
from hrl.config.arithmetic import Fact
from hrl.config.model import FsdpConfig
from hrl.config.outline import Outline, RunConfiguration
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.trainer import RunConfig
from hrl.models.adapter import AdapterError, adapter_of
from hrl.models.footprint import Footprint, FootprintError, footprint
from hrl.models.loading import ModelSource
from hrl.preflight.findings import Findings, sentence
from hrl.preflight.machine_look import gpus_here, joins_a_cluster
from hrl.preflight.memory_ledger import (
    Ledger,
    engine_too_small,
    gib,
    in_words,
    ledgers_of,
    perhaps_too_large,
    too_large,
)

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"


def look_at_memory(findings: Findings, config: RunConfiguration, outline: Outline, folders: Mapping[str, Path]) -> None:
    """Add up the memory of a run and report what can't fit; do nothing if a model was not found.

    Args:
        findings: Collects problems and facts.
        config: The validated configuration.
        outline: Outline of the run.
        folders: Role → folder of its model.
    """
    if outline.models.keys() != folders.keys():
        return
    device, capacity = device_and_capacity(config.trainer)
    config = with_dtypes(config, device)
    sizes = {}
    for role, model in outline.models.items():
        source = ModelSource.to_look_at(
            folders[role],
            model.override_config,
            trust_remote_code=outline.model.trust_remote_code,
            max_model_len=outline.lengths.total,
            adapter=None if model.learner is None else adapter_of(model.learner, config.trainer.seed),
        )
        try:
            sizes[role] = footprint(source)
        except FootprintError as error:
            findings.unchecked.append(f"memory: {error}")
            return
        except AdapterError as error:
            by_folder = model.learner is not None and model.learner.lora_adapter_path is not None
            key = f"{model.key.rpartition('.')[0]}.{'lora_adapter_path' if by_folder else 'target_modules'}"
            findings.problem(key, f"can't be used: {sentence(str(error))}")
            return
        if sizes[role].adapter:
            findings.facts.append(Fact(f"adapter of {role}", _share(sizes[role])))
    learner = next(iter(sizes.values()))
    fewer: Iterable[str] = ["lower data.max_token_len_per_gpu"]
    section = "model"
    if isinstance(config, PPOTrainerConfig):
        fewer, section = _fewer(config, device), "actor_rollout_ref.actor"
        if device != "cpu" and capacity is not None:
            share = config.actor_rollout_ref.rollout.gpu_memory_utilization * capacity
            small = engine_too_small(share, config, learner)
            if small is not None:
                hint = "Raise it, or spread the engine: tensor_model_parallel_size."
                findings.problem(_UTILIZATION, f"{small}.", hint)
    sharding = f"{section}.fsdp_config"
    levers = [*_levers(sharding, attrgetter(sharding)(config), outline, device), *fewer]
    ledgers = ledgers_of(config, sizes, device, capacity)
    _note(findings, ledgers, learner, capacity, sharding, levers)
    if device == "cpu" and capacity is not None:
        _note_what_others_hold(findings, ledgers, capacity)


def device_and_capacity(trainer: RunConfig) -> tuple[str, float | None]:
    """Return the device that a run will choose, `cpu` or `cuda`, and the bytes of a card or the machine, if known."""
    if joins_a_cluster(trainer):
        return ("cpu" if trainer.device == "cpu" else "cuda"), None
    if trainer.device != "cpu" and (gpus := gpus_here()):
        return "cuda", min(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
    if trainer.device == "cuda":
        return "cuda", None
    return "cpu", memory_here()


def _note_what_others_hold(findings: Findings, ledgers: Iterable[Ledger], capacity: float) -> None:
    free = float(psutil.virtual_memory().available)
    for ledger in ledgers:
        if free < ledger.peak.num_bytes <= capacity:
            findings.notes.append(
                f"{ledger.where} has {gib(capacity)} GiB, of which {gib(free)} are free now, and the phase "
                f"{ledger.peak.name!r} may take {gib(ledger.peak.num_bytes)}: other processes hold the rest (`ps aux "
                "--sort=-rss`), and the kernel ends a process when memory runs out"
            )


def memory_here() -> float:
    """Return the bytes of memory that processes here may take: the machine's, or a container's limit below it."""
    total = float(psutil.virtual_memory().total)
    if _CGROUP_LIMIT.is_file() and (limit := _CGROUP_LIMIT.read_text().strip()).isdigit():
        return min(total, float(limit))
    return total


def _levers(section: str, fsdp: FsdpConfig, outline: Outline, device: str) -> Iterator[str]:
    """Yield the keys that move more of a trained model off a GPU, or recompute it."""
    if device != "cpu" and not fsdp.optimizer_offload:
        yield f"{section}.optimizer_offload=true"
    if device != "cpu" and not fsdp.param_offload:
        yield f"{section}.param_offload=true"
    if not outline.model.enable_gradient_checkpointing:
        yield f"{outline.section}.enable_gradient_checkpointing=true"


def _fewer(config: PPOTrainerConfig, device: str) -> Iterator[str]:
    actor: ActorConfig = config.actor_rollout_ref.actor
    if actor.ppo_max_token_len_per_gpu > config.data.max_prompt_length + config.data.max_response_length:
        yield "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    if device != "cpu":
        yield "more processes (trainer.n_gpus_per_node)"
        return
    yield "lower actor_rollout_ref.rollout.kv_cache_gib"
    if config.trainer.n_gpus_per_node > 1:  # each has libraries of its own, and each engine its cache
        yield "fewer processes (trainer.n_gpus_per_node)"


def _note(
    findings: Findings,
    ledgers: list[Ledger],
    size: Footprint,
    capacity: float | None,
    key: str,
    levers: list[str],
) -> None:
    ways = ", ".join(levers)
    findings.memory += [Fact("parameters", _in_millions(size.parameters)), *in_words(ledgers)]
    there = "" if capacity is None else f" of {gib(capacity)}"
    peaks = "; ".join(f"{one.where}: at most {gib(one.peak.num_bytes)}{there} GiB ({one.peak.name})" for one in ledgers)
    findings.facts.append(Fact("memory", f"{_in_millions(size.parameters)} parameters; {peaks}"))
    if capacity is None:
        return
    for ledger in ledgers:
        if (wrong := too_large(ledger, capacity)) is not None:
            findings.problem(key, f"does not fit: {wrong}.", f"What helps: {ways}.")
        elif (doubt := perhaps_too_large(ledger, capacity)) is not None:
            findings.notes.append(f"{doubt}. If it runs out, what helps is: {ways}")


def _share(size: Footprint) -> str:
    """Return in words how much of a model is trained."""
    trained, whole = size.adapter, size.parameters
    return (
        f"{_in_millions(trained)} weights beside {size.adapted_layers} matrices are trained, {trained / whole:.2%} of "
        f"{_in_millions(whole)}"
    )


def _in_millions(number: int) -> str:
    return f"{number / 1e6:,.0f} million" if number >= 1e6 else f"{number:,}"
