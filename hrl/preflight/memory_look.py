"""The preflight check of memory: compare every phase's needs with the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import psutil
import torch

from hrl.cluster.precision import with_dtypes
from hrl.config.arithmetic import Fact
from hrl.config.outline import Outline, RunConfiguration, outline_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.trainer import RunConfig
from hrl.models.adapter import AdapterError, adapter_of
from hrl.models.footprint import Footprint, FootprintError, footprint
from hrl.models.loading import ModelSource
from hrl.preflight.findings import Findings, sentence
from hrl.preflight.machine_look import gpus_here, joins_a_cluster
from hrl.preflight.memory_ledger import (
    Column,
    Ledger,
    engine_too_small,
    gib,
    ledgers_of,
    perhaps_too_large,
    too_large,
)
from hrl.preflight.memory_savings import savings
from hrl.preflight.memory_table import Saving
from hrl.preflight.model_look import look_at_heads

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SMALLER_ENGINES = frozenset({"quantization", "kv_cache_dtype", "cpu_offload_gb"})
"""vLLM's own arguments with which an engine holds less than its dtype says; how much is not added up."""
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
        try:
            sizes[role] = size_of(role, outline, folders[role], config.trainer.seed)
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
    section = "model"
    if isinstance(config, PPOTrainerConfig):
        section = "actor_rollout_ref.actor"
        small = _engine_too_small(config, learner, device, capacity)
        if small is not None:
            hint = "Raise it, or spread the engine: tensor_model_parallel_size."
            findings.problem(_UTILIZATION, f"{small}.", hint)
        if device == "cuda" and capacity is not None and config.actor_rollout_ref.rollout.name == "vllm":
            _look_at_what_is_free(findings, config.actor_rollout_ref.rollout.gpu_memory_utilization)

    ledgers = ledgers_of(config, sizes, device, capacity)
    # The memory beside GPUs is known where they are on this machine.
    host = None if device == "cpu" or joins_a_cluster(config.trainer) or capacity is None else memory_here()
    most_in_host = max([host or inf, *(ledger.peak.num_bytes for ledger in ledgers if ledger.is_host)])

    def ledgers_with(changed: RunConfiguration) -> list[Ledger]:
        """Return those of a configuration that this one may become, nothing if it would not run for another reason."""
        shared = Findings()
        look_at_heads(shared, outline_of(changed), folders)
        is_new = not (isinstance(config, PPOTrainerConfig) and _engine_too_small(config, learner, device, capacity))
        if is_new and isinstance(changed, PPOTrainerConfig) and _engine_too_small(changed, learner, device, capacity):
            return []
        found = ledgers_of(changed, sizes, device, capacity)
        overflows = any(ledger.is_host and ledger.peak.num_bytes > most_in_host for ledger in found)
        return [] if shared.problems or overflows else found

    peaks = []
    for ledger in ledgers:
        there = host if ledger.is_host else capacity
        found = savings(config, ledger, ledgers_with, device)
        findings.memory.append(table_of(ledger, there, found))
        peaks.append(_peak(ledger, there))
        if there is not None:
            _compare(findings, ledger, there, f"{section}.fsdp_config", found)
    findings.facts.append(Fact("memory", f"{_in_millions(learner.parameters)} parameters; {'; '.join(peaks)}"))
    if device == "cpu" and capacity is not None:
        _note_what_others_hold(findings, ledgers, capacity)


def size_of(role: str, outline: Outline, folder: Path, seed: int) -> Footprint:
    """Return the sizes of a role's model as the run has it: with its adapter, and with the head that the role gives it.

    Args:
        role: Of `outline.models`.
        outline: Outline of the run.
        folder: Of its model.
        seed: Of the run.

    Raises:
        FootprintError: They can't be computed without the weights.
        AdapterError: The adapter does not fit the model.
    """
    model = outline.models[role]
    source = ModelSource.to_look_at(
        folder,
        model.override_config,
        trust_remote_code=outline.model.trust_remote_code,
        max_model_len=outline.lengths.total,
        adapter=None if model.learner is None else adapter_of(model.learner, seed),
    )
    size = footprint(source)
    if not model.is_scalar:
        return size
    return replace(size, parameters=size.parameters - size.head, head=0)  # of its own it has a head of one row


