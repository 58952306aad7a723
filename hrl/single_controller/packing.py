"""A batch laid out for sending: plain arrays, of padded columns without the padding.

A padded column `(B, C)` is mostly margins: a row's runs of padding on the left and right. `pack_column` removes both
and stores integers in the smallest type that holds them. The results are plain numpy arrays, which Ray writes to shared
memory and maps on the other side without a copy. `unpack_batch` restores all or some rows exactly, `join_batches` the
rows of many batches in one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hrl.columns import object_column
from hrl.protocol import DataProto

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


# ---- columns ---------------------------------------------------------------------------------------------------


class Column(ABC):
    """A packed column `(B, ...)`.

    Attributes:
        dtype: Dtype of the original tensor.
    """

    dtype: torch.dtype

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""

    @abstractmethod
    def write(self, rows: np.ndarray | slice, out: np.ndarray, places: np.ndarray) -> None:
        """Copy the given rows to `places` of `out`."""

    @abstractmethod
    def pick(self, rows: np.ndarray) -> Column:
        """Return the given rows as a packed column."""

    def take(self, rows: np.ndarray) -> torch.Tensor:
        """Return a copy of the given rows."""
        tensor, out = _empty((len(rows), *self.row_shape), self.dtype)
        self.write(rows, out, np.arange(len(rows)))
        return tensor


@dataclass(frozen=True)
class DenseColumn(Column):
    """A tensor column sent whole.

    Attributes:
        values: (B, ...), integers narrowed.
        dtype: Dtype of the original tensor.
    """

    values: np.ndarray
    dtype: torch.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.values.shape[1:]

    def write(self, rows: np.ndarray | slice, out: np.ndarray, places: np.ndarray) -> None:
        """Copy the given rows to `places` of `out`."""
        out[places] = self.values[rows]

    def pick(self, rows: np.ndarray) -> DenseColumn:
        """Return the given rows as a packed column."""
        return DenseColumn(self.values[rows], self.dtype)


@dataclass(frozen=True)
class RaggedColumn(Column):
    """A column `(B, C)` without its margins.

    Attributes:
        values: (sum of stops - starts,), row after row, integers narrowed; (1,) if all are equal, as in a mask.
        spans: (2, B) where the part of each row that is in `values` starts and where it stops.
        margins: (2,) the value left of that part and the value right of it.
        num_columns: C.
        dtype: Dtype of the original tensor.
    """

    values: np.ndarray
    spans: np.ndarray
    margins: np.ndarray
    num_columns: int
    dtype: torch.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return (self.num_columns,)

    def write(self, rows: np.ndarray | slice, out: np.ndarray, places: np.ndarray) -> None:
        """Copy the given rows, with their margins, to `places` of `out`."""
        (starts, stops), (left, right), values = self.spans, self.margins, self.values
        # Where each row begins in `values`. One value that stands for all is read from its place by every row.
        offsets = np.cumsum(stops - starts) - (stops - starts) if len(values) > 1 else np.zeros_like(starts)
        spans = (column[rows].tolist() for column in (starts, stops, offsets))
        # A copy of a slice for each row: faster than an index for each token if rows have a few dozen.
        for place, start, stop, offset in zip(places.tolist(), *spans, strict=True):
            row = out[place]
            row[:start] = left
            row[start:stop] = values[offset : offset + stop - start]
            row[stop:] = right

    def pick(self, rows: np.ndarray) -> RaggedColumn:
        """Return the given rows as a packed column."""
        lengths = self.spans[1] - self.spans[0]
        values = self.values
        if len(values) > 1:
            ends = np.cumsum(lengths, dtype=np.int64)
            places = zip((ends - lengths)[rows].tolist(), ends[rows].tolist(), strict=True)
            values = np.concatenate([values[:0], *(values[start:end] for start, end in places)])
        return RaggedColumn(values, self.spans[:, rows], self.margins, self.num_columns, self.dtype)


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's memory as an array. Types that numpy lacks (bfloat16, float8) come as unsigned integers."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _WITHOUT_NUMPY:
        flat = tensor.reshape(-1).view(torch.uint8).numpy()
        return flat.view(_BITS[tensor.itemsize]).reshape(tuple(tensor.shape))
    return tensor.numpy()


_WITHOUT_NUMPY = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize <= 2 and dtype != torch.float16
)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
    """Return a new tensor and its memory as `_as_numpy` shows it."""
    tensor = torch.empty(shape, dtype=dtype)
    return tensor, _as_numpy(tensor)


def _narrowed(values: np.ndarray) -> np.ndarray:
    """Convert int64 to the smallest signed type that holds every value; return other types unchanged."""
    if values.dtype != np.int64 or values.size == 0:
        return values
    low, high = int(values.min()), int(values.max())
    for dtype in (np.int8, np.int16, np.int32):
        info = np.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return values.astype(dtype)
    return values


def _margin_value(edge: np.ndarray) -> np.ndarray:
    """Return the most frequent value of a column's edge (B,), compared bitwise so that NaN and -0.0 count too."""
    bits = edge.view(_BITS[edge.itemsize])
    found, counts = np.unique(bits, return_counts=True)
    return found[counts.argmax()]


