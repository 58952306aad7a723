"""A file or a folder of this process in a place that others see too, and what dead processes have left there.

Whoever lives holds a lock on its own. A lock says nothing of another machine, since some network file systems keep
locks for each machine apart; so a name says whose it is. And what has its name is locked already: it is made under
another name, under which nobody looks for it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_UNFINISHED_S = 3600.0
"""After which what was made and not given its name is no longer on its way to it."""
_ELSEWHERE_S = 7 * 86_400.0
"""After which what another machine has left is dead, if nothing was written to it and nobody here holds its lock."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class OwnPlace:
    """A file or a folder, empty at first, that is removed with its owner, or by others once its owner is dead.

    Args:
        root: Where it lies. What dead processes have left there is removed.
        kind: What its name begins with.
        is_folder: Whether it is a folder.

    Attributes:
        path: Its name.
        handle: The open file or folder, which holds the lock.

    Raises:
        OSError: It can't be made there.
    """

    def __init__(self, root: Path, kind: str, *, is_folder: bool) -> None:
        remove_what_was_left(root, kind)
        name = f"{kind}-{this_machine()}-{secrets.token_hex(8)}"
        unnamed = root / f".{name}"
        if is_folder:
            unnamed.mkdir()
            self.handle = os.open(unnamed, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            self.handle = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.path = root / name
        try:
            with suppress(OSError):  # of a file system without locks, where nobody removes what was left
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(self.path)
        except BaseException:
            os.close(self.handle)
            _remove(unnamed)
            raise

    def touch(self) -> None:
        """Show other machines that its owner lives."""
        with suppress(OSError):
            os.utime(self.handle)

    def remove(self) -> None:
        """Remove it. To be called once."""
        _remove(self.path)  # before the lock goes
        os.close(self.handle)


def this_machine() -> str:
    """Return what names made here have in them: the host, and its kernel's start, which tells equal hosts apart."""
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:64] or "host"
    try:
        start = _BOOT_ID.read_text()[:8]
    except OSError:
        start = ""
    return f"{host}.{start}"


def remove_what_was_left(root: Path, kind: str) -> None:
    """Remove what dead processes of this machine have left, and what others have not written to for a week.

    Args:
        root: Where it lies.
        kind: What its name begins with.

    Raises:
        OSError: Nothing can be written there.
    """
    own = f"{kind}-{this_machine()}-"
    with tempfile.TemporaryFile(dir=root) as probe:  # the clock of those who wrote there, whatever this machine's says
        now = os.fstat(probe.fileno()).st_mtime
    made_here = re.compile(rf"\.?{re.escape(kind)}-[\w.]+-[0-9a-f]{{16}}")  # nothing that a user may have named so
    for path in [*root.glob(f"{kind}-*"), *root.glob(f".{kind}-*")]:
        if not made_here.fullmatch(path.name):
            continue
        is_named, is_own = not path.name.startswith("."), path.name.removeprefix(".").startswith(own)
        least_s = _ELSEWHERE_S if not is_own else 0.0 if is_named else _UNFINISHED_S
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if now - os.fstat(handle).st_mtime >= least_s:
                    _remove(path)
            finally:
                os.close(handle)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
