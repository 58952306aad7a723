"""SECURITY.md and the page of promises claim nothing without a test: each of their claims names one that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"`(tests/[\w/.]+?\.py)(?:::(\w+))?`")
_QUOTED = re.compile(r"`tests/[^`]+`")
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


def unfounded(text: str) -> list[str]:
    """What it names under `tests/` that is neither a file nor, as `file::test`, a test that pytest collects there."""
    return [quoted.strip("`") for quoted in _QUOTED.findall(text) if not is_there(quoted)]


def is_there(quoted: str) -> bool:
    named = _NAMED.fullmatch(quoted)
    if named is None or not (ROOT / named[1]).is_file():
        return False
    if named[2] is None:
        return True
    tests = [node.name for node in ast.parse((ROOT / named[1]).read_text()).body if isinstance(node, ast.FunctionDef)]
    return named[2].startswith("test_") and named[2] in tests


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
    assert unfounded((ROOT / page).read_text()) == []


def test_a_named_test_is_one_that_pytest_collects_under_that_name() -> None:
    this = "tests/docs/test_claims.py"
    assert unfounded(f"`{this}`, `{this}::test_every_claim_names_a_test`") == []
    for name in (f"{this}::test_nothing", f"{this}::names_a_test", "tests/docs/test_nothing.py", "tests/docs"):
        assert unfounded(f"- Nothing is left. (`{this}`, `{name}`)") == [name]
    other_forms = [f"{this}::test_every_claim_names_a_test[SECURITY.md]", f"{this}:test_every_claim_names_a_test"]
    assert unfounded(" ".join(f"`{form}`" for form in other_forms)) == other_forms
