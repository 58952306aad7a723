"""Where rows come from, and reading them: files, folders, data sets of the hub, tasks that make rows, objects.

What a row must have is checked by the data set that takes it, with the function that it gives to `read_rows`.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from hrl.config.sources import SourceConfig, is_source, source_config
from hrl.data.by_place import by_place
from hrl.data.files import (
    PARQUET,
    BadRow,
    files_in,
    is_repository,
    is_saved_data_set,
    kind_of,
    parquet_columns,
    rows_of_file,
    stem_of,
)
from hrl.data.hub import converted, looks_like_hub, open_data_set
from hrl.errors import DatasetError
from hrl.files import expanded
from hrl.nearest import listing

if TYPE_CHECKING:
    from hrl.config.data import RowsConfig
    from hrl.pictures import Shown

BUNDLED_PREFIX = "bundled:"
REASONING_GYM_PREFIX = "reasoning_gym:"
PYTHON = "python"
"""The data source of rows that were given as objects and name none."""

GROUND_TRUTH = "ground_truth"
ROWS_LOOKED_AT = 64
_LONGEST_ROW_SHOWN = 300
_LONGEST_NAME_SHOWN = 80
_SPLIT_NAMES = {
    "train": "train",
    "test": "test",
    "eval": "test",
    "dev": "validation",
    "val": "validation",
} | dict.fromkeys(("valid", "validation"), "validation")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_MISSING = object()


@dataclass(frozen=True)
class Source:
    """A source of rows with its options.

    Attributes:
        options: Path and options, as configured.
        rows: The rows themselves, in place of a path.
        columns: Column as the data set names it → column of this source; see `Source.with_keys_of`.
    """

    options: SourceConfig
    rows: Sequence[Any] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What the source is called in messages."""
        if self.rows is not None:
            return "the list of rows"
        return ":".join(part for part in (self.options.path, self.options.name, self.options.split) if part)

    @property
    def path(self) -> Path:
        """The path, with `~` expanded; an unknown user's `~name` stays as it is."""
        return expanded(self.options.path)

    @property
    def makes_rows(self) -> bool:
        """Whether a task makes the rows."""
        return self.rows is None and self.options.path.startswith((BUNDLED_PREFIX, REASONING_GYM_PREFIX))

    @property
    def data_source(self) -> str:
        """The data source of rows that name none: the task, the hub's name, the file's, the folder's, or `python`."""
        if self.options.data_source:
            return self.options.data_source
        path = self.options.path
        if self.rows is not None:
            return PYTHON
        if path.startswith(BUNDLED_PREFIX):
            return f"bundled/{path.removeprefix(BUNDLED_PREFIX).partition('/')[0]}"
        return path if self.is_of_the_hub else stem_of(Path(os.path.abspath(self.path)))

    @property
    def is_of_the_hub(self) -> bool:
        """Whether the path is the name of a data set of the hub: it has the form of one, and nothing here has it."""
        return not self.path.exists() and looks_like_hub(self.options.path)

    def with_keys_of(self, data: RowsConfig) -> Source:
        """Return the source with the columns that the section `data` and its own options map."""
        mapped = {**data.map, **self.options.map}
        columns = {ours: theirs for ours, theirs in mapped.items() if ours != theirs}
        for ours, theirs in (
            (getattr(data, "prompt_key", None), self.options.prompt_key),
            (getattr(data, "answer_key", None) or "answer", self.options.answer_key),
        ):
            if theirs is not None and ours is not None and theirs != ours:
                columns[ours] = theirs
        return replace(self, columns=columns)


DataFiles = str | Source | Mapping[str, Any] | Sequence[Any] | Iterable[Mapping[str, Any]]
"""A source as `data.train_files` takes it, or several of them; or the rows themselves."""


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """The fields of every checked row.

    Attributes:
        data_source: Chooses the scorer and groups validation metrics.
        origin: File and row, for messages.
        images: The pictures and videos that its prompt shows, in order.
    """

    data_source: str = ""
    origin: str = ""
    images: tuple[Shown, ...] = ()


