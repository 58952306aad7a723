"""A script that waits for the process that started it to die, then ends what would otherwise stay behind.

It imports the standard library only. The kernel tells it of the death (by a descriptor of the process, else by
PR_SET_PDEATHSIG): a pipe would stay open in forked children, and polling for the pid is fooled by zombies.

    guard.py LEADER group            ends the rest of LEADER's process group
    guard.py LEADER PID@START …      kills these processes, if they still are the ones that began at START
    guard.py LEADER descendants      kills what LEADER has started, and what that has, after some time to leave
    guard.py LEADER marked NAME=VALUE
                                     kills what began with this in its environment, after some time to leave
    guard.py LEADER needs PID@START=TITLE …
                                     says so, if one of these has ended before LEADER
    guard.py LEADER run COMMAND …    runs a command, and kills it and all that it started when it or LEADER has ended;
                                     what it leaves in the temporary folder, which is its own, goes with it

The last one finds also what left its group and its session, and whose parent has ended: the kernel then makes the guard
its parent (PR_SET_CHILD_SUBREAPER). The command's process begins as the leader of its session, and the guard ends as it
has ended. SIGTERM from LEADER to the guard ends all.
"""

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0
_TRACKER_GRACE_S = 4.0
"""On a busy machine a tracker takes seconds to notice that the others have ended, and to unlink what they left."""
_POLL_S = 0.05
_NOT_FOUND = 127
_NUM_THREADS = 17
"""Its place in /proc/PID/stat behind the name."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that ask a command to end, which schedulers and terminals send to all processes of a job; a guard has to
outlive its leader."""
_RESOURCE_TRACKER = b"multiprocessing.resource_tracker"


@dataclass(frozen=True)
class ProcessEntry:
    """A line of the process table; `start` tells processes apart that had the same pid one after the other."""

    pid: int
    parent: int
    group: int
    start: str

    @property
    def identity(self) -> str:
        """Pid and start, as `PID@START`."""
        return f"{self.pid}@{self.start}"


def process_table() -> list[ProcessEntry]:
    """Return the processes of this machine that are alive.

    Zombies are not, but for those of which only the first thread has ended: the others run on, and children of theirs
    still have the process as their parent.
    """
    entries = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if fields[0] not in "ZX" or int(fields[_NUM_THREADS]) > 1:
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
        if entry.identity in identities:
            _send(entry.pid, signal.SIGKILL)


