"""Writes docs/configuration.md from the schema: `python -m hrl.config.reference > docs/configuration.md`."""

import json
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, cast

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from hrl.config.arithmetic import UNITS
from hrl.config.conversions import CONVERTED
from hrl.config.derived_defaults import DERIVED
from hrl.config.keys import Leaf, leaves, sections
from hrl.config.outside import OUTSIDE, VALUES
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.problems import Reason
from hrl.config.section import Section
from hrl.config.spellings import MUST_EQUAL, RENAMED
from hrl.config.synonyms import PPO_SYNONYMS

_HEAD = """\
# Configuration

<!-- Written by `python -m hrl.config.reference > docs/configuration.md`; edit the schema instead. -->

A run is composed by hydra from `configs/`, then validated against a typed schema before torch or ray is imported.
All problems are listed at once, each with the way out; a key that nothing reads is refused, with `+` too.
`hrl check key=value ...` composes and validates exactly as a run would, looks at every file that is named as the run
does, says in words what the run would do, and starts nothing; `hrl check --config-only` opens none of these files.

```console
$ python -m hrl.trainer.main_ppo                                    # the quickstart
$ python -m hrl.trainer.main_ppo recipe=ppo placement=separate      # a recipe and a placement
$ python -m hrl.trainer.main_ppo --config-path my/configs --config-name my_run trainer.seed=3
```

The bare command takes the quickstart's values from `configs/quickstart/ppo.yaml`: short answers, small batches, a
learning rate for 135M parameters. Recipes, placements and single keys go on top of them. As soon as a line names
another model (`actor_rollout_ref.model.path`), other rows (`data.train_files`, `data.val_files`) or a YAML file of your
own, none of these values is in force any more: every key that you leave out has the default that stands below, and
`data.train_files` is asked for. `quickstart=ppo` brings the values back, also beside a model of your own.

A file of your own starts from hrl's by naming it:

```yaml
defaults:
  - ppo_trainer
  - _self_

data:
  train_files: [train.parquet]
```

Names and meanings are verl's where both have a key. Interpolations such as `${data.max_prompt_length}` may refer to any
key, set or not. *follows* in the column of defaults means that the default comes from other keys, as the sentence says.
"""


def render() -> str:
    """Return the whole page."""
    parts = [_HEAD, f"There are {len(leaves())} keys.\n", *_sections(), *_compatibility()]
    return "\n".join(parts).rstrip() + "\n"


def _sections() -> Iterator[str]:
    for parent, members in by_section(leaves().values()).items():
        yield f"## {parent}\n"
        yield f"{docstring_of(parent, PPOTrainerConfig)}\n"
        yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
        yield "\n".join(_row(leaf) for leaf in members) + "\n"


def by_section(members: Iterable[Leaf]) -> dict[str, list[Leaf]]:
    """Return the keys of every section, both in the order of the schema."""
    found: dict[str, list[Leaf]] = {}
    for leaf in members:
        found.setdefault(leaf.key.rpartition(".")[0], []).append(leaf)
    return found


def docstring_of(parent: str, node: type[Section]) -> str:
    """Return the class docstring of a section below `node`, without the repeated name of the section in front."""
    for name in parent.split("."):
        node = cast(type[Section], node.model_fields[name].annotation)
    text = " ".join((node.__doc__ or "").split())
    sentence = text.split(": ", 1)[1] if text.startswith("`") and ": " in text else text
    return sentence[:1].upper() + sentence[1:]


def _row(leaf: Leaf) -> str:
    name = leaf.key.rpartition(".")[2]
    default = "*follows*" if leaf.key in DERIVED else f"`{json.dumps(leaf.default, ensure_ascii=False)}`"
    unit = f" ({UNITS[leaf.key]})" if leaf.key in UNITS else ""
    return f"| `{name}` | {cell(type_in_words(leaf.field) + unit)} | {cell(default)} | {cell(leaf.help)} |"


