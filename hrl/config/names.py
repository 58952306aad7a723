"""Names that live in registries elsewhere, known here without importing torch.

The schema must be able to refuse `adv_estimator=grop` before any heavy import, so the built-in names stand here
once more; a test holds them equal to the registries. Names that a user registers before the configuration is
composed are found through the registry itself, which is then already imported.
"""

import sys
from collections.abc import Iterable
from typing import NamedTuple


class EstimatorNeeds(NamedTuple):
    """What an advantage estimator asks of the rest of the run."""

    critic: bool = False
    min_group_size: int = 1
    baseline: bool = False


ESTIMATORS: dict[str, EstimatorNeeds] = {
    "gae": EstimatorNeeds(critic=True),
    "grpo": EstimatorNeeds(min_group_size=2),
    "rloo": EstimatorNeeds(min_group_size=2),
    "reinforce_plus_plus": EstimatorNeeds(),
    "reinforce_plus_plus_baseline": EstimatorNeeds(min_group_size=2),
    "remax": EstimatorNeeds(baseline=True),
    "opo": EstimatorNeeds(min_group_size=2),
    "gpg": EstimatorNeeds(min_group_size=2),
    "grpo_passk": EstimatorNeeds(min_group_size=2),
    "gdpo": EstimatorNeeds(min_group_size=2),
    "optimal_token_baseline": EstimatorNeeds(min_group_size=2),
}
POLICY_LOSSES = frozenset(
    ["vanilla", "gspo", "cispo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dppo_tv", "dppo_kl", "dro"],
)


class PairLossTraits(NamedTuple):
    """What a loss of pairs reads beside the two answers and beta."""

    reference: bool = True
    label_smoothing: bool = True
    target_margin: bool = True


PAIR_LOSSES: dict[str, PairLossTraits] = {
    "sigmoid": PairLossTraits(target_margin=False),
    "ipo": PairLossTraits(label_smoothing=False, target_margin=False),
    "hinge": PairLossTraits(label_smoothing=False, target_margin=False),
    "simpo": PairLossTraits(reference=False),
    "orpo": PairLossTraits(reference=False, target_margin=False),
}
IMPORTANCE_LEVELS = frozenset(["token", "sequence"])
REWEIGHT_METHODS = frozenset(["pow", "max_min", "max_random"])
KL_KINDS = frozenset(["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
REWARD_SHAPERS = frozenset(["clip", "scale", "standardise"])
JSON_CONSOLE = "console-json"
WITHOUT_TRACKER = ("console", JSON_CONSOLE, "file")
"""Entries of `trainer.logger` that no tracker stands behind: a run is shown and logged in any case."""
LOGGERS = frozenset([*WITHOUT_TRACKER, "tensorboard", "wandb", "mlflow", "swanlab", "trackio"])


def _registry(module: str, attribute: str) -> dict[str, object]:
    """Return the registry's entries if its module is already imported; it is never imported from here."""
    loaded = sys.modules.get(module)
    return dict(getattr(loaded, attribute, {})) if loaded is not None else {}


def _declared(module: str, attribute: str) -> set[str]:
    """Likewise the names in a set that stands beside a registry."""
    loaded = sys.modules.get(module)
    return set(getattr(loaded, attribute, ())) if loaded is not None else set()


def _known(built_in: Iterable[str], module: str, attribute: str) -> set[str]:
    """Return the built-in names and those registered so far."""
    return {*built_in, *_registry(module, attribute)}


def known_estimators() -> set[str]:
    """Built-in advantage estimators and those registered so far."""
    return _known(ESTIMATORS, "hrl.algos.advantages", "ADVANTAGE_ESTIMATORS")


def known_policy_losses() -> set[str]:
    """Built-in policy losses and those registered so far."""
    return _known(POLICY_LOSSES, "hrl.algos.policy_losses", "POLICY_LOSSES")


def known_kl_kinds() -> set[str]:
    """Built-in KL estimators and those registered so far, without `+`."""
    return _known(KL_KINDS, "hrl.algos.kl", "KL_ESTIMATORS")


def known_reward_shapers() -> set[str]:
    """Built-in members of `reward.shaping` and those registered so far."""
    return _known(REWARD_SHAPERS, "hrl.algos.reward_shaping", "REWARD_SHAPERS")


def known_pair_losses() -> set[str]:
    """Built-in losses of pairs and those registered so far."""
    return _known(PAIR_LOSSES, "hrl.algos.preference", "PAIR_LOSSES")


def known_importance_levels() -> set[str]:
    """Built-in values of `rollout_is` and those registered so far."""
    return _known(IMPORTANCE_LEVELS, "hrl.algos.rollout_correction", "IMPORTANCE_LEVELS")


def known_reweight_methods() -> set[str]:
    """Built-in methods of policy filtration and those registered so far."""
    return _known(REWEIGHT_METHODS, "hrl.algos.policy_filtration", "REWEIGHT_METHODS")


def is_registered_aggregation(name: str) -> bool:
    """Return whether an aggregation of token losses was registered under that name so far."""
    return name in _registry("hrl.algos.aggregation", "AGGREGATION_MODES")


def estimator_needs(name: str) -> EstimatorNeeds:
    """Critic and group size that the estimator `name` asks for; a registered estimator of the user says so itself."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    entry = _registry("hrl.algos.advantages", "ADVANTAGE_ESTIMATORS").get(name)
    return EstimatorNeeds(
        getattr(entry, "needs_critic", False),
        getattr(entry, "min_group_size", 1),
        getattr(entry, "needs_baseline", False),
    )


def pair_loss_traits(name: str) -> PairLossTraits:
    """Return what the loss `name` reads; a registered loss of the user reads every constant."""
    if name in PAIR_LOSSES:
        return PAIR_LOSSES[name]
    return PairLossTraits(reference=name not in _declared("hrl.algos.preference", "REFERENCE_FREE_LOSSES"))