R = TypeVar("R", bound=DataRow)


def sources_of(data_files: DataFiles) -> list[Source]:
    """Return the list of sources; a list of rows is a single source.

    Raises:
        DatasetError: A list mixes names and rows.
    """
    if isinstance(data_files, str | Source | Path) or is_source(data_files):
        return [_source(data_files)]
    items: list[Any] = list(data_files)
    named = [isinstance(item, str | Source | Path) or is_source(item) for item in items]
    if any(named) and not all(named):
        raise DatasetError("a list of data holds either the names of sources or the rows themselves, not both")
    return [_source(item) for item in items] if any(named) else [Source(SourceConfig(path="python:rows"), items)]


def _source(value: Any) -> Source:
    if isinstance(value, Source):
        return value
    try:
        options = source_config(value if isinstance(value, Mapping) else str(value))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        option = ".".join(map(str, detail["loc"]))
        raise DatasetError(
            f"a source of rows can't have {option}={show_value(detail['input'])}: {detail['msg'].lower()}"
        ) from error
    _require_a_name(options.path)
    path, *more = options.path.split(":")
    there = os.path.exists(os.path.expanduser(options.path))
    known = looks_like_hub(path) or os.path.isdir(os.path.expanduser(path))
    if there or options.path.startswith((BUNDLED_PREFIX, REASONING_GYM_PREFIX)) or not more or not known:
        return Source(options)
    name, split = more[0], ":".join(more[1:])
    if (name and options.name) or (split and options.split):
        raise DatasetError(f"{options.path} has its configuration or split twice, in its path and as an option")
    changes = {"path": path, "name": name or options.name, "split": split or options.split}
    return Source(options.model_copy(update=changes))


