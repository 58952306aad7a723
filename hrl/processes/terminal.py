"""Output to a terminal that may be closed while a run goes on: what is written from then on goes nowhere.

A terminal that was closed sends SIGHUP, and answers writes with an error. The error may come first, and would end a run
that the signal has saved in order.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STREAMS: Final = {"stdout": 1, "stderr": 2}


class TerminalOutput:
    """The standard streams of this process that lead to a terminal."""

    def __init__(self) -> None:
        self._descriptors = [descriptor for descriptor in _STREAMS.values() if os.isatty(descriptor)]

    def survive(self) -> None:
        """Have `sys.stdout` and `sys.stderr` take it that the terminal is closed."""
        for name, descriptor in _STREAMS.items():
            stream = getattr(sys, name)
            if descriptor in self._descriptors and isinstance(stream, io.TextIOWrapper):
                stream.flush()
                raw = io.BufferedWriter(_Terminal(descriptor, self))
                lasting = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
                setattr(sys, name, lasting)

    def leave(self) -> None:
        """Write nowhere from now on."""
        if self._descriptors:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in self._descriptors:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)


class _Terminal(io.FileIO):
    def __init__(self, descriptor: int, output: TerminalOutput) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._output = output

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._output.leave()
            return memoryview(data).nbytes
