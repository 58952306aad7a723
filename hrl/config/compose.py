"""From a command line to a configuration: hydra composes the YAML tree, overrides go on top, validation follows.

Hydra's own override handling stops at the first key it doesn't know. Here hydra composes only files and groups; values
are parsed with hydra's grammar and applied afterwards, so all wrong keys are reported at once, each with a suggestion.

The quickstart's values suit a small model and short answers. They stand in `configs/quickstart/`, apart from the
primary files, and apply to hrl's own model and tasks only: a run on anything else starts from the schema's defaults.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hrl.config.help import run_help
from hrl.config.limits import check_aliases, shown_key, usable
from hrl.config.load import option_problem, validate_kind
from hrl.config.offline import OfflineConfig
from hrl.config.override import literal
from hrl.config.own_members import traits_of_estimator
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import OFFLINE_KINDS, PPO, C, RunKind, config_folder
from hrl.config.section import Get, Section, WholeConfig, flatten, leaves, unflatten
from hrl.config.spellings import ONLY_FSDP2, OTHER_ENGINES
from hrl.errors import ConfigError, Problem, Reason
from hrl.masking import masked
from hrl.nearest import did_you_mean

QUICKSTART = "quickstart"
"""The group of YAML files; a kind's file has the kind's name."""
TRAIN_FILES = "data.train_files"
_VAL_FILES, _TEST_FREQ = "data.val_files", "trainer.test_freq"
_MODELS = ("actor_rollout_ref.model.path", "model.path")
_BUILT_IN = ("bundled:", "reasoning_gym:")
_OF_ITS_ROWS = ("data.max_prompt_length", "trainer.experiment_name", _TEST_FREQ)
"""Keys whose value in the quickstart suits its rows alone."""
_NEEDS_GRAMMAR = frozenset("[]{}'\"$,()")
_UNREADABLE = (
    *(HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, RecursionError),
    *(ValueError, TypeError, AttributeError, KeyError, AssertionError),
)
"""What hydra and OmegaConf raise for files that make no sense: they check little of what a file holds."""
_KEY = re.compile(r"[+~]{0,2}[\w./@:$-]+", re.ASCII)
"""A key as hydra's grammar has it, which has no error for others but one of its lexer."""
_PARSER = OverridesParser.create()
_BESIDE_THE_PROGRAM = ("config", "./config")
"""The `--config-path` of verl's launch lines, a folder beside its programs. It is read as hrl's own folder."""
_LONGEST_SHOWN = 200
"""How much of a value is repeated in a message."""
YOURS = "yours"
"""The origin of values from the command line or from the user's own YAML file."""


@dataclass(frozen=True)
class _Options:
    """A command line, taken apart.

    Attributes:
        config_name: Name of the primary YAML file, without the suffix.
        folders: All folders with YAML files, that of the primary file first.
        missing: Problems of options that name no folder.
        overrides: The remaining arguments, to be read as `key=value`.
        help: Whether `--help` was given.
        cfg: Whether `--cfg` was given.
    """

    config_name: str
    folders: list[Path]
    missing: list[Problem]
    overrides: list[str]
    help: bool
    cfg: bool

    @property
    def own_file(self) -> Path | None:
        """The primary YAML file if it is the user's own, else None."""
        return None if self.folders[0] == config_folder() else self.folders[0] / f"{self.config_name}.yaml"


#: verl's file for Megatron, which is its file for PPO with this key.
_OF_MEGATRON, _SAYS_MEGATRON = "ppo_megatron_trainer", "model_engine=megatron"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem("the command line", f"can't be read: {message}.", "See --help.")])


def compose_cli(argv: Sequence[str]) -> PPOTrainerConfig:
    """Compose and validate the configuration of a PPO run from its command line; see `compose_kind`."""
    return compose_kind(PPO, argv)


