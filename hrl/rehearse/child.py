"""A run of a rehearsal as its user would start it, followed by what it says in JSON and by what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from hrl.errors import HrlError

_LOOK_S = 0.1
_LAST_LINES = 30
_NEEDS: dict[str, tuple[str, type]] = {"stage": ("title", str), "step": ("step", int), "validation": ("step", int)}
"""Event → a field that it has, and of what type."""


class StuckError(HrlError):
    """A run took longer than it was given."""


class Child:
    """One start of a run.

    Args:
        program: The module that is run, `hrl.trainer.main_ppo` or another.
        arguments: Its arguments.
        environ: Its environment.
        errors: A file for what it writes to standard error.
        limit_s: Seconds that it may take.
    """

    def __init__(
        self, program: str, arguments: list[str], environ: Mapping[str, str], errors: Path, limit_s: float
    ) -> None:
        self._errors, self._limit_s = errors, limit_s
        self._deadline = time.monotonic() + limit_s
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._others: deque[str] = deque(maxlen=_LAST_LINES)
        with errors.open("ab") as written:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=written,
                env=dict(environ),
                start_new_session=True,  # Ctrl-C is for the rehearsal, which then ends it
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            try:
                said = json.loads(line)
            except ValueError:
                said = None
            if _is_event(said):
                self._events.put(said)
            else:  # of a library, or of the user's code
                self._others.append(line.decode(errors="replace").rstrip())
        self._events.put(None)

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Yield what the run says until it has ended, and None from time to time.

        Raises:
            StuckError: It has taken longer than it may.
        """
        while True:
            try:
                said = self._events.get(timeout=_LOOK_S)
            except queue.Empty:
                said = {}
            if said is None:
                return
            yield said or None
            if time.monotonic() > self._deadline:
                raise StuckError(f"it has not come further in {self._limit_s:.0f} s; --timeout gives it more")

    def wait(self) -> int:
        """Return the exit status of a run that has said its last.

        Raises:
            StuckError: It has not ended in the time that it has.
        """
        try:
            return self._process.wait(timeout=max(1.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise StuckError(f"it has said its last and not ended in {self._limit_s:.0f} s") from None

    def family(self) -> list[psutil.Process]:
        """Return its processes, itself first."""
        try:
            mine = psutil.Process(self._process.pid)
            return [mine, *mine.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self, victim: psutil.Process | None = None) -> None:
        """Send SIGKILL to its driver, or to one of its other processes; one that has ended by itself gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid if victim is None else victim.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """Return the end of what it wrote for people."""
        text = self._errors.read_text(errors="replace") if self._errors.exists() else ""
        return "\n".join([*self._others, *text.splitlines()][-_LAST_LINES:]).strip()

    def end(self) -> None:
        """Kill what is left of it; its guards end what has left its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
        self._process.wait()


def _is_event(said: object) -> bool:
    """Return whether a line of standard output is the run's own, not one of the user's code that looks like it."""
    if not isinstance(said, dict) or not isinstance(said.get("event"), str):
        return False
    needs = _NEEDS.get(said["event"])
    return needs is None or isinstance(said.get(needs[0]), needs[1])
