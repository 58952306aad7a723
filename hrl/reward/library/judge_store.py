"""What a judge said already, and when it may be asked next: shared by the processes of a run, and by later runs."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from hrl.reward.library.base import ArgumentError

_WAIT_FOR_LOCK_S = 10.0
MOST_REPLIES = 50_000
"""So many replies are kept, the latest ones; of two kilobytes each, as a reply of 512 tokens has, 100 MB."""
_TABLES = """
create table if not exists replies (key text primary key, reply text not null);
create table if not exists pace (only integer primary key check (only = 0), next real not null);
insert or ignore into pace values (0, 0.0);
"""


class JudgeStore:
    """Replies by key, and the time of the next turn.

    Args:
        path: A file; None keeps everything in this process's memory.

    Raises:
        ArgumentError: The file can't be opened.
    """

    def __init__(self, path: str | Path | None) -> None:
        where = ":memory:" if path is None else str(Path(path).expanduser())
        try:
            if path is not None:
                Path(where).parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(where, timeout=_WAIT_FOR_LOCK_S, isolation_level=None)
            self._file.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ArgumentError(f"cache {where} can't be used: {error}") from error

    def reply(self, key: str) -> str | None:
        """Return what was said; None if it was not asked yet."""
        row = self._file.execute("select reply from replies where key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, key: str, reply: str) -> None:
        """Remember what was said, and forget what was said `MOST_REPLIES` replies ago."""
        self._file.execute("insert or replace into replies values (?, ?)", (key, reply))
        self._file.execute("delete from replies where rowid <= (select max(rowid) from replies) - ?", (MOST_REPLIES,))

    def take_turn(self, apart_s: float) -> float:
        """Reserve the next turn, and return how many seconds it is away.

        Args:
            apart_s: Seconds between two turns, over all processes.
        """
        now = time.time()
        (turn,) = self._file.execute(
            "update pace set next = max(next, ?) + ? returning next - ?", (now, apart_s, apart_s)
        ).fetchone()
        return max(0.0, float(turn) - now)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