def compose_kind(kind: RunKind[C], argv: Sequence[str]) -> C:
    """Compose and validate a configuration from a command line.

    Args:
        kind: Kind of run; it names the primary YAML file unless `--config-name` names another.
        argv: `key=value` overrides, `--config-path DIR`, `--config-name NAME`, `--config-dir DIR`, `--cfg`, `--help`.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: Lists every problem at once.
        SystemExit: After `--help` or `--cfg` has been answered.
    """
    options = _parse_options(argv, kind.config_name)
    if options.help:
        _answer(run_help(kind=kind))
    values, origins, problems = _compose_values(options, kind)
    config = validate_kind(kind, values, problems)
    if options.cfg:
        _answer(to_yaml(config))
    return config.with_origins(origins)


def config_problems(kind: RunKind[WholeConfig], argv: Sequence[str]) -> tuple[Problem, ...]:
    """Return the problems of a command line, without opening files that it names and without looking at devices.

    Args:
        kind: Kind of run.
        argv: Arguments as for `compose_kind`.
    """
    try:
        compose_kind(kind, argv)
    except ConfigError as error:
        return error.problems
    return ()


def to_yaml(config: Section, *, with_secrets: bool = False) -> str:
    """Return the whole configuration as YAML with all defaults; composing it again gives the same configuration.

    Secrets are masked, and a configuration with one that was masked is refused, unless they are asked for: for a file
    that only this user can read, and that goes with the run.
    """
    names = config.trainer.secrets if isinstance(config, PPOTrainerConfig | OfflineConfig) else []
    values = config.model_dump() if with_secrets else masked(config.model_dump(), names)
    return OmegaConf.to_yaml(OmegaConf.create(_literal(values)))


def _literal(value: Any) -> Any:
    """Return plain values with every text such that it reads back as itself."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return literal(value) if isinstance(value, str) else value


def _answer(text: str) -> NoReturn:
    """Print an answer such as the help text and exit, as argparse does for `--help`."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    raise SystemExit(0)


