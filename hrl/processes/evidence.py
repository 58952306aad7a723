"""What the kernel tells of why a process was killed: memory or shared memory that ran out."""

from __future__ import annotations

import os
import re
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_SCARCE_BYTES = 64 << 20


def oom_kills() -> int | None:
    """Return how many processes the kernel's out-of-memory killer has ended so far; None where nobody counts.

    The count is that of this container, where one can be read, else of the machine.
    """
    for file, name in _counts():
        try:
            found = re.search(rf"^{name} (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:  # no such file system here
            continue
        if found:
            return int(found[1])
    return None


def _counts() -> list[tuple[Path, str]]:
    cgroup = Path("/proc/self/cgroup")
    own = re.search(r"^0::(/.*)$", cgroup.read_text(), re.MULTILINE) if cgroup.is_file() else None
    version_2 = Path("/sys/fs/cgroup", own[1].lstrip("/") if own else "", "memory.events")
    return [(version_2, "oom_kill"), (Path("/proc/vmstat"), "oom_kill")]


_before = oom_kills()


def why_memory_ended_it() -> str | None:
    """Return why a process may have been killed: the kernel's out-of-memory killer was at work, or /dev/shm is full.

    None if there is no sign of either since this module was imported.
    """
    now = oom_kills()
    if _before is not None and now is not None and now > _before:
        killed = now - _before
        what = "a process" if killed == 1 else f"{killed} processes"
        return (
            f"The kernel's out-of-memory killer has ended {what} here since the run began: give the machine (or "
            "container) more memory, or the run less (`hrl check` shows what takes how much)"
        )
    free = free_shared_memory()
    if free is not None and free < _SCARCE_BYTES:
        return (
            f"/dev/shm is full ({free >> 20} MiB free), and writing there kills a process (SIGBUS): free some, "
            "or give it more (`mount -o remount,size=…`, `docker run --shm-size=…`)"
        )
    return None


def free_shared_memory() -> int | None:
    """Return the bytes that are free in `/dev/shm`; None where there is none."""
    try:
        stat = os.statvfs(SHARED_MEMORY)
    except FileNotFoundError:
        return None
    return stat.f_bavail * stat.f_frsize
