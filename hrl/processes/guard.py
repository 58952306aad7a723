"""A script that waits for the process that started it to die, then ends what would otherwise stay behind.

It imports the standard library only. The kernel tells it of the death (by a descriptor of the process, else by
PR_SET_PDEATHSIG): a pipe would stay open in forked children, and polling for the pid is fooled by zombies.

    guard.py LEADER group            ends the rest of LEADER's process group
    guard.py LEADER PID@START …      kills these processes, if they still are the ones that began at START
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_GRACE_S = 5.0
_POLL_S = 0.05
_RESOURCE_TRACKER = b"multiprocessing.resource_tracker"


@dataclass(frozen=True)
class ProcessEntry:
    """A line of the process table; `start` tells processes apart that had the same pid one after the other."""

    pid: int
    parent: int
    group: int
    start: str


def process_table() -> list[ProcessEntry]:
    """Return the processes of this machine that are alive (zombies are not)."""
    entries = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if fields[0] not in "ZX":
            entries.append(ProcessEntry(int(path.parent.name), int(fields[1]), int(fields[2]), fields[19]))
    return entries


def _send(pid: int, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


def _is_resource_tracker(pid: int) -> bool:
    try:
        return _RESOURCE_TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _members(group: int) -> list[int]:
    return [entry.pid for entry in process_table() if entry.group == group]


def end_group(group: int, grace_s: float = _GRACE_S) -> None:
    """End a process group: SIGTERM, time to leave, SIGKILL.

    The resource tracker of `multiprocessing` goes last: it ignores SIGTERM, unlinks the shared memory of its clients
    once they are gone, and then leaves by itself.
    """
    for pid in _members(group):
        _send(pid, signal.SIGTERM)
    for may_stay in (_is_resource_tracker, lambda pid: False):
        deadline = time.monotonic() + grace_s
        while any(not may_stay(pid) for pid in _members(group)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for pid in _members(group):
            if not may_stay(pid):
                _send(pid, signal.SIGKILL)


def kill_processes(identities: list[str]) -> None:
    """Send SIGKILL to the processes given as `PID@START`."""
    for entry in process_table():
        if f"{entry.pid}@{entry.start}" in identities:
            _send(entry.pid, signal.SIGKILL)


def _wait_for_end(leader: int) -> None:
    """Return when process `leader`, the parent of this one, has ended. SIGTERM is blocked and comes at its death.

    A leader in a Landlock domain of its own can send no signal beyond it, not even that one: its descriptor tells, too.
    """
    try:
        ended = os.pidfd_open(leader)
    except ProcessLookupError:
        return
    except OSError:  # before Linux 5.3, or where a container forbids it
        while os.getppid() == leader:
            # Anyone may send SIGTERM; only the change of parent says that the leader is gone. One that comes between
            # the check and the wait stays pending and ends the wait.
            signal.sigwait({signal.SIGTERM})
        return
    if os.getppid() == leader:  # else it is the descriptor of a process that has got its number
        select.select([ended], [], [])


def main(leader: int, targets: list[str]) -> None:
    """Wait until process `leader`, the parent of this one, has died, then end the targets."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    _wait_for_end(leader)
    if targets == ["group"]:
        end_group(leader)
    else:
        kill_processes(targets)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