def _parse_options(argv: Sequence[str], config_name: str) -> _Options:
    """Split a command line into options and overrides; folders are relative to the working folder.

    Raises:
        ConfigError: An option lacks its value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp", type=Path)
    parser.add_argument("--config-name", "-cn", default=config_name)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", nargs="?", const="job", choices=["job", "all"])
    problems: list[Problem] = []
    usable({shown_key(text): text for text in argv}, problems)
    if problems:
        raise ConfigError(problems)
    known, rest = parser.parse_known_args(list(argv))
    name = known.config_name.removesuffix(".yaml")
    own = name == config_name or any(engine in name for engine in OTHER_ENGINES)
    if own and str(known.config_path) in _BESIDE_THE_PROGRAM and not os.path.isdir(known.config_path):
        known.config_path = None
    if name == _OF_MEGATRON and known.config_path is None:
        name, rest = config_name, [_SAYS_MEGATRON, *rest]
    named = {"--config-path": known.config_path, "--config-dir": known.config_dir}
    folders = {option: folder.resolve() for option, folder in named.items() if folder is not None}
    hint = "It is relative to the working folder; without it the files are hrl's own."
    missing = [
        Problem(option, f"names {_cut(str(folder))}, which is not a folder.", hint, reason=Reason.UNREADABLE)
        for option, folder in folders.items()
        if not os.path.isdir(folder)
    ]
    return _Options(
        config_name=name,
        folders=list(
            dict.fromkeys([folders.pop("--config-path", config_folder()), *folders.values(), config_folder()])
        ),
        missing=missing,
        overrides=list(_with_their_values(rest)),
        help=known.help,
        cfg=known.cfg is not None,
    )


def _with_their_values(arguments: Sequence[str]) -> Iterator[str]:
    """Join `--name value`, the syntax of other programs, into one argument, so that one problem names both."""
    at = 0
    while at < len(arguments):
        text = arguments[at]
        at += 1
        if text.startswith("-") and "=" not in text and at < len(arguments):
            value = arguments[at]
            if "=" not in value and not value.startswith("-"):
                text, at = f"{text} {value}", at + 1
        yield text


def require_no_blanks(arguments: Sequence[str]) -> None:
    """Refuse `key = value` among arguments of which some are no keys, such as files or functions.

    Raises:
        ConfigError: Names each.
    """
    problems: list[Problem] = []
    list(_without_blanks(arguments, problems))
    if problems:
        raise ConfigError(problems)


def _without_blanks(arguments: Sequence[str], problems: list[Problem]) -> Iterator[str]:
    """Yield the arguments; `key = value`, which a shell cuts into three, becomes one problem."""
    at = 0
    while at < len(arguments):
        key, *following = arguments[at : at + 3]
        cut = _cut_at_blanks(key, following)
        if not cut:
            yield key
        else:
            value = "".join(cut).removeprefix("=")
            problems.append(_blanks(" ".join([key, *cut]), key.removesuffix("="), value))
        at += 1 + len(cut)


def _cut_at_blanks(key: str, following: Sequence[str]) -> list[str]:
    """Return which of the arguments after a key are its `=` and its value, cut off by blanks."""
    after, value = [*following, "", ""][:2]
    if key.endswith("=") and _KEY.fullmatch(key[:-1]) and _is_bare(after):  # key= value
        return [after]
    if not _KEY.fullmatch(key):
        return []
    if after == "=" and _is_bare(value):  # key = value
        return [after, value]
    return [after] if len(after) > 1 and after.startswith("=") else []  # key =value


def _blanks(text: str, key: str, value: str) -> Problem:
    return Problem(text, "has blanks around the `=`.", f"Write {key}={value}.", reason=Reason.UNREADABLE)


def _is_bare(text: str) -> bool:
    """Return whether a text can be the value of a key that stands before it, and is no argument by itself."""
    return bool(text) and "=" not in text and not text.startswith(("-", "~"))


def _compose_values(
    options: _Options, kind: RunKind[WholeConfig]
) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Compose the YAML files and apply the overrides, collecting problems instead of stopping at the first.

    hrl's own model and rows get the quickstart's values, unless another YAML file or a quickstart was chosen.

    Returns:
        Dotted key → value, interpolations resolved; dotted key → who set it (`YOURS`, or a chosen file such as
        `recipe=ppo`) for keys that are not at their default; and what could not be read.
    """
    problems = list(options.missing)
    choices: dict[str, str] = {}
    overrides: list[Override] = []
    for text in _without_blanks(options.overrides, problems):
        override = option_problem(text, kind) if text.startswith("-") else read_override(text)
        if isinstance(override, Problem):
            problems.append(override)
        elif group := _choices_of(override.key_or_group, options.folders, kind):
            choice = override.value()
            if override.is_delete() or (isinstance(choice, str) and choice in group):
                choices[override.key_or_group] = text.lstrip("+")
            else:
                hint = did_you_mean(str(choice), group, f"Choose one of {', '.join(group)}.")
                if override.key_or_group == "recipe" and isinstance(choice, str) and choice in OFFLINE_KINDS:
                    hint = f"It is a program of its own: {OFFLINE_KINDS[choice].program} --help."
                problems.append(Problem(override.key_or_group, f"has no choice {choice!r}.", hint))
        elif override.key_or_group in PPO.help.groups:
            hint = f"Remove it; `{kind.check} --help` shows what there is to choose."
            problems.append(Problem(override.key_or_group, "is a choice of PPO runs.", hint))
        else:
            overrides.append(override)
    asked = choices.pop(QUICKSTART, None)
    bombs = [problem for folder in options.folders if folder != config_folder() for problem in check_aliases(folder)]
    problems += bombs
    readable = not options.missing and not bombs
    composed = _compose_files(options, list(choices.values()), problems) if readable else None
    tree, files = composed or (OmegaConf.create({}), {})
    for override in overrides:
        problem = _apply_override(tree, override, kind.schema)
        problems += [problem] if problem else []
    present = kind.spellings.present_name
    plain: Any = OmegaConf.to_container(tree, resolve=False)
    values: dict[str, Any] = usable(dict(flatten(plain, kind.schema)), problems)
    origins = {present(key): origin for file, origin in files.items() for key in _values_of(file, kind)}
    origins |= dict.fromkeys((present(override.key_or_group) for override in overrides), YOURS)
    meant = {present(key): value for key, value in values.items()}
    removed = [present(override.key_or_group) for override in overrides if override.is_delete()]
    quickstart = _quickstart_of(kind)
    if asked == quickstart or (asked is None and options.own_file is None and _is_the_quickstarts_task(kind, meant)):
        for key, value in _values_of(config_folder() / QUICKSTART / f"{kind.name}.yaml", kind).items():
            if key not in meant and not any(f"{key}.".startswith(f"{gone}.") for gone in removed):
                values[key], origins[key] = value, quickstart
    for key in _without_its_critic(kind, values, origins):  # before the estimator is derived from it
        del values[key], origins[key]
    values = _resolve(values, kind, problems)
    rows = Get(values, kind.schema).default(TRAIN_FILES)
    if _as_list(values.get(TRAIN_FILES, rows)) != rows:
        for key in _OF_ITS_ROWS:
            if origins.get(key) == quickstart and not (key == _TEST_FREQ and _VAL_FILES in values):
                del values[key], origins[key]
    is_open = composed is not None and all(problem.key != TRAIN_FILES for problem in problems)
    if is_open and TRAIN_FILES not in values and quickstart not in origins.values():
        hint = (
            f"Name yours, e.g. {TRAIN_FILES}=train.parquet; or add {quickstart}, which brings bundled rows and "
            "settings for a small model."
        )
        problems.append(Problem(TRAIN_FILES, "is not set.", hint))
    return values, origins, problems


