"""A guard ends as its leader has, whatever the leader may still tell it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hrl.processes.guard import end_marked
from tests.processes.process_table import descendants

LEADER = """
import subprocess, sys, time
from hrl.processes.isolation import isolate
from hrl.processes.lifetime import guard_process_group
guard_process_group()
isolate()
subprocess.Popen(["sleep", "600"])
print("up", flush=True)
time.sleep(600)
"""


def waits(guard: int) -> bool:
    """Whether it has blocked its signals and sleeps."""
    facts = dict(line.split(":", 1) for line in Path(f"/proc/{guard}/status").read_text().splitlines())
    return facts["State"].strip().startswith("S") and int(facts["SigBlk"], 16) != 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is guarded")
def test_a_leader_that_may_send_no_signals_is_followed_by_its_guard_and_its_group() -> None:
    leader = subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert leader.stdout is not None and leader.stdout.readline() == b"up\n"
    below = [psutil.Process(pid) for pid in descendants(leader.pid)]
    assert len(below) == 2
    (guard,) = [process.pid for process in below if "guard.py" in " ".join(process.cmdline())]
    deadline = time.monotonic() + 15
    while not waits(guard):  # a guard that is still starting sees its leader's end without being told
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(leader.pid, signal.SIGKILL)
    leader.wait()
    leader.stdout.close()
    assert not psutil.wait_procs(below, timeout=15)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is guarded")
def test_what_began_with_the_mark_is_ended_in_whatever_session_and_nothing_else() -> None:
    marked, other = (
        subprocess.Popen(["sleep", "600"], start_new_session=True, env={"HRL_STARTED_BY": mark}) for mark in ("a", "ab")
    )
    leaves = subprocess.Popen(["sleep", "0.2"], env={"HRL_STARTED_BY": "a"})
    end_marked("HRL_STARTED_BY=a", grace_s=0.5)
    assert leaves.wait(0) == 0, "what leaves by itself gets its time"
    assert marked.wait(0) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


STARTING = """
import subprocess, sys, time
from hrl.processes.lifetime import guarded_start
with guarded_start():
    nested = "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", nested], start_new_session=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is guarded")
def test_what_a_process_has_started_in_whatever_session_ends_after_it_where_it_is_killed_while_starting() -> None:
    leader = subprocess.Popen([sys.executable, "-c", STARTING], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 60
    while len(below := descendants(leader.pid)) < 3:  # the guard, and two that know nothing of it
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    family = [psutil.Process(pid) for pid in below]
    os.kill(leader.pid, signal.SIGKILL)
    leader.wait()
    assert not psutil.wait_procs(family, timeout=15)[1]


INHERITING = """
import os, resource
from hrl.processes.guard import close_inherited
os.closerange = None
os.dup2(1, 500)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, most))  # what is open above it stays open
os.pipe()
close_inherited()
print([number for number in range(1000) if os.path.exists(f"/proc/self/fd/{number}")])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is guarded")
def test_what_is_open_is_closed_whatever_the_limit_of_open_files() -> None:
    """A limit of a billion, as of a container, costs nothing: no range up to it is closed."""
    said = subprocess.run(
        [sys.executable, "-c", INHERITING], stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parents[2]
    )
    assert said.stdout == b"[0, 1, 2]\n"
