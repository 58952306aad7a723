"""From a composed tree to a valid configuration, or one error that lists everything that is wrong with it."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hrl.trainer.config.base import Section
from hrl.trainer.config.compat import lookup, present_name
from hrl.trainer.config.derived import with_derived_defaults
from hrl.trainer.config.errors import ConfigError, Problem
from hrl.trainer.config.keys import flatten, leaves, nearest, nearest_keys, sections, unflatten
from hrl.trainer.config.kinds import PPO, C, RunKind
from hrl.trainer.config.schema import PPOTrainerConfig


def load_config(tree: DictConfig | Mapping[str, Any]) -> PPOTrainerConfig:
    """Validate the composed tree of a PPO run; see `load_kind`."""
    return load_kind(PPO, tree)


def load_kind(kind: RunKind[C], tree: DictConfig | Mapping[str, Any]) -> C:
    """Validate a composed tree; reads the tree alone: no file, no network, no device.

    Args:
        kind: of the run.
        tree: nested keys and values, as hydra composes them or as a plain dict.

    Returns:
        The configuration with every default filled in.

    Raises:
        ConfigError: something is wrong; lists all problems at once.
    """
    plain: Any = OmegaConf.to_container(tree, resolve=True) if isinstance(tree, DictConfig) else tree
    return validate_kind(kind, dict(flatten({str(name): value for name, value in plain.items()}, kind.schema)))


def validate(given: Mapping[str, Any], problems: tuple[Problem, ...] = ()) -> PPOTrainerConfig:
    """Validate the dotted keys of a PPO run; see `validate_kind`."""
    return validate_kind(PPO, given, problems)


def validate_kind(kind: RunKind[C], given: Mapping[str, Any], problems: tuple[Problem, ...] = ()) -> C:
    """Validate dotted keys.

    Args:
        kind: of the run.
        given: dotted key → value.
        problems: what was found before, while composing; listed first.

    Raises:
        ConfigError: as `load_kind`.
    """
    values, found = _translate(given, kind)
    found = [*problems, *found]
    doubtful = {key for problem in found for key in (problem.key, *problem.involves)}
    given_keys = frozenset(values)
    values = with_derived_defaults(values, kind.derived, kind.schema)
    config, wrong = _build(values, kind.schema)
    # A wrong value also fails in the defaults that follow from it; it is reported where it was written.
    found += [problem for problem in wrong if _was_given(problem.key, given_keys)]
    doubtful.update(problem.key for problem in wrong)
    for rule in kind.rules:
        found += [problem for problem in rule(config) if doubtful.isdisjoint((problem.key, *problem.involves))]
    if found:
        raise ConfigError(found)
    return config


def _was_given(key: str, given: frozenset[str]) -> bool:
    return any(other == key or other.startswith(f"{key}.") or key.startswith(f"{other}.") for other in given)


def _translate(given: Mapping[str, Any], kind: RunKind[Section]) -> tuple[dict[str, Any], list[Problem]]:
    """Bring every key to its present name; report those that have none here."""
    values: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    problems: list[Problem] = []
    second_spellings: list[tuple[str, str, Any]] = []
    for written, value in given.items():
        key = present_name(written, kind.spellings.renamed)
        if key != written and value is None:
            continue
        if key in kind.spellings.must_equal:
            second_spellings.append((written, kind.spellings.must_equal[key], value))
        elif _is_schema_key(key, kind.schema):
            if key in values and values[key] != value:
                problems.append(_contradiction(written, value, spelt[key], values[key], key))
            values[key], spelt[key] = value, written
        else:
            problems += _outside_schema(written, key, value, kind)
    for written, key, value in second_spellings:
        wanted = values.get(key, leaves(kind.schema)[key].default)
        if value is not None and value != wanted:
            what = f"is {value!r}, but {key} is {wanted!r}."
            problems.append(Problem(written, what, f"Set {key} alone.", involves=(key,)))
    return values, problems


def _is_schema_key(key: str, root: type[Section]) -> bool:
    """Whether validation can judge `key`: it is in the schema, or lies under or over a value of it."""
    parts = key.split(".")
    above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return key in leaves(root) or key in sections(root) or any(prefix in leaves(root) for prefix in above)


def _contradiction(written: str, value: object, other: str, other_value: object, key: str) -> Problem:
    what = f"is {value!r}, but {other} is {other_value!r}; both mean {key}."
    return Problem(written, what, f"Set {key} alone.", involves=(key,))


def _outside_schema(written: str, key: str, value: object, kind: RunKind[Section]) -> Iterator[Problem]:
    """The problem with a key that is no field of the schema; none if it describes what hrl always does."""
    fixed = kind.spellings.fixed.get(key)
    if fixed is not None:
        if not any(
            value is accepted or (value == accepted and _same_kind(value, accepted)) for accepted in fixed.accepted
        ):
            yield Problem(written, f"can't be {_show(value)} here:", fixed.advice)
        return
    refused = lookup(kind.spellings.refused, key)
    if refused is not None:
        yield Problem(written, "has no counterpart in hrl:", refused[1])
        return
    known = leaves(kind.schema)
    close = nearest_keys(key, {old: new for old, new in kind.spellings.renamed.items() if new in known}, kind.schema)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"See {kind.help.page}, or `{kind.check} --help`."
    yield Problem(written, "is not a key of hrl.", hint, involves=tuple(close))


def _same_kind(value: object, other: object) -> bool:
    return isinstance(value, bool) == isinstance(other, bool)


def _build(values: Mapping[str, Any], root: type[C]) -> tuple[C, list[Problem]]:
    """Validate field by field; wrong fields fall back to their default so that the cross-field rules can still run."""
    try:
        return root.model_validate(unflatten(dict(values))), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems: dict[str, Problem] = {}
    for detail in details:
        key = ".".join(_key_path(detail, root))
        problems.setdefault(key, _field_problem(key, detail, root))
    sound = {
        key: value
        for key, value in values.items()
        if not any(key == bad or key.startswith(f"{bad}.") or bad.startswith(f"{key}.") for bad in problems)
    }
    return root.model_validate(unflatten(sound)), list(problems.values())


def _key_path(detail: ErrorDetails, root: type[Section]) -> Iterator[str]:
    """The dotted key of an error, without pydantic's steps into unions and list items."""
    key = ""
    for step in detail["loc"]:
        key = f"{key}.{step}" if key else str(step)
        yield str(step)
        if key in leaves(root):
            return


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section with keys below it",
}