def _values_of(file: Path, kind: RunKind[WholeConfig]) -> dict[str, Any]:
    """Return the dotted keys that a YAML file sets itself."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False) or {}
    return dict(flatten({name: value for name, value in tree.items() if name != "defaults"}, kind.schema))


def _choices_of(name: str, folders: Sequence[Path], kind: RunKind[WholeConfig]) -> list[str]:
    """Return the YAML files of the group `name` that suit the kind of run; empty if it has no such group."""
    if name == QUICKSTART:
        return [kind.name]
    if "." in name:
        return []
    suitable = [folder for folder in folders if folder != config_folder() or name in kind.help.groups]
    return sorted({path.stem for folder in suitable for path in (folder / name).glob("*.yaml")})


def _compose_files(
    options: _Options, choices: Sequence[str], problems: list[Problem]
) -> tuple[DictConfig, dict[Path, str]] | None:
    """Compose the primary file and its groups with hydra; on failure return None and record a problem.

    Returns:
        The tree, and the files with values of a run that went into it, each with the origin of its values.
    """
    primary, *others = options.folders
    search_path = ",".join(f"'file://{folder}'" for folder in others)
    overrides = [f"hydra.searchpath=[{search_path}]", *choices]
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
    except _UNREADABLE as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        problems.append(_composition_problem(options, "; ".join(lines[:3])))
        return None
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
    return tree, files


def _composition_problem(options: _Options, message: str) -> Problem:
    file, folder = f"{options.config_name}.yaml", options.folders[0]
    if any(engine in options.config_name or f"{engine}_trainer" in message for engine in OTHER_ENGINES):
        return Problem(file, "is for another engine:", ONLY_FSDP2.hint, reason=Reason.ABSENT)
    if not os.path.isfile(folder / file):  # which a name that no disk takes does not break
        return Problem(file, f"is not in {folder}.", "See --config-path and --config-name.", reason=Reason.UNREADABLE)
    return Problem(file, f"can't be composed: {message}.")


def _resolve(given: Mapping[str, Any], kind: RunKind[WholeConfig], problems: list[Problem]) -> dict[str, Any]:
    """Resolve interpolations, which may also refer to keys left at their default."""
    values = dict(given)
    open_values = [key for key, value in values.items() if "${" in str(value)]
    if open_values:
        get = Get(values, kind.schema)
        whole = OmegaConf.create(unflatten({**{key: get(key) for key in leaves(kind.schema)}, **values}))
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


def read_override(text: str) -> Override | Problem:
    """Read one argument of the command line.

    A value that hydra's grammar rejects but that is plainly one string (`?`, `&`, `=` or `~` in a path) is taken as
    that string: `data.train_files=reasoning_gym:gsm_symbolic?size=100&seed=1` needs no inner quotes.
    """
    key, equals, value = text.partition("=")
    if not key.strip("+~") or (not equals and not key.startswith("~")):
        return Problem(text, "is not an override.", "Write key=value.", reason=Reason.UNREADABLE)
    if key != key.strip():
        return _blanks(text, key.strip(), value.strip())
    if not _KEY.fullmatch(key):
        hint = "A key is made of words with dots between them, such as trainer.seed."
        return Problem(key.lstrip("+~"), "can't be a key.", hint, reason=Reason.UNREADABLE)
    bare = key.lstrip("+~")
    try:
        return _checked(_PARSER.parse_override(text), text)
    except HydraException as error:
        first = str(error).splitlines()[0]
    except ValueError:
        return Problem(
            bare, "holds a number of thousands of digits.", "Quote it if it is text.", reason=Reason.UNREADABLE
        )
    except RecursionError:
        return Problem(bare, "is nested too deep to be read.", "No key holds such a value.", reason=Reason.UNREADABLE)
    if value and _NEEDS_GRAMMAR.isdisjoint(value):
        try:
            return _checked(_PARSER.parse_override(f'{key}="{value}"'), text)
        except HydraException as error:
            first = str(error).splitlines()[0]
    what = f"can't read {_cut(value)!r}: {_cut(first)}."
    return Problem(bare, what, _quoting(key, value), reason=Reason.UNREADABLE)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _checked(override: Override, text: str) -> Override | Problem:
    if override.is_sweep_override():
        key, _, value = text.partition("=")
        hint = f"For a list write '{key}=[{value}]'." if "," in value else ""
        return Problem(override.key_or_group, "has several values; one run takes one.", hint)
    return override


def _quoting(key: str, value: str) -> str:
    if value.startswith("[") and not value.endswith("]"):  # a shell cuts a list at its spaces
        return f"Write a list without spaces, or quote it: '{key}=[…,…]'."
    return f"Quote the value: '{key}=\"{value}\"'." if '"' not in value and "'" not in value else "Check its quotes."


def _apply_override(tree: DictConfig, override: Override, root: type[Section]) -> Problem | None:
    """Set or remove one key; the prefixes `+` and `++` change nothing. A key that holds a dict is replaced whole."""
    key = override.key_or_group
    try:
        if override.type is OverrideType.DEL:
            _remove(tree, key)
        else:
            OmegaConf.update(tree, key, override.value(), merge=key not in leaves(root), force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError, RecursionError) as error:
        return Problem(key, f"can't be set: {_cut(str(error).splitlines()[0])}.")
    return None


def _remove(tree: DictConfig, key: str) -> None:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(tree, parent) if parent else tree
    if isinstance(node, DictConfig):
        node.pop(name, None)


def _is_the_quickstarts_task(kind: RunKind[WholeConfig], values: Mapping[str, Any]) -> bool:
    """Return whether the run is one of hrl's model on hrl's tasks, with no rows or model of the user's own.

    Args:
        kind: Kind of run.
        values: Dotted key → value, without the quickstart's own.
    """
    known = leaves(kind.schema)
    for key in _MODELS:
        if key in known and values.get(key, known[key].plain) != known[key].plain:
            return False
    trained = _as_list(Get(values, kind.schema)(TRAIN_FILES))
    held_out = _as_list(values.get(_VAL_FILES) or [])
    if not isinstance(trained, list):
        return False
    return all(str(source).startswith(_BUILT_IN) for source in trained) and (
        not isinstance(held_out, list) or all(str(source).startswith(_BUILT_IN) for source in held_out)
    )


def _without_its_critic(kind: RunKind[WholeConfig], values: Mapping[str, Any], origins: Mapping[str, str]) -> set[str]:
    """Return the quickstart's `critic.*` keys if nothing else asks for a critic; they would make gae the estimator."""
    settings = {key: value for key, value in values.items() if key.startswith("critic.")}
    its_own = {key for key in settings if origins.get(key) == _quickstart_of(kind)}
    is_estimators = traits_of_estimator(values.get("algorithm.adv_estimator")).needs_critic
    is_asked_for = any(settings[key] not in (None, False) for key in settings.keys() - its_own)
    return set() if is_estimators or is_asked_for else its_own


def _quickstart_of(kind: RunKind[WholeConfig]) -> str:
    """Return the argument that asks for the quickstart, which is also the origin of its values."""
    return f"{QUICKSTART}={kind.name}"


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str | Mapping) else value
