"""The registries of `hrl.algos`, and tests that leave them as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from hrl.algos import (
    advantages,
    aggregation,
    distillation,
    groups,
    kl,
    policy_filtration,
    policy_losses,
    preference,
    reward_shaping,
    rollout_correction,
    token_selection,
    value_loss,
)
from hrl.algos.registry import Registry

REGISTRIES: dict[str, Registry[Any, Any]] = {
    "advantage": advantages.ADVANTAGE_ESTIMATORS,
    "policy loss": policy_losses.POLICY_LOSSES,
    "aggregation": aggregation.AGGREGATION_MODES,
    "value loss": value_loss.VALUE_LOSSES,
    "distillation": distillation.DISTILLATION_LOSSES,
    "kl": kl.KL_ESTIMATORS,
    "correction": rollout_correction.IMPORTANCE_LEVELS,
    "group filter": groups.GROUP_FILTERS,
    "preference": preference.PAIR_LOSSES,
    "labelled": preference.LABELLED_LOSSES,
    "reward model": preference.REWARD_MODEL_LOSSES,
    "sft": preference.SFT_LOSSES,
    "reward shaping": reward_shaping.REWARD_SHAPERS,
    "policy filtration": policy_filtration.REWEIGHT_METHODS,
    "token selection": token_selection.TOKEN_SELECTORS,
}


@contextmanager
def restored_registries() -> Iterator[None]:
    """What is registered inside the block is gone after it."""
    with ExitStack() as stack:
        for registry in REGISTRIES.values():
            stack.enter_context(patch.dict(registry.data))
            stack.enter_context(patch.dict(registry.table))
        yield
