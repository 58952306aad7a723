"""The section `reward` of a run."""

from functools import cache
from typing import Any

from hrl.config import compose_cli
from hrl.config.reward import RewardConfig


@cache
def _default() -> RewardConfig:
    return compose_cli([]).reward


def reward(**changes: Any) -> RewardConfig:
    """One process, and what the schema says; with changes."""
    return _default().model_copy(update=changes)