def cell(text: str) -> str:
    """Text that stays within its cell of a table."""
    return text.replace("|", "\\|")


def type_in_words(field: FieldInfo) -> str:
    """Return a field's type and bounds as a person would say them."""
    words = _annotation_in_words(field.annotation)
    return " ".join([words, *_bounds_in_words(field.metadata)])


def _bounds_in_words(metadata: list[Any]) -> Iterator[str]:
    for bound in metadata:
        match bound:
            case Gt(gt=limit):
                yield f"> {limit}"
            case Ge(ge=limit):
                yield f"≥ {limit}"
            case Lt(lt=limit):
                yield f"< {limit}"
            case Le(le=limit):
                yield f"≤ {limit}"
            case FieldInfo(metadata=inner):
                yield from _bounds_in_words(inner)


_PLAIN = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null", Any: "any"}


def _annotation_in_words(annotation: Any) -> str:
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is typing.Annotated:
        return " ".join([_annotation_in_words(arguments[0]), *_bounds_in_words(list(arguments[1:]))])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_annotation_in_words(argument) for argument in arguments)
    if origin is list:
        return f"list of {_annotation_in_words(arguments[0])}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping to {_annotation_in_words(arguments[1])}"
    raise TypeError(f"no words for the type {annotation!r}")


def _compatibility() -> Iterator[str]:
    yield "## Coming from verl\n"
    yield "A launch script ports by changing `verl` to `hrl`. The keys below are the exceptions.\n"
    yield "### Other spellings that are understood\n"
    yield "| key | is read as |\n| --- | --- |"
    yield from (f"| `{old}` | `{new}` |" for old, new in RENAMED.items() if _ends_here(new))
    yield from (f"| `{key}` | {cell(conversion.says)} |" for key, conversion in CONVERTED.items())
    yield "\n### Second spellings of one value\n"
    yield "Accepted when they agree with the key they repeat.\n"
    yield "| key | must equal |\n| --- | --- |"
    yield "\n".join(f"| `{key}` | `{other}` |" for key, other in MUST_EQUAL.items()) + "\n"
    yield "### Taken without effect\n"
    yield "They say how fast a run is and not what it learns. One line of `hrl check` and of the banner lists them.\n"
    yield "| key | with the values | what hrl does |\n| --- | --- | --- |"
    for key, verdict in OUTSIDE.items():
        if verdict.noted or verdict.noted is None:
            taken = "all" if verdict.noted is None else _values((*verdict.same, *verdict.noted))
            yield f"| `{key}` | {taken} | {cell(verdict.says)} |"
    yield "\n### What is refused\n"
    yield "Other values than the accepted ones; a feature that is absent is marked so.\n"
    yield "| key | accepted | otherwise |\n| --- | --- | --- |"
    for key, verdict in OUTSIDE.items():
        if verdict.noted is not None:
            mark = "absent: " if verdict.reason is Reason.ABSENT else ""
            yield f"| `{key}` | {_values((*verdict.same, *verdict.noted))} | {mark}{cell(verdict.hint)} |"
    for (key, value), verdict in VALUES.items():
        mark = "absent: " if verdict.reason is Reason.ABSENT else ""
        yield f"| `{key}={value}` | | {mark}{cell(verdict.hint)} |"
    yield "\n## Coming from TRL or OpenRLHF\n"
    yield "Their names are not accepted; the error says what to write.\n"
    yield "| name | here | |\n| --- | --- | --- |"
    yield from (f"| `{name}` | `{other.key}` | {cell(other.but)} |" for name, other in PPO_SYNONYMS.items())


def _ends_here(target: str) -> bool:
    """Return whether a renaming leads to keys of the schema, and not to what becomes of another of verl's keys."""
    return target.removesuffix(".*") in {*leaves(), *sections()}


def _values(values: Iterable[Any]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


if __name__ == "__main__":
    sys.stdout.write(render())
