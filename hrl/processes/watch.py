"""Nobody waits for a process that somebody has stopped: it is killed, and whoever needed it is told why it ended.

A process that gets SIGSTOP neither works nor dies, so its peers would wait for it until their deadline, and it is they
whom the deadline finds. Death, on the other hand, is noticed everywhere within seconds. So a thread of the process that
needs others looks at their state and kills those that stay stopped; `why_it_ended` is then part of the message of
whoever notices the death. On Linux only.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

STOPPED_S = 10.0
"""How long a process may stay stopped: long enough for Ctrl-Z and `fg`, and far shorter than any deadline of a call."""
_LOOK_S = 1.0
STOPPED = "T"  # by a signal; a debugger's stop is "t"
_GONE = "ZX"


@dataclass(frozen=True)
class ProcessState:
    """What the kernel says of a process.

    Attributes:
        letter: `R` runs, `S` and `D` wait, `T` is stopped, `Z` has ended.
        start: Tells processes apart that had the same pid one after the other.
    """

    letter: str
    start: str


def state_of(pid: int) -> ProcessState | None:
    """Return the state of a process of this machine; None if there is none, or the system doesn't say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessState(fields[0], fields[19])


def is_gone(pid: int) -> bool:
    """Return whether a process of this machine has ended."""
    state = state_of(pid)
    return state is None or state.letter in _GONE


@dataclass
class _Watched:
    title: str
    start: str
    kills: bool
    stopped_s: float = 0.0
    is_condemned: bool = False


class ProcessWatch:
    """Looks at processes of this machine, and kills those that stay stopped.

    Args:
        stopped_s: How long one may stay stopped.
        look_s: Interval of the looks.
    """

    def __init__(self, stopped_s: float = STOPPED_S, look_s: float = _LOOK_S) -> None:
        self._stopped_s, self._look_s = stopped_s, look_s
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._thread: threading.Thread | None = None

    def add(self, pid: int, title: str, *, kills: bool = True) -> None:
        """Watch a process from now on.

        Args:
            pid: Its id; that of a process that has ended does no harm.
            title: What it is, for `why_it_ended`.
            kills: Whether it is killed here. Otherwise whoever asks `why_it_ended` does so.
        """
        state = state_of(pid)
        if state is None:
            return
        with self._lock:
            self._watched[pid] = _Watched(title, state.start, kills)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="process-watch", daemon=True)
                self._thread.start()

    def remove(self, pid: int) -> None:
        """Watch a process no longer, and forget why it ended."""
        with self._lock:
            self._watched.pop(pid, None)

    def why_it_ended(self, pid: int) -> str | None:
        """Return the sentence about a process that is killed because it stayed stopped; None for any other."""
        with self._lock:
            watched = self._watched.get(pid)
        if watched is None or not watched.is_condemned:
            return None
        return (
            f"Somebody had stopped {watched.title} (pid {pid}, SIGSTOP) for {self._stopped_s:g} s. A stopped process "
            "holds up all others, so it was killed; let one go on with `kill -CONT` before that"
        )

    def look(self, passed_s: float) -> None:
        """Look at each process once.

        Args:
            passed_s: Time since the last look. While this process itself was stopped, no look was missed: only what
                one sees counts.
        """
        with self._lock:
            present = list(self._watched.items())
        for pid, watched in present:
            state = state_of(pid)
            if state is None or state.start != watched.start or watched.is_condemned:
                continue
            watched.stopped_s = watched.stopped_s + passed_s if state.letter == STOPPED else 0.0
            if watched.stopped_s >= self._stopped_s:
                watched.is_condemned = self._kill(pid) if watched.kills else True

    def _kill(self, pid: int) -> bool:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended while we looked
            return False
        except PermissionError:  # another user's, on a cluster that was joined: the deadline of the call has to do
            return False
        return True

    def _run(self) -> None:
        while True:
            time.sleep(self._look_s)
            with self._lock:
                if not self._watched:
                    self._thread = None
                    return
            self.look(self._look_s)


#: The processes that this one needs, whatever they are.
NEEDED = ProcessWatch()
