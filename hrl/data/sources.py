"""Where rows come from, and reading them: Parquet and JSON files, tasks that make rows, objects of a caller.

Reading never runs code. What a row must have is checked by the data set that takes it, with the function that it gives
to `read_rows`.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hrl.errors import DatasetError
from hrl.nearest import listing, way_to

if TYPE_CHECKING:
    import pyarrow as pa

BUNDLED_PREFIX = "bundled:"
REASONING_GYM_PREFIX = "reasoning_gym:"

Source = str | Iterable[Mapping[str, Any]]
"""A `.parquet` or `.jsonl` path, `bundled:<task>/<split>`, `reasoning_gym:<dataset>?…`, or the rows themselves."""
DataFiles = Source | Sequence[str]

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


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """The fields of every checked row.

    Attributes:
        data_source: Chooses the scorer and groups validation metrics.
        origin: File and row, for messages.
    """

    data_source: str = ""
    origin: str = ""


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used, and why."""

    origin: str
    reason: str


R = TypeVar("R", bound=DataRow)


def read_rows(sources: Iterable[Source], check: Callable[[Mapping[str, Any]], R | str]) -> Iterator[R | BadRow]:
    """Yield every row of all sources in order, the unusable ones as `BadRow`.

    Args:
        sources: Sources from `sources_of`.
        check: Turns a raw row into a checked one, or into a sentence about what is wrong with it.

    Raises:
        DatasetError: A whole source can't be read.
    """
    for source in sources:
        for origin, raw in _raw_rows(source):
            if isinstance(raw, BadRow):
                yield raw
                continue
            row = check(raw) if isinstance(raw, Mapping) else f"is a {type(raw).__name__}, expected an object"
            if isinstance(row, str):
                yield BadRow(origin, row)
            else:
                yield replace(row, origin=origin, data_source=row.data_source or _source_name(source))


def sources_of(data_files: DataFiles) -> list[Source]:
    """Return the list of sources; a list of rows is a single source.

    Raises:
        DatasetError: A list mixes names and rows.
    """
    if isinstance(data_files, str):
        return [data_files]
    items: list[Any] = list(data_files)
    names: list[Source] = [item for item in items if isinstance(item, str)]
    if names and len(names) < len(items):
        raise DatasetError("a list of data holds either the names of sources or the rows themselves, not both")
    return names or [items]


def source_of(raw: Mapping[str, Any], key: str) -> str:
    """Return the data source of a row that may leave it out, as text; empty if it does."""
    return "" if raw.get(key) is None else str(raw[key])


def _source_name(source: Source) -> str:
    """Return the data source of rows that don't name one: `bundled/<task>`, the file's name, or `list`."""
    if not isinstance(source, str):
        return "list"
    if source.startswith(BUNDLED_PREFIX):
        return f"bundled/{source.removeprefix(BUNDLED_PREFIX).partition('/')[0]}"
    return Path(source).stem


def _raw_rows(source: Source) -> Iterator[tuple[str, object]]:
    """Yield every row of a source unchanged, with file and row for messages."""
    if not isinstance(source, str):
        return ((f"row {index} of the list", row) for index, row in enumerate(source))
    if source.startswith(BUNDLED_PREFIX):
        from hrl.data.tasks import bundled_rows

        made = bundled_rows(source.removeprefix(BUNDLED_PREFIX))
    elif source.startswith(REASONING_GYM_PREFIX):
        from hrl.data.tasks.reasoning_gym import reasoning_gym_rows

        made = reasoning_gym_rows(source.removeprefix(REASONING_GYM_PREFIX))
    else:
        path = Path(source).expanduser()
        check_data_file(path)
        return _parquet_rows(path) if path.suffix in PARQUET else _jsonl_rows(path)
    return ((f"{source} row {index}", row) for index, row in enumerate(made))


# ---- files -----------------------------------------------------------------------------------------------------


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
            for row in _decoded(batch):
                origin = f"{path} row {number}"
                number += 1
                if isinstance(row, UnicodeDecodeError):
                    yield origin, BadRow(origin, f"holds text that is not UTF-8 ({row.reason})")
                else:
                    yield origin, {name: _without_missing(v) if isinstance(v, list) else v for name, v in row.items()}


def _decoded(batch: pa.RecordBatch) -> list[dict[str, Any] | UnicodeDecodeError]:
    """Return the rows of a batch, or the error of those that hold text that can't be decoded."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [error]
        half = batch.num_rows // 2
        return _decoded(batch.slice(0, half)) + _decoded(batch.slice(half))


def _without_missing(value: Any) -> Any:
    """Remove the nulls that Parquet adds: it gives every struct in a list the fields of all structs in it."""
    if isinstance(value, list):
        return [_without_missing(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_missing(item) for name, item in value.items() if item is not None}
    return value


# ---- messages --------------------------------------------------------------------------------------------------


def show_value(value: object) -> str:
    """Return a value as text for a message, shortened and then with its type."""
    text = repr(value)
    return "missing or null" if value is None else f"{text[:60]}… ({type(value).__name__})" if len(text) > 60 else text
