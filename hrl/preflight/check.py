"""What `hrl check` says: the look that a run takes before it starts anything, and the run in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hrl.config.arithmetic import differences, units_in_words, value_of
from hrl.config.compose import YOURS
from hrl.config.run_kind import RunKind
from hrl.config.section import WholeConfig, leaves
from hrl.preflight.findings import Findings

_TELLING = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.max_length",
    "actor_rollout_ref.actor.optim.lr",
    "optim.lr",
    "trainer.total_epochs",
)
"""Keys whose default a reader should have seen before a run."""

_SHOWN = 6
_MICRO_BATCH = "micro-batch"
_FOUND_FIRST = ("model", "rows", "validation rows", "reward")
_ONLY_IN_FULL = ("KV cache",)


def look(kind: RunKind[WholeConfig], config: WholeConfig) -> tuple[Findings, int | None]:
    """Take the look of a run, without downloading anything.

    Returns:
        What was found; and the number of training rows, where they could be read.
    """
    ready: Any
    if kind.name == "ppo":
        from hrl.preflight.ppo import inspect_run

        ready, findings = inspect_run(config, download=False)  # type: ignore[arg-type]
    else:
        from hrl.preflight.offline import inspect_offline

        ready, findings = inspect_offline(kind.name, config, download=False)  # type: ignore[arg-type]
    return findings, None if ready is None else len(ready.train_dataset)


def report(
    kind: RunKind[WholeConfig], config: WholeConfig, findings: Findings | None, train_rows: int | None
) -> dict[str, Any]:
    """Everything that `hrl check` can say of a run, as plain data.

    Args:
        kind: Of the run.
        config: The validated configuration.
        findings: None where the configuration alone was judged.
        train_rows: See `look`.
    """
    words = kind.words
    return {
        "config": config.model_dump(),
        "origins": dict(config.origins or {}),
        "differs_from_default": {
            key: {"value": value, "default": default} for key, (value, default) in differences(config).items()
        },
        "found": dict(findings.facts) if findings is not None else {},
        "placement": dict(words.placement(config)),
        "arithmetic": dict(words.arithmetic(config, train_rows=train_rows)),
        "units": dict(units_in_words(config)),
        "memory": {} if findings is None else dict(findings.memory),
        "warnings": words.warnings(config),
        "notes": [] if findings is None else findings.notes,
        "unchecked": ["what the configuration names"] if findings is None else findings.unchecked,
    }


def summary(config: WholeConfig, said: Mapping[str, Any]) -> dict[str, str]:
    """Return the twenty lines that matter: label → text.

    Args:
        config: The validated configuration.
        said: A `report`.
    """
    found = dict(said["found"])
    arithmetic = {name: text for name, text in said["arithmetic"].items() if name not in _ONLY_IN_FULL}
    passes = {name: arithmetic.pop(name) for name in list(arithmetic) if name.startswith(_MICRO_BATCH)}
    lines = {name: found[name] for name in _FOUND_FIRST if name in found}
    lines["placement"] = _joined({name.removeprefix("pool "): text for name, text in said["placement"].items()})
    lines |= {name: found[name] for name in ("devices",) if name in found}
    lines |= arithmetic
    lines["micro-batches"] = _joined({name.removeprefix(_MICRO_BATCH).strip(): text for name, text in passes.items()})
    lines |= {name: found[name] for name in ("memory", "run folder") if name in found}
    return lines | dict(settings(config))


def _joined(lines: Mapping[str, str]) -> str:
    """Several lines in one; equal texts share their label's place."""
    labels: dict[str, list[str]] = {}
    for label, text in lines.items():
        labels.setdefault(text, []).append(label)
    return "; ".join(f"{', '.join(filter(None, names))}: {text}".removeprefix(": ") for text, names in labels.items())


def settings(config: WholeConfig) -> Iterator[tuple[str, str]]:
    """Yield which values come from where: by origin, and the telling ones among the defaults."""
    origins = dict(config.origins or {})
    by_origin: dict[str, list[str]] = {}
    for key, origin in origins.items():
        by_origin.setdefault(origin, []).append(key)
    for origin in sorted(by_origin, key=lambda name: name == YOURS, reverse=True):
        if origin != "placement=colocated":  # the default layout, which the line of placement shows
            yield "yours" if origin == YOURS else origin, _assignments(config, by_origin[origin])
    default = [key for key in _TELLING if key in leaves(type(config)) and key not in origins]
    if default:
        yield "defaults", _assignments(config, default)


def _assignments(config: WholeConfig, keys: list[str]) -> str:
    """Keys with their values, the telling ones first; the others are counted where there are many."""
    known = leaves(type(config))
    ordered = sorted(keys, key=lambda key: key not in _TELLING)
    shown = [f"{key}={_as_typed(value_of(config, key))}" if key in known else key for key in ordered[:_SHOWN]]
    more = [f"and {len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else []
    return ", ".join([*shown, *more])


def _as_typed(value: Any) -> str:
    """Return a value as a command line takes it."""
    if isinstance(value, list):
        return str(value[0]) if len(value) == 1 else f"[{','.join(map(_as_typed, value))}]"
    if isinstance(value, dict):
        return "{…}" if value else "{}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
