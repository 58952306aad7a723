"""A configuration with other values, as a search tries them: nothing is composed or validated again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from hrl.config.section import ACTOR, Section

C = TypeVar("C", bound=Section)

_PROCESSES = "trainer.n_gpus_per_node"
BUDGET = f"{ACTOR}.ppo_max_token_len_per_gpu"
_OTHER_BUDGETS = (
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
)
"""Budgets that follow the actor's unless they are set."""


def with_values(config: C, values: Mapping[str, Any]) -> C:
    """Return a configuration with other values; budgets that followed the actor's still do, and pools their machines.

    Args:
        config: A whole configuration.
        values: Dotted key → value, each valid and of the key's type.
    """
    changed = dict(values)
    if BUDGET in changed:
        old = attrgetter(BUDGET)(config)
        changed |= {key: changed[BUDGET] for key in _OTHER_BUDGETS if attrgetter(key)(config) == old}
    if _PROCESSES in changed:
        old, new = attrgetter(_PROCESSES)(config), changed[_PROCESSES]
        pools = config.trainer.resource_pools  # type: ignore[attr-defined]
        changed["trainer.resource_pools"] = {
            name: [new if size == old else size for size in sizes] for name, sizes in pools.items()
        }
    for key, value in changed.items():
        config = _with(config, key.split("."), value)
    return config


def _with(section: Any, path: Sequence[str], value: Any) -> Any:
    """Return a section with another value at a path below it."""
    name, *rest = path
    inner: Section = getattr(section, name)
    return section.model_copy(update={name: _with(inner, rest, value) if rest else value})
