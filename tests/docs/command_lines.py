"""The command lines that a page shows, as a shell would cut them into words."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from hrl import cli
from hrl.commands.run_arguments import kind_and_arguments
from hrl.commands.table import COMMANDS

_FENCE = re.compile(r"^```(bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r"hrl\.trainer\.main_(\w+)")
_PYTHONS = ("python", "python3", ".venv/bin/python")
_OF_RUNS = {command.name for command in COMMANDS if command.takes_overrides} - {"plan", "reward", "env-test"}


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield each command of the page's shell blocks; the two sides of a pipe are two."""
    for language, code in _FENCE.findall(page.read_text()):
        for line in code.replace("\\\n", " ").splitlines():
            if language == "console" and not line.startswith("$ "):
                continue  # what a command shows
            words = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|;<>")
            words.whitespace_split = True
            command: list[str] = []
            for word in [*words, ";"]:
                if word in ("|", ";"):
                    if command:
                        yield command
                    command = []
                else:
                    command.append(word)


def run_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Return kind and arguments of a command that starts or checks a run, None if it does neither."""
    if words[0] in _PYTHONS and words[1:2] == ["-m"] and (module := _MODULE.fullmatch(words[2])):
        return module[1], words[3:]
    if words[0] == "hrl" and words[1] in _OF_RUNS:
        return kind_and_arguments(options_of(words).overrides)
    return None


def options_of(words: list[str]) -> Namespace:
    """Return the options of a line of `hrl`; what its parser does not know ends the test by `SystemExit`."""
    (command,) = [command for command in COMMANDS if command.name == words[1]]
    ends = [index for index, word in enumerate(words) if word in ("<", ">")]
    return cli.read_arguments(command, words[2 : min(ends, default=len(words))])
