"""The phases of a step: the names of their timers, what they are called where they are shown, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Phase:
    """A part of a step that is timed as `timing_s/<name>`.

    Attributes:
        name: The name of the timer, as the trainer calls it.
        label: Its name in the phase bar, where there is little room.
        title: Its name in the report.
        tokens: The tokens it works on, by which `timing_per_token_ms/<name>` divides its seconds; None if its time does
            not depend on tokens.
        group: The phases that share its colour in the picture; None leaves it to "other".
    """

    name: str
    label: str
    title: str
    tokens: Literal["response", "all"] | None = None
    group: str | None = None


PHASES = (
    Phase("gen", "gen", "generation", tokens="response", group="generation"),
    Phase("reward", "reward", "reward", group="reward"),
    Phase("old_log_prob", "logp", "log-probs", tokens="all", group="log-probs and values"),
    Phase("ref", "ref", "reference log-probs", tokens="all", group="log-probs and values"),
    Phase("values", "values", "values", tokens="all", group="log-probs and values"),
    Phase("adv", "adv", "advantages", tokens="all"),
    Phase("update_critic", "critic", "critic update", tokens="all", group="update"),
    Phase("update_actor", "update", "policy update", tokens="all", group="update"),
    Phase("update", "learn", "update", tokens="all", group="update"),
    Phase("weight_sync", "sync", "weight sync", group="weight sync"),
    Phase("testing", "validate", "validation"),
)
"""In the order of a step; trainers that learn from a data set have the phase `update`. A phase that a subclass of a
trainer adds is shown after these, by the name of its timer."""

LABELS = {phase.name: phase.label for phase in PHASES}
TITLES = {phase.name: phase.title for phase in PHASES}


def phase_groups() -> dict[str, tuple[str, ...]]:
    """Return the names of the phases of each group, both in the order of a step."""
    groups = dict.fromkeys(phase.group for phase in PHASES if phase.group is not None)
    return {group: tuple(phase.name for phase in PHASES if phase.group == group) for group in groups}


class Tokens(NamedTuple):
    """How many tokens a step worked on: those of its responses, and those of its prompts and responses together."""

    response: int
    all: int


def timing_metrics(seconds: Mapping[str, float], tokens: Tokens, num_devices: int) -> dict[str, float]:
    """Return what a step cost: its seconds, by phase and per token, and its throughput.

    Args:
        seconds: Phase to seconds, with `step` for the whole step.
        tokens: How many tokens the step worked on.
        num_devices: Devices that the step used (processes, on a machine without GPUs).
    """
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()}
    for phase in PHASES:
        count = 0 if phase.tokens is None else getattr(tokens, phase.tokens)
        if phase.name in seconds and count > 0:
            metrics[f"timing_per_token_ms/{phase.name}"] = seconds[phase.name] * 1000 / count
    return metrics | {
        "perf/total_num_tokens": float(tokens.all),
        "perf/time_per_step": seconds["step"],
        "perf/throughput": tokens.all / (seconds["step"] * num_devices),
    }
