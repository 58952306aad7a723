"""Looking at processes from outside."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def still_alive(pids: Iterable[int], within_s: float) -> list[int]:
    """Waits for the processes to end; returns those that have not. A zombie has ended."""
    deadline = time.monotonic() + within_s
    remaining = [pid for pid in pids if _alive(pid)]
    while remaining and time.monotonic() < deadline:
        time.sleep(0.05)
        remaining = [pid for pid in remaining if _alive(pid)]
    return remaining


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> dict[int, str]:
    """The processes that `pid` started, directly or not: their ids and command lines."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        try:
            found[process.pid] = " ".join(process.cmdline())[:200]
        except psutil.NoSuchProcess:
            continue
    return found
