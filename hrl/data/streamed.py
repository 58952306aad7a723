"""Rows that stay on disk and are read when they are drawn, for data that does not fit in memory.

A few thousand of them are kept, so that a batch that was drawn is there when it is put together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np

from hrl.data.by_number import ByNumber
from hrl.data.order import EpochOrder, Position, epoch_of
from hrl.errors import DatasetError

R = TypeVar("R")
T = TypeVar("T")
C = TypeVar("C")

FIRST_ROWS = 256
"""How many rows of each source are read before a run, to look at them."""
_LEAST_KEPT = 1024

Load = Callable[[Sequence[tuple[int, int, Any]], bool], list[tuple[R, T] | None]]
"""Takes (source, row in it, raw row) of some rows, and whether they were read before; returns each with its tokens, or
None for one to leave out."""


class StreamedRows(Generic[R, T]):
    """Rows of several tables, by number.

    Args:
        tables: Raw rows of each source, by number; such as a `datasets.Dataset`, whose rows are memory-mapped.
        load: Makes rows of raw ones.
        max_rows: Use only this many first rows, of all tables or of each; -1 uses all.
        keep: Rows to keep at least.

    Attributes:
        sizes: Rows of each table that are used.
        num_used: How many different rows have been made.
    """

    def __init__(
        self, tables: Sequence[Any], load: Load[R, T], max_rows: int | Sequence[int] = -1, *, keep: int = 0
    ) -> None:
        if isinstance(max_rows, int):
            left = sum(map(len, tables)) if max_rows < 0 else max_rows
            self.sizes: list[int] = []
            for table in tables:
                self.sizes.append(min(len(table), left))
                left -= self.sizes[-1]
        else:
            self.sizes = [min(len(table), most) for table, most in zip(tables, max_rows, strict=True)]
        self.num_used = 0
        self._tables, self._load, self._keep = tables, load, max(keep, _LEAST_KEPT)
        self._ends = list(accumulate(self.sizes))
        self._kept: OrderedDict[int, tuple[R, T] | None] = OrderedDict()
        self._was_read = np.zeros(len(self), dtype=bool)

    def __len__(self) -> int:
        return self._ends[-1]

    def get(self, indices: Sequence[int]) -> list[tuple[R, T] | None]:
        """Return rows with their tokens, None for those to leave out.

        Raises:
            DatasetError: A row can't be used, and must not be left out.
        """
        missing = [index for index in dict.fromkeys(indices) if index not in self._kept]
        for again in (False, True):
            wanted = [index for index in missing if bool(self._was_read[index]) is again]
            if wanted:
                made = self._load([self._raw(index) for index in wanted], again)
                self._kept |= zip(wanted, made, strict=True)
                self.num_used += 0 if again else sum(one is not None for one in made)
        self._was_read[missing] = True
        found = []
        for index in indices:
            self._kept.move_to_end(index)
            found.append(self._kept[index])
        while len(self._kept) > max(self._keep, len(indices)):
            self._kept.popitem(last=False)
        return found

    def _raw(self, index: int) -> tuple[int, int, Any]:
        source = bisect_right(self._ends, index)
        place = index - (self._ends[source] - self.sizes[source])
        return source, place, self._tables[source][place]

    def first_of_each(self) -> list[int]:
        """Return the numbers of the usable ones of the first rows of each source."""
        starts = [end - size for end, size in zip(self._ends, self.sizes, strict=True)]
        first = [
            start + place
            for start, size in zip(starts, self.sizes, strict=True)
            for place in range(min(size, FIRST_ROWS))
        ]
        return [index for index, row in zip(first, self.get(first), strict=True) if row is not None]

    def draw(self, order: EpochOrder, position: Position, batch_size: int) -> tuple[list[int], Position]:
        """Return the next usable rows of an order, and the position after them; see `TokenisedDataset.draw`."""
        order.check(position, batch_size)
        for epoch in (position.epoch, position.epoch + 1):
            rows = epoch_of(order, epoch)
            offset, found = position.offset if epoch == position.epoch else 0, list[int]()
            while len(found) < batch_size and offset < len(rows):
                ahead = rows[offset : offset + batch_size - len(found)].tolist()
                found += [index for index, row in zip(ahead, self.get(ahead), strict=True) if row is not None]
                offset += len(ahead)
            if len(found) == batch_size:
                return found, Position(epoch, offset)
        raise DatasetError(
            f"epoch {position.epoch + 1} has {len(found)} rows that can be used, too few for a batch of {batch_size}: "
            "lower data.train_batch_size, or see why rows are left out (data.bad_rows=error names them)"
        )


class Column(ByNumber[C]):
    """One side of streamed rows, the rows or their tokens, as a sequence."""

    def __init__(self, streamed: StreamedRows[Any, Any], side: int) -> None:
        self._streamed, self._side = streamed, side

    def __len__(self) -> int:
        return len(self._streamed)

    def item(self, index: int) -> C:
        """Return a row, or its tokens.

        Raises:
            DatasetError: The row can't be used.
        """
        (row,) = self._streamed.get([index])
        if row is None:
            raise DatasetError(f"row {index} was to be left out")
        return row[self._side]  # type: ignore[no-any-return]