def _engine_too_small(config: PPOTrainerConfig, size: Footprint, device: str, capacity: float | None) -> str | None:
    """Return why a card's share for the engine holds none; None if it does, or if nothing is known of the card."""
    given = config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}
    if device == "cpu" or capacity is None or _SMALLER_ENGINES & given.keys():
        return None
    return engine_too_small(config.actor_rollout_ref.rollout.gpu_memory_utilization * capacity, config, size)


def device_and_capacity(trainer: RunConfig) -> tuple[str, float | None]:
    """Return the device that a run will choose, `cpu` or `cuda`, and the bytes of a card or the machine, if known."""
    if joins_a_cluster(trainer):
        return ("cpu" if trainer.device == "cpu" else "cuda"), None
    if trainer.device != "cpu" and (gpus := gpus_here()):
        return "cuda", min(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
    if trainer.device == "cuda":
        return "cuda", None
    return "cpu", memory_here()


def _look_at_what_is_free(findings: Findings, utilization: float) -> None:
    """Refuse a share of a card that other programs hold a part of: vLLM does when it starts, minutes later."""
    for index in range(gpus_here()):
        total = float(torch.cuda.get_device_properties(index).total_memory)
        try:
            free = total - torch.cuda.device_memory_used(index)  # asks the driver, and leaves no context on the card
        except (ModuleNotFoundError, RuntimeError) as error:
            findings.unchecked.append(f"{_UTILIZATION}: what is free on the cards is not known: {error}")
            return
        if free < utilization * total:
            findings.problem(
                _UTILIZATION,
                f"is {utilization:g}, {gib(utilization * total)} GiB of card {index}, of which {gib(free)} of "
                f"{gib(total)} are free: vLLM would not start.",
                f"Lower it below {int(100 * free / total) / 100:g}, or end what holds the rest (nvidia-smi shows it).",
            )


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


def table_of(ledger: Ledger, capacity_bytes: float | None, savings: Sequence[Saving]) -> dict[str, Any]:
    """Return a ledger as plain data, in bytes.

    Args:
        ledger: Phases of a memory.
        capacity_bytes: Of it, if known.
        savings: Keys that would lower its peak.
    """
    return {
        "where": ledger.where,
        "capacity": capacity_bytes,
        "peak": ledger.peak.name,
        "dominates": ledger.peak.largest.label,
        "phases": [
            {
                "phase": phase.name,
                "bytes": phase.num_bytes,
                "certain": phase.certain_bytes,
                "columns": {str(column): phase.in_column(column) for column in Column},
                "entries": {entry.label: entry.num_bytes for entry in phase.entries},
            }
            for phase in ledger.phases
        ],
        "savings": [saving._asdict() for saving in savings],
    }


def _peak(ledger: Ledger, there: float | None) -> str:
    """Return a ledger's peak in words."""
    of = "" if there is None else f" of {gib(there)}"
    return f"{ledger.where}: at most {gib(ledger.peak.num_bytes)}{of} GiB ({ledger.peak.name})"


def _compare(findings: Findings, ledger: Ledger, there: float, key: str, found: list[Saving]) -> None:
    """Report what does not fit, or may not."""
    more = "more memory" if ledger.is_host or ledger.where == "this machine" else "more GPUs (trainer.n_gpus_per_node)"
    ways = ", ".join([*map(str, found), more])
    if (wrong := too_large(ledger, there)) is not None:
        findings.problem(key, f"does not fit: {wrong}.", f"What helps: {ways}.")
    elif (doubt := perhaps_too_large(ledger, there)) is not None:
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
