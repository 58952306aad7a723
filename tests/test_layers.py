"""Imports go downwards only, between rooms and inside them; docs/architecture.md has the order of the rooms."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hrl"
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports_of(path: Path) -> set[str]:
    """The modules of hrl that a file imports, anywhere in it, for its types too, or names in a text to import later."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide from whoever greps for a module's name"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else str(node.module))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("hrl."):
            names = node.value.split(".")
            found |= {".".join(names[:depth]) for depth in (len(names), len(names) - 1) if depth > 1}
    return (found & MODULES.keys()) - {module_of(path)}


ARROWS = {name: imports_of(path) for name, path in MODULES.items() if name != "hrl"}  # the face hands names on


def rooms_in_order() -> list[str]:
    table = re.findall(r"^\| `hrl/([a-z_]+)(?:\.py)?` \|", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert table, "docs/architecture.md has no table of rooms"
    return table


def test_the_table_has_every_room_once() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert sorted(rooms_in_order()) == sorted(rooms)


def test_a_room_imports_only_rooms_further_down_in_the_table() -> None:
    floor = {room: place for place, room in enumerate(rooms_in_order())}
    upwards = {
        (module, target)
        for module, targets in ARROWS.items()
        for target in targets - {"hrl"}
        if floor[target.split(".")[1]] < floor[module.split(".")[1]]
    }
    assert not upwards


FOLDERS = sorted({path.parent for path in FILES})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: module_of(folder / "__init__.py"))
def test_files_and_folders_of_a_room_form_no_circle(folder: Path) -> None:
    here = module_of(folder / "__init__.py")
    below = defaultdict(set)
    for module, targets in ARROWS.items():
        for target in targets:
            if module.startswith(here + ".") and target.startswith(here + "."):
                one, other = (name.removeprefix(here + ".").split(".")[0] for name in (module, target))
                if one != other:
                    below[one].add(other)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        pytest.fail(f"a circle in {here}: {' -> '.join(error.args[1])}")


def test_no_room_is_larger_than_a_quarter_of_the_package() -> None:
    lines = {path: path.read_text().count("\n") for path in FILES}
    rooms: defaultdict[str, int] = defaultdict(int)
    for path, count in lines.items():
        rooms[path.relative_to(PACKAGE).parts[0]] += count
    largest = max(rooms, key=rooms.__getitem__)
    assert rooms[largest] <= sum(lines.values()) / 4, (
        f"hrl/{largest} has {rooms[largest]} of {sum(lines.values())} lines"
    )
