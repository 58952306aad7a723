"""Names that live in registries elsewhere, known here without importing torch.

The schema must be able to refuse `adv_estimator=grop` before any heavy import, so the built-in names stand here
once more; a test holds them equal to the registries. Names that a user registers before the configuration is
composed are found through the registry itself, which is then already imported.
"""

import sys
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

KL_KINDS = frozenset(["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
REWARD_SHAPERS = frozenset(["clip", "scale", "standardise"])
JSON_CONSOLE = "console-json"
WITHOUT_TRACKER = ("console", JSON_CONSOLE, "file")
"""Entries of `trainer.logger` that no tracker stands behind: a run is shown and logged in any case."""
LOGGERS = frozenset([*WITHOUT_TRACKER, "tensorboard", "wandb", "mlflow", "swanlab", "trackio"])


def _registry(module: str, attribute: str) -> dict[str, object]:
    """The registry's entries if its module is already imported; it is never imported from here."""
    loaded = sys.modules.get(module)
    return dict(getattr(loaded, attribute, {})) if loaded is not None else {}


def known_estimators() -> set[str]:
    """Built-in advantage estimators and those registered so far."""
    return set(ESTIMATORS) | set(_registry("hrl.algos.advantages", "ADVANTAGE_ESTIMATORS"))


def known_policy_losses() -> set[str]:
    """Built-in policy losses and those registered so far."""
    return set(POLICY_LOSSES) | set(_registry("hrl.algos.policy_losses", "POLICY_LOSSES"))


def known_kl_kinds() -> set[str]:
    """Built-in KL estimators and those registered so far, without `+`."""
    return set(KL_KINDS) | set(_registry("hrl.algos.kl", "KL_ESTIMATORS"))


def known_reward_shapers() -> set[str]:
    """Built-in members of `reward.shaping` and those registered so far."""
    return set(REWARD_SHAPERS) | set(_registry("hrl.algos.reward_shaping", "REWARD_SHAPERS"))


def is_registered_aggregation(name: str) -> bool:
    """Whether an aggregation of token losses was registered under that name so far."""
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
