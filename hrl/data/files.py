"""Files and folders of rows: Parquet, JSON, JSON lines, CSV, and text formats packed by gzip.

Reading never runs code. A row that can't be read is a `BadRow` with its place; a file that can't be read is an error.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from hrl.errors import DatasetError
from hrl.nearest import listing, way_to

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".ndjson")
JSON = (".json",)
CSV = (".csv", ".tsv")
_PACKED = ".gz"
READ = (*PARQUET, *JSON_LINES, *JSON, *CSV)
FORMATS = ".parquet, .jsonl, .json, .csv or .tsv (the last four also as .gz)"

DEEPEST = 100
"""How deep rows may be nested; deeper ones cannot be sent to another process (`hrl.processes.plain_data`)."""

_ROWS_AT_ONCE = 1024
_PARQUET_MAGIC = b"PAR1"
_GZIP_MAGIC = b"\x1f\x8b"
_GLOB = frozenset("*?[")
_WAYS_OUT = {
    ".arrow": "pyarrow.parquet.write_table(pyarrow.ipc.open_stream('rows.arrow').read_all(), 'rows.parquet')",
    ".xlsx": "pandas.read_excel('rows.xlsx').to_parquet('rows.parquet')",
    ".pkl": "pandas.read_pickle('rows.pkl').to_parquet('rows.parquet')",
}
"""Suffix → a line of Python that converts such a file to a supported format."""
_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files in a folder that `datasets.save_to_disk` wrote."""


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used, and why."""

    origin: str
    reason: str


def kind_of(path: Path) -> str:
    """Return the suffix that tells a file's format, without `.gz`; empty for a format that is not read."""
    name = path.name.lower()
    plain = name.removesuffix(_PACKED)
    found = next((suffix for suffix in READ if plain.endswith(suffix)), "")
    return "" if found in PARQUET and plain != name else found


def is_packed(path: Path) -> bool:
    """Return whether a file is packed by gzip."""
    return path.name.lower().endswith(_PACKED)


def stem_of(path: Path) -> str:
    """Return a file's name without the suffixes of its format."""
    plain = path.name.removesuffix(_PACKED)
    return plain.removesuffix(Path(plain).suffix) if kind_of(path) else plain


def is_saved_data_set(path: Path) -> bool:
    """Return whether `datasets.save_to_disk` wrote a folder."""
    return any((path / name).is_file() for name in _SAVED)


def is_repository(path: Path) -> bool:
    """Return whether a folder has the form of a data set of the hub: its README.md says which files are which split."""
    readme = path / "README.md"
    if not readme.is_file():
        return False
    text = readme.read_text(encoding="utf-8", errors="replace")
    return text.startswith("---") and bool(re.search(r"^(configs|dataset_info):", text, re.MULTILINE))


# ---- what can be read ------------------------------------------------------------------------------------------


def files_in(path: Path) -> list[Path]:
    """Return the files of rows that a path names: itself, or those in a folder and in the folders of it, sorted.

    Args:
        path: Path from the configuration, with `~` expanded.

    Raises:
        DatasetError: The path is missing, a pattern, empty, unreadable, or of another format; the hint says what to
            name instead.
    """
    if not path.is_dir():
        check_data_file(path)
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and kind_of(file) and _is_visible(file, path))
    if not files:
        raise DatasetError(f"{path} is a folder without a file of rows ({FORMATS}). {_holds(path)}")
    kinds = Counter(kind_of(file) for file in files)
    if len(kinds) > 1:
        counted = " and ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        raise DatasetError(
            f"{path} is a folder with files of several kinds ({counted}); name the files. {_named(files)}"
        )
    for file in files:
        check_data_file(file)
    return files


