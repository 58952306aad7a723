"""Size and hash of a file: taken as it is written, or by reading it.

The hash is XXH3 with 128 bits: it finds damage of any kind, faster than any disk delivers, but keeps nobody from making
another file with the same one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from xxhash import xxh3_128

from hrl.files import naming

#: What is read at once: large enough that the hash is taken without the interpreter's lock.
_CHUNK_BYTES = 4 << 20
_HASH = re.compile(r"[0-9a-f]{32}")


class FileDigest(NamedTuple):
    """What a file holds.

    Attributes:
        size: In bytes.
        xxh3_128: In hexadecimal digits.
    """

    size: int
    xxh3_128: str

    def to_plain(self) -> dict[str, Any]:
        """Return it for a JSON file."""
        return self._asdict()

    @classmethod
    def of_plain(cls, plain: Any) -> FileDigest:
        """Return what `to_plain` wrote.

        Raises:
            ValueError: It is something else.
        """
        match plain:
            case {"size": int(size), "xxh3_128": str(xxh3), **rest} if not rest:
                if not isinstance(size, bool) and size >= 0 and _HASH.fullmatch(xxh3):
                    return cls(size, xxh3)
        raise ValueError(f"{plain!r:.80} is no size and hash of a file")

    @classmethod
    def of(cls, path: Path, *, from_disk: bool = False) -> FileDigest:
        """Return the digest of a file that is there, by reading it.

        Args:
            path: Of the file.
            from_disk: Whether to have the system forget what it keeps of the file in memory, so that the disk is read.
                Only what is durable can be forgotten; a file system may ignore the wish.
        """
        size, xxh3 = 0, xxh3_128()
        with open(path, "rb", buffering=0) as file:
            chunk = memoryview(bytearray(min(_CHUNK_BYTES, 1 + os.fstat(file.fileno()).st_size)))
            if from_disk and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while read := file.readinto(chunk):
                xxh3.update(chunk[:read])
                size += read
        return cls(size, xxh3.hexdigest())


class DigestingFile:
    """A new file whose digest is known when all of it is written, without reading it.

    Args:
        path: Of the file, which is overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115 (closed by `__exit__`)
        self._size, self._xxh3 = 0, xxh3_128()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as failed:
            if error is None:  # the first one says what is wrong
                raise naming(failed, self.path) from failed

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes.

        Raises:
            OSError: The disk refuses; names the file.
        """
        try:
            self._file.write(data)
        except OSError as error:
            raise naming(error, self.path) from error
        self._xxh3.update(data)
        self._size += len(data)

    @property
    def digest(self) -> FileDigest:
        """Of everything written so far."""
        return FileDigest(self._size, self._xxh3.hexdigest())


class Written(NamedTuple):
    """A file that was written, and what it has to hold.

    Attributes:
        path: Of the file.
        digest: Of what was written.
    """

    path: Path
    digest: FileDigest

    @classmethod
    def by_reading(cls, path: Path) -> Written:
        """Return a file that another library has just written; it is read once, from memory as a rule."""
        return cls(path, FileDigest.of(path))
