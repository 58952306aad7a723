"""Writes docs/configuration-offline.md from the three schemas.

`python -m hrl.config.offline_reference > docs/configuration-offline.md`
"""

import json
import sys
from collections.abc import Iterator

from hrl.config.keys import Leaf, leaves
from hrl.config.offline_kinds import KINDS
from hrl.config.offline_words import UNITS
from hrl.config.reference import by_section, cell, docstring_of, type_in_words

_HEAD = """\
# Configuration of the offline trainers

<!-- Written by `python -m hrl.config.offline_reference > docs/configuration-offline.md`; edit the schema. -->

Keys of `python -m hrl.trainer.main_dpo`, `main_sft` and `main_rm`. They are composed, checked and overridden as those
of [PPO](configuration.md); `hrl check dpo key=value ...` (or `sft`, `rm`) says what a run would do and starts nothing.
Names are those of verl's SFT trainer where it has the thing. A key behind which trainers stand in brackets is theirs
alone; *follows* means that the default comes from other keys, as the sentence says.
"""


def render() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *_sections()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    union = {leaf.key: leaf for kind in KINDS.values() for leaf in leaves(kind.schema).values()}
    for parent, members in by_section(union.values()).items():
        schema = next(kind.schema for kind in KINDS.values() if members[0].key in leaves(kind.schema))
        yield f"## {parent}\n"
        yield f"{docstring_of(parent, schema)}\n"
        yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
        yield "\n".join(_row(leaf) for leaf in members) + "\n"


def _row(leaf: Leaf) -> str:
    owners = [name for name, kind in KINDS.items() if leaf.key in leaves(kind.schema)]
    only = "" if len(owners) == len(KINDS) else f" ({', '.join(owners)})"
    unit = f" ({UNITS[leaf.key]})" if leaf.key in UNITS else ""
    name, kind = leaf.key.rpartition(".")[2], type_in_words(leaf.field) + unit
    return f"| `{name}`{only} | {cell(kind)} | {cell(_default(leaf.key, owners))} | {cell(leaf.help)} |"


def _default(key: str, owners: list[str]) -> str:
    if any(key in KINDS[name].derived for name in owners):
        return "*follows*"
    shown: dict[str, list[str]] = {}
    for name in owners:
        value = json.dumps(leaves(KINDS[name].schema)[key].default, ensure_ascii=False)
        shown.setdefault(f"`{value}`", []).append(name)
    if len(shown) == 1:
        return next(iter(shown))
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in shown.items())


if __name__ == "__main__":
    sys.stdout.write(render())
