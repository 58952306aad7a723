"""An event loop that knows for whom it works, so that each of its callers has a clock of its own."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from hrl.processes.shared_state import SharedState
from hrl.processes.waiting import Clock

CALLER: contextvars.ContextVar[int] = contextvars.ContextVar("caller", default=0)
"""For whom the present code runs; 0 is nobody."""


class AttributingLoop(asyncio.SelectorEventLoop):
    """Records which caller each callback runs for: the one that scheduled it, also through tasks of tasks.

    Args:
        state: State that the parent reads.
    """

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._held_s: dict[int, float] = {}
        self._all_held_s = 0.0
        self._clocks: weakref.WeakKeyDictionary[asyncio.Task[Any], Clock] = weakref.WeakKeyDictionary()
        self._is_ending = False
        self._own_pid = os.getpid()
        super().__init__()

    def create_attributed(self, caller: int, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Create a task that runs for `caller`, which must not be 0."""
        context = contextvars.copy_context()
        context.run(CALLER.set, caller)
        self._held_s.setdefault(caller, 0.0)
        clock = Clock()
        context.run(clock.__enter__)
        task = self.create_task(coroutine, context=context)
        self._clocks[task] = clock
        return task

    def clock_of(self, call: asyncio.Task[Any]) -> Clock:
        """Return the clock of a call of a caller."""
        return self._clocks[call]

    async def finishes_within(self, call: asyncio.Task[Any], caller: int, timeout_s: float) -> bool:
        """Wait for a call of a caller, and return whether it is done by its deadline.

        Its clock is paused while others occupy the loop, so that calls aren't charged for each other's computation, and
        while it waits in line (`hrl.processes.waiting`).
        """
        left_s, clock = timeout_s, self._clocks[call]
        begun_s, others_s = time.monotonic(), self.held_by_others_s(caller)
        while not call.done() and left_s > 0:
            await asyncio.wait({call}, timeout=left_s)
            held_s = self.held_by_others_s(caller) - others_s
            left_s = timeout_s - (clock.counted_s(begun_s, timeout_s) - held_s)
        return call.done()

    def held_by_others_s(self, caller: int) -> float:
        """Return the seconds spent so far in callbacks of all other callers."""
        return self._all_held_s - self._held_s.get(caller, 0.0)

    def forget(self, caller: int) -> None:
        """Delete the record of a caller."""
        self._held_s.pop(caller, None)

    def note(self, caller: int) -> None:
        """Record that a caller, or none if 0, occupies the loop from now on."""
        if not self._is_ending:
            self._state.hold(caller)

    def call_soon(  # type: ignore[override]  # the base has type variables for the arguments
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback as asyncio does, to be noted while it runs."""
        return super().call_soon(self._run_noted, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback as asyncio does, to be noted while it runs."""
        return super().call_at(when, self._run_noted, callback, *args, context=context)

    def _run_noted(self, callback: Callable[..., object], *args: Any) -> None:
        caller = CALLER.get()
        if caller == 0:
            callback(*args)
            return
        self.note(caller)
        begun_s = time.monotonic()
        try:
            callback(*args)
        except (SystemExit, KeyboardInterrupt):
            self._is_ending = True  # callbacks during the exit must not hide which caller ends the process
            raise
        finally:
            if os.getpid() != self._own_pid:  # a fork that came back here: the loop is its parent's
                os._exit(0)
            held_s = time.monotonic() - begun_s
            self._all_held_s += held_s
            self._held_s[caller] = self._held_s.get(caller, 0.0) + held_s
            self.note(0)