def end_marked(mark: str, grace_s: float = _GRACE_S) -> None:
    """Wait until no process is left that began with `NAME=VALUE` in its environment; after `grace_s`, kill them."""
    deadline = time.monotonic() + grace_s
    while (left := _marked(mark.encode())) and time.monotonic() < deadline + grace_s:
        if time.monotonic() > deadline:
            for pid in left:
                _send(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _marked(mark: bytes) -> list[int]:
    found = []
    for entry in process_table():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in Path(f"/proc/{entry.pid}/environ").read_bytes().split(b"\0"):
                found.append(entry.pid)
    return found


def tell_of_needed(leader: int, needed: list[str]) -> None:
    """Say which of the processes `PID@START=TITLE` has ended, too: a library may end the leader with it."""
    alive = {entry.identity for entry in process_table()}
    for each in needed:
        identity, _, title = each.partition("=")
        if identity not in alive:
            pid = identity.partition("@")[0]
            sys.stderr.write(
                f"\nThe run's process (pid {leader}) has ended without a word, and {title} (pid {pid}) is gone. If "
                "nobody killed the first, Ray ended it because it can't do without the second. Start the run again\n"
            )
            return


def follow_and_end(leader: int, grace_s: float = _GRACE_S) -> None:
    """Take note of what `leader`, the parent of this process, starts; when it has ended, give that time, and kill it.

    Looking again and again is needed: those who lose their parent are no longer found below the leader. (Their
    environment tells nothing either: a process that gives itself a title writes over it.)
    """
    seen: dict[int, str] = {}
    while os.getppid() == leader:
        _note_descendants({leader}, seen)
        seen.pop(leader, None)
        signal.sigtimedwait({signal.SIGTERM}, 2 * _POLL_S)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline + grace_s:
        _note_descendants(set(seen), seen)
        left = [entry.identity for entry in process_table() if seen.get(entry.pid) == entry.start]
        if not left:
            return
        if time.monotonic() > deadline:
            kill_processes(left)
        time.sleep(2 * _POLL_S)


def _note_descendants(of: set[int], seen: dict[int, str]) -> None:
    table = process_table()
    found = _with_descendants(of, table) - {os.getpid()}
    for entry in table:
        if entry.pid in found:
            seen.setdefault(entry.pid, entry.start)


def _with_descendants(of: set[int], table: list[ProcessEntry]) -> set[int]:
    found = set(of)
    while more := {entry.pid for entry in table if entry.parent in found} - found:
        found |= more
    return found


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


class _Run:
    """A command, whose process and all that descends from it end together.

    Args:
        command: Program and arguments.
        mask: The signals that its process blocks.
    """

    def __init__(self, command: list[str], mask: set[int | signal.Signals]) -> None:
        own = os.getpid()
        self._status: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            _begin(command, mask, own)
        # What the process inherited is its alone: its peer is to notice when it closes it.
        close_inherited()

    def has_ended(self) -> bool:
        """Return whether its process has ended; also takes note of others that have."""
        self._is_anyone_left()
        return self._status is not None

    def _is_anyone_left(self) -> bool:
        """Take note of who has ended; return whether this process has children, as it has while a descendant lives."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._pid:
                    self._status = ended[1]
            return True
        return False

    def kill_all(self) -> None:
        """Kill what descends from this process, at once; resource trackers may clear up behind the others."""
        trackers_until = time.monotonic() + _TRACKER_GRACE_S
        deadline = trackers_until + _GRACE_S
        # The table is read line by line while parents end, so that a look may miss a descendant.
        while self._is_anyone_left() and time.monotonic() < deadline:
            spared = time.monotonic() < trackers_until
            for pid in _with_descendants({os.getpid()}, process_table()) - {os.getpid()}:
                if not (spared and _is_resource_tracker(pid)):
                    _send(pid, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)

    def end_alike(self) -> NoReturn:
        """End this process as the command's has ended."""
        if self._status is not None and os.WIFEXITED(self._status):
            os._exit(os.WEXITSTATUS(self._status))
        number = signal.SIGKILL if self._status is None else os.WTERMSIG(self._status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's process has left its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)


def close_inherited() -> None:
    """Close every descriptor but the standard streams.

    Those that are open: a range up to the limit of open files, which containers set to a billion, is as many calls
    where the kernel or Python has no close_range(2).
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with contextlib.suppress(OSError):  # the one by which they were listed
                os.close(number)


def _begin(command: list[str], mask: set[int | signal.Signals], parent: int) -> NoReturn:
    """Become the command, in a session of its own that the kernel ends with the guard."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_NOT_FOUND)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} can't be started: {error}\n")
    os._exit(_NOT_FOUND)


def run(leader: int, command: list[str]) -> NoReturn:
    """Run a command for process `leader`, the parent of this one; see the module."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, _PR_SET_CHILD_SUBREAPER, 1)
    _prctl(libc, PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != leader:
        os._exit(0)
    folder = _own_folder()
    started = _Run(command, mask)
    while not started.has_ended():
        came = signal.sigwaitinfo({signal.SIGTERM, signal.SIGCHLD})
        # A scheduler sends SIGTERM to all processes of a job, and it is the leader who decides what that means.
        if came.si_signo == signal.SIGTERM and (came.si_pid == leader or os.getppid() != leader):
            break
    started.kill_all()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    started.end_alike()


def _own_folder() -> str | None:
    """Make the command a temporary folder of its own; None if there is no room. Who is killed clears up nothing."""
    try:
        folder = tempfile.mkdtemp(prefix="hrl-process-")
    except OSError:
        return None  # a command that needs one says so itself
    os.environ["TMPDIR"] = folder
    return folder


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def main(leader: int, targets: list[str]) -> None:
    """Wait until process `leader`, the parent of this one, has died, then end the targets."""
    if targets[:1] == ["run"]:
        run(leader, targets[1:])
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    _prctl(ctypes.CDLL(None, use_errno=True), PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if targets == ["descendants"]:
        follow_and_end(leader)
        return
    _wait_for_end(leader)
    if targets == ["group"]:
        end_group(leader)
    elif targets[:1] == ["needs"]:
        tell_of_needed(leader, targets[1:])
    elif targets[:1] == ["marked"]:
        end_marked(targets[1])
    else:
        kill_processes(targets)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
