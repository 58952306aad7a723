"""How long an episode may take: its clock stands while it waits for an engine, or in line behind other episodes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class EpisodeClock:
    """Counts the seconds of an episode that are its environment's, over all its attempts.

    An engine with much to do is no fault of an episode's; there is one deadline for the whole batch, which counts all.

    Args:
        seconds: That the episode may take, without those in which it waits for an engine.
        ends_at: Time of the event loop at which it ends in any case.
    """

    def __init__(self, seconds: float, ends_at: float = math.inf) -> None:
        self._loop = asyncio.get_running_loop()
        self._left_s, self._since, self._ends_at = seconds, self._loop.time(), ends_at
        self._num_waits = 0
        self._cut_off: asyncio.Timeout | None = None

    @property
    def is_over(self) -> bool:
        """Whether the episode may not go on."""
        return self._loop.time() >= self._due

    @property
    def _due(self) -> float:
        """When it is over, if nothing changes; a time of the loop."""
        return self._ends_at if self._num_waits else min(self._ends_at, self._since + self._left_s)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Timeout]:
        """Cut off what is awaited in this context, with a `TimeoutError`, when the time is over."""
        try:
            async with asyncio.timeout_at(self._due) as self._cut_off:
                yield self._cut_off
        finally:
            self._cut_off = None

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Let no time pass in this context, in which an engine is waited for; several may overlap."""
        self.stop()
        try:
            yield
        finally:
            self.go_on()

    def stop(self) -> None:
        """Let no time pass until `go_on` has been called as often as this."""
        if self._num_waits == 0:
            self._left_s -= self._loop.time() - self._since
        self._num_waits += 1
        self._set()

    def go_on(self) -> None:
        """Undo one `stop`."""
        self._num_waits -= 1
        if self._num_waits == 0:
            self._since = self._loop.time()
        self._set()

    def _set(self) -> None:
        if self._cut_off is not None and not self._cut_off.expired():
            self._cut_off.reschedule(None if math.isinf(self._due) else self._due)
