"""From a composed tree to a valid configuration, or one error that lists everything that is wrong with it."""

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hrl.config.limits import usable
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import PPO, C, RunKind
from hrl.config.section import Get, Section, WholeConfig, flatten, leaves, sections, unflatten
from hrl.config.spellings import Synonym, Verdict, lookup
from hrl.errors import ConfigError, Problem, Reason
from hrl.nearest import did_you_mean, edit_distance, nearest

_POLICY = "actor_rollout_ref"
_FEW_KEYS = 12
"""A hint lists the keys of a section if it has at most this many."""


def load_config(tree: DictConfig | Mapping[str, Any] | PPOTrainerConfig) -> PPOTrainerConfig:
    """Validate the configuration of a PPO run; see `load_kind`."""
    return load_kind(PPO, tree)


def load_kind(kind: RunKind[C], tree: DictConfig | Mapping[str, Any] | WholeConfig) -> C:
    """Validate a configuration without looking at files, network or devices.

    Args:
        kind: Kind of run.
        tree: Nested keys and values, from hydra or as a plain dict, in which a section may be an object; or a
            configuration built directly from its class, which does not check the rules between keys.

    Returns:
        The configuration with every default filled in, as a command line with the same keys gives it.

    Raises:
        ConfigError: Lists all problems at once.
    """
    plain: Any = OmegaConf.to_container(tree, resolve=True) if isinstance(tree, DictConfig) else tree
    problems: list[Problem] = []
    if isinstance(plain, Mapping):
        plain = usable(plain, problems)
    return validate_kind(kind, dict(flatten(plain, kind.schema)), problems)


def validate_kind(kind: RunKind[C], given: Mapping[str, Any], problems: Sequence[Problem] = ()) -> C:
    """Validate dotted keys.

    Args:
        kind: Kind of run.
        given: Dotted key → value.
        problems: Problems found while composing; listed first.

    Raises:
        ConfigError: As `load_kind`.
    """
    values, found, remarks = _translate(given, kind)
    found = [*problems, *found]
    doubtful = {key for problem in found for key in (problem.key, *problem.involves)}
    config, wrong = _build(values, kind.schema)
    # A wrong value also fails in the defaults derived from it; report it only where it was written.
    found += [_with_synonym(problem, kind) for problem in wrong if any(_overlap(problem.key, key) for key in values)]
    doubtful.update(key for problem in wrong for key in (problem.key, _leaf_above(problem.key, kind.schema)))
    for rule in kind.rules:
        sound = [problem for problem in rule(config) if doubtful.isdisjoint((problem.key, *problem.involves))]
        # These values contradict each other; the hint names values that don't.
        found += [problem._replace(reason=problem.reason or Reason.ALTERNATIVE) for problem in sound]
    if found:
        raise ConfigError(found)
    return config.with_remarks(*remarks) if remarks else config


def _with_synonym(problem: Problem, kind: RunKind[WholeConfig]) -> Problem:
    """Return the problem of a section that has a value, with the key that was meant where another name tells it."""
    synonym = kind.spellings.synonyms.get(problem.key)
    return problem if synonym is None or problem.hint else problem._replace(hint=synonym.hint)


def value_problems(values: Mapping[str, Any], kind: RunKind[WholeConfig]) -> list[Problem]:
    """Return what is wrong with values on their own: rules between keys and unknown keys are not looked at."""
    known = {key: value for key, value in values.items() if _is_schema_key(key, kind.schema)}
    return [problem for problem in _build(known, kind.schema)[1] if any(_overlap(problem.key, key) for key in known)]


