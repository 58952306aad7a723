"""What a judge said already, and when it may be asked next: shared by the processes of a run, and by later runs."""

from __future__ import annotations

import functools
import logging
import socket
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hrl.files import expanded
from hrl.reward.library.base import ArgumentError

logger = logging.getLogger(__name__)

_WAIT_FOR_LOCK_S = 10.0
_MEMORY = ":memory:"
MOST_REPLIES = 50_000
"""So many replies are kept, the latest ones; of two kilobytes each, as a reply of 512 tokens has, 100 MB."""
_TABLES = """
create table if not exists replies (key text primary key, reply text not null);
create table if not exists turns (boot text primary key, next real not null);
"""


@functools.cache
def _boot() -> str:
    """Return since when `time.monotonic` counts: a name of this start of this machine."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else socket.gethostname()


class JudgeStore:
    """Replies by key, and the time of the next turn.

    If the file breaks on the way (a full disk, a lock that is not given back), a warning says so, and everything is
    kept in memory from then on.

    Args:
        path: A file; None keeps everything in this process's memory.
        processes: How many processes share the file.

    Raises:
        ArgumentError: The file can't be opened.
    """

    def __init__(self, path: str | Path | None, processes: int = 1) -> None:
        where = _MEMORY if path is None else str(expanded(path))
        try:
            if path is not None:
                Path(where).parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(where, timeout=_WAIT_FOR_LOCK_S, isolation_level=None)
            self._file.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ArgumentError(f"cache {where} can't be used: {error}") from error
        self._where, self._sharers, self._has_broken = where, processes, False

    def reply(self, key: str) -> str | None:
        """Return what was said; None if it was not asked yet."""
        rows = self._rows("select reply from replies where key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def keep(self, key: str, reply: str) -> None:
        """Remember what was said, and forget what was said `MOST_REPLIES` replies ago."""
        self._rows("insert or replace into replies values (?, ?)", (key, reply))
        self._rows("delete from replies where rowid <= (select max(rowid) from replies) - ?", (MOST_REPLIES,))

    def take_turn(self, apart_s: float) -> float:
        """Reserve the next turn, and return how many seconds it is away.

        Args:
            apart_s: Seconds between two turns, over all processes.
        """
        now = time.monotonic()  # of the machine, and not set back or forward as its date may be
        turn = (
            "insert into turns values (?1, ?2 + ?3) "
            "on conflict do update set next = max(next, ?2) + ?3 returning next - ?3"
        )
        if self._has_broken:
            apart_s *= self._sharers  # the others no longer see the turns of this process
        ((next_turn,),) = self._rows(turn, (_boot(), now, apart_s))
        return max(0.0, float(next_turn) - now)

    def _rows(self, statement: str, values: Sequence[Any]) -> list[Any]:
        try:
            return self._file.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            if self._has_broken or self._where == _MEMORY:
                raise
            logger.warning("the judge's cache %s can't be used any more, goes on without: %s", self._where, error)
            self._file.close()
            self._has_broken = True
            self._file = sqlite3.connect(_MEMORY, isolation_level=None)
            self._file.executescript(_TABLES)
            return self._file.execute(statement, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
