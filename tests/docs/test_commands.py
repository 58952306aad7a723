"""docs/commands.md has every command."""

import re
from pathlib import Path

from hrl.commands.table import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_table_has_every_command() -> None:
    named = re.findall(r"^\| `hrl ([\w-]+)`", PAGE.read_text(), re.MULTILINE)
    assert {command.name for command in COMMANDS} <= set(named)
    assert len(set(named)) == len(named)
