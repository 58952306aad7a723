"""Engine processes don't outlive the process they work for, not even when it gets SIGKILL."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import weakref

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel for SIGKILL when this process's parent dies.

    To be called in a child of `multiprocessing`. "Parent" is, to the kernel, the thread that started the child, which
    therefore has to live as long as the child is wanted.

    Raises:
        OSError: the kernel refused.
        RuntimeError: not a child of multiprocessing.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("die_with_parent() is for processes started by multiprocessing")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent.pid:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


class ProcessLife:
    """A hold on a process that is no child of this one: waits for its end, and ends it.

    The kernel's handle stays that of the same process when its pid is given to another one.
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        self._close = weakref.finalize(self, os.close, self._fd)

    def end(self, grace_s: float) -> None:
        """Waits for the process to end by itself, then kills it. To be called once."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(grace_s * 1000):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            poll.poll(grace_s * 1000)
        self._close()
