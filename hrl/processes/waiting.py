"""Waiting one's turn at what all calls of a process share: who is next, and whose clock stands still meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

_CLOCKS: contextvars.ContextVar[tuple[Clock, ...]] = contextvars.ContextVar("clocks", default=())
"""The clocks of the present call, and of those that it is made in."""
_MOST_WAITED = 4
"""Times its deadline that a call may wait in line; from there on its clock runs."""


class Clock:
    """The clock of a call, which stands still while the call waits in line.

    As a context manager it is the clock of what is begun inside, tasks too. It belongs to one event loop.

    Attributes:
        tell: Told when it stops (True) and when it goes on (False).
    """

    def __init__(self) -> None:
        self.tell: Callable[[bool], object] = lambda _: None
        self._waiting = 0
        self._since = self._waited_s = 0.0
        self._token: contextvars.Token[tuple[Clock, ...]] | None = None

    def __enter__(self) -> Self:
        self._token = _CLOCKS.set((*_CLOCKS.get(), self))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        assert self._token is not None
        _CLOCKS.reset(self._token)

    @property
    def waited_s(self) -> float:
        """Seconds for which it has stood still; where parts of a call wait at the same time they count once."""
        return self._waited_s + (time.monotonic() - self._since if self._waiting else 0.0)

    def counted_s(self, begun_s: float, timeout_s: float) -> float:
        """Return the seconds that count since a time.

        Args:
            begun_s: The time, of `time.monotonic`; before that nothing has waited.
            timeout_s: Deadline of the call.
        """
        return time.monotonic() - begun_s - min(self.waited_s, _MOST_WAITED * timeout_s)

    async def finishes_within(self, call: asyncio.Future[Any], timeout_s: float) -> bool:
        """Wait for a call, and return whether it is done by its deadline."""
        begun_s, left_s = time.monotonic(), timeout_s
        while not call.done() and left_s > 0:
            await asyncio.wait({call}, timeout=left_s)
            left_s = timeout_s - self.counted_s(begun_s, timeout_s)
        return call.done()

    def _stop(self) -> None:
        if not self._waiting:
            self._since = time.monotonic()
            self.tell(True)
        self._waiting += 1

    def _go_on(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._waited_s += time.monotonic() - self._since
            self.tell(False)


@contextlib.contextmanager
def in_line() -> Iterator[None]:
    """Let the clocks of the present call stand still: what it waits for is held by others."""
    clocks = _CLOCKS.get()
    for clock in clocks:
        clock._stop()
    try:
        yield
    finally:
        for clock in clocks:
            clock._go_on()


class Places:
    """Places that are given away in the order in which they were asked for. Any thread may ask.

    Args:
        number: How many there are.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._taken = 0
        self._lock = threading.Lock()
        self._asked: deque[Future[None]] = deque()

    def ask(self) -> Future[None]:
        """Return what is done once a place is the caller's, who has to `leave` it then, or the line before."""
        asked: Future[None] = Future()
        with self._lock:
            self._asked.append(asked)
        self._give()
        return asked

    def leave(self, asked: Future[None]) -> None:
        """Give back a place, or withdraw from the line."""
        if asked.cancel():
            with self._lock, contextlib.suppress(ValueError):
                self._asked.remove(asked)
            return
        with self._lock:
            self._taken -= 1
        self._give()

    def resize(self, number: int) -> None:
        """Change how many places there are; those that are taken stay so."""
        self.number = number
        self._give()

    def _give(self) -> None:
        given = []
        with self._lock:
            while self._taken < self.number and self._asked:
                if (asked := self._asked.popleft()).set_running_or_notify_cancel():
                    self._taken += 1
                    given.append(asked)
        for asked in given:  # without the lock: this may call back
            asked.set_result(None)
