"""What a run shows of itself before it starts: the kind, the model, the data, a step, the engine, the folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hrl
from hrl.config.arithmetic import Fact, batch_arithmetic
from hrl.config.ppo import PPOTrainerConfig
from hrl.preflight.findings import PADDED_ROWS

if TYPE_CHECKING:
    from hrl.config.outline import RunConfiguration
    from hrl.preflight.preflight import Preflight

_FROM_LOOKING = (
    "rows",
    "validation rows",
    "environment",
    "reward",
    "devices",
    "run folder",
    "first prompt",
    PADDED_ROWS,
)
_FROM_ARITHMETIC = ("one step", "actor update", "critic update", "run", "engines")
_ORDER = (
    *("model", "rows", "validation rows", "environment", "reward"),
    *("one step", "actor update", "critic update", "run", "engines"),
)


def title(config: RunConfiguration, kind: str) -> str:
    """Return version, kind and name of the run: `hrl 0.4 · grpo · sums`."""
    method = config.algorithm.adv_estimator if isinstance(config, PPOTrainerConfig) else kind
    return f"hrl {hrl.__version__} · {method} · {config.trainer.experiment_name}"


def run_facts(config: RunConfiguration, ready: Preflight) -> list[Fact]:
    """Return the facts of a run, in the order in which they are shown."""
    looked = {fact.label: fact.text for fact in ready.findings.facts}
    model = Fact("model", ", ".join(filter(None, (looked.get("model"), _parameters(looked)))))
    found = {"model": model} | {
        fact.label: fact
        for fact in (
            *(Fact(label, looked[label]) for label in _FROM_LOOKING if label in looked),
            *(fact for fact in batch_arithmetic(config, train_rows=len(ready.train_dataset))),
        )
        if fact.label in (*_FROM_LOOKING, *_FROM_ARITHMETIC)
    }
    ordered = [found.pop(label) for label in _ORDER if label in found]
    return [*ordered, *found.values(), Fact("see more", _commands(config))]


def _parameters(looked: dict[str, str]) -> str:
    return looked.get("memory", "").partition(";")[0]


def _commands(config: RunConfiguration) -> str:
    folder = config.trainer.default_local_dir
    samples = f", hrl rollouts {folder}" if isinstance(config, PPOTrainerConfig) else ""
    resume = (
        "; the same command continues after the last checkpoint"
        if config.trainer.save_freq > 0 and config.trainer.resume_mode == "auto"
        else ""
    )
    return f"hrl watch {folder} (a live page){samples}{resume}"