def _before_first(inside: np.ndarray) -> np.ndarray:
    """Return how many entries of each row `(B, C)` stand before the first that is True, `(B,)` int32; C without one."""
    first = inside.argmax(1)
    found = np.take_along_axis(inside, first[:, None], 1)[:, 0]
    return np.where(found, first, inside.shape[1]).astype(np.int32)


def pack_column(tensor: torch.Tensor) -> Column:
    """Pack a tensor `(B, ...)`, losing nothing."""
    values = _as_numpy(tensor)
    if values.ndim != 2 or values.size == 0 or values.dtype.itemsize not in _BITS:
        return DenseColumn(_narrowed(values), tensor.dtype)
    bits = values.view(_BITS[values.itemsize])
    left, right = _margin_value(bits[:, 0].copy()), _margin_value(bits[:, -1].copy())
    inside = bits != left
    starts = _before_first(inside)
    stops = values.shape[1] - _before_first((inside if left == right else bits != right)[:, ::-1])
    spans = np.stack([starts, np.maximum(starts, stops)])
    parts = [row[start:stop] for row, start, stop in zip(bits, *spans.tolist(), strict=True)]
    kept = np.concatenate([*parts, np.array([left, right])])
    if (kept[:-2] == kept[0]).all():
        kept = np.concatenate([kept[:-2][:1], kept[-2:]])
    kept = _narrowed(kept.view(values.dtype))
    return RaggedColumn(kept[:-2], spans, kept[-2:], values.shape[1], tensor.dtype)


# ---- batches ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedBatch:
    """A DataProto packed for sending.

    Attributes:
        num_rows: B.
        tensors: Packed columns by name.
        objects: Object columns (B,) by name, as lists.
        others: Columns of other kinds (nested tensors, arrays of numbers), as DataProto pickles them; None if the batch
            has tensors and no such columns.
        meta_info: Unchanged.
    """

    num_rows: int
    tensors: dict[str, Column]
    objects: dict[str, list[Any]]
    others: DataProto | None
    meta_info: dict[str, Any]

    def __len__(self) -> int:
        return self.num_rows

    def pick(self, rows: np.ndarray) -> PackedBatch:
        """Return the given rows (indices, repeats allowed), packed."""
        tensors = {name: column.pick(rows) for name, column in self.tensors.items()}
        objects = {name: [values[row] for row in rows] for name, values in self.objects.items()}
        others = self.others.select_idxs(rows) if self.others is not None and len(self.others) else self.others
        return PackedBatch(len(rows), tensors, objects, others, self.meta_info)

    @property
    def layout(self) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], set[str]]:
        """Shape of a row and dtype of every packed column, and the names of object columns."""
        return {name: (column.row_shape, column.dtype) for name, column in self.tensors.items()}, set(self.objects)


