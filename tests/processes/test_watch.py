"""A process that stays stopped is killed and named; one that works, or is only stopped for a moment, is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hrl.processes.watch import ProcessWatch, is_gone, state_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def wait_for_state(pid: int, letter: str) -> None:
    deadline = time.monotonic() + 10
    while (state := state_of(pid)) is None or state.letter != letter:
        assert time.monotonic() < deadline, state
        time.sleep(0.01)


def stopped(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGSTOP)
    wait_for_state(process.pid, "T")
    return process.pid


def unhurried_watch(pid: int) -> ProcessWatch:
    """Its thread looks once in ten minutes, so that only the test's looks count."""
    watch = ProcessWatch(stopped_s=10.0, look_s=600.0)
    watch.add(pid, "rank 3's process")
    return watch


def test_a_process_that_stays_stopped_is_killed_and_the_reason_names_it(sleeper: subprocess.Popen[bytes]) -> None:
    pid = stopped(sleeper)
    watch = unhurried_watch(pid)
    watch.look(5.0)
    assert sleeper.poll() is None and watch.why_it_ended(pid) is None, "five seconds are allowed"
    watch.look(5.0)
    assert sleeper.wait(10) == -signal.SIGKILL
    reason = watch.why_it_ended(pid)
    assert reason is not None and f"rank 3's process (pid {pid}, SIGSTOP) for 10 s" in reason and "kill -CONT" in reason


def test_a_stop_that_ends_in_time_is_forgotten(sleeper: subprocess.Popen[bytes]) -> None:
    pid = stopped(sleeper)
    watch = unhurried_watch(pid)
    watch.look(9.0)
    sleeper.send_signal(signal.SIGCONT)
    wait_for_state(pid, "S")
    watch.look(9.0)
    stopped(sleeper)
    watch.look(9.0)
    assert sleeper.poll() is None, "nine seconds twice are not eighteen in a row"


def test_a_process_that_works_or_died_otherwise_is_never_explained(sleeper: subprocess.Popen[bytes]) -> None:
    watch = unhurried_watch(sleeper.pid)
    watch.look(1000.0)
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
    watch.look(1000.0)
    assert watch.why_it_ended(sleeper.pid) is None


def test_another_process_with_the_same_pid_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    pid = stopped(sleeper)
    watch = unhurried_watch(pid)
    watch._watched[pid].start = "1"
    watch.look(1000.0)
    assert sleeper.poll() is None


def test_who_is_removed_is_left_alone_and_who_is_not_there_does_no_harm(sleeper: subprocess.Popen[bytes]) -> None:
    pid = stopped(sleeper)
    watch = unhurried_watch(pid)
    watch.remove(pid)
    watch.add(2**22 + 1, "nobody")
    watch.look(1000.0)
    assert sleeper.poll() is None


def test_one_that_others_end_is_explained_and_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    pid = stopped(sleeper)
    watch = ProcessWatch(stopped_s=10.0, look_s=600.0)
    watch.add(pid, "Ray's raylet", kills=False)
    watch.look(10.0)
    assert sleeper.poll() is None and "Ray's raylet" in (watch.why_it_ended(pid) or "")


def test_its_thread_looks_by_itself(sleeper: subprocess.Popen[bytes]) -> None:
    pid = stopped(sleeper)
    watch = ProcessWatch(stopped_s=0.05, look_s=0.05)
    watch.add(pid, "it")
    assert sleeper.wait(20) == -signal.SIGKILL


def test_a_zombie_is_gone_and_this_process_is_not() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    wait_for_state(child, "Z")
    assert is_gone(child) and not is_gone(os.getpid())
    os.waitpid(child, 0)
    assert state_of(child) is None and is_gone(child)
