"""The phases of a step: timers, display names and timing metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Phase:
    """A part of a step that is timed as `timing_s/<name>`.

    Attributes:
        name: Name of the timer in the trainer.
        label: Short name for the phase bar.
        title: Name in the report.
        tokens: The tokens that the phase works on, by which `timing_per_token_ms/<name>` divides its seconds; None if
            its time does not depend on tokens.
        group: Name of the group whose colour it has in the picture; None for "other".
    """

    name: str
    label: str
    title: str
    tokens: Literal["response", "all"] | None = None
    group: str | None = None


PHASES = (
    Phase("gen", "gen", "generation", tokens="response", group="generation"),
    Phase("rm", "rm", "reward model", tokens="all", group="reward"),
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
"""All phases in the order of a step; `update` is that of trainers that learn from a data set. Phases added by a
subclass of a trainer are shown after these, under the name of their timer."""

LABELS = {phase.name: phase.label for phase in PHASES}
TITLES = {phase.name: phase.title for phase in PHASES}


def phase_groups() -> dict[str, tuple[str, ...]]:
    """Return the names of the phases of each group, both in the order of a step."""
    groups = dict.fromkeys(phase.group for phase in PHASES if phase.group is not None)
    return {group: tuple(phase.name for phase in PHASES if phase.group == group) for group in groups}


class Tokens(NamedTuple):
    """Numbers of tokens of a step: in its responses, and in its prompts and responses together."""

    response: int
    all: int


def timing_metrics(seconds: Mapping[str, float], tokens: Tokens, num_devices: int) -> dict[str, float]:
    """Return the timing metrics of a step: seconds by phase and per token, and throughput.

    Args:
        seconds: Phase → seconds, with `step` for the whole step.
        tokens: Numbers of tokens of the step.
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
