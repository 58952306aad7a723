"""Files and folders of rows: Parquet, JSON, JSON lines, CSV, and packed text formats.

Reading never runs code. A row that can't be read is a `BadRow` with its place; a file that can't be read is an error.
"""

from __future__ import annotations

import bz2
import csv
import glob
import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hrl.errors import DatasetError
from hrl.nearest import listing, way_to

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".ndjson")
JSON = (".json",)
CSV = (".csv", ".tsv")
READ = (*PARQUET, *JSON_LINES, *JSON, *CSV)
FORMATS = ".parquet, .jsonl, .json, .csv or .tsv (the last four also as .gz, .zst, .bz2 or .xz)"
PACKED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\x00"}
"""Suffix of a packed file → how it begins."""
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises."""
UNREADABLE = (ValueError, OverflowError, LookupError)
"""What Arrow raises for a value that Python's types can't hold: bytes that are no text, a date of the year 29,000, a
moment in a time zone that nobody knows."""

DEEPEST = 100
"""How deep rows may be nested; deeper ones cannot be sent to another process (`hrl.processes.plain_data`)."""

_LONGEST_NAME = 80
_LONGEST_REASON = 160
_ROWS_AT_ONCE = 1024
_PARQUET_MAGIC = b"PAR1"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_DELIMITERS = ",;\t|"
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
    """Return the suffix that tells a file's format, without that of packing; empty for a format that is not read."""
    plain = _unpacked_name(path).lower()
    found = next((suffix for suffix in READ if plain.endswith(suffix)), "")
    return "" if found in PARQUET and packing_of(path) else found


def packing_of(path: Path) -> str:
    """Return the suffix of a packed file, such as `.gz`; empty for any other."""
    suffix = path.suffix.lower()
    return suffix if suffix in PACKED else ""


def _unpacked_name(path: Path) -> str:
    return path.name[: len(path.name) - len(packing_of(path))]


def stem_of(path: Path) -> str:
    """Return a file's name without the suffixes of its format."""
    plain = _unpacked_name(path)
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
    if not path.is_file() and not path.is_dir():
        raise DatasetError(
            f"data file {path} is {_special(path)}, and rows are read more than once: write them into a file"
        )
    kind = kind_of(path)
    if not kind:
        how = _WAYS_OUT.get(path.suffix.lower())
        way_out = f", e.g. in Python: {how}" if how else ""
        raise DatasetError(f"data file {path} is none of {FORMATS}; write it as one of them{way_out}")
    try:
        with path.open("rb") as file:
            start = file.read(max(map(len, (_PARQUET_MAGIC, *PACKED.values()))))
    except OSError as error:
        raise DatasetError(f"data file {path} can't be read: {error.strerror}") from error
    if not start:
        raise DatasetError(f"data file {path} is empty")
    if kind in PARQUET:
        if not start.startswith(_PARQUET_MAGIC):
            raise DatasetError(f"data file {path} is not a readable Parquet file: it does not begin with PAR1")
        return
    named, found = packing_of(path), next((suffix for suffix, magic in PACKED.items() if start.startswith(magic)), "")
    if named and found != named:
        raise DatasetError(f"data file {path} is not packed as its name says ({named})")
    if found and not named:
        raise DatasetError(f"data file {path} is packed: call it {path.name}{found}")
    if start.startswith(_PARQUET_MAGIC):
        raise DatasetError(f"data file {path} is a Parquet file by its content: call it .parquet")
    if start.startswith(_UTF16):
        raise DatasetError(f"data file {path} is UTF-16 text: save it as UTF-8")


def _special(path: Path) -> str:
    """Return what a path is that is neither a file nor a folder."""
    kinds = {"a pipe": path.is_fifo, "a socket": path.is_socket, "a device": path.is_char_device}
    return next((name for name, is_it in kinds.items() if is_it()), "no ordinary file")


