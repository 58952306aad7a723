"""Run a program of a benchmark, and note when it first wrote something and when each of its steps ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from bench import peers

_LOOKS_EVERY_S = 0.05
# A user does not set how many threads a program has, and a benchmark's process does.
_NOT_PASSED_ON = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Ran:
    """A program that has ended.

    Attributes:
        first_output_s: Seconds from its start until it first wrote something on the screen.
        ended_s: Seconds from its start until each step had ended and its metrics were written.
        metrics: Of each step.
    """

    first_output_s: float
    ended_s: Sequence[float]
    metrics: Sequence[dict[str, Any]]

    @property
    def steps_s(self) -> list[float]:
        """Seconds of each step but the first, from the end of one to the end of the next."""
        return [end - begin for begin, end in zip(self.ended_s, self.ended_s[1:], strict=False)]


def run(command: Sequence[str], metrics: Path, key: str, *, deadline_s: float) -> Ran:
    """Run a program to its end.

    Args:
        command: Of the program, whose processes may import the peers.
        metrics: The file to which it adds a line of JSON for each step.
        key: What only a line of a trained step has.
        deadline_s: Within how many seconds it has to end.

    Raises:
        RuntimeError: It ended with an error, which is the end of what it wrote.
        TimeoutError: It did not end.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(peers.FOLDER))))
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    screen = _Screen(process, began)
    ended_s: list[float] = []
    try:
        while True:
            is_over = process.poll() is not None
            now = time.perf_counter() - began
            found = _lines(metrics, key)
            ended_s += [now] * (len(found) - len(ended_s))
            if is_over:
                break
            if now > deadline_s:
                raise TimeoutError(f"{' '.join(command[:4])} … did not end within {deadline_s:g} s\n{screen.end()}")
            time.sleep(_LOOKS_EVERY_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} … ended with status {process.returncode}\n{screen.end()}")
    assert screen.first_s is not None
    return Ran(screen.first_s, ended_s, found)


def _lines(file: Path, key: str) -> list[dict[str, Any]]:
    """Return the lines that are whole and have the key."""
    if not file.is_file():
        return []
    whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    return [row for row in map(json.loads, whole.splitlines()) if key in row]


class _Screen:
    """What a program writes, read as it comes."""

    def __init__(self, process: subprocess.Popen[bytes], began: float) -> None:
        self.first_s: float | None = None
        self._process, self._began, self._text = process, began, b""
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while piece := os.read(self._process.stdout.fileno(), 1 << 16):
            if self.first_s is None and piece.strip():
                self.first_s = time.perf_counter() - self._began
            self._text = (self._text + piece)[-4000:]

    def end(self) -> str:
        """Return the end of it."""
        self._thread.join(1)
        return self._text.decode(errors="replace")