def _field_problem(key: str, detail: ErrorDetails, root: type[Section]) -> Problem:
    """Say in the user's words what pydantic found."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    where = ".".join(map(str, detail["loc"])).removeprefix(key).strip(".")
    item = f"[{where}] " if where else ""
    if kind == "literal_error":
        return _choice_problem(key, item, value, root)
    if kind in _EXPECTED:
        hint = f"Quote it: {key}='\"{value}\"'." if kind == "string_type" and value is not None else ""
        return Problem(key, f"{item}is {_show(value)}, expected {_EXPECTED[kind]}.", hint)
    bounds = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    for name, words in bounds.items():
        if name in context:
            return Problem(key, f"{item}is {_show(value)}, must be {words} {context[name]}.")
    return Problem(key, f"{item}is {_show(value)}: {detail['msg'].lower()}.")


def _choice_problem(key: str, item: str, value: object, root: type[Section]) -> Problem:
    choices = choices_of(key, root)
    close = nearest(str(value), choices)
    hint = f"Did you mean {close[0]}?" if close else f"Choose one of {', '.join(choices)}."
    return Problem(key, f"{item}can't be {_show(value)}.", hint)


def choices_of(key: str, root: type[Section] = PPOTrainerConfig) -> list[str]:
    """The values that a key of fixed choices can take, as the schema lists them; empty for other keys."""
    return [str(choice) for choice in _literals(leaves(root)[key].field.annotation)]


def _literals(annotation: Any) -> Iterator[Any]:
    for argument in getattr(annotation, "__args__", ()):
        if isinstance(argument, str | int):
            yield argument
        elif argument is not type(None):
            yield from _literals(argument)


def _show(value: object) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
