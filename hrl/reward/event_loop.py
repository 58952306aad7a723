"""An event loop that knows which of its callers holds it, and tells another process.

When a loop stands still, something in it computes or waits without `await`. From outside that is visible only if the
name of the caller was written down before: here, into two numbers of shared memory.
"""

from __future__ import annotations

import asyncio
import contextvars
import mmap
import os
import struct
import time
from collections.abc import Callable, Coroutine
from typing import Any

_CALLER: contextvars.ContextVar[int] = contextvars.ContextVar("caller", default=0)
_NUMBER = struct.Struct("=q")


class LoopState:
    """Who holds a loop, and since when: shared between its process and the one that watches it.

    Args:
        descriptor: Of a memory file, as `create` gives; it is closed.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 2 * _NUMBER.size)
        os.close(descriptor)

    @staticmethod
    def create() -> int:
        """Return the descriptor of a new memory file, held by nobody since now."""
        descriptor = os.memfd_create("reward-loop")
        os.ftruncate(descriptor, 2 * _NUMBER.size)
        os.pwrite(descriptor, _NUMBER.pack(time.monotonic_ns()), 0)
        return descriptor

    def write(self, holder: int) -> None:
        """Notes that `holder` has the loop from now on; 0 is nobody."""
        # The time first: a reader that comes between the two writes sees a loop that has just moved.
        _NUMBER.pack_into(self._memory, 0, time.monotonic_ns())
        _NUMBER.pack_into(self._memory, _NUMBER.size, holder)

    def read(self) -> tuple[int, float]:
        """Return the holder, and the moment of the last change, on the clock of `time.monotonic`."""
        (holder,) = _NUMBER.unpack_from(self._memory, _NUMBER.size)
        (since_ns,) = _NUMBER.unpack_from(self._memory, 0)
        return holder, since_ns / 1e9

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class AttributingLoop(asyncio.SelectorEventLoop):
    """Notes for whom each callback runs: for the caller in whose context it was scheduled, tasks of tasks included.

    Args:
        state: Where the parent reads it.
    """

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._held_s: dict[int, float] = {}
        self._all_held_s = 0.0
        self._is_ending = False
        super().__init__()

    def create_attributed(self, caller: int, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Return a task that runs for `caller`, which is not 0."""
        context = contextvars.copy_context()
        context.run(_CALLER.set, caller)
        self._held_s[caller] = 0.0
        return self.create_task(coroutine, context=context)

    def held_by_others_s(self, caller: int) -> float:
        """Seconds that callbacks of all other callers have taken so far."""
        return self._all_held_s - self._held_s.get(caller, 0.0)

    def forget(self, caller: int) -> None:
        """End the account of a caller."""
        self._held_s.pop(caller, None)

    def touch(self) -> None:
        """Shows that the loop turns."""
        self._note(0)

    def call_soon(  # type: ignore[override]  # the base's type variables say the same at greater length
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As in asyncio; the callback is noted while it runs."""
        return super().call_soon(self._run_noted, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """As in asyncio; the callback is noted while it runs."""
        return super().call_at(when, self._run_noted, callback, *args, context=context)

    def _run_noted(self, callback: Callable[..., object], *args: Any) -> None:
        caller = _CALLER.get()
        if caller == 0:
            callback(*args)
            return
        self._note(caller)
        begun_s = time.monotonic()
        try:
            callback(*args)
        except (SystemExit, KeyboardInterrupt):
            self._is_ending = True  # what still runs on the way out must not hide which caller ends the process
            raise
        finally:
            held_s = time.monotonic() - begun_s
            self._all_held_s += held_s
            self._held_s[caller] = self._held_s.get(caller, 0.0) + held_s
            self._note(0)

    def _note(self, caller: int) -> None:
        if not self._is_ending:
            self._state.write(caller)
