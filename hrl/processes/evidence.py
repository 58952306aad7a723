"""How a process ended, and what tells of why: the kernel, of memory that ran out, or what was printed last."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
_FULL_BELOW_BYTES = 64 << 20
_ROOM_BYTES = 64 << 20
_LAST_BYTES = 64 << 10
_LONGEST_ERROR = 500
_ERROR = re.compile(r"\b(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit)\b: .+")
"""The last line of a traceback, wherever in a line of a log it stands."""
_ECHO = "for the root cause"
"""In an error of vLLM that only says that another one was printed before it."""


def exit_in_words(code: int) -> str:
    """Return how a process ended, as the rest of a sentence about it.

    Args:
        code: Its exit status, or minus the number of the signal that killed it, as `Popen.returncode` has it.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    known = {each.value: each.name for each in signal.Signals}  # real-time signals have a number alone
    return f"was killed by {known.get(-code, f'signal {-code}')}"


class Kills(NamedTuple):
    """How many processes the kernel's out-of-memory killer has ended so far.

    Attributes:
        number: Of the processes.
        is_own: Whether they are those of this container, rather than of everybody on the machine.
    """

    number: int
    is_own: bool


def oom_kills() -> Kills | None:
    """Return the count of this container, where one can be read, else of the machine; None where nobody counts."""
    for file, is_own in _counts():
        try:
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:  # no such file system here
            continue
        if found:
            return Kills(int(found[1]), is_own)
    return None


def _counts() -> list[tuple[Path, bool]]:
    cgroup = Path("/proc/self/cgroup")
    own = re.search(r"^0::(/.*)$", cgroup.read_text(), re.MULTILINE) if cgroup.is_file() else None
    version_2 = Path("/sys/fs/cgroup", own[1].lstrip("/") if own else "", "memory.events")
    return [(version_2, True), (Path("/proc/vmstat"), False)]


_before = oom_kills()


def count_kills_from_now() -> None:
    """Have `why_memory_ended_it` leave out what was killed so far: a run begins, in a session that may be days old."""
    global _before
    _before = oom_kills()


def why_memory_ended_it() -> str | None:
    """Return why a process may have been killed: the kernel's out-of-memory killer was at work, or /dev/shm is full.

    None if there is no sign of either since the run began, or, in a process of the run, since that did.
    """
    now = oom_kills()
    if _before is not None and now is not None and now.is_own == _before.is_own and now.number > _before.number:
        killed = now.number - _before.number
        what = "a process" if killed == 1 else f"{killed} processes"
        where = "here" if now.is_own else "on this machine"
        if_others = "" if now.is_own else ", and this may have been " + ("it" if killed == 1 else "one of them")
        return (
            f"The kernel's out-of-memory killer has ended {what} {where} since the run began{if_others}: give the "
            "machine (or container) more memory, or the run less (`hrl check` shows what takes how much)"
        )
    free = free_shared_memory()
    if free is not None and free < _FULL_BELOW_BYTES:
        return (
            f"/dev/shm is full ({free >> 20} MiB free), and writing there kills a process (SIGBUS): free some, "
            "or give it more (`mount -o remount,size=…`, `docker run --shm-size=…`)"
        )
    return None


def memory_is_left() -> bool:
    """Return whether this process may allocate more; False if it has reached its limit (`RLIMIT_AS`).

    It tells one allocation that was too large from memory that has run out.
    """
    try:
        bytearray(_ROOM_BYTES)
    except MemoryError:
        return False
    return True


def free_shared_memory() -> int | None:
    """Return the bytes that are free in `/dev/shm`; None where there is none."""
    try:
        stat = os.statvfs(SHARED_MEMORY)
    except FileNotFoundError:
        return None
    return stat.f_bavail * stat.f_frsize


def printed_last() -> str:
    """Return the last error that this process, or one that it started, has printed, and where; else where to look.

    Under Ray the output of a process is a file that nobody shows. It is the rest of a sentence about an end.
    """
    files = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):
            file = Path(os.readlink(f"/proc/self/fd/{number}"))
            if file.is_file():
                files[file] = _last_error(file)
    if not files:
        return "its last output is on stderr"
    where = " and ".join(map(str, files))
    said = [error for error in files.values() if error is not None]
    return f"its last error was {said[-1]} (its output is in {where})" if said else f"its output is in {where}"


def _last_error(file: Path) -> str | None:
    """Return the last error that stands at the end of a file; None where there is none."""
    with file.open("rb") as stream:
        stream.seek(max(file.stat().st_size - _LAST_BYTES, 0))
        found = _ERROR.findall(stream.read().decode(errors="replace"))
    causes = [error for error in found if _ECHO not in error]
    return str((causes or found)[-1])[:_LONGEST_ERROR].strip() if found else None
