"""Write the documentation pages of all keys from the schemas.

`python -m hrl.config.reference > docs/configuration.md`
`python -m hrl.config.reference offline > docs/configuration-offline.md`
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from hrl.config.run_kind import OFFLINE_KINDS, PPO, RunKind
from hrl.config.section import Leaf, Section, WholeConfig, leaves, section_of, sections
from hrl.config.spellings import PPO_SPELLINGS, Verdict

_HEAD = """\
# Configuration

<!-- Written by `python -m hrl.config.reference > docs/configuration.md`; edit the schema instead. -->

A run is composed by hydra from `configs/`, then validated against a typed schema before torch or ray is imported.
All problems are listed at once, each with what to do about it; a key that nothing reads is refused, even with `+`.
`hrl check key=value ...` composes and validates exactly as a run would, makes a run's checks of every file that is
named, says in words what the run would do, and starts nothing; `hrl check --config-only` opens none of these files.

```console
$ python -m hrl.trainer.main_ppo                                    # the quickstart
$ python -m hrl.trainer.main_ppo recipe=ppo placement=separate      # a recipe and a placement
$ python -m hrl.trainer.main_ppo --config-path my/configs --config-name my_run trainer.seed=3
```

The bare command takes the quickstart's values from `configs/quickstart/ppo.yaml`: short answers, small batches, a
learning rate for 135M parameters. Recipes, placements and single keys go on top of them. As soon as a command names
another model (`actor_rollout_ref.model.path`), other rows (`data.train_files`, `data.val_files`) or a YAML file of your
own, none of these values applies any more: every key that you leave out has the default listed below, and
`data.train_files` is required. `quickstart=ppo` brings the values back, for a model of your own too.

A file of your own starts from hrl's by naming it:

```yaml
defaults:
  - ppo_trainer
  - _self_

data:
  train_files: [train.parquet]
```

In Python a configuration is a nested dict, with the same defaults and rules but without the quickstart's values. A
section in it may also be an object, such as `DataConfig(train_files=["train.parquet"])`:

```python
from hrl.config import load_config

config = load_config({"data": {"train_files": ["train.parquet"]}, "trainer": {"seed": 3}})
```

Names and meanings are verl's where both have a key. Interpolations such as `${data.max_prompt_length}` may refer to any
key, set or not. *follows* in the column of defaults means that the default comes from other keys, as the sentence says.
A key that several roles have is one row, which lists all its places.
"""


_OFFLINE_HEAD = """\
# Configuration of the offline trainers

<!-- Written by `python -m hrl.config.reference offline > docs/configuration-offline.md`; edit the schema instead. -->

Keys of `python -m hrl.trainer.main_dpo`, `main_sft` and `main_rm`. They are composed, checked and overridden like those
of [PPO](configuration.md); `hrl check dpo key=value ...` (or `sft`, `rm`) says what a run would do and starts nothing.
Names are those of verl's SFT trainer where it has an equivalent. A key or a default with names of trainers in brackets
applies only to these; *follows* means that the default comes from other keys, as the sentence says.
"""


_EXAMPLES: Mapping[str, Mapping[str, str]] = yaml.safe_load(Path(__file__).with_name("examples.yaml").read_text())


def render() -> str:
    """Return the page of a PPO run."""
    parts = [_HEAD, f"There are {len(leaves(PPO.schema))} keys.\n", *_tables([PPO]), *_compatibility()]
    return "\n".join(parts).rstrip() + "\n"


def render_offline() -> str:
    """Return the page of the runs that learn from a data set."""
    return "\n".join([_OFFLINE_HEAD, *_tables(list(OFFLINE_KINDS.values()))]).rstrip() + "\n"


class _Place(NamedTuple):
    """A key of one kind of run."""

    kind: str
    leaf: Leaf


def _tables(kinds: Sequence[RunKind[WholeConfig]]) -> Iterator[str]:
    """Yield one table per section; sections with the same keys share one."""
    places: dict[str, dict[str, list[_Place]]] = {}
    for kind in kinds:
        for key, leaf in leaves(kind.schema).items():
            parent, _, name = key.rpartition(".")
            places.setdefault(parent, {}).setdefault(name, []).append(_Place(kind.name, leaf))
    families: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for parent, members in places.items():
        says = tuple((name, _type(found[0].leaf), found[0].leaf.help) for name, found in members.items())
        families.setdefault(says, []).append(parent)
    for says, parents in families.items():
        yield f"## {', '.join(parents)}\n"
        yield f"{_docstring_of(parents[0], kinds)}\n"
        yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
        for name, kind_of_value, meaning in says:
            here = [place for parent in parents for place in places[parent][name]]
            owners = {place.kind for place in here}
            only = (
                ""
                if len(owners) == len(kinds)
                else f" ({', '.join(kind.name for kind in kinds if kind.name in owners)})"
            )
            keys = ", ".join(f"`{parent}.{name}`" for parent in parents)
            yield f"| {keys}{only} | {_cell(kind_of_value)} | {_cell(_default(here))} | {_cell(meaning)} |"
        yield ""
        yield from _example(parents[0], kinds)


def _example(parent: str, kinds: Sequence[RunKind[WholeConfig]]) -> Iterator[str]:
    """Yield a launch line that sets keys of the section, if there is one for it."""
    if kinds[0].name == PPO.name:
        program, arguments = PPO.program, _EXAMPLES["ppo"].get(parent)
    else:
        kind, _, rest = _EXAMPLES["offline"].get(parent, "").partition(" ")
        program, arguments = (OFFLINE_KINDS[kind].program, rest) if kind else ("", None)
    if arguments is not None:
        yield f"```bash\n{program} {arguments}\n```\n"


def _docstring_of(parent: str, kinds: Iterable[RunKind[WholeConfig]]) -> str:
    """Return the class docstring of a section, without the repeated name of the section in front."""
    node: type[Section] = next(kind.schema for kind in kinds if parent in sections(kind.schema))
    for name in parent.split("."):
        node = section_of(node.model_fields[name]) or node
    text = " ".join((node.__doc__ or "").split())
    sentence = text.split(": ", 1)[1] if text.startswith("`") and ": " in text else text
    return sentence[:1].upper() + sentence[1:]


def _type(leaf: Leaf) -> str:
    return type_in_words(leaf.field) + (f" ({leaf.unit})" if leaf.unit else "")


def _default(places: Sequence[_Place]) -> str:
    """Return the default; where places differ, each value with its own."""
    shown: dict[str, list[str]] = {}
    several_kinds = len({place.kind for place in places}) > 1
    for kind, leaf in places:
        value = "*follows*" if leaf.derive is not None else f"`{json.dumps(leaf.plain, ensure_ascii=False)}`"
        shown.setdefault(value, []).append(kind if several_kinds else leaf.key.rpartition(".")[0])
    if len(shown) == 1:
        return next(iter(shown))
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in shown.items())


def _cell(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|")


_TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "str", "null": "null"}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


def type_in_words(field: FieldInfo) -> str:
    """Describe a field's type and bounds in words, from its JSON schema."""
    kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return _in_words(TypeAdapter(kind).json_schema())


