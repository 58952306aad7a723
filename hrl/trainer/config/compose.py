"""From a command line to a configuration: hydra composes the YAML tree, overrides go on top, validation follows.

Hydra's own override handling stops at the first key it doesn't know. Here hydra composes files and groups only; values
are read with hydra's grammar and applied afterwards, so that every wrong key is reported at once, with its suggestion.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hrl.trainer.config.base import Section
from hrl.trainer.config.compat import present_name
from hrl.trainer.config.derived import with_derived_defaults
from hrl.trainer.config.errors import ConfigError, Problem
from hrl.trainer.config.folder import config_folder
from hrl.trainer.config.help import run_help
from hrl.trainer.config.keys import flatten, leaves, nearest, unflatten
from hrl.trainer.config.kinds import PPO, C, RunKind
from hrl.trainer.config.load import validate_kind
from hrl.trainer.config.overrides import apply_override, read_override
from hrl.trainer.config.quickstart import borrowed, in_words, without_its_validation
from hrl.trainer.config.schema import PPOTrainerConfig


@dataclass
class Composition:
    """What the files and the command line say, before validation.

    Attributes:
        values: dotted key → value, interpolations resolved.
        borrowed: the quickstart's values that another task has taken over, see `hrl.trainer.config.quickstart`.
        problems: what could not be read.
    """

    values: dict[str, Any] = field(default_factory=dict)
    borrowed: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """A command line, taken apart.

    Attributes:
        config_path: folder of the primary YAML file; None is hrl's own.
        config_name: its name without the suffix.
        config_dir: one more folder that groups are looked for in.
        overrides: the rest, to be read as `key=value`.
        help: `--help` was asked.
        cfg: `--cfg` was asked.
    """

    config_path: Path | None
    config_name: str
    config_dir: Path | None
    overrides: tuple[str, ...]
    help: bool = False
    cfg: bool = False

    @property
    def folders(self) -> list[Path]:
        """Every folder that holds YAML files, the primary first."""
        primary = self.config_path or config_folder()
        more = [self.config_dir] if self.config_dir else []
        return list(dict.fromkeys([primary, *more, config_folder()]))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem("the command line", f"can't be read: {message}.", "See --help.")])


def compose_cli(argv: Sequence[str]) -> PPOTrainerConfig:
    """Compose and validate what the command line of a PPO run asks for; see `compose_kind`."""
    return compose_kind(PPO, argv)


def compose_kind(kind: RunKind[C], argv: Sequence[str]) -> C:
    """Compose and validate what a command line asks for.

    Args:
        kind: of the run; it names the primary YAML file unless `--config-name` names another.
        argv: `key=value` overrides, `--config-path DIR`, `--config-name NAME`, `--config-dir DIR`, `--cfg`, `--help`.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: lists every problem at once.
        SystemExit: after `--help` or `--cfg` has been answered.
    """
    options = parse_options(argv, kind.config_name)
    if options.help:
        _answer(run_help(kind=kind))
    composition = compose_tree(options, kind)
    config = validate_kind(kind, composition.values, tuple(composition.problems))
    if options.cfg:
        _answer(to_yaml(config))
    return config.with_remarks(in_words(composition.borrowed)) if composition.borrowed else config


def to_yaml(config: Section) -> str:
    """The whole configuration as YAML, every default filled in; composing it again gives the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump()))


def _answer(text: str) -> NoReturn:
    """Answer a question about the program on standard output and end it, as argparse does for `--help`."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    raise SystemExit(0)


def parse_options(argv: Sequence[str], config_name: str) -> Options:
    """Take a command line apart; `--config-path` is relative to the working folder.

    Raises:
        ConfigError: an option lacks its value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp", type=Path)
    parser.add_argument("--config-name", "-cn", default=config_name)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", nargs="?", const="job", choices=["job", "all"])
    known, rest = parser.parse_known_args(list(argv))
    return Options(
        config_path=known.config_path.resolve() if known.config_path else None,
        config_name=known.config_name.removesuffix(".yaml"),
        config_dir=known.config_dir.resolve() if known.config_dir else None,
        overrides=tuple(rest),
        help=known.help,
        cfg=known.cfg is not None,
    )


