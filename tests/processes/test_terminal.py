"""A terminal that is closed ends nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

PROGRAM = """
import sys
from hrl.processes.terminal import TerminalOutput

if sys.argv[1] == "survives":
    TerminalOutput().survive()
print("here", flush=True)
sys.stdin.readline()
print("a line", flush=True)
print("and one more", file=sys.stderr, flush=True)
sys.exit(75)
"""


def status_after_the_terminal_closed(how: str) -> int:
    """Of a program whose terminal is closed between two lines, and which gets no signal of that."""
    terminal, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how], stdin=subprocess.PIPE, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    assert os.read(terminal, 100).split() == [b"here"]
    os.close(terminal)
    process.communicate(b"go on\n", timeout=60)
    return process.returncode


def test_what_is_written_to_a_closed_terminal_goes_nowhere():
    assert status_after_the_terminal_closed("survives") == 75


def test_without_that_a_line_to_it_is_an_error():
    assert status_after_the_terminal_closed("does not") != 75
