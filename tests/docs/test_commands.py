"""docs/commands.md has every command, and so has the README."""

import re
from pathlib import Path

from hrl.commands.table import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_table_has_every_command() -> None:
    named = re.findall(r"^\| `hrl ([\w-]+)`", PAGE.read_text(), re.MULTILINE)
    assert {command.name for command in COMMANDS} <= set(named)
    assert len(set(named)) == len(named)


def test_the_readme_has_every_command() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text()
    cells = re.findall(r"^\| (`hrl [^|]*)\|", readme.split("\n## Commands\n")[1].split("\n## ")[0], re.MULTILINE)
    named = [re.sub(r"^(hrl )?", "", word).split()[0] for cell in cells for word in re.findall(r"`([^`]+)`", cell)]
    assert {command.name for command in COMMANDS} <= set(named)