def _in_words(schema: Mapping[str, Any]) -> str:
    options = schema.get("anyOf") or schema.get("oneOf", ())
    if "enum" in schema:
        suffix = f", each also with `{schema['suffix']}`" if schema.get("suffix") else ""
        null = " or null" if {"type": "null"} in options else ""
        return ", ".join(f"`{name}`" for name in schema["enum"]) + suffix + null
    if options:
        return " or ".join(map(_in_words, options))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_in_words(schema['items'])}"
    if kind == "object":
        names, values = schema.get("propertyNames"), schema["additionalProperties"]
        return (
            "mapping"
            + (f" of {_in_words(names)}" if names else "")
            + (f" to {_in_words(values)}" if values is not True else "")
        )
    return " ".join(
        [
            _TYPES[kind] if kind else "any",
            *(f"{sign} {schema[name]:g}" for name, sign in _BOUNDS.items() if name in schema),
        ]
    )


def _compatibility() -> Iterator[str]:
    spellings = PPO_SPELLINGS
    yield "## Coming from verl\n"
    yield "A launch script ports by changing `verl` to `hrl`. The keys below are the exceptions.\n"
    yield "### Other spellings that are understood\n"
    yield "| key | is read as |\n| --- | --- |"
    ends = {*leaves(PPO.schema), *sections(PPO.schema)}
    # A renaming that leads to another key of verl is left out.
    yield from (f"| `{old}` | `{new}` |" for old, new in spellings.renamed.items() if new.removesuffix(".*") in ends)
    yield from (f"| `{key}` | {_cell(conversion.says)} |" for key, conversion in spellings.converted.items())
    yield "\n### Second spellings of one value\n"
    yield "Accepted when they agree with the key they repeat.\n"
    yield "| key | must equal |\n| --- | --- |"
    yield "\n".join(f"| `{key}` | `{other}` |" for key, other in spellings.must_equal.items()) + "\n"
    yield "### Taken without effect\n"
    yield "They affect how fast a run is, not what it learns. One line of `hrl check` and of the banner lists them.\n"
    yield "| keys | with the values | what hrl does |\n| --- | --- | --- |"
    by_verdict = [(verdict, keys, [*verdict.same, *verdict.taken]) for verdict, keys in _by_verdict(spellings.outside)]
    for verdict, keys, accepted in by_verdict:
        if verdict.taken:
            yield f"| {keys} | {'all' if verdict.taken == 'all' else _values(accepted)} | {_cell(verdict.says)} |"
    yield "\n### What is refused\n"
    yield "Values other than the accepted ones; absent features are marked.\n"
    yield "| keys | accepted | otherwise |\n| --- | --- | --- |"
    for verdict, keys, accepted in by_verdict:
        either_way = any(value is True for value in accepted) and any(value is False for value in accepted)
        if verdict.taken != "all" and not either_way:
            yield f"| {keys} | {_values(accepted)} | {_refusal(verdict)} |"
    for (key, value), verdict in spellings.values.items():
        yield f"| `{key}={value}` | | {_refusal(verdict)} |"
    yield "\n## Coming from TRL or OpenRLHF\n"
    yield "Their names, and those of hrl's arguments in Python, are no keys; the error says what to write instead.\n"
    yield "| name | here | |\n| --- | --- | --- |"
    yield from (f"| `{name}` | `{other.key}` | {_cell(other.but)} |" for name, other in spellings.synonyms.items())


def _by_verdict(outside: Mapping[str, Verdict]) -> list[tuple[Verdict, str]]:
    """Return every verdict once, with all keys that it applies to."""
    keys: dict[str, tuple[Verdict, list[str]]] = {}
    for key, verdict in outside.items():
        keys.setdefault(repr(verdict), (verdict, []))[1].append(f"`{key}`")
    return [(verdict, ", ".join(names)) for verdict, names in keys.values()]


def _refusal(verdict: Verdict) -> str:
    return ("absent: " if verdict.absent else "") + _cell(verdict.hint)


def _values(values: Iterable[Any]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


if __name__ == "__main__":
    sys.stdout.write(render_offline() if sys.argv[1:] == ["offline"] else render())
