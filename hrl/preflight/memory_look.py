"""The look of a preflight at memory: what every phase takes, against what the machine has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from hrl.cluster.precision import with_dtypes
from hrl.config.actor import ActorConfig
from hrl.config.arithmetic import Fact
from hrl.config.offline import DPOTrainerConfig, OfflineConfig, RMTrainerConfig
from hrl.config.ppo import PPOTrainerConfig
from hrl.models.footprint import Footprint, FootprintError, footprint
from hrl.models.loading import ModelSource
from hrl.preflight.findings import Findings
from hrl.preflight.looks import gpus_here, joins_a_cluster
from hrl.preflight.memory_ledger import engine_too_small, offline_ledger, ppo_ledgers
from hrl.preflight.memory_phases import Ledger, gib, in_words, perhaps_too_large, too_large

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"


def look_at_memory(
    findings: Findings, config: PPOTrainerConfig, policy: Path, critic: Path | None, reward_model: Path | None
) -> None:
    """Add up what a PPO run takes, and refuses what can't fit.

    Args:
        findings: Takes what was found.
        config: The validated configuration.
        policy: Its folder.
        critic: Likewise; None where the run has none.
        reward_model: Likewise.
    """
    device, capacity = device_and_capacity(config.trainer)
    config = with_dtypes(config, device)
    roles = config.actor_rollout_ref
    row = config.data.max_prompt_length + config.data.max_response_length
    trust = roles.model.trust_remote_code
    folders = {"actor": (policy, roles.model.override_config)}
    if critic is not None:
        folders["critic"] = (critic, config.critic.model.override_config)
    if reward_model is not None:
        folders["rm"] = (reward_model, {})
    sizes = {}
    for role, (folder, override) in folders.items():
        size = _size(findings, ModelSource.to_look_at(folder, override, trust_remote_code=trust, max_model_len=row))
        if size is None:
            return
        sizes[role] = size
    if device != "cpu" and capacity is not None:
        small = engine_too_small(roles.rollout.gpu_memory_utilization * capacity, config, sizes["actor"])
        if small is not None:
            findings.problem(_UTILIZATION, f"{small}.", "Raise it, or spread the engine: tensor_model_parallel_size.")
    ledgers = ppo_ledgers(config, sizes, device, capacity)
    section = "actor_rollout_ref.actor"
    levers = [*_levers(section, "actor_rollout_ref.model", roles.actor, roles.model, device), *_fewer(config, device)]
    _note(findings, ledgers, sizes["actor"], capacity, f"{section}.fsdp_config", levers)


def look_at_offline_memory(findings: Findings, config: OfflineConfig, folder: Path) -> None:
    """As `look_at_memory`, for a run without a sampler."""
    device, capacity = device_and_capacity(config.trainer)
    config = with_dtypes(config, device)
    model = config.model
    source = ModelSource.to_look_at(
        folder,
        model.override_config,
        trust_remote_code=model.trust_remote_code,
        max_model_len=config.data.max_length,
    )
    size = _size(findings, source)
    if size is None:
        return
    reference = isinstance(config, DPOTrainerConfig) and config.needs_reference
    head = not isinstance(config, RMTrainerConfig)
    ledger = offline_ledger(config, size, device, has_head=head, has_reference=reference)
    levers = [*_levers("model", "model", model, model, device), "lower data.max_token_len_per_gpu"]
    _note(findings, [ledger], size, capacity, "model.fsdp_config", levers)


def device_and_capacity(trainer: Any) -> tuple[str, float | None]:
    """`cpu` or `cuda`, as a run will choose it, and the bytes of a card or of the machine; None where unknown."""
    if joins_a_cluster(trainer):
        return ("cpu" if trainer.device == "cpu" else "cuda"), None
    if trainer.device != "cpu" and (gpus := gpus_here()):
        return "cuda", min(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
    if trainer.device == "cuda":
        return "cuda", None
    return "cpu", memory_here()


def memory_here() -> float:
    """Bytes of memory that processes here may take: the machine's, or a container's limit below it."""
    total = float(psutil.virtual_memory().total)
    if _CGROUP_LIMIT.is_file() and (limit := _CGROUP_LIMIT.read_text().strip()).isdigit():
        return min(total, float(limit))
    return total


def _size(findings: Findings, source: ModelSource) -> Footprint | None:
    try:
        return footprint(source)
    except FootprintError as error:
        findings.unchecked.append(f"memory: {error}")
        return None


def _levers(section: str, model_key: str, trained: Any, model: Any, device: str) -> Iterator[str]:
    """Yield what of a trained model can still be moved off a GPU or made again."""
    fsdp = trained.fsdp_config
    if device != "cpu" and not fsdp.optimizer_offload:
        yield f"{section}.fsdp_config.optimizer_offload=true"
    if device != "cpu" and not fsdp.param_offload:
        yield f"{section}.fsdp_config.param_offload=true"
    if not model.enable_gradient_checkpointing:
        yield f"{model_key}.enable_gradient_checkpointing=true"


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
    ledgers: Iterable[Ledger],
    size: Footprint,
    capacity: float | None,
    key: str,
    levers: Iterable[str],
) -> None:
    ledgers, ways = list(ledgers), ", ".join(levers)
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


def _in_millions(number: int) -> str:
    return f"{number / 1e6:,.0f} million" if number >= 1e6 else f"{number:,}"
