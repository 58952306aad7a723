"""Rows of text files by number, each read when it is asked for; in memory is where each begins."""

from __future__ import annotations

import csv
import io
import shutil
import tempfile
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from hrl.data.by_number import ByNumber
from hrl.data.files import (
    CSV,
    DAMAGED,
    JSON,
    PARQUET,
    BadRow,
    CsvForm,
    Lines,
    csv_records,
    from_json,
    kind_of,
    opened,
    packing_of,
)
from hrl.data.hub import cache_folder
from hrl.errors import DatasetError


class RowsByPlace(ByNumber[object]):
    """The rows of several files of text; packed ones are unpacked first, into a file that ends with the process.

    Args:
        paths: The files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._files = list(paths), [_seekable(path) for path in paths]
        starts, which = array("Q"), array("I")
        for number, (path, file) in enumerate(zip(self._paths, self._files, strict=True)):
            for start in self.starts(path, file):
                starts.append(start)
                which.append(number)
        self._starts, self._which = starts, which

    @abstractmethod
    def starts(self, path: Path, file: IO[bytes]) -> Iterator[int]:
        """Yield the byte at which each row of a file begins."""

    @abstractmethod
    def row(self, path: Path, text: bytes, origin: str) -> object:
        """Return the row of a text, or the `BadRow` that it is.

        Args:
            path: Its file.
            text: From its first byte to the beginning of the next row.
            origin: Its place, for messages.
        """

    def __len__(self) -> int:
        return len(self._starts)

    def item(self, index: int) -> object:
        """Return a row, or the `BadRow` that it is."""
        number, start = self._which[index], self._starts[index]
        is_last = index + 1 == len(self) or self._which[index + 1] != number
        file, path = self._files[number], self._paths[number]
        file.seek(start)
        text = file.read() if is_last else file.read(self._starts[index + 1] - start)
        return self.row(path, text, f"{path} byte {start}")


class JsonLines(RowsByPlace):
    """The rows of files of JSON lines."""

    def starts(self, path: Path, file: IO[bytes]) -> Iterator[int]:
        place = 0
        for line in file:
            if line.strip():
                yield place
            place += len(line)

    def row(self, path: Path, text: bytes, origin: str) -> object:
        return from_json(text.rstrip(), origin, "utf-8-sig", "of the line")


class CsvRows(RowsByPlace):
    """The rows of CSV files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._forms: dict[Path, CsvForm] = {}
        super().__init__(paths)

    def starts(self, path: Path, file: IO[bytes]) -> Iterator[int]:
        lines = Lines(file)
        for start, _, form in csv_records(path, lines):
            self._forms[path] = form
            yield start
        lines.leave_open()

    def row(self, path: Path, text: bytes, origin: str) -> dict[str, str | None] | BadRow:
        form = self._forms[path]
        fields: Any = next(csv.reader(io.StringIO(text.decode(), newline=""), delimiter=form.delimiter, strict=True))
        return form.row(fields, origin)


def by_place(files: Sequence[Path]) -> RowsByPlace | None:
    """Return the rows of files of text of one kind; None for a format that is not read row by row.

    Raises:
        DatasetError: A file can't be read, or is one JSON object.
    """
    kind = kind_of(files[0])
    if kind in PARQUET:
        return None
    if kind in CSV:
        return CsvRows(files)
    if kind in JSON and not all(_is_json_lines(file) for file in files):
        return None
    return JsonLines(files)


def _is_json_lines(path: Path) -> bool:
    """Return whether a file called .json holds JSON lines; False for a list.

    Raises:
        DatasetError: It is one object, which has to be read whole.
    """
    with opened(path) as file:
        try:
            first, second = [*islice((line for line in file if line.strip(b"\xef\xbb\xbf \t\r\n")), 2), b"", b""][:2]
        except DAMAGED as error:
            raise DatasetError(f"data file {path} can't be read: {error}") from error
    if first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return False
    if second and isinstance(from_json(first, "", "utf-8-sig", ""), dict):
        return True
    raise DatasetError(
        f"data file {path} is one JSON object, which has to be read whole: leave out streaming, or write its rows as "
        "JSON lines"
    )


def _seekable(path: Path) -> IO[bytes]:
    if not packing_of(path):
        return path.open("rb")
    unpacked: IO[bytes] = tempfile.TemporaryFile(dir=cache_folder())  # noqa: SIM115 as long as the rows are read
    try:
        with opened(path) as packed:
            shutil.copyfileobj(packed, unpacked)
    except DAMAGED as error:
        raise DatasetError(f"data file {path} is damaged: {error}") from error
    unpacked.seek(0)
    return unpacked
