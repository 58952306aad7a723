"""No deadline reads the time of day, which may be set back or forward while a run goes on."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hrl"
#: What shows a time, or names a file after it, and waits for nothing.
SHOWN = {
    "report/console.py": {"now"},
    "cluster/remote_store.py": {"gmtime", "time_ns"},
    "serve/answers.py": {"time"},  # `created`, which OpenAI's protocol asks for
    "environments/verifiers.py": {"time"},  # likewise
}
OF_THE_DAY = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}


def reads(path: Path) -> set[str]:
    """The functions of `time` and `datetime` that a file calls for the time of day."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in OF_THE_DAY:
            found |= {node.attr} if node.value.id in ("time", "datetime", "date") else set()
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {alias.name for alias in node.names} & OF_THE_DAY
    return found


def test_only_what_is_shown_reads_the_time_of_day() -> None:
    found = {str(path.relative_to(PACKAGE)): reads(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {name: names for name, names in found.items() if names} == SHOWN
