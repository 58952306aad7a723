"""What becomes of rows while a data set reads them: which are used, bad, too long or cut, and how that is told."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from hrl.data.files import DatasetError
from hrl.data.rows import BadRow

logger = logging.getLogger(__name__)

DataFiles = str | Sequence[str] | Sequence[Mapping[str, Any]]

_ROWS_AT_ONCE = 1024
_BAD_ROWS_SHOWN = 5

R = TypeVar("R")


@dataclass(frozen=True)
class DatasetCounts:
    """What became of the rows that were read."""

    read: int
    bad: int
    too_long: int
    truncated: int
    kept: int

    def __str__(self) -> str:
        return (
            f"{self.read} rows read, {self.bad} bad, {self.too_long} too long, {self.truncated} truncated, "
            f"{self.kept} kept"
        )


def sources_of(data_files: DataFiles) -> list[Any]:
    """Return the sources, each as `hrl.data.rows.raw_rows` takes it; a list of rows is one.

    Raises:
        DatasetError: A list of both.
    """
    if isinstance(data_files, str):
        return [data_files]
    names = [item for item in data_files if isinstance(item, str)]
    if names and len(names) < len(data_files):
        raise DatasetError("a list of data holds either the names of sources or the rows themselves, not both")
    return names or [data_files]


class Intake:
    """The books of a data set while it is read.

    Args:
        data_files: Where the rows come from, for messages.

    Attributes:
        bad: Rows that can't be used.
        too_long: File and row of those that don't fit, with their tokens.
        truncated: Number of rows that were cut.
    """

    def __init__(self, data_files: DataFiles) -> None:
        self.bad: list[BadRow] = []
        self.too_long: list[str] = []
        self.truncated = 0
        names = [item for item in sources_of(data_files) if isinstance(item, str)]
        self._name = ", ".join(names) or "the list of rows"

    def blocks(self, rows: Iterable[R | BadRow], max_samples: int) -> Iterator[list[R]]:
        """Yield the usable rows, many at a time, at most `max_samples` in all (-1: all of them).

        The others go into `bad`.
        """
        usable = islice(self._sort_out(rows), max_samples if max_samples >= 0 else None)
        while block := list(islice(usable, _ROWS_AT_ONCE)):
            yield block

    def _sort_out(self, rows: Iterable[R | BadRow]) -> Iterator[R]:
        for row in rows:
            if isinstance(row, BadRow):
                self.bad.append(row)
            else:
                yield row

    def close(self, kept: int, *, skip_bad: bool, too_long: tuple[str, str] | None) -> DatasetCounts:
        """Say what became of the rows.

        Args:
            kept: Number of rows that the data set has.
            skip_bad: Bad rows are left out (`data.bad_rows=skip`).
            too_long: What rows are that don't fit, and what can be done; None where they are left out.

        Raises:
            DatasetError: A row that must not be left out, or no row is left.
        """
        shown = "; ".join(f"{row.origin}: {row.reason}" for row in self.bad[:_BAD_ROWS_SHOWN])
        if self.bad and not skip_bad:
            raise DatasetError(f"{len(self.bad)} bad rows, or data.bad_rows=skip leaves them out: {shown}")
        if self.too_long and too_long is not None:
            what, way_out = too_long
            raise DatasetError(f"{len(self.too_long)} {what}, the first {self.too_long[0]}: {way_out}")
        bad, over = len(self.bad), len(self.too_long)
        counts = DatasetCounts(kept + bad + over, bad, over, self.truncated, kept)
        if not kept:
            raise DatasetError(f"no row to use in {self._name}: {counts}" + (f" ({shown})" if bad else ""))
        if bad:
            logger.warning("%s: skipped %d bad rows: %s", self._name, bad, shown)
        logger.info("%s: %s", self._name, counts)
        return counts
