"""docs/troubleshooting.md quotes messages that the code has, and names every error that a user can act on."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
MODULES = sorted((ROOT / "hrl").rglob("*.py"))
GAP = "…"


def text_of(node: ast.AST) -> str | None:
    """A string as it may be shown: what is put in at run time, and every number, is a gap. None if it is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return with_gaps(node.value)
    if isinstance(node, ast.JoinedStr):
        return with_gaps("".join(text_of(part) or GAP for part in node.values))
    return None


def with_gaps(text: str) -> str:
    """Numbers and keys are gaps too: a problem of a configuration has its key apart from what is wrong with it."""
    return re.sub(r"(?:…|\d+(?:[.,]\d+)*|\b[a-z_]+(?:\.[a-z_]+)+\b)+", GAP, text)


@cache
def texts() -> str:
    """All strings of the package, one per line."""
    lines = []
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            text = text_of(node)
            if text is not None and " " in text:
                lines.append(text.replace("\n", " "))
    return "\n".join(lines)


def is_in_the_code(message: str, code: str | None = None) -> bool:
    """Whether the code's strings have what the quote has between its gaps; messages are put together from strings."""
    pieces = [piece.strip(" .,:;") for piece in with_gaps(message).split(GAP)]
    words = [piece for piece in pieces if re.search(r"\w", piece)]
    return bool(words) and all(piece in (texts() if code is None else code) for piece in words)


def quotes() -> list[str]:
    """The messages in bold and code at the beginning of an entry."""
    found = []
    for entry in re.findall(r"^(\*\*`.*?)(?:\n\n|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        bold = re.findall(r"\*\*(.+?)\*\*", " ".join(entry.split()))
        found += [message for part in bold for message in re.findall(r"`([^`]+)`", part)]
    return found


@pytest.mark.parametrize("message", quotes())
def test_every_quoted_message_is_in_the_code(message: str) -> None:
    assert is_in_the_code(message)


def test_there_are_quotes_and_a_wrong_one_is_noticed() -> None:
    assert len(quotes()) > 40
    code = with_gaps("step 3: … batches were sampled, and … are missing")
    assert is_in_the_code("step …: 10 batches were sampled", code)
    assert not is_in_the_code("step …: 10 batches were drawn", code)


def errors_of_the_package() -> dict[str, str]:
    """Class → file, of every subclass of HrlError."""
    classes = {
        node.name: (str(module.relative_to(ROOT)), {ast.unparse(base) for base in node.bases})
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    known = {"HrlError"}
    while True:
        more = {name for name, (_, bases) in classes.items() if bases & known} - known
        if not more:
            return {name: classes[name][0] for name in known - {"HrlError"}}
        known |= more


def test_every_error_that_a_user_can_act_on_is_in_the_table_of_kinds() -> None:
    table = PAGE.read_text().partition("## Kinds of errors")[2]
    named = set(re.findall(r"`(\w+Error)`", table)) - {"HrlError"}
    errors = errors_of_the_package()
    missing = {name: file for name, file in errors.items() if name not in named and not name.startswith("_")}
    assert not missing, f"the table at the end of docs/troubleshooting.md lacks {missing}"
    assert not named - errors.keys()
