"""Values that no configuration can hold, whichever key they stand under; they are refused before anything shows them.

Python and OmegaConf fail on some of them in places of their own: an integer of thousands of digits can't be shown,
nesting without end exhausts the stack, and a YAML file of a line can stand for more values than there is memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any

import yaml

from hrl.errors import Problem, Reason

DEEPEST = 50
"""How deep a value may be nested."""
MOST_VALUES = 100_000
"""How many values a YAML file may stand for with its aliases written out."""
_MOST_BITS = 64


def usable(values: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Return the values without those that no configuration can hold, which become problems.

    Args:
        values: Key → value.
        problems: Receives a problem for each value that is left out.
    """
    found = {}
    for key, value in values.items():
        if (what := _unusable(value)) is None:
            found[key] = value
        else:
            problems.append(Problem(shown_key(key), what[0], what[1], reason=Reason.UNREADABLE))
    return found


def shown_key(key: object) -> str:
    """Return a key as it can be written anywhere, shortened; half characters are spelt out."""
    text = str(key).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 200 else f"{text[:200]}…"


def _unusable(value: object) -> tuple[str, str] | None:
    """Return what is wrong with a value, and what to do; None for one that a configuration can hold."""
    level: list[object] = [value]
    for _ in range(DEEPEST):
        below: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                below += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                below += item
            elif isinstance(item, int) and item.bit_length() > _MOST_BITS:
                return f"holds an integer of more than {_MOST_BITS} bits.", "No key needs one as large."
            elif isinstance(item, str) and "\x00" in item:
                return "holds a NUL character.", "Take it out: it ends a text for the system."
            elif isinstance(item, str) and not item.isascii() and any("\ud800" <= sign <= "\udfff" for sign in item):
                return "holds bytes that are not UTF-8, or half a character.", "Write the text in UTF-8."
        if not below:
            return None
        if len(below) > MOST_VALUES:
            return f"holds more than {MOST_VALUES:,} values.", "Put long lists into a file."
        level = below
    return f"is nested more than {DEEPEST} levels deep.", "No key holds such a value."


def check_aliases(folder: Path) -> list[Problem]:
    """Return the YAML files in a folder, and in the folders of it, whose aliases stand for too many values.

    Files that can't be read are left to what reads them.
    """
    problems = []
    for name in sorted([*glob("*.yaml", root_dir=folder), *glob("*/*.yaml", root_dir=folder)]):
        file = folder / name
        try:
            content = file.read_bytes()
            if b"&" not in content or b"*" not in content:
                continue
            size = _written_out(yaml.compose(content, Loader=yaml.SafeLoader), {})
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            continue
        if size > MOST_VALUES:
            what = f"has aliases (*name) that stand for more than {MOST_VALUES:,} values, or for themselves."
            problems.append(Problem(str(file), what, "Write the values out.", reason=Reason.UNREADABLE))
    return problems


def _written_out(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Return how many values a node of a YAML file stands for, with its aliases written out."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # what is below itself
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_written_out(part, known) for part in inner)
    return known[id(node)]
