"""What a child process is busy with, in memory that its parent can read at any time, even while the child hangs."""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple

_SINCE_NS, _HOLDER, _BLAME, _PID, _BEAT_NS, _NUM_THREADS = range(6)
_HEAD = 6
_THREAD_ID, _THREAD_HOLDER, _THREAD_SINCE_NS = range(3)
_CELLS_OF_THREAD = 3
_CELL_BYTES = 8


class BusyThread(NamedTuple):
    """A thread of the child that works for somebody.

    Attributes:
        thread_id: As the kernel numbers it.
        holder: Whom it works for.
        since: On the clock of `time.monotonic`.
    """

    thread_id: int
    holder: int
    since: float


class SharedState:
    """Who occupies the process and since when; `holder` is a number that the parent knows, and 0 is nobody.

    The main thread and each further thread have a place of their own.

    Args:
        descriptor: Descriptor of a memory file from `create`; it is closed.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._cells = memoryview(self._memory).cast("q")
        os.close(descriptor)

    @staticmethod
    def create(num_threads: int = 0) -> int:
        """Return the descriptor of a new memory file, occupied by nobody, with places for further threads."""
        descriptor = os.memfd_create("child-process")
        os.ftruncate(descriptor, (_HEAD + num_threads * _CELLS_OF_THREAD) * _CELL_BYTES)
        return descriptor

    def hold(self, holder: int) -> None:
        """Record that somebody occupies the process from now on; 0 is nobody."""
        if holder:
            self.blame_response(False)
        # The time is written first: a reader between the two writes sees a process that has just moved on.
        self._cells[_SINCE_NS] = time.monotonic_ns()
        self._cells[_HOLDER] = holder

    def blame_response(self, is_to_blame: bool) -> None:
        """Record whether a response is to blame if the present holder fails from now on."""
        self._cells[_BLAME] = is_to_blame

    def read(self) -> tuple[int, float, bool]:
        """Return the holder, since when (on the clock of `time.monotonic`), and whether a response is to blame."""
        return self._cells[_HOLDER], self._cells[_SINCE_NS] / 1e9, bool(self._cells[_BLAME])

    def enter(self) -> None:
        """Record that this process is the one whose state it is."""
        self._cells[_PID] = os.getpid()

    @property
    def pid(self) -> int:
        """Id of the process; 0 before it has begun."""
        return self._cells[_PID]

    def beat(self) -> None:
        """Record that a thread that works for nobody has had its turn just now."""
        self._cells[_BEAT_NS] = time.monotonic_ns()

    @property
    def last_beat(self) -> float:
        """When `beat` was called last, on the clock of `time.monotonic`; 0 before."""
        return self._cells[_BEAT_NS] / 1e9

    def add_thread(self, thread_id: int) -> int | None:
        """Return a place for a further thread, or `None` if all are taken; not to be called by two at once."""
        number = self._cells[_NUM_THREADS]
        place = _HEAD + number * _CELLS_OF_THREAD
        if place + _CELLS_OF_THREAD > len(self._cells):
            return None
        self._cells[place + _THREAD_ID] = thread_id
        self._cells[_NUM_THREADS] = number + 1
        return place

    def hold_thread(self, place: int, holder: int) -> None:
        """Record that somebody occupies the thread of a place from now on; 0 is nobody."""
        self._cells[place + _THREAD_SINCE_NS] = time.monotonic_ns()
        self._cells[place + _THREAD_HOLDER] = holder

    def busy_threads(self) -> list[BusyThread]:
        """Return the further threads that somebody occupies."""
        # What the child wrote is checked: it may have written anything.
        most = (len(self._cells) - _HEAD) // _CELLS_OF_THREAD
        found = []
        for number in range(min(max(self._cells[_NUM_THREADS], 0), most)):
            place = _HEAD + number * _CELLS_OF_THREAD
            thread_id, holder, since_ns = self._cells[place : place + _CELLS_OF_THREAD]
            if holder:
                found.append(BusyThread(thread_id, holder, since_ns / 1e9))
        return found

    def close(self) -> None:
        """Release the memory."""
        self._cells.release()
        self._memory.close()
