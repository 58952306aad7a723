"""Reading what a file system does not give at once.

A network file system whose server moves, or whose rights are renewed, refuses a read for a moment. A file that can't be
read is another thing than one that was read and is wrong: nobody knows what is in it, so nothing may be done to it.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hrl.errors import HrlError

T = TypeVar("T")

#: Seconds before each further attempt.
PAUSES_S = (0.2, 0.8, 2.0)
#: What is known for certain: there is no such file, or something else in its place.
_CERTAIN = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


class UnreadableError(HrlError, RuntimeError):
    """A file or folder can't be read, again and again; what is in it may be right."""

    may_pass = True


def patiently(read: Callable[[], T], path: Path) -> T:
    """Return what `read` does, after further attempts if the system refuses.

    Args:
        read: May be called several times.
        path: What it reads, unless the system names another file.

    Raises:
        UnreadableError: No attempt went well.
        OSError: There is no such file, or something else in its place; at the first attempt.
    """
    for pause_s in PAUSES_S:
        try:
            return read()
        except OSError as error:
            if error.errno in _CERTAIN:
                raise
        time.sleep(pause_s)
    try:
        return read()
    except OSError as error:
        if error.errno in _CERTAIN:
            raise
        raise UnreadableError(
            f"{error.filename or path} can't be read: {error.strerror or error} "
            f"({1 + len(PAUSES_S)} attempts within {sum(PAUSES_S):g} s)"
        ) from error
