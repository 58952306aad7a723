"""What may be given as `data`: names of sources, or rows in any of the usual containers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hrl.config.sources import is_source
from hrl.errors import HrlError

Rows = str | Path | Sequence[str] | Iterable[Mapping[str, Any]] | Mapping[str, Any]
"""A source as `data.train_files` takes it, a text or a mapping with a `path` and options, or several of them; or the
rows themselves: a list of dicts, a dict of columns, a `datasets.Dataset` or `IterableDataset`, a pandas `DataFrame`, a
polars or Arrow table, any iterable of dicts."""

MOST_ROWS = 1_000_000
"""Rows that are read from an iterable without a length, which may never end."""


_LONGEST_SHOWN = 60


class UsageError(HrlError, TypeError):
    """A trainer was given something that it can't take, or asked for something that it can't do now."""


def as_sources_or_rows(
    data: Rows | None,
) -> tuple[list[str | dict[str, Any]] | None, list[Mapping[str, Any]] | None]:
    """Return the names of sources, or the rows; None for what was not given.

    Raises:
        UsageError: It is neither; says what it is and what to give.
    """
    if data is None:
        return None, None
    items: list[Any] = [data] if _is_source(data) or _is_meant_as_source(data) else list(_items(data))
    if items and (all(map(_is_source, items)) or _is_meant_as_source(data)):
        _require_names(items)
        return [dict(item) if isinstance(item, Mapping) else str(item) for item in items], None
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise UsageError(f"row {index} of data is a {type(item).__name__}; a row is a dict of column to value")
    return None, items


def _is_source(value: object) -> bool:
    return isinstance(value, str | Path) or is_source(value)


def _is_meant_as_source(value: object) -> bool:
    """Return whether a dict is a source with an option that there is not: its path is a text, and no column."""
    return isinstance(value, Mapping) and isinstance(value.get("path"), str | Path)


def _require_names(items: Sequence[Any]) -> None:
    """Refuse prompts that stand where names of files are expected.

    Raises:
        UsageError: A text with a space or a line break in it is no file.
    """
    for index, item in enumerate(items):
        text = str(item)
        if isinstance(item, str) and re.search(r"\s", text) and not os.path.exists(os.path.expanduser(text)):
            shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
            raise UsageError(
                f"text {index} of data is {shown!r}, and no file has that name. A text names a file or a data set; "
                "rows are dicts: [{'prompt': …, 'answer': …}]"
            )


def _items(data: Any) -> Iterable[Any]:
    """Return what a container holds, row by row. Packages of tables need not be installed, so methods tell them."""
    if hasattr(data, "to_dict") and hasattr(data, "iterrows"):  # pandas
        if any(name is not None for name in data.index.names):  # a column that was made the index
            data = data.reset_index()
        return [_without_missing(row) for row in data.to_dict("records")]
    if hasattr(data, "to_pylist"):  # pyarrow
        return _arrow_rows(data)
    if hasattr(data, "to_dicts"):  # polars
        return list(data.to_dicts())
    if isinstance(data, Mapping):
        return _rows_of_columns(data)
    if hasattr(data, "with_format") and hasattr(data, "column_names"):  # datasets: plain values, not tensors
        from hrl.data.files import UNREADABLE
        from hrl.data.hub import undecoded

        data = undecoded(data)
        if hasattr(data, "__len__"):
            try:
                return list(data)
            except UNREADABLE:
                return _arrow_rows(data.with_format("arrow")[:])
    if not isinstance(data, Iterable) or isinstance(data, bytes):
        raise UsageError(
            f"data is a {type(data).__name__}; give a list of rows (dicts), a dict of columns, a data set, or a file's "
            "name"
        )
    if hasattr(data, "__len__"):
        return data
    found = list(islice(data, MOST_ROWS + 1))
    if len(found) > MOST_ROWS:
        raise UsageError(
            f"data is a {type(data).__name__} of more than {MOST_ROWS:,} rows, which are all read before the first "
            "step: take some, e.g. with itertools.islice or .take(n), or name its files, which are streamed"
        )
    return found


def _arrow_rows(data: Any) -> list[Any]:
    """Return the rows of an Arrow table, batch or array.

    Raises:
        UsageError: One holds what Python's types can't.
    """
    from hrl.data.files import decoded

    if not hasattr(data, "schema"):
        return list(data.to_pylist())
    rows = decoded(data)
    for index, row in enumerate(rows):
        if isinstance(row, str):
            raise UsageError(f"row {index} of data {row}")
    return rows


def _rows_of_columns(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dict of columns.

    Raises:
        UsageError: Its values are not columns of one length.
    """
    for name, column in columns.items():
        if hasattr(column, "column_names"):  # a data set: these are the splits of a `DatasetDict`
            raise UsageError(f"data is a dict of data sets; give one of them: {', '.join(map(str, columns))}")
        if isinstance(column, str | bytes) or not hasattr(column, "__len__"):
            raise UsageError(
                f"data is a dict whose {name!r} is a {type(column).__name__}; give a list of rows (dicts), or a dict "
                "of columns, each a list"
            )
    lengths = {str(name): len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UsageError(f"the columns of data have different lengths: {listed}")
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _without_missing(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of pandas with None for what is missing there: NaN, NaT and NA are the values unequal to themselves.

    NA compares to NA, which has no truth value.
    """
    return {_text(name): None if _is_missing(value) else value for name, value in row.items()}


def _text(name: Any) -> str:
    try:
        return str(name)
    except ValueError as error:
        raise UsageError("data has a column whose name is an integer of thousands of digits; use words") from error


def _is_missing(value: Any) -> bool:
    if type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and value != value
