"""A Ray of this process's own comes up soon, or is given up.

`ray.init` asks a control service that does not answer twenty times for 40 s each, and says in an exception of no kind
of its own that it did not come up.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hrl.processes.guard import ProcessEntry, kill_processes, process_table
from hrl.processes.watch import NEEDED, STOPPED, is_gone, state_of
from hrl.single_controller.own_ray import LOOK_S, VITAL
from hrl.single_controller.worker_errors import ClusterLostError

START_LIMIT_S = 120.0
"""How long Ray may take to come up: a few seconds where nothing else is at work, and Ray gives each part of it 30 s."""
_LAST_RESORT_S = 45.0
"""How long `ray.init` may take to see that its processes were killed; one connection takes it 40 s."""
_NOT_UP = re.compile(r"timed out during startup|Failed to start GCS|Timed out waiting for file")
"""What Ray says where a process of its own was not ready in time."""


class _Start:
    """The processes of a Ray that is being started."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        #: Of another Ray that this process has, or had: none of it is this one's to end.
        self._there_before = {entry.pid for entry in process_table() if entry.parent == os.getpid()}
        self._found: dict[ProcessEntry, str] = {}
        self._is_late = False
        self._ended: str | None = None
        self.over = threading.Event()

    def watch(self) -> None:
        """Kill the processes if they are not there in time; each if it stays stopped. End this one if that is no help.

        Returns when the start is over.
        """
        until = time.monotonic() + self._limit_s
        while not self.over.wait(LOOK_S):
            self.look()
            if time.monotonic() > until:
                break
        else:
            return
        self._is_late = True
        self.kill()
        if not self.over.wait(_LAST_RESORT_S):
            os.write(2, f"\n{ClusterLostError.__name__}: {self.told(self.why())}\n".encode())
            os._exit(1)

    def look(self) -> None:
        """Find the processes that are there by now, and note which has ended."""
        own = os.getpid()
        for entry in process_table():
            if entry.parent != own or entry.pid in self._there_before or entry in self._found:
                continue
            if (title := VITAL.get(_program(entry.pid))) is not None:
                self._found[entry] = title
                NEEDED.add(entry.pid, title)
        for entry, title in self._found.items():
            if self._ended is None and is_gone(entry.pid):
                self._ended = f"{title} (pid {entry.pid}) has ended"

    def why(self) -> str | None:
        """Return what has kept it from coming up; None if nothing is known."""
        reasons = (NEEDED.why_it_ended(entry.pid) for entry in self._found)
        if (reason := next(filter(None, reasons), None)) is not None:
            return reason
        # While Ray waits for its control service to name its port, no other thread of this process has a turn.
        for entry, title in self._found.items():
            if (state := state_of(entry.pid)) is not None and state.letter == STOPPED:
                return f"somebody has stopped {title} (pid {entry.pid}, SIGSTOP)"
        return f"it was not ready after {self._limit_s:g} s" if self._is_late else self._ended

    @staticmethod
    def told(why: str | None) -> str:
        """Return the sentence about a Ray that did not come up."""
        return (
            f"Ray did not come up on this machine: {why}. Start the run again, once the machine is less busy if that "
            "was it. Ray's logs are in session_latest/logs of its temporary folder (/tmp/ray, if RAY_TMPDIR says "
            "nothing else)"
        )

    def kill(self) -> None:
        """Kill the processes."""
        kill_processes([entry.identity for entry in self._found])

    def forget(self) -> None:
        """Watch them no longer."""
        for entry in self._found:
            NEEDED.remove(entry.pid)


def _program(pid: int) -> str:
    try:
        return Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0])).name
    except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
        return ""


@contextmanager
def coming_up(limit_s: float = START_LIMIT_S) -> Iterator[None]:
    """Give a Ray up that does not come up in time; wraps `ray.init`, which starts one.

    Raises:
        ClusterLostError: A process of it was stopped, has ended, or was not ready in time.
    """
    start = _Start(limit_s)
    watching = threading.Thread(target=start.watch, name="ray-start", daemon=True)
    watching.start()
    try:
        yield
    except Exception as error:  # Ray's own are of any kind; what is known of its processes decides
        start.over.set()
        watching.join()
        start.look()
        why = start.why() or (_first_line(error) if _NOT_UP.search(str(error)) else None)
        start.kill()
        if why is None:
            raise
        raise ClusterLostError(start.told(why)) from error
    finally:
        start.over.set()
        watching.join()
        start.forget()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