def _overlap(key: str, other: str) -> bool:
    """Return whether two keys are the same, or one is a section that holds the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _translate(given: Mapping[str, Any], kind: RunKind[WholeConfig]) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """Translate every key to its name in the schema; report those without one.

    Returns:
        Key of the schema → value, the problems, and remarks about keys that were not taken as written.
    """
    spellings = kind.spellings
    values: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    problems: list[Problem] = []
    remarks: list[str] = []
    others: list[tuple[str, str, Any]] = []
    for written, value in given.items():
        if _names_a_class_of_verl(written, value):
            continue
        key = written if written in spellings.outside else spellings.present_name(written)
        if value is None and (key != written or key in spellings.null_is_unset):
            continue
        lacking = {each: spellings.values.get((key, each)) for each in _words_of(value)}
        if refused := [_refusal(written, each, verdict) for each, verdict in lacking.items() if verdict is not None]:
            problems += refused
        elif key in spellings.outside or not _is_schema_key(key, kind.schema):
            others.append((written, key, value))
        else:
            if key in values and values[key] != value:
                what = f"is {value!r}, but {spelt[key]} is {values[key]!r}; both mean {key}."
                hint = f"Set {key} alone."
                problems.append(Problem(written, what, hint, involves=(key,), reason=Reason.ALTERNATIVE))
            values[key], spelt[key] = value, written

    # Conversions see what others have set, and the keys of verl beside theirs.
    value_of = Get(ChainMap(values, {key: value for _, key, value in others}), kind.schema)
    taken: dict[str, list[tuple[str, Any, Verdict]]] = {}
    for written, key, value in others:
        if same := spellings.must_equal.get(key):
            if value is not None and value != value_of(same):
                what = f"is {value!r}, but {same} is {value_of(same)!r}."
                hint = f"Set {same} alone."
                problems.append(Problem(written, what, hint, involves=(same,), reason=Reason.ALTERNATIVE))
        elif conversion := spellings.converted.get(key):
            result = {} if value is None else conversion.convert(value, value_of)
            if result is None:
                hint = f"{_capitalised(conversion.instead)}."
                problems.append(Problem(written, f"can't be {_show(value)} here.", hint, reason=Reason.ALTERNATIVE))
            elif result:
                values |= result
                read_as = ", ".join(f"{key}={_show(other)}" for key, other in result.items())
                remarks.append(f"{written}={_show(value)} is read as {read_as}.")
        elif (entry := lookup(spellings.outside, key)) is None or _is_of_a_nearer_section(key, entry[0], kind.schema):
            problems.append(_unknown(written, key, kind))
        elif entry[1].is_taken(value) and not entry[1].is_same(value):
            taken.setdefault(entry[1].says, []).append((written, value, entry[1]))
        elif not entry[1].is_same(value):
            problems.append(_refusal(written, value, entry[1], _of_the_policy(key, kind)))
    without_effect = []
    for says, of_verdict in taken.items():
        if (beside := of_verdict[0][2].beside) and values.get(beside) is not None:
            problems.append(_refusal(*of_verdict[0]))
        else:
            keys = ", ".join(f"{written}={_show(value)}" for written, value, _ in of_verdict)
            without_effect.append(f"{keys} ({says})")
    if without_effect:
        remarks.append(f"taken without effect: {'; '.join(without_effect)}.")
    return values, problems, remarks


def _words_of(value: object) -> list[str]:
    """Return the words that a value is, or is a list of."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def _names_a_class_of_verl(key: str, value: object) -> bool:
    """Return whether this is a `_target_` key, which names the class of a section in verl's YAML files."""
    return key.rpartition(".")[2] == "_target_" and str(value).startswith("verl.")


def _is_schema_key(key: str, root: type[Section]) -> bool:
    """Return whether validation can judge `key`: the schema has it, a key above it, or keys below it."""
    parts = key.split(".")
    above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return key in leaves(root) or key in sections(root) or any(prefix in leaves(root) for prefix in above)


def _is_of_a_nearer_section(key: str, pattern: str, root: type[Section]) -> bool:
    """Return whether the schema has a section right above `key`, below the one that a pattern `a.b.*` speaks of."""
    parent = key.rpartition(".")[0]
    return parent.startswith(pattern.removesuffix("*")) and parent in sections(root)