def _is_visible(file: Path, folder: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _holds(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return f"It holds {listing(names)}."


def check_data_file(path: Path) -> None:
    """Refuse a path that can't be a file of rows, with a hint at what to name instead.

    Raises:
        DatasetError: The path is missing, a pattern, empty, unreadable, or of another format.
    """
    if path.is_symlink() and not path.exists():
        raise DatasetError(f"data file {path} is a link that leads nowhere")
    if not path.exists():
        raise DatasetError(_missing(path))
    kind = kind_of(path)
    if not kind:
        how = _WAYS_OUT.get(path.suffix.lower())
        way_out = f", e.g. in Python: {how}" if how else ""
        raise DatasetError(f"data file {path} is none of {FORMATS}; write it as one of them{way_out}")
    try:
        with path.open("rb") as file:
            start = file.read(len(_PARQUET_MAGIC))
    except OSError as error:
        raise DatasetError(f"data file {path} can't be read: {error.strerror}") from error
    if not start:
        raise DatasetError(f"data file {path} is empty")
    if kind in PARQUET and start != _PARQUET_MAGIC:
        raise DatasetError(f"data file {path} is not a readable Parquet file: it does not begin with PAR1")
    if is_packed(path) and not start.startswith(_GZIP_MAGIC):
        raise DatasetError(f"data file {path} is not packed by gzip, as its name says")


def _missing(path: Path) -> str:
    if _GLOB & set(path.name):
        found = sorted(Path(file) for file in glob.glob(str(path)))
        return f"{path} is a pattern, and no file has that name; name the files. {_named(found)}"
    return f"data file {path} does not exist. {way_to(path, lambda other: bool(kind_of(other)))}"


def _named(files: list[Path]) -> str:
    """List the files in the configuration's syntax."""
    return f"There are: [{listing([str(file) for file in files])}]" if files else "There is no file of rows"


# ---- reading ---------------------------------------------------------------------------------------------------


def rows_of_file(path: Path) -> Iterator[tuple[str, object]]:
    """Yield every row of a file unchanged, with file and place for messages.

    Args:
        path: A file that has passed `check_data_file`.

    Raises:
        DatasetError: The file as a whole can't be read.
    """
    kind = kind_of(path)
    if kind in PARQUET:
        return _parquet_rows(path)
    if kind in JSON_LINES:
        return _jsonl_rows(path)
    return _csv_rows(path) if kind in CSV else _json_rows(path)


def parquet_columns(path: Path) -> list[str]:
    """Return the names of a Parquet file's columns.

    Raises:
        DatasetError: It can't be read, or two columns have the same name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = list(pq.read_schema(path).names)
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"data file {path} is not a readable Parquet file: {error}") from error
    _require_once(path, names)
    return names


def _require_once(path: Path, names: Sequence[str]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise DatasetError(f"data file {path} has two columns of the name {twice[0]!r}; rename one")


def _opened(path: Path) -> Any:
    return gzip.open(path, "rb") if is_packed(path) else path.open("rb")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, object]]:
    with _opened(path) as file:
        number = 0
        while True:
            number += 1
            try:
                line = file.readline()
            except (OSError, EOFError) as error:
                raise DatasetError(f"data file {path} is damaged after line {number - 1}: {error}") from error
            if not line:
                return
            if line.strip():
                origin = f"{path} line {number}"
                # Programs on Windows often begin a file with a byte order mark.
                yield origin, _from_json(line, origin, "utf-8-sig" if number == 1 else "utf-8", "of the line")


def _from_json(text: bytes, origin: str, encoding: str, where: str) -> object:
    """Return the value of a JSON text, or the `BadRow` that it is."""
    try:
        return json.loads(text.decode(encoding))
    except UnicodeDecodeError as error:
        return BadRow(origin, f"is not UTF-8 (byte {error.start} {where})")
    except json.JSONDecodeError as error:
        return BadRow(origin, f"is not JSON ({error.msg} at column {error.colno})")
    except ValueError:
        return BadRow(origin, "holds an integer of thousands of digits; write it as a string")
    except RecursionError:
        return BadRow(origin, f"is nested more than {DEEPEST} levels deep")


def _json_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the rows of a list, of the one list in an object, or of JSON lines that are called .json."""
    try:
        with _opened(path) as file:
            text = file.read()
    except (OSError, EOFError) as error:
        raise DatasetError(f"data file {path} can't be read: {error}") from error
    if not text.removeprefix(b"\xef\xbb\xbf").strip():
        raise DatasetError(f"data file {path} is empty")
    whole = _from_json(text, str(path), "utf-8-sig", "of the file")
    if isinstance(whole, BadRow):
        first = text.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
        if not isinstance(_from_json(first, "", "utf-8", ""), dict):
            raise DatasetError(f"data file {path} {whole.reason}")
        yield from _jsonl_rows(path)
        return
    where, rows = _list_in(path, whole)
    yield from ((f"{path} row {index}{where}", row) for index, row in enumerate(rows))


def _list_in(path: Path, whole: object) -> tuple[str, list[Any]]:
    """Return the list of rows in a JSON document, and where it stands in it."""
    if isinstance(whole, list):
        return "", whole
    if not isinstance(whole, dict):
        raise DatasetError(f"data file {path} holds a {type(whole).__name__}; expected a list of rows")
    lists = {name: value for name, value in whole.items() if isinstance(value, list)}
    of_rows = {name: value for name, value in lists.items() if all(isinstance(row, dict) for row in value)}
    if len(of_rows) == 1:
        ((name, rows),) = of_rows.items()
        return f" of {name!r}", rows
    if len(of_rows) > 1:
        hint = f"it has several lists of rows ({listing(list(of_rows))}): write the one that is meant into its own file"
    elif lists or all(isinstance(value, dict) for value in whole.values()):
        hint = "it looks like a table by columns: write it by rows (in pandas, to_json(path, orient='records'))"
    else:
        hint = f"it is one object with {listing(list(whole))}"
    raise DatasetError(f"data file {path} is no list of rows, and no object with one list of rows: {hint}")


def csv_header(path: Path) -> list[str]:
    """Return the names of the columns of a CSV file; none if it has no row."""
    row = next((row for _, row in _csv_rows(path) if isinstance(row, dict)), {})
    return list(row)


class JsonLines(Sequence[object]):
    """The rows of files of JSON lines by number, each read when it is asked for; in memory is where each begins.

    Args:
        paths: Files of JSON lines, not packed.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [path.open("rb") for path in paths]
        starts, which = array("Q"), array("I")
        for number, file in enumerate(self._files):
            place = 0
            for line in file:
                if line.strip():
                    starts.append(place)
                    which.append(number)
                place += len(line)
        self._starts, self._which = starts, which

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> object: ...
    @overload
    def __getitem__(self, index: slice) -> list[object]: ...
    def __getitem__(self, index: int | slice) -> object:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        start, file = self._starts[index], self._files[self._which[index]]
        file.seek(start)
        origin = f"{file.name} byte {start}"
        return _from_json(file.readline(), origin, "utf-8" if start else "utf-8-sig", "of the line")


def _csv_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield rows of text; an empty field is null."""
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter="\t" if kind_of(path) == ".tsv" else ",", strict=True)
        header: list[str] | None = None
        while True:
            try:
                fields = next(reader, None)
            except UnicodeDecodeError as error:
                raise DatasetError(
                    f"data file {path} is not UTF-8 after line {reader.line_num}: {error.reason}"
                ) from error
            except (csv.Error, OSError, EOFError) as error:
                raise DatasetError(f"data file {path} is damaged at line {reader.line_num}: {error}") from error
            if fields is None:
                return
            if not fields:
                continue
            if header is None:
                header = [name.strip() for name in fields]
                _require_once(path, header)
                continue
            origin = f"{path} line {reader.line_num}"
            if len(fields) != len(header):
                yield (
                    origin,
                    BadRow(origin, f"has {len(fields)} fields, and the header {len(header)}: is a comma unquoted?"),
                )
            else:
                yield origin, {name: field or None for name, field in zip(header, fields, strict=True)}


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parquet_columns(path)
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"data file {path} is not a readable Parquet file: {error}") from error
    number = 0
    with file:
        batches = file.iter_batches(batch_size=_ROWS_AT_ONCE)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise DatasetError(f"data file {path} is damaged after row {number}: {error}") from error
            if batch is None:
                return
            for row in _decoded(batch):
                origin = f"{path} row {number}"
                number += 1
                if isinstance(row, UnicodeDecodeError):
                    yield origin, BadRow(origin, f"holds text that is not UTF-8 ({row.reason})")
                else:
                    yield origin, without_missing(row)


def _decoded(batch: pa.RecordBatch) -> list[dict[str, Any] | UnicodeDecodeError]:
    """Return the rows of a batch, or the error of those that hold text that can't be decoded."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [error]
        half = batch.num_rows // 2
        return _decoded(batch.slice(0, half)) + _decoded(batch.slice(half))


def without_missing(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the nulls that Arrow adds: it gives every struct in a list the fields of all in it."""
    return {name: _stripped(value) if isinstance(value, list) else value for name, value in row.items()}


def _stripped(value: Any) -> Any:
    if isinstance(value, list):
        return [_stripped(item) for item in value]
    if isinstance(value, dict):
        return {name: _stripped(item) for name, item in value.items() if item is not None}
    return value