def _require_a_name(path: str) -> None:
    """Refuse a text that no file can be called, on which the system fails.

    Raises:
        DatasetError: It is too long, or holds a NUL character or half a character.
    """
    if path.startswith((BUNDLED_PREFIX, REASONING_GYM_PREFIX)):
        return
    try:
        os.stat(os.path.expanduser(path))
    except (ValueError, UnicodeEncodeError) as error:
        raise DatasetError(f"{path[:_LONGEST_NAME_SHOWN]!r} can't be the name of a file: {error}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise DatasetError(f"{path[:_LONGEST_NAME_SHOWN]!r}… is too long to be the name of a file") from error


def source_of(raw: Mapping[str, Any], key: str) -> str:
    """Return the data source of a row that may leave it out, as text; empty if it does."""
    return "" if raw.get(key) is None else str(raw[key])


# ---- reading ---------------------------------------------------------------------------------------------------


def read_rows(
    sources: Iterable[Source | str | Sequence[Any]], check: Callable[[Mapping[str, Any]], R | str]
) -> Iterator[R | BadRow]:
    """Yield every row of all sources in order, the unusable ones as `BadRow`.

    Args:
        sources: Sources, or what `sources_of` takes for one.
        check: Turns a raw row into a checked one, or into a sentence about what is wrong with it.

    Raises:
        DatasetError: A whole source can't be read.
    """
    for each in sources:
        for source in sources_of(each):
            data_source = source.data_source
            for origin, raw in raw_rows(source):
                yield checked_row(source, origin, raw, check, data_source)


def checked_row(
    source: Source, origin: str, raw: object, check: Callable[[Mapping[str, Any]], R | str], data_source: str
) -> R | BadRow:
    """Return a row as the data set takes it, with its place and its data source; or the `BadRow` that it is."""
    if isinstance(raw, BadRow):
        return raw
    if not isinstance(raw, Mapping):
        return BadRow(origin, f"is a {type(raw).__name__}, expected an object")
    plain = mapped(raw, source.columns)
    if source.options.answer_key is not None:
        if field_of(plain, source.options.answer_key) in (None, _MISSING):
            return BadRow(origin, f"{source.options.answer_key!r} is missing or null (answer_key of its source)")
        plain = _without_truth(plain)
    row = check(plain)
    if isinstance(row, str):
        told = [f"{ours!r} is its column {theirs!r}" for ours, theirs in source.columns.items() if repr(ours) in row]
        return BadRow(origin, f"{row} ({', '.join(told)})" if told else row)
    return replace(row, origin=origin, data_source=row.data_source or data_source)


def _without_truth(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row without the ground truth that it has beside the answer which its source names."""
    others = {name: value for name, value in row.items() if name != GROUND_TRUTH}
    if isinstance(row.get("reward_model"), Mapping):
        others["reward_model"] = {name: value for name, value in row["reward_model"].items() if name != GROUND_TRUTH}
    return others


def mapped(raw: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a row with the columns that are mapped also under hrl's names, in Python's own types.

    pandas gives lists as arrays, and fills fields that a row lacks with not-a-number, which becomes null.
    """
    row = {str(name): _as_python(value) for name, value in raw.items()}
    found = {ours: field_of(row, theirs) for ours, theirs in columns.items()}
    return row | {ours: None if value is _MISSING else value for ours, value in found.items()}


def _as_python(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)  # also of numpy, whose doubles are Python's
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        plain = value.tolist()
        if type(plain) is type(value):  # a long double, for which Python has no type
            return value
        return [_as_python(item) for item in plain] if isinstance(plain, list) else _as_python(plain)
    if isinstance(value, dict) and any(type(item).__module__ == "numpy" for item in value.values()):
        return {name: _as_python(item) for name, item in value.items()}
    return None if type(value).__name__ in ("NAType", "NaTType") else value  # of pandas


def field_of(row: Mapping[str, Any], path: str) -> Any:
    """Return the column of a row, or for `a.b` the field `b` of its column `a`; a marker if there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _MISSING
        value = value[name]
    return value


def raw_rows(source: Source) -> Iterator[tuple[str, object]]:
    """Yield every row of a source unchanged, with file and row for messages.

    Raises:
        DatasetError: The source can't be read.
    """
    if source.rows is not None:
        return ((f"row {index} of the list", row) for index, row in enumerate(source.rows))
    path = source.options.path
    if path.startswith(BUNDLED_PREFIX):
        from hrl.data.tasks import bundled_rows

        return _numbered(path, bundled_rows(path.removeprefix(BUNDLED_PREFIX)))
    if path.startswith(REASONING_GYM_PREFIX):
        from hrl.data.tasks.reasoning_gym import reasoning_gym_rows

        return _numbered(path, reasoning_gym_rows(path.removeprefix(REASONING_GYM_PREFIX)))
    files = files_of(source)
    if files is None:
        return _numbered(source.title, open_table(source))
    return ((origin, row) for file in files for origin, row in rows_of_file(file))


def _numbered(title: str, rows: Iterable[Any]) -> Iterator[tuple[str, object]]:
    return ((f"{title} row {index}", row) for index, row in enumerate(rows))


def files_of(source: Source) -> list[Path] | None:
    """Return the files of a source; None for one that the package `datasets` opens.

    Raises:
        DatasetError: There are none, or they hold several splits, or one and files of none, and none is named.
    """
    options, path = source.options, source.path
    if source.is_of_the_hub:
        return None
    if path.is_dir() and (options.name or options.split or is_saved_data_set(path) or is_repository(path)):
        return None
    if options.name or options.split:
        given = "name" if options.name else "split"
        raise DatasetError(
            f"{options.path} is no data set of the hub and no folder, so it has no {given}: leave it out"
        )
    if _URL.match(options.path):
        raise DatasetError(
            f"{options.path} is a URL: download the file and name it; a data set of the hub is named owner/name"
        )
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", options.path) and not kind_of(path):
        files_in_or_hub(path)
    files = files_in(path)
    split_of = {file: _split_of(file, path) for file in files}
    splits = {split for split in split_of.values() if split}
    if path.is_dir() and len(splits) > 1:
        raise DatasetError(
            f"{path} is a folder with the splits {listing(sorted(splits))}: name the files of one, or one split, "
            f"{options.path}::{'train' if 'train' in splits else min(splits)}"
        )
    if splits and None in split_of.values():
        split, named = next((split, file) for file, split in split_of.items() if split)
        other = next(file for file, split in split_of.items() if not split)
        raise DatasetError(
            f"{path} is a folder with {named.relative_to(path)}, by its name of the split {split}, beside files of "
            f"none, such as {other.relative_to(path)}: name the files that are meant"
        )
    return files


def held_out_files(source: Source) -> list[Path]:
    """Return the files of a folder if all are of a split to validate or test on, by their names; none otherwise.

    Raises:
        DatasetError: The source can't be read.
    """
    if source.rows is not None or source.makes_rows or not source.path.is_dir():
        return []
    files = files_of(source) or []
    return files if all(_split_of(file, source.path) in ("test", "validation") for file in files) else []


def files_in_or_hub(path: Path) -> None:
    """Refuse a path that is missing and may have been meant as a data set of the hub.

    Raises:
        DatasetError: Always.
    """
    try:
        files_in(path)
    except DatasetError as error:
        raise DatasetError(
            f"{error} (A data set of the hub with the name {path} would be looked for if there were no folder "
            f"{path.parts[0]} here.)"
        ) from None


def _split_of(file: Path, folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    words = re.split(r"[^a-z]+", str(file.relative_to(folder)).lower())
    return next((_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES), None)


def open_table(source: Source) -> Any:
    """Return the rows of a source by number, left on disk where they are in files.

    Raises:
        DatasetError: The source can't be read.
    """
    if source.rows is not None:
        return source.rows
    if source.makes_rows:
        return [row for _, row in raw_rows(source)]
    files = files_of(source)
    if files is not None:
        rows = by_place(files)
        return converted(files) if rows is None else rows
    return open_data_set(str(source.path), source.options.name, source.options.split)


# ---- looking at a source before its rows are read --------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """The beginning of a source.

    Attributes:
        columns: Names of its columns; those of the first rows, where a row may have its own. None if no row is one.
        first: Its first row, None if there is none.
    """

    columns: list[str] | None
    first: Mapping[str, Any] | None

    @property
    def shown(self) -> str:
        """The first row in a line, for messages; empty if there is none."""
        return "" if self.first is None else f"The first row: {show_row(self.first)}"


def look_into(source: Source) -> Look:
    """Return the columns and the first row of a source.

    Raises:
        DatasetError: It can't be read.
    """
    columns: dict[str, None] = {}
    first: Mapping[str, Any] | None = None
    for _, raw in islice(raw_rows(source), ROWS_LOOKED_AT):
        if isinstance(raw, Mapping):
            first = raw if first is None else first
            columns |= dict.fromkeys(map(str, raw))
    files = [] if source.rows is not None or source.makes_rows else files_of(source) or []
    for file in files:
        if kind_of(file) in PARQUET:
            columns |= dict.fromkeys(parquet_columns(file))
    return Look(list(columns) or None, first)


def has_field(look: Look, path: str) -> bool:
    """Return whether rows have a column, or a field of one (`a.b`)."""
    there = look.columns or ()
    return path in there or (look.first is not None and field_of(look.first, path) is not _MISSING)


# ---- messages --------------------------------------------------------------------------------------------------


def show_value(value: object) -> str:
    """Return a value as text for a message, shortened and then with its type."""
    text = _repr(value)
    return "missing or null" if value is None else f"{text[:60]}… ({type(value).__name__})" if len(text) > 60 else text


def _repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a {type(value).__name__} of thousands of digits"


def show_row(row: Mapping[str, Any]) -> str:
    """Return a row on one line, its values shortened."""
    most = max(20, _LONGEST_ROW_SHOWN // max(len(row), 1))
    texts = {str(name): _repr(value) for name, value in row.items()}
    shown = ", ".join(f"{name}: {text if len(text) <= most else text[:most] + '…'}" for name, text in texts.items())
    return f"{{{shown[:_LONGEST_ROW_SHOWN]}{'…' if len(shown) > _LONGEST_ROW_SHOWN else ''}}}"
