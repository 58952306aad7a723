"""The folder of a model that is written: under another name until all of it is there and on the disk."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from hrl.files import make_durable, remove, unfinished, unfinished_beside

_CONFIG = "config.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@contextmanager
def whole_model(folder: Path) -> Iterator[Path]:
    """Yield a folder to write a model into, which gets its name at the end of the block; it goes if the block fails.

    Args:
        folder: The name. Of a model that is there already every file is replaced; other files stay.

    Raises:
        OSError: The disk refuses.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One that is there may be the place of a disk, or lie in a folder of somebody else's: then nothing goes beside it.
    is_there = folder.is_dir()
    new = folder / unfinished_beside(folder).name if is_there else unfinished_beside(folder)
    for left in (*folder.parent.glob(_unfinished(folder)), *folder.glob(_unfinished(folder))):
        _remove_if_left(left)
    new.mkdir()
    with ExitStack() as held:
        held.callback(shutil.rmtree, new, ignore_errors=True)
        with suppress(OSError):  # of a file system without locks, where nobody removes what was left
            held.enter_context(_locked(new))
        yield new
        for path in (*new.rglob("*"), new):
            make_durable(path)
        if is_there or (folder.is_dir() and any(folder.iterdir())):
            _replace(folder, new)
        else:
            new.rename(folder)
            make_durable(folder.parent)


def is_free(folder: Path) -> bool:
    """Return whether nothing is in a folder but what killed processes left that were writing a model there."""
    return all(fnmatchcase(entry.name, _unfinished(folder)) for entry in folder.iterdir())


def _unfinished(folder: Path) -> str:
    return unfinished(glob.escape(folder.name))


def _remove_if_left(new: Path) -> None:
    """Remove what a process was writing, unless it lives."""
    with suppress(OSError), _locked(new):
        shutil.rmtree(new, ignore_errors=True)


@contextmanager
def _locked(new: Path) -> Iterator[None]:
    handle = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _replace(folder: Path, new: Path) -> None:
    # Nobody loads a folder without a configuration: it goes first and comes last, so that the files of two models are
    # never taken for one.
    (folder / _CONFIG).unlink(missing_ok=True)
    make_durable(folder)
    for file in folder.iterdir():
        if _WEIGHTS.fullmatch(file.name):
            file.unlink()
    for path in sorted(new.iterdir(), key=lambda path: path.name == _CONFIG):
        target = folder / path.name
        if target.is_dir():
            remove(target)
        path.replace(target)
    make_durable(folder)
