"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for a caller that has no event loop, or that must not be blocked by one.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """Run a coroutine to its end.

        Raises:
            TimeoutError: It took longer; it is cancelled, and the message says what it was.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout=timeout_s)
        except FutureTimeoutError:
            if future.done():  # the coroutine's own timeout, not ours
                raise
            future.cancel()
            raise TimeoutError(f"{what} took longer than {timeout_s:g} s") from None

    def stop(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs and end the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
            self._thread.join(timeout_s)
        if not self._thread.is_alive() and not self._loop.is_closed():
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()
        self._loop.stop()