def compose_tree(options: Options, kind: RunKind[Section]) -> Composition:
    """Compose the YAML files and put the overrides on top; collects problems instead of stopping."""
    composition = Composition()
    choices: list[str] = []
    values: list[Override] = []
    for text in options.overrides:
        override = read_override(text)
        if isinstance(override, Problem):
            composition.problems.append(override)
        elif group := _group_options(options.folders, override.key_or_group):
            problem = _choice_problem(override, group)
            composition.problems += [problem] if problem else []
            choices += [] if problem else [text.lstrip("+")]
        else:
            values.append(override)
    tree = _compose_files(options, choices, composition.problems)
    for override in values:
        problem = apply_override(tree, override, kind.schema)
        composition.problems += [problem] if problem else []
    composition.values = _resolve(tree, kind, composition.problems)
    own_file = options.folders[0] / f"{options.config_name}.yaml"
    written = [present_name(override.key_or_group, kind.spellings.renamed) for override in values]
    named = {present_name(key, kind.spellings.renamed): value for key, value in composition.values.items()}
    composition.borrowed = borrowed(kind, named, written, own_file)
    for key in without_its_validation(kind, composition.values, composition.borrowed):
        del composition.values[key], composition.borrowed[key]
    return composition


def _group_options(folders: Sequence[Path], name: str) -> list[str]:
    """The YAML files of the group `name`; empty if no folder holds such a group."""
    if "." in name:
        return []
    found = {path.stem for folder in folders for path in (folder / name).glob("*.yaml")}
    return sorted(found)


def _choice_problem(override: Override, group: list[str]) -> Problem | None:
    choice = override.value()
    if choice is None or choice in group:
        return None
    close = nearest(str(choice), group)
    hint = f"Did you mean {close[0]}?" if close else f"Choose one of {', '.join(group)}."
    return Problem(override.key_or_group, f"has no choice {choice!r}.", hint)


def _compose_files(options: Options, choices: list[str], problems: list[Problem]) -> DictConfig:
    """Let hydra compose the primary file with its groups; an empty tree, and a problem, if it can't."""
    primary, *others = options.folders
    search_path = ",".join(f"'file://{folder}'" for folder in others)
    overrides = [f"hydra.searchpath=[{search_path}]", *choices]
    try:
        with initialize_config_dir(str(primary), version_base="1.3"):
            try:
                tree = compose(options.config_name, overrides)
            except ConfigCompositionException as error:
                if "Could not override" not in str(error):
                    raise
                # The primary file has no place for the group: a user's own YAML without hrl's defaults list.
                tree = compose(options.config_name, [overrides[0], *(f"+{choice}" for choice in choices)])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        problems.append(Problem(f"{options.config_name}.yaml", f"can't be composed: {'; '.join(lines[:3])}."))
        tree = OmegaConf.create({})
    OmegaConf.set_struct(tree, False)
    return tree


def _resolve(tree: DictConfig, kind: RunKind[Section], problems: list[Problem]) -> dict[str, Any]:
    """Flatten the tree and resolve interpolations; they may also refer to keys that stand at their default."""
    values = dict(flatten(OmegaConf.to_container(tree, resolve=False), kind.schema))  # type: ignore[arg-type]
    open_values = {key: value for key, value in values.items() if "${" in str(value)}
    if open_values:
        defaults = {key: leaf.default for key, leaf in leaves(kind.schema).items()}
        derived = with_derived_defaults(values, kind.derived, kind.schema)
        whole = OmegaConf.create(unflatten({**defaults, **derived}))
    for key in open_values:
        try:
            value = OmegaConf.select(whole, key)
            is_node = isinstance(value, DictConfig | ListConfig)
            values[key] = OmegaConf.to_container(value, resolve=True) if is_node else value
        except OmegaConfBaseException as error:
            problems.append(Problem(key, f"can't be resolved: {str(error).splitlines()[0]}."))
            del values[key]
    for key in [key for key, value in values.items() if value == "???"]:
        problems.append(Problem(key, "needs a value; the file marks it as mandatory (???)."))
        del values[key]
    return values
