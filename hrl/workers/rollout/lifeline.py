"""A hold on processes that a library started for us: their end is waited for, and brought about if need be."""

from __future__ import annotations

import os
import select
import signal
import weakref


class ProcessLife:
    """A hold on a process that is no child of this one: waits for its end, and ends it.

    The kernel's handle stays that of the same process when its pid is given to another one.
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        self._close = weakref.finalize(self, os.close, self._fd)

    def end(self, grace_s: float) -> None:
        """Wait for the process to end by itself, then kills it. To be called once."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(grace_s * 1000):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            poll.poll(grace_s * 1000)
        self._close()
