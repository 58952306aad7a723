"""The reward function that a configuration names, as the processes that score are told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hrl.reward.function import RewardSpec

if TYPE_CHECKING:
    from hrl.config.reward import RewardConfig


def reward_spec(reward: RewardConfig, data_sources: tuple[str, ...]) -> RewardSpec:
    """Return the reward function of the section `reward`.

    Its file by absolute path, since no process need run in our folder.

    Args:
        reward: The section.
        data_sources: Of the rows to come.
    """
    custom = reward.custom_reward_function
    path = None if custom.path is None else str(Path(custom.path).expanduser().resolve())
    return RewardSpec(path, custom.name, custom.reward_kwargs, data_sources)


def memory_limit_bytes(reward: RewardConfig) -> int | None:
    """Address space of a process that scores; None for no limit."""
    return None if reward.memory_limit_gib is None else int(reward.memory_limit_gib * 2**30)
