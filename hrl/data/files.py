"""Files of rows: check that one can be read, list its columns, read its rows."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hrl.errors import HrlError
from hrl.nearest import listing, way_to

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".ndjson")
READ = (*PARQUET, *JSON_LINES)

DEEPEST = 100
"""How deep rows may be nested; deeper ones cannot be sent to another process (`hrl.processes.plain_data`)."""

_ROWS_AT_ONCE = 1024
_ROWS_LOOKED_AT = 64
_PARQUET_MAGIC = b"PAR1"
_GLOB = frozenset("*?[")
_WAYS_OUT = {
    ".csv": "pyarrow.parquet.write_table(pyarrow.csv.read_csv('rows.csv'), 'rows.parquet')",
    ".json": "open('rows.jsonl', 'w').writelines(json.dumps(row) + '\\n' for row in json.load(open('rows.json')))",
    ".arrow": "pyarrow.parquet.write_table(pyarrow.ipc.open_stream('rows.arrow').read_all(), 'rows.parquet')",
}
"""Suffix → a line of Python that converts such a file to a supported format."""


class DatasetError(HrlError, ValueError):
    """A source, a row or a whole data set can't be used; the message names file, row and the way out."""


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used, and why."""

    origin: str
    reason: str


def check_data_file(path: Path) -> None:
    """Refuse a path that can't be a file of rows, with a hint at what to name instead.

    Args:
        path: Path from the configuration, with `~` expanded.

    Raises:
        DatasetError: The path is missing, a pattern, a folder, empty, unreadable, or of another format.
    """
    if path.is_dir():
        files = sorted(file for suffix in READ for file in path.glob(f"*{suffix}"))
        raise DatasetError(f"{path} is a folder; name the files in it. {_named(files)}")
    if path.is_symlink() and not path.exists():
        raise DatasetError(f"data file {path} is a link that leads nowhere")
    if not path.exists():
        raise DatasetError(_missing(path))
    if path.suffix not in READ:
        how = _WAYS_OUT.get(path.suffix)
        way_out = f", e.g. in Python: {how}" if how else ""
        raise DatasetError(f"data file {path} is neither .parquet nor .jsonl; write it as one of them{way_out}")
    try:
        with path.open("rb") as file:
            start = file.read(len(_PARQUET_MAGIC))
    except OSError as error:
        raise DatasetError(f"data file {path} can't be read: {error.strerror}") from error
    if not start:
        raise DatasetError(f"data file {path} is empty")
    if path.suffix in PARQUET and start != _PARQUET_MAGIC:
        raise DatasetError(f"data file {path} is not a readable Parquet file: it does not begin with PAR1")


def _missing(path: Path) -> str:
    if _GLOB & set(path.name):
        found = sorted(Path(file) for file in glob.glob(str(path)))
        return f"{path} is a pattern, and no file has that name; name the files. {_named(found)}"
    as_hub = not path.is_absolute() and len(path.parts) == 2 and not path.suffix
    hub = " Data sets of the hub are read from their files: download one and name its Parquet files." if as_hub else ""
    return f"data file {path} does not exist. {way_to(path, _is_read)}{hub}"


def _is_read(path: Path) -> bool:
    return path.suffix in READ


def _named(files: list[Path]) -> str:
    """List the files in the configuration's syntax."""
    return f"There are: [{listing([str(file) for file in files])}]" if files else "There is no .parquet or .jsonl file"


def columns_of(path: Path) -> list[str] | None:
    """Return the names of a file's columns: those of a Parquet file, or all keys in the first JSON lines.

    Args:
        path: A file that has passed `check_data_file`.

    Returns:
        The names, or None if none of the first lines is a JSON object.

    Raises:
        DatasetError: A Parquet file can't be read.
    """
    if path.suffix in PARQUET:
        return _parquet_columns(path)
    names: dict[str, None] = {}
    with path.open("rb") as file:
        for line in islice(file, _ROWS_LOOKED_AT):
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError:
                continue  # reported with its line number when the rows are read
            if isinstance(row, dict):
                names |= dict.fromkeys(row)
    return list(names) or None


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"data file {path} is not a readable Parquet file: {error}") from error


def rows_of_file(path: Path) -> Iterator[tuple[str, object]]:
    """Yield every row of a file that has passed `check_data_file`, unchanged, with file and row for messages.

    Raises:
        DatasetError: The file as a whole can't be read, or is damaged.
    """
    return _parquet_rows(path) if path.suffix in PARQUET else _jsonl_rows(path)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            origin = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                # Programs on Windows often begin a file with a byte order mark.
                yield origin, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                yield origin, BadRow(origin, f"is not UTF-8 (byte {error.start} of the line)")
            except json.JSONDecodeError as error:
                yield origin, BadRow(origin, f"is not JSON ({error.msg} at column {error.colno})")
            except ValueError:
                yield origin, BadRow(origin, "holds an integer of thousands of digits; write it as a string")
            except RecursionError:
                yield origin, BadRow(origin, f"is nested more than {DEEPEST} levels deep")


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

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
            for offset in range(batch.num_rows):
                origin = f"{path} row {number}"
                number += 1
                try:
                    row = batch.slice(offset, 1).to_pylist()[0]
                    yield origin, {name: _without_missing(v) if isinstance(v, list) else v for name, v in row.items()}
                except UnicodeDecodeError as error:
                    yield origin, BadRow(origin, f"holds text that is not UTF-8 ({error.reason})")


def _without_missing(value: Any) -> Any:
    """Remove the nulls that Parquet adds: it gives every struct in a list the fields of all structs in it."""
    if isinstance(value, list):
        return [_without_missing(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_missing(item) for name, item in value.items() if item is not None}
    return value