def _missing(path: Path) -> str:
    if _GLOB & set(path.name):
        found = sorted(Path(file) for file in glob.glob(str(path)))
        return f"{path} is a pattern, and no file has that name; name the files. {_named(found)}"
    if str(path).startswith("python:"):  # as `config.yaml` names rows given as objects
        return (
            f"{path} stands for rows that an earlier run was given from Python. Give them again (data=rows), or a file"
        )
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
    except (pa.ArrowException, OSError, ValueError) as error:  # names that are no UTF-8 are a ValueError
        raise DatasetError(f"data file {path} is not a readable Parquet file: {error}") from error
    _require_once(path, names)
    return names


def _require_once(path: Path, names: Sequence[str]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise DatasetError(f"data file {path} has two columns of the name {twice[0]!r}; rename one")


def opened(path: Path) -> IO[bytes]:
    """Open a file to read its bytes, unpacked."""
    packing = packing_of(path)
    if packing == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(packing, open)
    return opener(path, "rb")  # type: ignore[no-any-return]


def _jsonl_rows(path: Path) -> Iterator[tuple[str, object]]:
    with opened(path) as file:
        number = 0
        while True:
            number += 1
            try:
                line = file.readline()
            except DAMAGED as error:
                raise DatasetError(f"data file {path} is damaged after line {number - 1}: {error}") from error
            if not line:
                return
            if line.strip():
                origin = f"{path} line {number}"
                # Programs on Windows often begin a file with a byte order mark.
                row = from_json(line.rstrip(), origin, "utf-8-sig" if number == 1 else "utf-8", "of the line")
                if isinstance(row, BadRow) and line.strip() in (b"{", b"["):
                    row = BadRow(origin, f"{row.reason}; a document of several lines is called .json")
                yield origin, row


def from_json(text: bytes, origin: str, encoding: str, where: str) -> object:
    """Return the value of a JSON text, or the `BadRow` that it is.

    Args:
        text: The text.
        origin: Its place, for messages.
        encoding: UTF-8, with or without a byte order mark.
        where: Of what bytes are counted.
    """
    try:
        return json.loads(text.decode(encoding), object_pairs_hook=_object)
    except _KeyTwiceError as error:
        return BadRow(origin, f"has the key {str(error)[:_LONGEST_NAME]!r} twice in one object, and they may differ")
    except UnicodeDecodeError as error:
        return BadRow(origin, f"is not UTF-8 (byte {error.start} {where})")
    except json.JSONDecodeError as error:
        return BadRow(origin, f"is not JSON ({error.msg} at column {error.colno})")
    except ValueError:
        return BadRow(origin, "holds an integer of thousands of digits; write it as a string")
    except RecursionError:
        return BadRow(origin, f"is nested more than {DEEPEST} levels deep")


class _KeyTwiceError(Exception):
    """An object in JSON has a key twice, of which Python would keep the last."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _KeyTwiceError(next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1))
    return found


def _json_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the rows of a list, of the one list in an object, or of JSON lines that are called .json."""
    try:
        with opened(path) as file:
            text = file.read()
    except DAMAGED as error:
        raise DatasetError(f"data file {path} can't be read: {error}") from error
    if not text.removeprefix(b"\xef\xbb\xbf").strip():
        raise DatasetError(f"data file {path} is empty")
    whole = from_json(text, str(path), "utf-8-sig", "of the file")
    if isinstance(whole, BadRow):
        first = text.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
        if not isinstance(from_json(first, "", "utf-8", ""), dict):
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
    of_rows = {name: value for name, value in lists.items() if value and all(isinstance(row, dict) for row in value)}
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


class Lines:
    """The lines of a text, with the number of lines and bytes that were taken."""

    def __init__(self, file: IO[bytes]) -> None:
        self.number = self.num_bytes = 0
        self._text = io.TextIOWrapper(file, encoding="utf-8", newline="")

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._text)
        is_first, self.number, self.num_bytes = self.number == 0, self.number + 1, self.num_bytes + len(line.encode())
        return line.removeprefix("\ufeff") if is_first else line

    def leave_open(self) -> None:
        """Let go of the file, which is closed with the text otherwise."""
        self._text.detach()


