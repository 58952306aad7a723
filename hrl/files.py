"""How a file of a run is named and written: whole or not at all, and never through a link that somebody left there."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.partial", re.DOTALL)


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder in place of `~`.

    A user whom nobody knows, or who has no home, as in a container with a number for a user, leaves `~name` as it is:
    what is not there is told by its name. `Path.expanduser` raises a `RuntimeError`.
    """
    return Path(os.path.expanduser(path))


def write_whole(path: Path, content: str | bytes, *, durable: bool = False, mode: int = 0o666) -> Path:
    """Write a file so that whoever reads it sees the old one or all of the new one.

    A link of this name is replaced, and what it leads to stays as it is.

    Args:
        path: Of the file.
        content: Of the file.
        durable: Whether the content outlives a crash of the machine; its name does when the folder is made durable.
        mode: Who may do what with it, before the process's umask.

    Raises:
        OSError: The disk refuses; names the file. The old one is still there, and no part of the new one.
    """
    # A name that nobody can guess, and a file that is new: a link that waits under it is not written through.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    data = content.encode() if isinstance(content, str) else content
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(handle)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise naming(error, path) from error
    return path


def unfinished_in(folder: Path) -> list[Path]:
    """Return what a writer left in a folder that was killed in `write_whole`."""
    return sorted(path for path in folder.glob(".*.partial") if _UNFINISHED.fullmatch(path.name))


def unfinished_beside(folder: Path) -> Path:
    """Return the name under which a folder is made until it is whole."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.unfinished")


def unfinished(name: str) -> str:
    """Return the pattern of what processes left which were killed while they made a folder of this name."""
    return f".{name}.{'[0-9a-f]' * 16}.unfinished"


def add_whole(path: Path, text: str) -> None:
    """Add text to the end of a file, created if missing: all of it, or none if the disk refuses.

    Raises:
        OSError: The disk refuses; names the file, which is as it was.
    """
    handle = open_itself(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    size = os.fstat(handle).st_size
    try:
        left = memoryview(text.encode())
        try:
            while left:
                left = left[os.write(handle, left) :]
        finally:
            os.close(handle)  # a disk on the network may refuse here what it has taken before
    except OSError as error:
        os.truncate(path, size)
        raise naming(error, path) from error


def open_itself(path: Path, flags: int) -> int:
    """Open a file of this name, created if that is among the flags, but not what a link of this name leads to.

    Raises:
        OSError: It can't be opened, or it is a link; names the file.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a link, which hrl does not write through", str(path)) from error
        raise


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link; what a link leads to stays.

    Raises:
        OSError: Something of it can't be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def make_durable(path: Path) -> None:
    """Have a file, or the names in a folder, outlive a crash of the machine.

    Some file systems (vboxsf, several of FUSE, CIFS) know no such thing for folders, and say so.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not stat.S_ISDIR(os.fstat(handle).st_mode):
            raise naming(error, path) from error
    finally:
        os.close(handle)


def naming(error: OSError, path: Path) -> OSError:
    """Return the same error with the name of the file, which the system leaves out where a file is open already."""
    return OSError(error.errno, error.strerror, error.filename or str(path))
