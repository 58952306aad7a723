"""An event loop whose time passes only while everybody waits, and then at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skips(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0 if timeout else timeout)
        if not events and timeout:
            self.now += timeout
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skips = _Skips()
        super().__init__(self._skips)

    def time(self) -> float:
        return self._skips.now


def run_at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run what waits for no other thread or process, and skip the time in which it would wait."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)
