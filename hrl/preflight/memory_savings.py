"""Which single keys would lower the memory of a run's fullest moment, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from hrl.config.model import ForwardShardingConfig, FsdpConfig
from hrl.config.outline import RunConfiguration
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.rules import OFFLINE_RULES, PPO_RULES
from hrl.config.variant import BUDGET, with_values
from hrl.preflight.memory_ledger import Ledger
from hrl.preflight.memory_table import Saving

_ROLLOUT = "actor_rollout_ref.rollout"
_WORTH_SAYING = 0.02
"""Share of the peak that a key has to save to be named."""
_SHOWN = 3


def savings(
    config: RunConfiguration, ledger: Ledger, ledgers_with: Callable[[RunConfiguration], list[Ledger]], device: str
) -> list[Saving]:
    """Return the keys that lower a ledger's peak most, the best first, at most three.

    Values that the configuration's own rules refuse are left out.

    Args:
        config: The validated configuration, with every `auto` replaced by a dtype.
        ledger: The one that is to become smaller.
        ledgers_with: The ledgers of another configuration.
        device: `cpu` or `cuda`.
    """
    peak, rules = ledger.peak.num_bytes, PPO_RULES if isinstance(config, PPOTrainerConfig) else OFFLINE_RULES
    found = []
    for key, value in _candidates(config, device):
        changed = with_values(config, {key: value})
        if any(problem for rule in rules for problem in rule(changed)):
            continue
        same = next((one for one in ledgers_with(changed) if one.where == ledger.where), None)
        if same is not None and (saved := peak - same.peak.num_bytes) >= _WORTH_SAYING * peak:
            found.append(Saving(key, value, saved))
    return sorted(found, key=lambda saving: -saving.num_bytes)[:_SHOWN]


def _candidates(config: RunConfiguration, device: str) -> Iterator[tuple[str, Any]]:
    """Yield keys with other values that may need less memory; each costs time, or precision, or another device."""
    if isinstance(config, PPOTrainerConfig):
        yield from _of_ppo(config, device)
    else:
        yield from _of_model(config, "model", device)
        budget = config.micro_batches()["model"].max_tokens
        if budget is not None:
            yield "data.max_token_len_per_gpu", budget // 2


def _of_ppo(config: PPOTrainerConfig, device: str) -> Iterator[tuple[str, Any]]:
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    least = max(each.budget_for(longest) for each in config.micro_batches().values())
    if policy.actor.ppo_max_token_len_per_gpu > least:
        yield BUDGET, max(least, policy.actor.ppo_max_token_len_per_gpu // 2)
    yield from _of_model(config, "actor_rollout_ref.actor", device, model="actor_rollout_ref.model")
    if config.needs_critic:
        yield from _of_model(config, "critic.model", device)
    if config.runs_reference:
        yield from _of_sharding("actor_rollout_ref.ref.fsdp_config", policy.ref.fsdp_config, device)
    if config.reward.reward_model.enable:
        section = "reward.reward_model.model.fsdp_config"
        yield from _of_sharding(section, attrgetter(section)(config), device)
    if device == "cpu":
        yield f"{_ROLLOUT}.kv_cache_gib", rollout.kv_cache_gib / 2
        if config.trainer.n_gpus_per_node > 1:  # each process has libraries of its own, and each engine its cache
            yield "trainer.n_gpus_per_node", config.trainer.n_gpus_per_node // 2
        return
    yield f"{_ROLLOUT}.gpu_memory_utilization", round(0.8 * rollout.gpu_memory_utilization, 2)
    yield f"{_ROLLOUT}.free_cache_engine", True
    yield f"{_ROLLOUT}.tensor_model_parallel_size", 2 * rollout.tensor_model_parallel_size
    yield f"{_ROLLOUT}.weight_sync.bucket_mb", max(1, rollout.weight_sync.bucket_mb // 4)


def _of_model(config: RunConfiguration, section: str, device: str, model: str = "") -> Iterator[tuple[str, Any]]:
    """Yield those of a trained model; `section` has its `fsdp_config`, `model` the other keys, if not the same."""
    yield f"{model or section}.enable_gradient_checkpointing", True
    optim = {"critic.model": "critic.optim", "model": "optim"}.get(section, f"{section}.optim")
    if find_spec("torchao") is not None:
        yield f"{optim}.name", "adamw8bit"
    if device != "cpu":
        yield f"{model or section}.enable_activation_offload", True
    yield from _of_sharding(f"{section}.fsdp_config", attrgetter(f"{section}.fsdp_config")(config), device)


def _of_sharding(section: str, sharding: FsdpConfig | ForwardShardingConfig, device: str) -> Iterator[tuple[str, Any]]:
    if device != "cpu":
        yield f"{section}.param_offload", True
    yield f"{section}.ulysses_sequence_parallel_size", 2 * sharding.ulysses_sequence_parallel_size
    yield f"{section}.tensor_parallel_size", 2 * sharding.tensor_parallel_size
    yield f"{section}.expert_parallel_size", 2 * sharding.expert_parallel_size
    if isinstance(sharding, FsdpConfig):
        if device != "cpu":
            yield f"{section}.optimizer_offload", True
            yield f"{section}.offload_policy", True
        yield f"{section}.model_dtype", "bf16"
        yield f"{section}.reshard_after_forward", True