def _refusal(written: str, value: object, verdict: Verdict, or_meant: str | None = None) -> Problem:
    what = f"can't be {_show(value)} here:" if verdict.same or verdict.taken else "has no counterpart in hrl:"
    hint = verdict.hint if or_meant is None else f"{verdict.hint} Or did you mean {or_meant}?"
    return Problem(written, what, hint, reason=verdict.reason)


def _of_the_policy(key: str, kind: RunKind[WholeConfig]) -> str | None:
    """Return the key that was meant if only the policy's section is missing in front, as in `rollout.n`."""
    full = f"{_POLICY}.{key}"
    return full if "." in key and full in leaves(kind.schema) else None


def _unknown(written: str, key: str, kind: RunKind[WholeConfig]) -> Problem:
    """Return the problem of a key that neither hrl nor verl has, suggesting the key that was probably meant."""
    if (full := _of_the_policy(key, kind)) is not None:
        return Problem(written, "is not a key of hrl.", f"Did you mean {full}?", involves=(full,))
    synonym = _synonym(key, kind)
    known = leaves(kind.schema)
    close = nearest_keys(key, {old: new for old, new in kind.spellings.renamed.items() if new in known}, kind.schema)
    if synonym is not None and not (close and "." in key):
        return Problem(written, "is not a key of hrl.", synonym.hint, involves=(synonym.key,))
    if close:
        return Problem(written, "is not a key of hrl.", f"Did you mean {' or '.join(close)}?", involves=tuple(close))
    parent = key.rpartition(".")[0]
    there = [other.removeprefix(f"{parent}.") for other in known if other.rpartition(".")[0] == parent]
    short = 0 < len(there) <= _FEW_KEYS
    hint = f"{parent} has {', '.join(there)}." if short else f"See {kind.help.page}, or `{kind.check} --help`."
    return Problem(written, "is not a key of hrl.", hint)


def nearest_keys(key: str, aliases: Mapping[str, str], root: type[Section]) -> list[str]:
    """Return keys of the same section that `key` may stand for: a near spelling, or one path is the end of the other.

    Args:
        key: The unknown dotted key.
        aliases: Accepted older spelling → present name; a misspelt alias suggests its present name.
        root: The schema.

    Returns:
        At most two keys, the likeliest first.
    """
    known = {**{name: name for name in leaves(root)}, **aliases}
    parent, _, name = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    close = [siblings[other] for other in nearest(name, siblings)]
    close = close or [other for other in known if _is_slip(key, other)]
    close = close or [other for other in known if other.endswith(f".{key}")]
    close = close or [other for other in known if "." in other and key.endswith(f".{other}")]
    found = list(dict.fromkeys(known[other] for other in close))
    return found if len(found) <= 2 else []


def _is_slip(key: str, other: str) -> bool:
    """Return whether two paths of the same depth differ by one typing error."""
    return key.count(".") == other.count(".") and abs(len(key) - len(other)) <= 1 and edit_distance(key, other) == 1


def option_problem(text: str, kind: RunKind[WholeConfig]) -> Problem:
    """Return the problem of an argument such as `--n_samples_per_prompt 8`, the syntax of other programs."""
    name = text.lstrip("-").replace("=", " ").partition(" ")[0].replace("-", "_")
    synonym = _synonym(name, kind)
    hint = f"{synonym.hint} Write key=value." if synonym is not None else "Write key=value; see --help."
    return Problem(text, "is not an option of this command.", hint, involves=(synonym.key,) if synonym else ())


def _synonym(key: str, kind: RunKind[WholeConfig]) -> Synonym | None:
    """Return hrl's key for a name of another library, unless its section shows that something else is meant."""
    section, _, name = key.rpartition(".")
    synonym = kind.spellings.synonyms.get(name)
    if synonym is None:
        return None
    top = section.partition(".")[0]
    misplaced = synonym.key.rpartition(".")[2] == name
    fits = not section or top not in sections(kind.schema) or synonym.key.startswith(f"{top}.") or misplaced
    return synonym if fits else None


