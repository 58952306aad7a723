"""SECURITY.md and the page of promises claim nothing without a test: each of their claims names one that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"`(tests/[\w/.]+?\.py)(?:::(\w+))?`")
PAGES = ["SECURITY.md", "docs/reliability.md"]


def claims(page: str) -> list[str]:
    """The bullets of what hrl does, and the rows of tables with a column of tests; without what it does not promise."""
    text = re.sub(r"## What (?:hrl|is) (?:does )?not promise.*?(?=\n## |\Z)", "", (ROOT / page).read_text(), flags=re.S)
    bullets = re.findall(r"^- .*?(?=\n- |\n\n|\n#|\Z)", text, flags=re.S | re.M)
    tables = re.findall(r"^\|[^\n]*\btests?\b[^\n]*\|\n\|[ :|-]+\|\n((?:\|[^\n]*\n)+)", text, flags=re.M)
    return bullets + [row for table in tables for row in table.splitlines()]


def names_a_test(claim: str) -> bool:
    """Whether pytest collects one of the files that it names; what such a file uses may stand beside it."""
    return any(Path(file).name.startswith("test_") for file, _ in _NAMED.findall(claim))


@pytest.mark.parametrize("page", PAGES)
def test_every_claim_names_a_test(page: str) -> None:
    found = claims(page)
    assert len(found) > 5
    assert [claim for claim in found if not names_a_test(claim)] == []


def test_a_helper_alone_holds_no_claim() -> None:
    assert not names_a_test("- Nothing is left. (`tests/runs/runner.py`)")
    assert not names_a_test("- Nothing is left. (`test_lifecycle.py`)")
    assert names_a_test("- Nothing is left. (`tests/runs/runner.py`, `tests/runs/test_lifecycle.py`)")
    assert names_a_test("- Nothing is left. (`tests/runs/test_lifecycle.py::test_one`)")


@pytest.mark.parametrize("page", PAGES)
def test_every_named_test_exists(page: str) -> None:
    missing = []
    for file, name in _NAMED.findall((ROOT / page).read_text()):
        if not (ROOT / file).is_file():
            missing.append(file)
        elif name and name not in {
            node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        }:
            missing.append(f"{file}::{name}")
    assert missing == []
