"""What a run would write to its folder while the disk refuses it: kept in memory, within bounds, and written later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

MOST_BYTES = 64 << 20
"""So much is kept: thousands of records of the log, beside the samples of some steps."""


class _Write(NamedTuple):
    do: Callable[[], object]
    size_bytes: int


class Unwritten:
    """Writes, in their order; those that the disk refuses are kept, and tried again before the next one.

    What is more than memory is to keep is lost, and counted: the largest first, which are samples and not the log.

    Args:
        is_kept: Whether a refused write is kept (`trainer.on_save_error=continue`). Else its error is raised, and the
            write is forgotten.
        most_bytes: What is kept at most.

    Attributes:
        refusal: Why the disk refuses what waits; None if nothing waits.
        lost: Writes that were given up.
    """

    def __init__(self, *, is_kept: bool, most_bytes: int = MOST_BYTES) -> None:
        self.refusal: OSError | None = None
        self.lost = 0
        self._is_kept, self._most_bytes = is_kept, most_bytes
        self._waiting: deque[_Write] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def write(self, do: Callable[[], object], size_bytes: int) -> None:
        """Write, after what waits; or keep it if the disk refuses.

        Args:
            do: Writes all of it or nothing.
            size_bytes: What it takes in memory.

        Raises:
            OSError: The disk refuses, and nothing is to be kept.
        """
        if not self._is_kept:
            do()
            return
        self._waiting.append(_Write(do, size_bytes))
        self.try_again()
        while sum(write.size_bytes for write in self._waiting) > self._most_bytes:
            self._waiting.remove(max(self._waiting, key=lambda write: write.size_bytes))
            self.lost += 1

    def try_again(self) -> None:
        """Write what waits, up to what the disk refuses."""
        self.refusal = None
        while self._waiting and self.refusal is None:
            write = self._waiting.popleft()
            try:
                write.do()
            except OSError as error:
                self.refusal = error
                self._waiting.appendleft(write)
