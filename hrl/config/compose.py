"""From a command line to a configuration: hydra composes the YAML tree, overrides go on top, validation follows.

Hydra's own override handling stops at the first key it doesn't know. Here hydra composes files and groups only; values
are read with hydra's grammar and applied afterwards, so that every wrong key is reported at once, with its suggestion.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hrl.config.derived_defaults import with_derived_defaults
from hrl.config.folder import config_folder
from hrl.config.help import run_help
from hrl.config.keys import flatten, leaves, nearest, unflatten
from hrl.config.load import option_problem, validate_kind
from hrl.config.outside import ONLY_FSDP2, OTHER_ENGINES
from hrl.config.overrides import apply_override, read_override
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.problems import ConfigError, Problem, Reason
from hrl.config.quickstart import GROUP as QUICKSTART
from hrl.config.quickstart import (
    TRAIN_FILES,
    is_the_quickstarts_task,
    rows_are_missing,
    without_its_critic,
    without_its_validation,
)
from hrl.config.run_kind import PPO, C, RunKind
from hrl.config.section import Section
from hrl.config.spellings import present_name

_BESIDE_THE_PROGRAM = ("config", "./config")
"""Where verl's launch lines say that its own YAML files are, relative to its programs: hrl's own are meant."""
YOURS = "yours"
"""The origin of what stands on the command line or in a YAML file of the user's."""


@dataclass
class Composition:
    """What the files and the command line say, before validation.

    Attributes:
        values: Dotted key → value, interpolations resolved.
        origins: Dotted key → who set it: `YOURS`, or a chosen file such as `recipe=ppo`; other keys have their default.
        problems: What could not be read.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """A command line, taken apart.

    Attributes:
        config_path: Folder of the primary YAML file; None is hrl's own.
        config_name: Its name without the suffix.
        config_dir: One more folder that groups are looked for in.
        overrides: The rest, to be read as `key=value`.
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
    def own_file(self) -> Path | None:
        """The primary YAML file, where it is one of the user's."""
        file = self.folders[0] / f"{self.config_name}.yaml"
        return None if file.parent == config_folder() else file

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
        kind: Of the run; it names the primary YAML file unless `--config-name` names another.
        argv: `key=value` overrides, `--config-path DIR`, `--config-name NAME`, `--config-dir DIR`, `--cfg`, `--help`.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: Lists every problem at once.
        SystemExit: After `--help` or `--cfg` has been answered.
    """
    options = parse_options(argv, kind.config_name)
    if options.help:
        _answer(run_help(kind=kind))
    composition = compose_tree(options, kind)
    config = validate_kind(kind, composition.values, tuple(composition.problems))
    if options.cfg:
        _answer(to_yaml(config))
    return config.with_origins(composition.origins)


def config_problems(kind: RunKind[Section], argv: Sequence[str]) -> tuple[Problem, ...]:
    """Return what is wrong with a command line, judged by itself: no file that it names is opened, no device looked at.

    Args:
        kind: Of the run.
        argv: As `compose_kind` takes it.
    """
    try:
        compose_kind(kind, argv)
    except ConfigError as error:
        return error.problems
    return ()


def to_yaml(config: Section) -> str:
    """Return the whole configuration as YAML, every default filled in.

    Composing it again gives the same configuration.
    """
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump()))


def _answer(text: str) -> NoReturn:
    """Answer a question about the program on standard output and end it, as argparse does for `--help`."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    raise SystemExit(0)


