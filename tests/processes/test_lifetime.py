"""Nothing outlives its parent, without Ray and with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from hrl.processes.lifetime import die_with_parent, under_guard
from tests.processes.process_table import descendants, still_alive

ROOT = Path(__file__).parents[2]

PARENT = """
import multiprocessing, os, signal, subprocess, sys, time
from multiprocessing import shared_memory
from hrl.processes.lifetime import die_with_parent, guard_process_group

def engine():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    segment = shared_memory.SharedMemory(create=True, size=16)
    print("segment", segment.name, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    guard_process_group()
    guard_process_group()
    children = [
        subprocess.Popen(["sleep", "600"]),
        subprocess.Popen(["sleep", "600"], start_new_session=True, preexec_fn=die_with_parent),
        multiprocessing.get_context("spawn").Process(target=engine),
    ]
    children[-1].start()
    time.sleep(600)
"""

STRAYING = """
import os, signal, subprocess, sys, time

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def daemon():
    # as a daemon is made: in a session of its own, with a parent that has ended, deaf to what asks it to leave
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("daemon", os.getpid())
            os.execve("/bin/sleep", ["sleep", "600"], {})
        os._exit(0)
    os.wait()

daemon()
say("session", subprocess.Popen(["setsid", "sleep", "600"]).pid)
say("ready", os.getpid(), os.getpgrp())
sys.stdin.readline()
exec(sys.argv[1])
"""

HEADLESS = """
import ctypes, os, subprocess, threading, time

def go_on():
    child = subprocess.Popen(["setsid", "sleep", "600"], stdout=subprocess.DEVNULL)
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)

threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # exit(2) ends the calling thread alone
"""

MARKING = """
import os, subprocess, sys
from hrl.processes.child_environment import changed_environment
from hrl.processes.lifetime import guarded_environment
unmarked = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
with guarded_environment() as mark, changed_environment(mark):
    deaf = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600; sleep 600"])
    shell = subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
    session = subprocess.Popen(["setsid", "sleep", "600"])
    print("up", unmarked.pid, deaf.pid, shell.stdout.strip(), session.pid, flush=True)
    sys.stdin.readline()
"""

OWNER = """
import subprocess, sys, time
from hrl.processes.lifetime import under_guard
child = subprocess.Popen(under_guard([sys.executable, *sys.argv[1:]]))
child.wait()
"""

DRIVER = """
import os, subprocess, sys, time
from hrl.processes.lifetime import die_with_parent
from hrl.single_controller.dispatch import Dispatch, register
from hrl.single_controller.worker import Worker
from hrl.single_controller.ray_cluster import ray_cluster
from hrl.single_controller.resource_pool import RayResourcePool
from hrl.single_controller.worker import RayClassWithInitArgs
from hrl.single_controller.worker_group import RayWorkerGroup

class Parent(Worker):
    def __init__(self):
        self.children = [
            subprocess.Popen(["sleep", "600"]),
            subprocess.Popen(["sleep", "600"], start_new_session=True, preexec_fn=die_with_parent),
            subprocess.Popen(["setsid", "sleep", "600"]),
        ]
        subprocess.run(["sh", "-c", "setsid sleep 600.25 &"])

    @register(Dispatch.ONE_TO_ALL)
    def busy(self):
        while True:
            sum(range(1000))

if __name__ == "__main__":
    with ray_cluster(num_cpus=2, object_store_bytes=100 << 20):
        group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(Parent))
        call = group.execute_all_async("busy")
        print("up", flush=True)
        sys.stdin.readline()
        raise RuntimeError("the driver failed")
