"""What a trainer in Python chooses for rows of your own, where nobody has set it.

verl's defaults, which a command line has, suit large models and many GPUs: 1024 prompts per step, and a learning rate
that moves a small model nowhere. A model that is bundled, or that a machine without a GPU can train, is small, and gets
the values of the quickstart; batches are never larger than rows that are given as objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hrl.config.compose import QUICKSTART
from hrl.config.model import ADAPTER_RATE
from hrl.config.offline import OfflineConfig
from hrl.config.outline import RunConfiguration, outline_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import RunKind
from hrl.preflight.small_models import BUDGETS, has_small_model, runs_on_gpus, values_for_small_models

BATCH = "data.train_batch_size"
GPU_BATCH = 64
"""Rows per step of a model that a GPU trains; verl's 1024 take minutes there."""
CPU_RESPONSE_TOKENS = 128
"""Longest response without a GPU, where every token costs milliseconds."""
_RESPONSE = "data.max_response_length"


def chosen(kind: RunKind[Any], config: RunConfiguration, num_rows: int | None) -> dict[str, Any]:
    """Return key → value for keys that nobody set and whose default would not suit these rows or this machine.

    Args:
        kind: Kind of run.
        config: What was set, as composed.
        num_rows: Training rows, None if they are in files.
    """
    set_by = config.origins or {}
    if f"{QUICKSTART}={kind.name}" in set_by.values():
        return {}  # the quickstart's own rows
    small = values_for_small_models(kind)
    has_gpu = runs_on_gpus(config)
    values: dict[str, Any] = {}
    most = GPU_BATCH if has_gpu else small[BATCH]
    values[BATCH] = most if num_rows is None else _power_of_two_up_to(min(most, _used(config, num_rows)))
    if has_small_model(config):
        values |= {key: value for key, value in small.items() if key != BATCH}
    rate = "actor_rollout_ref.actor.optim.lr" if isinstance(config, PPOTrainerConfig) else "optim.lr"
    if rate in values and outline_of(config).model.trains_adapter:
        values[rate] = ADAPTER_RATE
    if isinstance(config, PPOTrainerConfig):
        if not has_gpu and _RESPONSE not in set_by:
            values[_RESPONSE] = CPU_RESPONSE_TOKENS
        if config.needs_critic and rate in values:
            small_rate = small.get(rate, values[rate])
            values["critic.optim.lr"] = ADAPTER_RATE if config.critic.model.trains_adapter else small_rate
    for key in BUDGETS:
        if key in values:
            values[key] = max(values[key], _share_of_longest_row(config, values))
    return {key: value for key, value in values.items() if key not in set_by}


def _used(config: RunConfiguration, num_rows: int) -> int:
    most = config.data.train_max_samples
    return max(1, num_rows if most < 0 else min(num_rows, most))


def _power_of_two_up_to(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _share_of_longest_row(config: RunConfiguration, values: Mapping[str, Any]) -> int:
    """Return the tokens of the longest row that one process has, in the smallest sequence group of the run."""
    if isinstance(config, OfflineConfig):
        longest = 2 * config.data.max_length
    else:
        response: int = values.get(_RESPONSE, config.data.max_response_length)
        longest = config.data.max_prompt_length + response
    return max(passes.budget_for(longest) for passes in config.micro_batches().values())
