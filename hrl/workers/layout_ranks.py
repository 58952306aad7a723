"""Two processes beside the driver that compare models in layouts, see `hrl.workers.layout_probe`."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hrl.errors import HrlError
from hrl.processes.child_environment import child_environment
from hrl.processes.lifetime import die_with_parent
from hrl.workers.layout_probe import NUM_RANKS, Layout, LayoutRequest, LayoutResult, compare_layouts

#: Of the ranks' environment: one thread each, no GPU, and no other machine.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_STARTED, _FOUND, _FAILED = "started", "found", "failed"
_START_TIMEOUT_S = 300.0
_GRACE_S = 5.0
#: What gloo says when the other rank has gone.
_LOST_PEER = re.compile("[Cc]onnection|[Tt]imed out|gloo")


class LayoutRanksError(HrlError, RuntimeError):
    """The two processes did not come to a result; the message says what happened."""


class LayoutRanks:
    """Both processes, from the first question to the end of the block.

    A question that fails ends them, and the next one starts new ones.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        self._folder.cleanup()

    def ask(self, request: LayoutRequest, deadline_s: float) -> dict[Layout, LayoutResult]:
        """Return what both ranks found.

        Args:
            request: What to compare.
            deadline_s: After which they are ended, once they have started.

        Raises:
            LayoutRanksError: They did not find the same, one ended, or they took too long; or no cut of the model runs.
        """
        try:
            if not self._pipes:
                self._start()
            with tempfile.TemporaryDirectory() as folder:
                for pipe in self._pipes:
                    with contextlib.suppress(BrokenPipeError):  # it has ended, as its answer will say
                        pipe.send((request.plain(), folder))
                answers = self._answers(deadline_s, f"did not compare {request.path}")
        except BaseException:
            self._end()
            raise
        for kind, found in answers:
            if kind == _FAILED:
                raise LayoutRanksError(found)
        (_, first), (_, second) = answers
        return {layout: _worse(LayoutResult(**first[layout]), LayoutResult(**second[layout])) for layout in first}

    def _start(self) -> None:
        environment = child_environment() | _ENVIRONMENT
        if sys.platform.startswith("linux"):
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        for rank in range(NUM_RANKS):
            ours, theirs = Pipe()
            self._pipes.append(ours)
            command = [sys.executable, "-m", "hrl.workers.layout_ranks", str(rank), str(theirs.fileno())]
            with theirs, self._errors(rank).open("wb") as errors:
                self._processes.append(
                    subprocess.Popen(
                        [*command, str(os.getpid())],
                        env=environment,
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                    )
                )
        self._answers(_START_TIMEOUT_S, "did not start")

    def _answers(self, timeout_s: float, what: str) -> list[tuple[str, Any]]:
        """Return a message of each."""
        end, missing = time.monotonic() + timeout_s, dict(enumerate(self._pipes))
        found: dict[int, tuple[str, Any]] = {}
        while missing:
            ready = wait([*missing.values()], max(0.0, end - time.monotonic()))
            if not ready:
                raise LayoutRanksError(f"the {len(missing)} of {NUM_RANKS} processes {what} within {timeout_s:g} s")
            for rank in [rank for rank, pipe in missing.items() if pipe in ready]:
                try:
                    found[rank] = missing.pop(rank).recv()
                except (EOFError, OSError) as error:
                    code = self._processes[rank].wait(_GRACE_S)
                    ended = f"process {rank} {what}: it ended with exit status {code}"
                    raise LayoutRanksError(f"{ended}{self._last_words(rank)}") from error
        return [found[rank] for rank in sorted(found)]

    def _errors(self, rank: int) -> Path:
        return Path(self._folder.name, f"{rank}.stderr")

    def _last_words(self, rank: int) -> str:
        """Return the last line of what a process wrote to standard error, which names the error that ended it."""
        lines = [line for line in self._errors(rank).read_text(errors="replace").splitlines() if line.strip()]
        return f" ({lines[-1].strip()})" if lines else ""

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.wait(_GRACE_S)
        self._processes, self._pipes = [], []


def _worse(one: LayoutResult, other: LayoutResult) -> LayoutResult:
    """Return the result of the rank that failed first: the other then lost its peer."""
    if not one.is_right and not other.is_right and _LOST_PEER.search(one.wrong):
        return other
    return other if one.is_right else one


def _serve(rank: int, pipe: Connection) -> None:
    """Answer questions until there are no more."""
    pipe.send((_STARTED, None))
    with contextlib.suppress(EOFError):
        while True:
            request, folder = pipe.recv()
            try:
                found = compare_layouts(rank, LayoutRequest(**request), Path(folder))
            except (HrlError, OSError, ValueError) as error:
                pipe.send((_FAILED, str(error)))
                continue
            pipe.send((_FOUND, {layout: asdict(result) for layout, result in found.items()}))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    _serve(int(sys.argv[1]), Connection(int(sys.argv[2])))