def pack_batch(
    batch: DataProto, columns: Sequence[str] | None = None, pack: Callable[[torch.Tensor], Column] = pack_column
) -> PackedBatch:
    """Pack the batch, or those of the named columns that it has, each by `pack`."""
    wanted = None if columns is None else frozenset(columns)
    tensor_names = [n for n in ([] if batch.batch is None else batch.batch.keys()) if wanted is None or n in wanted]
    arrays = {name: column for name, column in batch.non_tensor_batch.items() if wanted is None or name in wanted}
    columns_of = {name: batch.batch[name] for name in tensor_names}
    dense = {n: column for n, column in columns_of.items() if isinstance(column, torch.Tensor) and not column.is_nested}
    objects = {name: list(column) for name, column in arrays.items() if column.dtype == object and column.ndim == 1}
    other_tensors = [name for name in tensor_names if name not in dense]
    other_arrays = [name for name in arrays if name not in objects]
    others = None
    if other_tensors or other_arrays or batch.batch is None:
        others = batch.select(other_tensors, other_arrays, [])
        if others.batch is not None and others.batch.device is not None:
            others = others.to("cpu")
    tensors = {name: pack(column) for name, column in dense.items()}
    return PackedBatch(len(batch), tensors, objects, others, batch.meta_info)


def unpack_batch(packed: PackedBatch, rows: np.ndarray | None = None) -> DataProto:
    """Restore a copy of the batch, or of the given rows (indices, repeats allowed)."""
    rows = np.arange(packed.num_rows, dtype=np.int64) if rows is None else rows
    if packed.others is None:
        others = DataProto(TensorDict({}, batch_size=len(rows)))
    else:
        others = packed.others.select_idxs(rows) if len(packed.others) else packed.others
    for name, column in packed.tensors.items():
        others.batch[name] = column.take(rows)
    arrays = {name: object_column([values[row] for row in rows]) for name, values in packed.objects.items()}
    return DataProto(others.batch, {**arrays, **others.non_tensor_batch}, dict(packed.meta_info))


def join_batches(parts: Sequence[DataProto | PackedBatch], places: Sequence[np.ndarray]) -> DataProto:
    """Return one batch of all parts' rows, without meta_info.

    Args:
        parts: Batches of the same columns, packed or not.
        places: Per part where each of its rows stands in the joined batch.

    Raises:
        ValueError: The parts have different columns.
    """
    packed = [part for part in parts if isinstance(part, PackedBatch)]
    if len(packed) < len(parts) or any(part.layout != packed[0].layout or part.others is not None for part in packed):
        batches = [unpack_batch(part) if isinstance(part, PackedBatch) else part for part in parts]
        joined = DataProto.concat([DataProto(batch.batch, batch.non_tensor_batch) for batch in batches])
        return joined.select_idxs(np.argsort(np.concatenate(places)))
    num_rows, tensors, arrays = sum(map(len, places)), {}, {}
    for name, (row_shape, dtype) in packed[0].layout[0].items():
        tensors[name], out = _empty((num_rows, *row_shape), dtype)
        for part, where in zip(packed, places, strict=True):
            part.tensors[name].write(slice(None), out, where)
    for name in packed[0].objects:
        arrays[name] = np.empty(num_rows, dtype=object)
        for part, where in zip(packed, places, strict=True):
            arrays[name][where] = object_column(part.objects[name])
    return DataProto(TensorDict(tensors, batch_size=num_rows), arrays)


def pack_result(result: Any) -> Any:
    """Pack the batches in a method's result, also those in a tuple, list or dict."""
    if isinstance(result, DataProto):
        return pack_batch(result)
    return _mapped(pack_result, result)


def unpack_result(result: Any) -> Any:
    """Undo `pack_result`."""
    if isinstance(result, PackedBatch):
        return unpack_batch(result)
    return _mapped(unpack_result, result)


def _mapped(function: Any, value: Any) -> Any:
    """Apply `function` to the entries of a plain tuple, list or dict; return any other value unchanged."""
    if type(value) in (tuple, list):
        return type(value)(map(function, value))
    if type(value) is dict:
        return {key: function(entry) for key, entry in value.items()}
    return value
