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


def weighted(model: float = 1.0, overlong_tokens: int = 0) -> RewardConfig:
    """The section with this weight of the model; with a penalty over this many tokens, if any."""
    section = reward()
    overlong = {"enable": overlong_tokens > 0, "len": overlong_tokens}
    return section.model_copy(
        update={
            "reward_model": section.reward_model.model_copy(update={"weight": model, "model_path": "some/model"}),
            "overlong_buffer": section.overlong_buffer.model_copy(update=overlong),
        }
    )
