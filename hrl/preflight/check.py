"""`hrl check`: run a run's preflight checks, and describe the run in words."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from hrl.config.arithmetic import batch_arithmetic, changed_values, placement_facts, units_in_words
from hrl.config.compose import YOURS, compose_kind, to_yaml
from hrl.config.outline import RunConfiguration
from hrl.config.override import NotPlainError, as_override
from hrl.config.placement_picture import placement_picture
from hrl.config.rules import warnings
from hrl.config.run_kind import RunKind
from hrl.config.saved import saved_config
from hrl.config.section import Section, WholeConfig, leaves
from hrl.errors import ConfigError
from hrl.masking import masked, masked_text
from hrl.preflight.findings import PADDED_ROWS, Findings
from hrl.preflight.memory_table import shown
from hrl.processes.imports import quick_imports
from hrl.report.environment import facts_table

_TELLING = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.max_length",
    "actor_rollout_ref.actor.optim.lr",
    "optim.lr",
    "trainer.total_epochs",
)
"""Keys whose default value is shown even if it was not set."""

_SHOWN = 6
_SHORT = 60
_MICRO_BATCH = "micro-batch"
_FOUND_FIRST = (
    "model",
    "adapter of actor",
    "adapter of critic",
    "adapter of rm",
    "rows",
    "validation rows",
    "sampler",
    "server",
    "first prompt",
    "first row",
    "reward",
    "environment",
    "episodes",
    "parsers",
    PADDED_ROWS,
)
_ONLY_IN_FULL = ("KV cache",)


def check(
    kind: RunKind[RunConfiguration],
    overrides: Sequence[str],
    *,
    full: bool = False,
    config_only: bool = False,
    as_json: bool = False,
) -> int:
    """Compose and validate as a run would, make its preflight checks, and report.

    Args:
        kind: Kind of run.
        overrides: `key=value` and `--config-*` arguments of the run.
        full: Show every value instead of a summary.
        config_only: Check only the configuration, for a command line meant for another machine.
        as_json: Write one JSON object.

    Returns:
        The exit status: 0, or 2 if something is wrong.
    """
    try:
        config = compose_kind(kind, overrides)
        ready, findings = None, None
        if not config_only:
            with quick_imports():
                from hrl.preflight.earlier_models import with_models_of_before  # imports torch, as the next
                from hrl.preflight.preflight import inspect_run

            config = with_models_of_before(config)
            ready, findings = inspect_run(config, download=False)
            findings.raise_problems()
    except ConfigError as error:
        _show_problems(error, as_json=as_json)
        return 2
    said = report(config, findings, None if ready is None else len(ready.train_dataset))
    if as_json:
        _write_json({"valid": True, **said})
    else:
        _show_report(config, said, full=full, config_only=config_only)
    return 0


def report(config: RunConfiguration, findings: Findings | None, train_rows: int | None) -> dict[str, Any]:
    """Return everything that `hrl check` reports about a run, as plain data.

    Args:
        config: The validated configuration.
        findings: The findings; None if only the configuration was checked.
        train_rows: Number of training rows; None if they were not read.
    """
    return {
        "config": saved_config(config),
        "origins": dict(config.origins or {}),
        "differs_from_default": {
            key: {"value": masked({key: value}, config.trainer.secrets)[key], "default": default}
            for key, (value, default) in changed_values(config).items()
        },
        "found": dict(findings.facts) if findings is not None else {},
        "placement": dict(placement_facts(config)),
        "devices": dict(placement_picture(config)),
        "arithmetic": dict(batch_arithmetic(config, train_rows=train_rows)),
        "units": dict(units_in_words(config)),
        "memory": [] if findings is None else findings.memory,
        "changed": {} if findings is None or not findings.changes else {findings.changed: findings.changes},
        "warnings": warnings(config),
        "notes": [] if findings is None else findings.notes,
        "unchecked": ["what the configuration names"] if findings is None else findings.unchecked,
    }


def summary(config: WholeConfig, said: Mapping[str, Any]) -> dict[str, str]:
    """Return the summary of about twenty lines: label → text.

    Args:
        config: The validated configuration.
        said: A `report`.
    """
    found = dict(said["found"])
    arithmetic = {name: text for name, text in said["arithmetic"].items() if name not in _ONLY_IN_FULL}
    passes = {name: arithmetic.pop(name) for name in list(arithmetic) if name.startswith(_MICRO_BATCH)}
    shown = [
        name for first in _FOUND_FIRST for name in (first, *(other for other in found if _is_one_of(first, other)))
    ]
    if "rows 1" in found:  # which shows its first prompt
        shown = [name for name in shown if name not in ("first prompt", "first row")]
    lines = {name: found[name] for name in shown if name in found}
    lines["placement"] = _joined({name.removeprefix("pool "): text for name, text in said["placement"].items()})
    lines |= {name: found[name] for name in ("devices",) if name in found}
    lines |= arithmetic
    lines["micro-batches"] = _joined({name.removeprefix(_MICRO_BATCH).strip(): text for name, text in passes.items()})
    lines |= {name: found[name] for name in ("memory", "run folder") if name in found}
    return lines | dict(settings(config))


def _is_one_of(label: str, other: str) -> bool:
    """Return whether a label is another one with a number, as those of several sources of rows are."""
    return other.startswith(f"{label} ") and other.removeprefix(f"{label} ").isdecimal()


def _joined(lines: Mapping[str, str]) -> str:
    """Join several lines into one; labels with the same text share it."""
    labels: dict[str, list[str]] = {}
    for label, text in lines.items():
        labels.setdefault(text, []).append(label)
    return "; ".join(f"{', '.join(filter(None, names))}: {text}".removeprefix(": ") for text, names in labels.items())


def settings(config: WholeConfig) -> Iterator[tuple[str, str]]:
    """Yield the values that were set, by origin, and the most important defaults."""
    origins = dict(config.origins or {})
    by_origin: dict[str, list[str]] = {}
    for key, origin in origins.items():
        by_origin.setdefault(origin, []).append(key)
    for origin in sorted(by_origin, key=lambda name: name == YOURS, reverse=True):
        if origin != "placement=colocated":  # the default layout, which the line of placement shows
            yield "yours" if origin == YOURS else origin, masked_text(_assignments(config, by_origin[origin]))
    default = [key for key in _TELLING if key in leaves(type(config)) and key not in origins]
    if default:
        yield "defaults", _assignments(config, default)


def _assignments(config: WholeConfig, keys: list[str]) -> str:
    """List keys with their values, the important ones first; beyond a few the rest is only counted."""
    known = leaves(type(config))
    ordered = sorted(keys, key=lambda key: key not in _TELLING)
    shown = [f"{key}={_as_typed(attrgetter(key)(config))}" if key in known else key for key in ordered[:_SHOWN]]
    more = [f"and {len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else []
    return ", ".join([*shown, *more])


def _as_typed(value: Any) -> str:
    """Return a value in command-line syntax."""
    if isinstance(value, Section):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, list):
        return _as_typed(value[0]) if len(value) == 1 else f"[{','.join(map(_as_typed, value))}]"
    if isinstance(value, dict):
        try:
            typed = as_override(value)
        except NotPlainError:  # keys that only a file can hold
            typed = json.dumps(value, ensure_ascii=False, default=str)
        return typed if len(typed) <= _SHORT else "{…}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _show_problems(error: ConfigError, *, as_json: bool) -> None:
    if as_json:
        problems = [
            {"key": one.key, "what": masked_text(one.what), "hint": masked_text(one.hint)} for one in error.problems
        ]
        _write_json({"valid": False, "problems": problems})
    else:
        sys.stderr.write(masked_text(f"{error}\n"))


def _show_report(config: WholeConfig, said: dict[str, Any], *, full: bool, config_only: bool) -> None:
    console = Console(highlight=False)
    if full:
        _show_everything(console, config, said)
    _show(console, "Summary", facts_table(summary(config, said)))
    if len(said["devices"]) > 1:
        _show(console, "Which rank is where", facts_table(said["devices"]))
    for table in said["memory"]:
        _show(console, f"Memory of {table['where']} at the worst moment of each phase", shown(table))
    unchecked = [] if config_only else said["unchecked"]
    changed = [(f"{heading[:1].upper()}{heading[1:]}", lines) for heading, lines in said["changed"].items()]
    second_look = ("Worth a second look", [*said["warnings"], *said["notes"]])
    for title, remarks in (*changed, second_look, ("Not checked", unchecked)):
        if remarks:
            _show(console, title, _list(remarks))
    verdict = _verdict(full=full, config_only=config_only, whole=not unchecked)
    console.print(f"\n{verdict}", style="green", highlight=False)


def _verdict(*, full: bool, config_only: bool, whole: bool) -> str:
    if config_only:
        return "The configuration is valid. No file that it names was opened, and nothing was started."
    there = ", and what it names is there" if whole else "; everything that could be checked is there"
    more = "" if full else " --full shows every value."
    return f"The configuration is valid{there}. Nothing was started.{more}"


def _show_everything(console: Console, config: WholeConfig, said: dict[str, Any]) -> None:
    text = to_yaml(config).rstrip()
    # Don't wrap output to a file: wrapped lines would not be valid YAML.
    yaml = Syntax(text, "yaml", background_color="default") if console.is_terminal else Text(text)
    _show(console, "Configuration", yaml, soft_wrap=not console.is_terminal)
    changed = {}
    for key, pair in said["differs_from_default"].items():
        origin = said["origins"].get(key, "follows from other keys")
        changed[key] = f"{_yaml_value(pair['value'])}  (default {_yaml_value(pair['default'])}; {origin})"
    for title, lines in (
        ("Differs from the default", changed),
        ("Units", said["units"]),
        ("Found", said["found"]),
        ("Placement", said["placement"]),
        ("Arithmetic", said["arithmetic"]),
    ):
        if lines:
            _show(console, title, facts_table(lines))


def _show(console: Console, title: str, content: RenderableType, *, soft_wrap: bool = False) -> None:
    console.print(f"\n{title}", style="bold")
    console.print(content, soft_wrap=soft_wrap)


def _list(items: Sequence[str]) -> Padding:
    table = Table.grid(padding=(0, 1))
    for item in items:
        table.add_row(Text("-"), Text(item))
    return Padding(table, (0, 0, 0, 2))


def _yaml_value(value: Any) -> str:
    """Return a value on one line, in syntax that YAML and JSON share."""
    return json.dumps(value, ensure_ascii=False)


def _write_json(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
