"""Which pictures a row's prompt shows, as a column of a batch: `multi_modal_data`, a tuple of pictures for each row.

A picture travels as the file that it is (PNG, JPEG, WebP), which is a fraction of its pixels, and all samples of a
prompt hold one object, which a pickle writes once. It becomes pixels in the process that needs them
(`hrl.models.pictures`), which keeps them for the next pass.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrl.errors import DatasetError

#: Name of the column, as verl calls it. A row without pictures has an empty tuple.
MULTI_MODAL_DATA = "multi_modal_data"
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Picture:
    """A picture of a prompt.

    Attributes:
        data: The picture's file.
        digest: Of that file. Two pictures of one digest are the same picture.
        start: The first of the prompt's tokens that stand for it.
        length: How many tokens do.
    """

    data: bytes
    digest: str
    start: int
    length: int

    def __repr__(self) -> str:
        return f"Picture({self.digest}, tokens {self.start} to {self.start + self.length - 1})"


def digest_of(data: bytes) -> str:
    """Return what tells a picture's file from another."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(frozen=True)
class PictureSource:
    """Where a picture is.

    Attributes:
        width, height: In pixels.
        path: Of its file; None if its bytes are here.
        data: The bytes of its file.
    """

    width: int
    height: int
    path: str | None = None
    data: bytes | None = None

    def read(self) -> bytes:
        """Return the bytes of the file.

        Raises:
            DatasetError: The file can't be read any more.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None, "a picture has one of the two"
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise DatasetError(f"the picture {self.path} can't be read any more: {error}") from error

    @property
    def identity(self) -> list[Any]:
        """What tells it from another picture in a resumed run, as plain data."""
        return [self.width, self.height, self.path or digest_of(self.data or b"")]


def has_pictures(columns: Any) -> bool:
    """Return whether a batch has the column.

    Args:
        columns: Its `non_tensor_batch`.
    """
    return MULTI_MODAL_DATA in columns
