"""Standard output and standard error of a command that goes on without them: its results are in files.

A terminal that was closed sends SIGHUP, and answers writes with an error. The error may come first, and would end a run
that the signal has saved in order. A pipe that nobody reads any more answers with an error, too, and so does a file
while its disk is full.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Final, TypeGuard

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STREAMS: Final = {"stdout": 1, "stderr": 2}
_UNENCODABLE: Final = "backslashreplace"


def write_any_text() -> None:
    """Have `sys.stdout` and `sys.stderr` write what their encoding lacks as an escape, rather than raise."""
    for name in _STREAMS:
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # a notebook's are others, and take any text
            stream.reconfigure(errors=_UNENCODABLE)


class StandardStreams:
    """The standard streams of this process.

    Args:
        only_terminals: Whether files and pipes are left alone: what goes there is what the command is for.

    Attributes:
        lost: Writes that a stream refused, unless it was closed.
    """

    def __init__(self, *, only_terminals: bool = False) -> None:
        self.lost = 0
        self._terminals = [descriptor for descriptor in _STREAMS.values() if os.isatty(descriptor)]
        self._lasting = self._terminals if only_terminals else list(_STREAMS.values())

    def survive(self) -> None:
        """Have `sys.stdout` and `sys.stderr` raise no error: what can't be written is lost.

        From when a terminal or a pipe is closed on, what is written there goes nowhere.
        """
        for name, descriptor in _STREAMS.items():
            stream = getattr(sys, name)
            if descriptor in self._lasting and _leads_to(stream, descriptor):
                with suppress(OSError):  # it is full or closed already
                    stream.flush()
                raw = io.BufferedWriter(_Lasting(descriptor, self))
                setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, _UNENCODABLE, line_buffering=True))

    def leave_terminal(self) -> None:
        """Write nowhere from now on what goes to a terminal."""
        _lead_nowhere(*self._terminals)

    def refused(self, descriptor: int, error: OSError) -> None:
        """Take it that a write to one of the streams raised an error."""
        if error.errno == errno.EPIPE:
            _lead_nowhere(descriptor)
        elif error.errno == errno.EIO and descriptor in self._terminals:
            self.leave_terminal()
        else:
            self.lost += 1


def _leads_to(stream: IO[str] | None, descriptor: int) -> TypeGuard[io.TextIOWrapper]:
    """Return whether a stream writes to a descriptor, and is not one that a test or a notebook has put in its place."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor
    except (OSError, ValueError):  # it has none, or is closed
        return False


def _lead_nowhere(*descriptors: int) -> None:
    if descriptors:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in descriptors:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)


class _Lasting(io.FileIO):
    def __init__(self, descriptor: int, streams: StandardStreams) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._streams = streams

    def write(self, data: ReadableBuffer) -> int:
        try:
            while (written := super().write(data)) is None:  # it does not wait by itself, and its reader is slow
                select.select((), (self,), ())
        except OSError as error:
            self._streams.refused(self.fileno(), error)
            return memoryview(data).nbytes
        return written
