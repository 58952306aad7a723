"""verl's launch lines. verl's keys are hrl's, so that a line needs little: `hrl.config.spellings` knows the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from hrl.config.compose import read_override
from hrl.config.override import as_override
from hrl.config.run_kind import KINDS, RunKind
from hrl.config.section import Get, WholeConfig, leaves, sections
from hrl.config.spellings import lookup
from hrl.errors import Problem
from hrl.migrate.line import Migrated, MigrationError, Remark, key_of
from hrl.migrate.verl_turns import take_turns

PROGRAMS = {
    "verl.trainer.main_ppo": "ppo",
    "recipe.dapo.main_dapo": "ppo",
    "recipe.dapo.src.main_dapo": "ppo",
    "verl.trainer.sft_trainer": "sft",
    "verl.trainer.sft_trainer_ray": "sft",
    "verl.trainer.fsdp_sft_trainer": "sft",
}
"""verl's programs that hrl has → the kind of run."""


def migrate_verl(program: str, arguments: Sequence[str]) -> Migrated:
    """Return hrl's line for a line of verl.

    Args:
        program: The module that was run.
        arguments: What followed it.

    Raises:
        MigrationError: hrl has no such program.
    """
    if program not in PROGRAMS:
        raise MigrationError(f"hrl has no counterpart of {program}; there are those of {', '.join(PROGRAMS)}")
    into = Migrated(program, PROGRAMS[program])
    kind = KINDS[into.kind]
    options = [word for word in arguments if "=" not in word or word.startswith("-")]
    into.arguments = [word for word in arguments if word not in options]
    _options(options, kind, into)
    if into.kind == "ppo":
        take_turns(into, kind.spellings)
    into.drop_what_does_not_compose()
    converted: dict[str, str] = {}
    present = [text for word in into.arguments for text in _present(word, into, kind, converted)]
    into.arguments = [*(text for text in present if key_of(text) not in converted), *converted.values()]
    return into


def _options(words: Sequence[str], kind: RunKind[WholeConfig], into: Migrated) -> None:
    """Take verl's own configuration files for hrl's; say of others that they are not read."""
    named: dict[str, str] = {}
    stray: list[str] = []
    left = list(words)
    while left:
        option, equals, value = left.pop(0).partition("=")
        if not option.startswith("-"):
            stray.append(option)
        elif equals or not left or left[0].startswith("-"):
            named[option] = value
        else:
            named[option] = left.pop(0)
    for option, value in named.items():
        if not (option in ("--config-name", "-cn") and value.removesuffix(".yaml") == kind.config_name):
            why = "a YAML file of verl's is not read; hrl takes one of your own with the same options"
            into.lost.append(Remark(f"{option} {value}".rstrip(), why))
    if stray:
        into.lost.append(Remark(" ".join(stray), "is not key=value"))


def _present(word: str, into: Migrated, kind: RunKind[WholeConfig], converted: dict[str, str]) -> list[str]:
    """Return the arguments with present names that mean the same as one that hrl takes.

    Args:
        word: The argument.
        into: Gets remarks.
        kind: The kind of run.
        converted: Gets the arguments that a value is converted to, which hold before others of the same keys.
    """
    override, spellings = read_override(word), kind.spellings
    if isinstance(override, Problem):
        raise RuntimeError(f"{word} composes and can't be read")
    written, value = override.key_or_group, override.value()
    key = written if written in spellings.outside else spellings.present_name(written)
    if value is None and (key != written or key in spellings.null_is_unset):
        return []
    if key not in spellings.outside and _has(key, kind):
        return [f"{key}={_value_of(word)}"]
    if key in spellings.must_equal:
        return []
    conversion = spellings.converted.get(key)
    if conversion is not None:
        result = {} if value is None else conversion.convert(value, Get(_values(into, kind), kind.schema)) or {}
        converted |= {name: f"{name}={as_override(each)}" for name, each in result.items()}
        if result:
            read = ", ".join(f"{name}={each}" for name, each in result.items())
            into.differs.append(Remark(word, f"is {read}"))
        else:
            into.needless.append(Remark(word, "is off" if value in (None, False) else conversion.idle))
        return []
    entry = lookup(spellings.outside, key)
    if entry is not None:
        into.needless.append(Remark(word, entry[1].says))
        return []
    return [word.lstrip("+")]


def _has(key: str, kind: RunKind[WholeConfig]) -> bool:
    known = leaves(kind.schema)
    above = (key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1))
    return key in known or key in sections(kind.schema) or any(name in known for name in above)


def _values(into: Migrated, kind: RunKind[WholeConfig]) -> Mapping[str, Any]:
    """Return the values that the line gives, by present name."""
    found = [read_override(word) for word in into.arguments]
    taken = [override for override in found if isinstance(override, Override)]
    return {kind.spellings.present_name(each.key_or_group): each.value() for each in taken}


def _value_of(word: str) -> str:
    return word.partition("=")[2] if "=" in word else key_of(word)