def parse_options(argv: Sequence[str], config_name: str) -> Options:
    """Take a command line apart; `--config-path` is relative to the working folder.

    Raises:
        ConfigError: An option lacks its value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp", type=Path)
    parser.add_argument("--config-name", "-cn", default=config_name)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", nargs="?", const="job", choices=["job", "all"])
    known, rest = parser.parse_known_args(list(argv))
    name = known.config_name.removesuffix(".yaml")
    own = name == config_name or any(engine in name for engine in OTHER_ENGINES)
    if own and str(known.config_path) in _BESIDE_THE_PROGRAM and not known.config_path.is_dir():
        known.config_path = None
    rest = list(_with_their_values(rest))
    return Options(
        config_path=known.config_path.resolve() if known.config_path else None,
        config_name=name,
        config_dir=known.config_dir.resolve() if known.config_dir else None,
        overrides=tuple(rest),
        help=known.help,
        cfg=known.cfg is not None,
    )


def _with_their_values(arguments: Sequence[str]) -> Iterator[str]:
    """Join `--name value`, as other programs take it, to one argument, so that one problem names both."""
    at = 0
    while at < len(arguments):
        text = arguments[at]
        at += 1
        if text.startswith("-") and "=" not in text and at < len(arguments):
            value = arguments[at]
            if "=" not in value and not value.startswith("-"):
                text, at = f"{text} {value}", at + 1
        yield text


def compose_tree(options: Options, kind: RunKind[Section]) -> Composition:
    """Compose the YAML files and put the overrides on top; collects problems instead of stopping.

    hrl's own model and rows get the quickstart's values, unless another YAML file or a quickstart was chosen.
    """
    problems: list[Problem] = []
    choices: dict[str, str] = {}
    values: list[Override] = []
    for text in options.overrides:
        override = option_problem(text, kind) if text.startswith("-") else read_override(text)
        if isinstance(override, Problem):
            problems.append(override)
        elif group := _group_options(options.folders, override.key_or_group, kind):
            problem = _choice_problem(override, group)
            problems += [problem] if problem else []
            choices |= {} if problem else {override.key_or_group: text.lstrip("+")}
        else:
            values.append(override)
    composed = None
    if options.own_file is None and QUICKSTART not in choices and _is_quickstart(kind, _written(values)):
        composed = _composed(options, kind, [f"{QUICKSTART}={kind.name}", *choices.values()], values)
    if composed is None or not _is_quickstart(kind, composed.values):
        composed = _composed(options, kind, list(choices.values()), values)
    composed.problems = [*problems, *composed.problems]
    return composed


def _written(overrides: Sequence[Override]) -> dict[str, Any]:
    return {override.key_or_group: override.value() for override in overrides if not override.is_delete()}


def _is_quickstart(kind: RunKind[Section], values: Mapping[str, Any]) -> bool:
    return is_the_quickstarts_task(kind, {present_name(key, kind.spellings.renamed): values[key] for key in values})


def _composed(
    options: Options, kind: RunKind[Section], choices: Sequence[str], overrides: Sequence[Override]
) -> Composition:
    """Files, groups and values together, and where each value comes from."""
    composition = Composition()
    tree, files = _compose_files(options, choices, composition.problems)
    for override in overrides:
        problem = apply_override(tree, override, kind.schema)
        composition.problems += [problem] if problem else []
    keys = {key: origin for file, origin in files.items() for key in _keys_of(file, kind)}
    keys |= dict.fromkeys((override.key_or_group for override in overrides), YOURS)
    composition.origins = {present_name(key, kind.spellings.renamed): origin for key, origin in keys.items()}
    values = dict(flatten(OmegaConf.to_container(tree, resolve=False), kind.schema))  # type: ignore[arg-type]
    for key in without_its_critic(kind, values, composition.origins):  # before the estimator is derived from it
        del values[key], composition.origins[key]
    composition.values = _resolve(values, kind, composition.problems)
    for key in without_its_validation(kind, composition.values, composition.origins):
        del composition.values[key], composition.origins[key]
    if not any(problem.key in (TRAIN_FILES, f"{options.config_name}.yaml") for problem in composition.problems):
        missing = rows_are_missing(kind, composition.values)
        composition.problems += [missing] if missing else []
    return composition


def _keys_of(file: Path, kind: RunKind[Section]) -> list[str]:
    """Return the dotted keys that a YAML file sets itself."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    return [key for key, _ in flatten({name: value for name, value in tree.items() if name != "defaults"}, kind.schema)]


def _group_options(folders: Sequence[Path], name: str, kind: RunKind[Section]) -> list[str]:
    """Return the YAML files of the group `name` that suit the kind of run; empty if no folder holds such a group."""
    if name == QUICKSTART:
        return [kind.name]
    if "." in name:
        return []
    found = {path.stem for folder in folders for path in (folder / name).glob("*.yaml")}
    return sorted(found)


def _choice_problem(override: Override, group: list[str]) -> Problem | None:
    choice = override.value()
    if choice is None or choice in group:
        return None
    close = nearest(str(choice), group)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Choose one of {', '.join(group)}."
    return Problem(override.key_or_group, f"has no choice {choice!r}.", hint)


def _compose_files(
    options: Options, choices: Sequence[str], problems: list[Problem]
) -> tuple[DictConfig, dict[Path, str]]:
    """Let hydra compose the primary file with its groups; an empty tree, and a problem, if it can't.

    Returns:
        The tree; and every file that went into it and holds values of a run, with what `Composition.origins` calls it.
    """
    primary, *others = options.folders
    if not primary.is_dir():
        what = f"names {primary}, which is no folder here."
        hint = "It is relative to the working folder; without it the files are hrl's own."
        problems.append(Problem("--config-path", what, hint, reason=Reason.UNREADABLE))
        return OmegaConf.create({}), {}
    search_path = ",".join(f"'file://{folder}'" for folder in others)
    overrides = [f"hydra.searchpath=[{search_path}]", *choices]
    files: dict[Path, str] = {}
    try:
        with initialize_config_dir(str(primary), version_base="1.3"):
            try:
                tree = compose(options.config_name, overrides, return_hydra_config=True)
            except ConfigCompositionException as error:
                if "Could not override" not in str(error):
                    raise
                # The primary file has no place for the group: a user's own YAML without hrl's defaults list.
                added = [overrides[0], *(f"+{choice}" for choice in choices)]
                tree = compose(options.config_name, added, return_hydra_config=True)
        chosen = tree.hydra.runtime.choices
        files = {
            folder / group / f"{choice}.yaml": f"{group}={choice}"
            for group, choice in sorted(chosen.items(), key=lambda item: item[0] != QUICKSTART)  # the others win
            for folder in options.folders
            if (folder / group / f"{choice}.yaml").is_file()
        }
        if options.own_file is not None:
            files[options.own_file] = YOURS
        OmegaConf.set_struct(tree, False)
        del tree["hydra"]
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        problems.append(_composition_problem(options, "; ".join(lines[:3])))
        tree = OmegaConf.create({})
    OmegaConf.set_struct(tree, False)
    return tree, files


def _composition_problem(options: Options, message: str) -> Problem:
    file, folder = f"{options.config_name}.yaml", options.folders[0]
    if any(engine in options.config_name or f"{engine}_trainer" in message for engine in OTHER_ENGINES):
        return Problem(file, "is for another engine:", ONLY_FSDP2.hint, reason=Reason.ABSENT)
    if not (folder / file).is_file():
        return Problem(file, f"is not in {folder}.", "See --config-path and --config-name.", reason=Reason.UNREADABLE)
    return Problem(file, f"can't be composed: {message}.")


def _resolve(given: Mapping[str, Any], kind: RunKind[Section], problems: list[Problem]) -> dict[str, Any]:
    """Resolve interpolations; they may also refer to keys that stand at their default."""
    values = dict(given)
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
