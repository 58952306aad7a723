"""The folder of a model that is written: beside its name until all of it is there and on the disk."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hrl.files import make_durable, remove, unfinished_beside

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
    beside = unfinished_beside(folder)
    beside.mkdir()
    try:
        yield beside
        for path in (*beside.rglob("*"), beside):
            make_durable(path)
        if folder.is_dir() and any(folder.iterdir()):
            _replace(folder, beside)
        else:
            beside.rename(folder)
        make_durable(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


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
