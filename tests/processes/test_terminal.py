"""A terminal that is closed ends nothing, and neither does a pipe that nobody reads or a file on a full disk."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading

import pytest

PROGRAM = """
import sys
from hrl.processes.terminal import StandardStreams, write_any_text

write_any_text()
streams = StandardStreams(only_terminals="of terminals" in sys.argv[1])
if "survives" in sys.argv[1]:
    streams.survive()
print("here", flush=True)
sys.stdin.readline()
for _ in range(2):
    print("a line → ü", flush=True)
print("and one more", file=sys.stderr, flush=True)
sys.exit(75 + streams.lost)
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
    process.communicate(b"go on\n", timeout=600)
    return process.returncode


@pytest.mark.parametrize("how", ["survives", "survives that of terminals"])
def test_what_is_written_to_a_closed_terminal_goes_nowhere(how):
    assert status_after_the_terminal_closed(how) == 75


def test_without_that_a_line_to_it_is_an_error():
    assert status_after_the_terminal_closed("does not") != 75


@pytest.mark.parametrize(
    ("how", "status"),
    [("survives", 75), ("survives that of terminals", 1), ("does not", 1)],
    ids=["all", "terminals", "none"],
)
def test_what_is_written_to_a_closed_pipe_goes_nowhere(how, status):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, how], stdin=-1, stdout=-1, stderr=-1)
    assert process.stdin and process.stdout and process.stderr
    assert process.stdout.readline() == b"here\n"
    process.stdout.close()
    process.stdin.write(b"go on\n")
    process.stdin.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=600) == status, said
    assert (said == b"and one more\n") == (status == 75)


def test_what_a_full_disk_refuses_is_lost_and_counted_and_the_other_stream_goes_on():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "survives"],
            input=b"go on\n",
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=600,
            check=False,
        )
    assert (done.returncode, done.stderr) == (75 + 3, b"and one more\n")


@pytest.mark.parametrize("how", ["survives", "does not"])
@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_what_an_encoding_lacks_is_written_as_an_escape(how, encoding):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        input=b"go on\n",
        capture_output=True,
        env=dict(os.environ, PYTHONIOENCODING=encoding),
        timeout=600,
        check=False,
    )
    line = "a line → ü".encode(encoding, "backslashreplace")
    assert (done.returncode, done.stdout) == (75, b"\n".join([b"here", line, line, b""])), done.stderr


WAITS = """
import os
from hrl.processes.terminal import StandardStreams

os.set_blocking(1, False)
StandardStreams().survive()
print("x" * 200_000)
"""


def test_a_pipe_that_does_not_wait_is_waited_for_and_gets_all():
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdout=writing)
    os.close(writing)
    read = 0
    killer = threading.Timer(60, process.kill)
    killer.start()
    while part := os.read(reading, 4096):
        read += len(part)
    os.close(reading)
    killer.cancel()
    assert (process.wait(timeout=600), read) == (0, 200_001)


class _OfANotebook:
    """Neither a `TextIOWrapper` nor one that leads to a descriptor of the process."""


@pytest.mark.parametrize("stream", [None, _OfANotebook()], ids=["none", "a notebook's"])
def test_other_streams_are_left_alone(monkeypatch, capsys, stream):
    from hrl.processes.terminal import StandardStreams, write_any_text

    monkeypatch.setattr(sys, "stdout", stream)
    before = sys.stderr
    write_any_text()
    StandardStreams().survive()
    assert sys.stdout is stream and sys.stderr is before