def _capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _build(values: Mapping[str, Any], root: type[C]) -> tuple[C, list[Problem]]:
    """Validate field by field; a wrong field falls back to its default so that rules between keys can still run."""
    try:
        return root.model_validate(unflatten(dict(values))), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems: dict[tuple[str, object], Problem] = {}
    for detail in details:
        key = ".".join(_key_path(detail, root))
        each = detail["input"] if detail["type"] == "not_registered" else None  # of a list, every unknown name
        problems.setdefault((key, each), _field_problem(key, detail, root))
    sound = {key: value for key, value in values.items() if not any(_overlap(key, bad) for bad, _ in problems)}
    return root.model_validate(unflatten(sound)), list(problems.values())


def _key_path(detail: ErrorDetails, root: type[Section]) -> Iterator[str]:
    """Yield the dotted key of an error, without pydantic's steps into unions and list items.

    It goes on into a mapping of sections, whose keys can be written one by one.
    """
    key = ""
    for place, step in enumerate(detail["loc"], 1):
        key = f"{key}.{step}" if key else str(step)
        yield str(step)
        if key in leaves(root):
            if _entry_of(key, root) is not None:
                yield from map(str, detail["loc"][place : place + 2])
            return


def _entry_of(key: str, root: type[Section]) -> type[Section] | None:
    """Return the section that each entry of a mapping is, where a key holds such a mapping."""
    annotation = leaves(root)[key].field.annotation
    entry = get_args(annotation)[1] if get_origin(annotation) is dict else None
    return entry if isinstance(entry, type) and issubclass(entry, Section) else None


def _leaf_above(key: str, root: type[Section]) -> str:
    """Return the key of the schema that a key is, or lies in."""
    parts = key.split(".")
    above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((name for name in above if name in leaves(root)), key)


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
    """Rephrase an error of pydantic for the user."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    # A branch of a union stands there as pydantic spells its type, e.g. `dict[str,list[str]]`.
    where = ".".join(str(step) for step in detail["loc"] if "[" not in str(step)).removeprefix(key).strip(".")
    item = f"[{where}] " if where else ""
    if kind == "source":
        return Problem(key, context["what"], context["hint"])
    if kind == "extra_forbidden" and (entry := _entry_of(_leaf_above(key, root), root)) is not None:
        above, _, name = key.rpartition(".")
        known = list(entry.model_fields)
        hint = did_you_mean(name, known, f"{above} has {', '.join(known)}.")
        return Problem(key, "is not a key of hrl.", hint)
    if kind == "not_registered":
        hint = did_you_mean(str(value), context["known"], f"Known: {', '.join(context['known'])}.")
        return Problem(key, f"names {value!r}, which nothing is registered under.", hint)
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        hint = did_you_mean(str(value), choices, f"Choose one of {', '.join(choices)}.")
        return Problem(key, f"{item}can't be {_show(value)}.", hint)
    if (kind in _EXPECTED or kind == "string_too_short") and value == "":
        what = f"{item}is empty, expected {_EXPECTED.get(kind, 'text')}."
        return Problem(key, what, "Give it a value, or leave the key out.", reason=Reason.UNREADABLE)
    if kind in _EXPECTED:
        if kind == "list_type" and isinstance(value, str) and value.startswith("["):
            hint = f"Without inner quotes it is one: '{key}={value}'."
            return Problem(key, f"{item}is text, expected a list.", hint, reason=Reason.UNREADABLE)
        is_quotable = kind == "string_type" and value is not None
        hint = f'Quote it: "{value}", in a shell {key}=\'"{value}"\'.' if is_quotable else ""
        return Problem(key, f"{item}is {_show(value)}, expected {_EXPECTED[kind]}.", hint)
    bounds = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    for name, words in bounds.items():
        if name in context:
            return Problem(key, f"{item}is {_show(value)}, must be {words} {context[name]}.")
    return Problem(key, f"{item}is {_show(value)}: {detail['msg'].lower()}.")


def _show(value: object) -> str:
    """Return a value in YAML syntax."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