@dataclass(frozen=True)
class CsvForm:
    """How the rows of a CSV file are written: the names of its columns, and what is between two fields."""

    header: tuple[str, ...]
    delimiter: str

    def row(self, fields: Sequence[str], origin: str) -> dict[str, str | None] | BadRow:
        """Return the row of some fields, all text; an empty one is null, and one without a name is left out."""
        if len(fields) != len(self.header):
            hint = "is a comma unquoted?" if self.delimiter == "," else f"is the delimiter {self.delimiter!r} unquoted?"
            return BadRow(origin, f"has {len(fields)} fields, and the header {len(self.header)}: {hint}")
        return {name: field or None for name, field in zip(self.header, fields, strict=True) if name}


def csv_records(path: Path, lines: Lines) -> Iterator[tuple[int, list[str], CsvForm]]:
    """Yield the rows of a CSV file as fields, each with the byte that it begins at.

    What delimits fields follows from the header: the first of comma, semicolon, tab and bar that is in it.

    Raises:
        DatasetError: The file can't be read.
    """
    csv.field_size_limit(sys.maxsize)
    reader: Any = None
    form: CsvForm | None = None
    while True:
        start = lines.num_bytes
        try:
            if reader is None:
                first = next((line for line in lines if line.strip("\r\n")), "")
                outside = re.sub(r'"[^"]*"', "", first)
                delimiter = next((sign for sign in _DELIMITERS if sign in outside), ",")
                delimiter = "\t" if kind_of(path) == ".tsv" else delimiter
                reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
            fields = next(reader, None)
        except UnicodeDecodeError as error:
            what = f"not UTF-8 after line {lines.number}: {error.reason}"
            raise DatasetError(f"data file {path} is {what}; save it as UTF-8") from error
        except (csv.Error, *DAMAGED) as error:
            raise DatasetError(f"data file {path} is damaged at line {lines.number}: {error}") from error
        if fields is None:
            return
        if not fields:
            continue
        if form is None:
            form = CsvForm(tuple(name.strip() for name in fields), delimiter)
            _require_once(path, [name for name in form.header if name])
        else:
            yield start, fields, form


def _csv_rows(path: Path) -> Iterator[tuple[str, object]]:
    with opened(path) as file:
        lines = Lines(file)
        for _, fields, form in csv_records(path, lines):
            origin = f"{path} line {lines.number}"
            yield origin, form.row(fields, origin)


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
            for row in decoded(batch):
                origin = f"{path} row {number}"
                number += 1
                yield origin, BadRow(origin, row) if isinstance(row, str) else without_missing(row)


@dataclass(frozen=True)
class _Unreadable:
    """A value that Python's types can't hold."""

    reason: str


def decoded(table: pa.RecordBatch | pa.Table) -> list[dict[str, Any] | str]:
    """Return the rows of a table; for one with a value that Python's types can't hold, which value and why."""
    try:
        return table.to_pylist()  # type: ignore[no-any-return]
    except UNREADABLE:
        columns = [_values(field.name, table.column(index)) for index, field in enumerate(table.schema)]
        return [_row(table.schema.names, values) for values in zip(*columns, strict=True)]


def _values(name: str, column: pa.Array | pa.ChunkedArray) -> list[Any]:
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except UNREADABLE:
        return [_value(name, scalar) for scalar in column]


def _value(name: str, scalar: pa.Scalar) -> Any:
    where = f"in {name[:_LONGEST_NAME]!r}"
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return _Unreadable(f"holds text that is not UTF-8 {where} ({error.reason})")
    except UNREADABLE as error:
        what, why = str(scalar.type)[:_LONGEST_NAME], repr(error)[:_LONGEST_REASON]
        return _Unreadable(
            f"holds a value {where}, of the type {what!r}, that can't be read ({why}); write the column as text, or "
            "leave it out of the file"
        )


def _row(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any] | str:
    bad = next((value for value in values if isinstance(value, _Unreadable)), None)
    return dict(zip(names, values, strict=True)) if bad is None else bad.reason


def without_missing(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the nulls that Arrow adds: it gives every struct in a list the fields of all in it."""
    return {name: _stripped(value) if isinstance(value, list) else value for name, value in row.items()}


def _stripped(value: Any) -> Any:
    if isinstance(value, list):
        return [_stripped(item) for item in value]
    if isinstance(value, dict):
        return {name: _stripped(item) for name, item in value.items() if item is not None}
    return value
