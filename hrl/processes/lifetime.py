"""Processes that die with the process that started them.

Three layers, of which each covers what the one before it can't:

1. `die_with_parent()` in a child: the kernel kills it when the thread that started it ends (Linux).
2. `guard_process_group()` covers descendants that don't call it, such as the engine processes of a library: a guard of
   a few megabytes outlives the worker by a moment and ends the rest of its process group.
3. `under_guard()` covers what a stranger's code starts, in whatever group and session: the guard is there first, starts
   the process, and is the parent of all that it leaves.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hrl.processes import guard
from hrl.processes.watch import NEEDED

_MARK = "HRL_STARTED_BY"
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies. Call it first thing in the child.

    The kernel watches the *thread* that started this process: start long-lived children from a thread that lives as
    long as they should. Elsewhere than on Linux this does nothing.

    Args:
        parent_pid: The expected parent. If this process has another one by now, the parent died before the call could
            take effect, and the process ends at once. None is the process that `multiprocessing` started this one for
            (by spawn or fork); elsewhere there is no check.

    Raises:
        OSError: The kernel refused.
    """
    if _LIBC is None:
        return
    if _LIBC.prctl(guard.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    starter = multiprocessing.parent_process()
    if parent_pid is None and starter is not None:
        parent_pid = starter.pid
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


_group_guard: subprocess.Popen[bytes] | None = None  # kept: its finalizer warns while the process runs


def guard_process_group() -> None:
    """Make this process the leader of its own process group, and end the group with it, however it ends.

    Covers every descendant that stays in the group (`multiprocessing` and `subprocess` children do, unless they start
    a session of their own). They get SIGTERM, a few seconds, then SIGKILL. On Linux only.
    """
    global _group_guard
    if _LIBC is None or _group_guard is not None:
        return
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    _group_guard = _start_guard("group")
    NEEDED.add(_group_guard.pid, "a guard")  # a stopped one would outlive everything


def under_guard(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` and leaves nothing that it started, however it or this process ends.

    Start it from a thread that lives as long as it should. It ends as the command does: with its exit status, or by its
    signal. SIGTERM from this process ends it and kills all; SIGKILL would only kill the command's own process with it.
    Elsewhere than on Linux it is the command itself.

    Args:
        command: Program and arguments.
    """
    if _LIBC is None:
        return list(command)
    return [*_guard_command(), "run", *command]


@contextmanager
def guarded_start() -> Iterator[None]:
    """Kill what this process starts in the block, and what that starts, if this process dies within it. On Linux only.

    What is left gets some seconds first, in which guards of its own may end it in order. It costs a look at the table
    of processes ten times a second: `guarded_processes` is for longer.
    """
    with _guarding("descendants"):
        yield


@contextmanager
def guarded_processes(parent_pid: int) -> Iterator[None]:
    """Kill the present children of `parent_pid` if this process dies while the block runs. On Linux only."""
    with _guarding(*(entry.identity for entry in guard.process_table() if entry.parent == parent_pid)):
        yield


@contextmanager
def guarded_environment() -> Iterator[dict[str, str]]:
    """Yield variables, and kill what began with them in its environment at the end of the block, or of this process.

    What is left then gets some seconds first, in which guards of its own may end it in order. It is found whatever
    group, session and parent it has. On Linux only.
    """
    if _LIBC is None:
        yield {}
        return
    mark = uuid.uuid4().hex
    try:
        with _guarding("marked", f"{_MARK}={mark}"):
            yield {_MARK: mark}
    finally:
        guard.end_marked(f"{_MARK}={mark}")


@contextmanager
def telling_of(needed: Mapping[int, str]) -> Iterator[None]:
    """Say if one of these processes is gone, too, when this one ends while the block runs. On Linux only.

    Args:
        needed: Process ids, and what they are; their end may end this process before it can say so itself.
    """
    present = [entry for entry in guard.process_table() if entry.pid in needed]
    with _guarding("needs", *(f"{entry.identity}={needed[entry.pid]}" for entry in present)):
        yield


@contextmanager
def _guarding(*targets: str) -> Iterator[None]:
    """Have a guard with these targets while the block runs. On Linux only."""
    if _LIBC is None:
        yield
        return
    with _start_guard(*targets) as started:
        try:
            yield
        finally:
            started.kill()


def _start_guard(*targets: str) -> subprocess.Popen[bytes]:
    command = [*_guard_command(), *targets]
    return subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _guard_command() -> list[str]:
    # -I -S: the guard needs the standard library only, and starts in a few milliseconds without site-packages.
    return [sys.executable, "-I", "-S", guard.__file__, str(os.getpid())]
