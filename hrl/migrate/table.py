"""Tables of another library's names, `openrlhf.yaml` and `trl.yaml`.

A row says what becomes of a name:

    name: key                          the value of this key
    name: key (how it differs)         the same, and a remark
    name: {key: key, values: {a: b}}   the value is another word; words that are not listed have no counterpart
    name: {sets: {key: value}}         a switch: if it is on, these keys have these values
    name: {is: sentence}               needs no key, for this reason
    name: {not: sentence, unless: […]} has no counterpart, unless it has one of these values, which ask for nothing
    name: {by: word}                   is read together with other names, by the function of this name

`<a|b>` stands for each of its words in turn. `defaults` has values of the library that hrl has others for, and `older`
has earlier names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hrl.migrate.line import Migrated, Remark

_CHOICE = re.compile(r"<([^>]*)>")


@dataclass(frozen=True)
class Table:
    """What becomes of another library's names.

    Attributes:
        rows: Name → row.
        defaults: Name → the library's default, where hrl has another.
        older: Earlier name → name.
    """

    rows: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)

    def present(self, name: str) -> str:
        """Return the present name."""
        return self.older.get(name, name)


def read_table(file: str, part: str, program: str, *, with_part: str | None = None) -> Table:
    """Return the table of a kind of program.

    Args:
        file: `openrlhf.yaml` or `trl.yaml`.
        part: Its part.
        program: Chooses among `own_defaults`.
        with_part: A part whose rows hold too.
    """
    tree = yaml.safe_load(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    parts = [tree[name] for name in (with_part, part) if name is not None]
    rows: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    older: dict[str, str] = {}
    for each in parts:
        rows |= {name: row for pattern, row in each["rows"].items() for name, _ in _spread(pattern)}
        defaults |= each.get("defaults", {}) | each.get("own_defaults", {}).get(program, {})
        older |= {
            old: new for pattern, target in each.get("older", {}).items() for old, new in _spread(pattern, target)
        }
    return Table(rows, defaults, older)


def _spread(pattern: str, target: str = "") -> Iterator[tuple[str, str]]:
    found = _CHOICE.search(pattern)
    if found is None:
        yield pattern, target
        return
    for word in found[1].split("|"):
        yield from _spread(pattern.replace(found[0], word, 1), target.replace(found[0], word, 1))


class Given:
    """What a line sets, with the library's defaults underneath.

    Args:
        table: The table.
        values: Present name → value as written.
        written: Present name → how it was written.
    """

    def __init__(self, table: Table, values: Mapping[str, Any], written: Mapping[str, str]) -> None:
        self.table = table
        self.values = dict(values)
        self.written = dict(written)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return the value that was written, else the library's default, else `otherwise`."""
        return self.values.get(name, self.table.defaults.get(name, otherwise))

    def number(self, name: str, otherwise: float) -> float:
        """Return a number; `otherwise` in place of what is none."""
        try:
            return float(self.get(name, otherwise))
        except (TypeError, ValueError):
            return otherwise

    def is_on(self, name: str) -> bool:
        """Return whether a switch is on."""
        return self.get(name) not in (None, False, "False", "false", "0")

    def word(self, name: str) -> str:
        """Return how it was written, for a remark."""
        return self.written.get(name, name)


def by_table(given: Given, into: Migrated) -> list[str]:
    """Apply the rows that read one name alone; return the words of those that a function reads.

    Names without a row are lost.
    """
    functions: list[str] = []
    names = [*given.values, *(name for name in given.table.defaults if name not in given)]
    for name in names:
        row = given.table.rows.get(name)
        if row is None:
            into.lost.append(Remark(given.word(name), "is not known"))
        elif isinstance(row, dict) and "by" in row:
            functions.append(row["by"])
        else:
            _apply(name, row, given, into)
    return list(dict.fromkeys(functions))


def _apply(name: str, row: Any, given: Given, into: Migrated) -> None:
    value, written = given.get(name), given.word(name)
    if value is None and name in given and not (isinstance(row, dict) and ("is" in row or "not" in row)):
        return  # an explicit None is the default
    if isinstance(row, str):
        key, _, but = row.partition(" (")
        into.set({key: value})
        if but and name in given:
            into.differs.append(Remark(written, f"{key}: {but.removesuffix(')')}"))
    elif "key" in row:
        if value in row["values"]:
            into.set({row["key"]: row["values"][value]})
        elif name in given:
            into.lost.append(
                Remark(written, f"{row['key']} has {', '.join(sorted(map(str, set(row['values'].values()))))}")
            )
    elif "sets" in row:
        if given.is_on(name):
            into.set(row["sets"])
    elif "is" in row:
        into.needless.append(Remark(written, row["is"]))
    elif not any(value == other and type(value) is type(other) for other in row.get("unless", ())):
        into.lost.append(Remark(written, row["not"]))


def balance(given: Given, into: Migrated, *, name: str) -> None:
    """Take the weight of the loss that balances the load of experts, which reward models are trained without."""
    weight, word = given.number(name, 0), given.word(name)
    if not weight:
        return
    if into.kind == "rm":
        why = "a reward model is trained without a loss that balances the load of experts"
        into.lost.append(Remark(word, why))
        return
    section = "actor_rollout_ref.actor" if into.kind == "ppo" else "algorithm"
    into.set({f"{section}.router_aux_loss_coef": weight})
    into.differs.append(Remark(word, "balances the load of experts over a whole batch"))
