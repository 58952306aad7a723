"""What small models need: verl's defaults, which a command line has, suit large ones and many GPUs.

A model that is bundled, or that a machine without a GPU can train, is small. From Python it gets the quickstart's
values (`hrl.api.choices`). On a command line nothing is set that nobody asked for, but a learning rate that is far too
low is told.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import yaml

from hrl.config.compose import QUICKSTART
from hrl.config.outline import RunConfiguration, outline_of
from hrl.config.run_kind import KINDS, RunKind, config_folder
from hrl.config.section import flatten

if TYPE_CHECKING:
    from hrl.preflight.findings import Findings

BUDGETS = ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "data.max_token_len_per_gpu")
_OF_ITS_TASK = ("trainer.", "data.max_", "critic.")
"""Keys of the quickstart that belong to its task, or follow from others."""
_RATES = ("actor_rollout_ref.actor.optim.lr", "optim.lr")
_FAR_BELOW = 10
"""How many times lower than the quickstart's a learning rate has to be for a note."""


def values_for_small_models(kind: RunKind[Any]) -> dict[str, Any]:
    """Return the quickstart's keys that suit small models, whatever they learn."""
    tree = yaml.safe_load((config_folder() / QUICKSTART / f"{kind.name}.yaml").read_text(encoding="utf-8"))
    values = dict(flatten(tree, kind.schema))
    return {key: value for key, value in values.items() if not key.startswith(_OF_ITS_TASK) or key in BUDGETS}


def has_small_model(config: RunConfiguration) -> bool:
    """Return whether the trained model is small, as far as its name and this machine tell."""
    return outline_of(config).model.path.startswith("bundled:") or not runs_on_gpus(config)


def runs_on_gpus(config: RunConfiguration) -> bool:
    """Return whether the run will use GPUs, of this machine or of a cluster that it joins."""
    from hrl.preflight.machine_look import gpus_here, joins_a_cluster

    return config.trainer.device == "cuda" or (
        config.trainer.device == "auto" and (joins_a_cluster(config.trainer) or gpus_here() > 0)
    )


def look_at_rate(findings: Findings, config: RunConfiguration) -> None:
    """Note a learning rate that nobody chose and that changes a small model hardly at all."""
    if config.origins is None or config.trainer.total_training_steps == 0 or not has_small_model(config):
        return
    kind = next(kind for kind in KINDS.values() if kind.schema is type(config))
    values = values_for_small_models(kind)
    for key in _RATES:
        if key not in values or key in config.origins:
            continue
        default = attrgetter(key)(config)
        if values[key] >= _FAR_BELOW * default:
            findings.notes.append(
                f"{key}={default:g}, the default, hardly changes a small model; the quickstart sets {values[key]:g}"
            )