"""


def start(script: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(script)
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for_line(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.split()
    pytest.fail(f"the process ended with {process.wait()} before it said {word!r}")


def test_a_killed_parent_takes_its_group_and_its_shared_memory_along(tmp_path: Path) -> None:
    parent = start(PARENT, tmp_path)
    try:
        segment = wait_for_line(parent, "segment")[1]
        children = descendants(parent.pid)
        assert sum("sleep 600" in command for command in children.values()) == 2
        assert sum("processes/guard.py" in command for command in children.values()) == 1, (
            "one guard, however often asked"
        )
    finally:
        parent.kill()
        parent.wait()
    remaining = still_alive(children, within_s=15)
    assert not remaining, [children[pid] for pid in remaining]
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(name=segment)


def straying(end: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """A guarded process that has started what would outlive it; and their ids."""
    guarded = subprocess.Popen(
        under_guard([sys.executable, "-c", STRAYING, end]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return guarded, pids_said(guarded)


def pids_said(process: subprocess.Popen[str]) -> dict[str, int]:
    said = {}
    while "ready" not in said:
        name, pid, *group = process.stdout.readline().split()
        said[name] = int(pid)
    assert group == [str(said["ready"])], "it leads its own group"
    assert not still_ended(said.values())
    return said


def still_ended(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if not psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
)
def test_a_guarded_process_leaves_neither_sessions_nor_daemons_and_its_guard_ends_as_it_does(
    end: str, status: int
) -> None:
    guarded, started = straying(end)
    guarded.communicate("\n", timeout=30)
    assert guarded.returncode == status
    assert not still_alive(started.values(), within_s=0.0), "all are gone when the guard is"


def test_sigterm_to_a_guard_kills_all_at_once_also_what_is_stopped(tmp_path: Path) -> None:
    guarded, started = straying("")
    os.kill(started["ready"], signal.SIGSTOP)
    guarded.terminate()
    assert guarded.wait(30) == -signal.SIGKILL
    assert not still_alive(started.values(), within_s=0.0)


def test_a_process_whose_first_thread_has_ended_does_not_escape_its_guard() -> None:
    guarded = subprocess.Popen(under_guard([sys.executable, "-c", HEADLESS]), stdout=subprocess.PIPE, text=True)
    pid, child = map(int, guarded.stdout.readline().split())
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert psutil.Process(pid).num_threads() == 2, "the other runs on"
    guarded.terminate()
    assert guarded.wait(30) == -signal.SIGKILL
    assert not psutil.pid_exists(pid)
    assert not still_alive([child], within_s=0.0)


def test_what_a_guarded_process_started_ends_with_its_owner_that_gets_sigkill(tmp_path: Path) -> None:
    owner = start(OWNER, tmp_path, "-c", STRAYING, "")
    started = pids_said(owner)
    guards = descendants(owner.pid)
    owner.kill()
    owner.wait()
    assert not still_alive([*started.values(), *guards], within_s=15)


def test_a_guarded_program_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert subprocess.run(under_guard(["/nowhere/at-all"]), timeout=30, check=False).returncode == 127
    assert "/nowhere/at-all can't be started" in capfd.readouterr().err


def called(command: str) -> set[int]:
    return {each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == command.split()}


@pytest.mark.parametrize("end", ["SIGKILL of the owner", "the end of the block"])
def test_marked_processes_end_whatever_group_session_and_parent_they_have(end: str, tmp_path: Path) -> None:
    owner = start(MARKING, tmp_path)
    pids = [int(pid) for pid in wait_for_line(owner, "up")[1:]]
    unmarked, marked = pids[0], pids[1:]
    try:
        assert len(marked) == 3
        if end == "SIGKILL of the owner":
            owner.kill()
        owner.communicate("\n", timeout=30)
        assert not still_alive(marked, within_s=0.0 if end == "the end of the block" else 15)
        assert still_alive([unmarked], within_s=0.0) == [unmarked], "it began before the mark"
    finally:
        os.kill(unmarked, signal.SIGKILL)


def _child(pids: Connection, wait_for_end_of: int | None) -> None:
    while wait_for_end_of is not None and psutil.pid_exists(wait_for_end_of):
        time.sleep(0.02)
    die_with_parent()
    pids.send(os.getpid())
    time.sleep(60)


def _parent(pids: Connection, late: bool) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(pids, os.getpid() if late else None))
    child.start()
    pids.send(child.pid)
    child.join()


@pytest.mark.cluster
@pytest.mark.parametrize("late", [False, True], ids=["in time", "after the parent's death"])
def test_a_child_of_multiprocessing_dies_with_a_parent_that_gets_sigkill(late: bool) -> None:
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    parent = context.Process(target=_parent, args=(writer, late))
    parent.start()
    writer.close()
    assert reader.poll(60)
    child = reader.recv()
    assert late or (reader.poll(60) and reader.recv() == child)

    os.kill(parent.pid, signal.SIGKILL)
    parent.join(10)

    assert not still_alive([child], within_s=30 if late else 5)
    with pytest.raises(EOFError):  # nobody is left who could have said more
        reader.recv()


@pytest.mark.cluster
@pytest.mark.parametrize("end", ["sigkill", "exception"])
def test_no_process_outlives_the_driver(end: str, tmp_path: Path) -> None:
    before = called("sleep 600.25")
    driver = start(DRIVER, tmp_path)
    try:
        wait_for_line(driver, "up")
        children = descendants(driver.pid)
        commands = list(children.values())
        assert sum("sleep 600" in command for command in commands) == 6
        deadline = time.monotonic() + 30  # their parents have ended, so nobody waited until they were `sleep`
        while len(daemons := called("sleep 600.25") - before) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(daemons) == 2
        children |= dict.fromkeys(daemons, "a daemon")
        assert sum("raylet" in command and "gcs" not in command for command in commands) >= 1
        if end == "sigkill":
            driver.send_signal(signal.SIGKILL)
        driver.communicate("\n", timeout=600)
        assert driver.returncode == {"sigkill": -signal.SIGKILL, "exception": 1}[end]
    finally:
        driver.kill()
        driver.wait()
    remaining = still_alive(children, within_s=15)
    assert not remaining, [children[pid] for pid in remaining]
