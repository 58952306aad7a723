"""How rows cross a process boundary: packed once on the driver, picked from shared memory by the ranks.

A padded column `(B, C)` is mostly margins: a row's runs of padding on the left and right. `pack_column` removes both
and stores integers in the smallest type that holds them. The results are plain numpy arrays, which Ray writes to shared
memory and maps on the other side without a copy. `unpack_batch` restores all or some rows exactly.

The driver puts a batch into the object store once; a rank gets a `RowsRef`, the reference and its row indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from hrl.columns import object_column
from hrl.protocol import DataProto
from hrl.single_controller.dispatch import BatchRows, RankCall

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


# ---- columns ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseColumn:
    """A tensor column sent whole.

    Attributes:
        values: (B, ...), integers narrowed.
        dtype: Dtype of the original tensor.
    """

    values: np.ndarray
    dtype: torch.dtype

    def take(self, rows: np.ndarray) -> torch.Tensor:
        """Return a copy of the given rows."""
        return _to_tensor(self.values[rows], self.dtype)


@dataclass(frozen=True)
class RaggedColumn:
    """A column `(B, C)` without its margins.

    Attributes:
        values: (sum of stops - starts,), row after row, integers narrowed; (1,) if all are equal, as in a mask.
        starts, stops: (B,) the part of each row that is in `values`.
        margins: The value left of `starts` and the value from `stops` on, as arrays () of the type of `values`.
        num_columns: C.
        dtype: Dtype of the original tensor.
    """

    values: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    margins: tuple[np.ndarray, np.ndarray]
    num_columns: int
    dtype: torch.dtype

    def take(self, rows: np.ndarray) -> torch.Tensor:
        """Return a copy of the given rows (n, C) with their margins."""
        lengths = self.stops - self.starts
        offsets = np.cumsum(lengths) - lengths
        starts, stops, lengths = self.starts[rows, None], self.stops[rows, None], lengths[rows]
        positions = np.arange(self.num_columns, dtype=self.starts.dtype)
        left, right = self.margins
        out = np.where(positions < starts, left, right)
        values = self.values
        if len(values) > 1:
            # The k-th value of a row is at offsets[row] + k; `first` is the start of each row in the gathered values.
            first = np.cumsum(lengths) - lengths
            values = values[np.repeat(offsets[rows] - first, lengths) + np.arange(lengths.sum())]
        out[(positions >= starts) & (positions < stops)] = values
        return _to_tensor(out, self.dtype)


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


def _to_tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if dtype in _WITHOUT_NUMPY:
        flat = torch.from_numpy(values.reshape(-1).view(np.uint8)).view(dtype)
        return flat.reshape(values.shape)
    return torch.from_numpy(values).to(dtype)


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


def pack_column(tensor: torch.Tensor) -> DenseColumn | RaggedColumn:
    """Pack a tensor `(B, ...)`, losing nothing."""
    values = _as_numpy(tensor)
    if values.ndim != 2 or values.size == 0 or values.dtype.itemsize not in _BITS:
        return DenseColumn(_narrowed(values), tensor.dtype)
    values = _narrowed(values)
    bits = np.ascontiguousarray(values).view(_BITS[values.itemsize])
    num_columns = values.shape[1]
    left, right = _margin_value(bits[:, 0].copy()), _margin_value(bits[:, -1].copy())
    inside_left, inside_right = bits != left, (bits != right)[:, ::-1]
    starts = np.where(inside_left.any(1), inside_left.argmax(1), num_columns)
    stops = np.where(inside_right.any(1), num_columns - inside_right.argmax(1), 0)
    starts, stops = starts.astype(np.int32), np.maximum(starts, stops).astype(np.int32)
    positions = np.arange(num_columns, dtype=np.int32)
    kept = values[(positions >= starts[:, None]) & (positions < stops[:, None])]
    if (kept.view(bits.dtype) == kept[:1].view(bits.dtype)).all():
        kept = kept[:1]
    margins = (np.asarray(left).view(values.dtype), np.asarray(right).view(values.dtype))
    return RaggedColumn(kept, starts, stops, margins, num_columns, tensor.dtype)


# ---- batches ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedBatch:
    """A DataProto packed for sending.

    Attributes:
        num_rows: B.
        tensors: Packed columns by name.
        objects: Object columns (B,) by name, as lists.
        others: Columns of other kinds (nested tensors, arrays of numbers), as DataProto pickles them.
        meta_info: Unchanged.
    """

    num_rows: int
    tensors: dict[str, DenseColumn | RaggedColumn]
    objects: dict[str, list[Any]]
    others: DataProto
    meta_info: dict[str, Any]


def pack_batch(batch: DataProto, columns: Sequence[str] | None = None) -> PackedBatch:
    """Pack the batch, or those of the named columns that it has."""
    wanted = None if columns is None else frozenset(columns)
    tensor_names = [n for n in ([] if batch.batch is None else batch.batch.keys()) if wanted is None or n in wanted]
    arrays = {name: column for name, column in batch.non_tensor_batch.items() if wanted is None or name in wanted}
    columns_of = {name: batch.batch[name] for name in tensor_names}
    dense = {n: column for n, column in columns_of.items() if isinstance(column, torch.Tensor) and not column.is_nested}
    objects = {name: list(column) for name, column in arrays.items() if column.dtype == object and column.ndim == 1}
    others = batch.select([n for n in tensor_names if n not in dense], [n for n in arrays if n not in objects], [])
    if others.batch is not None and others.batch.device is not None:
        others = others.to("cpu")
    tensors = {name: pack_column(column) for name, column in dense.items()}
    return PackedBatch(len(batch), tensors, objects, others, batch.meta_info)


def unpack_batch(packed: PackedBatch, rows: np.ndarray | None = None) -> DataProto:
    """Restore a copy of the batch, or of the given rows (indices, repeats allowed)."""
    rows = np.arange(packed.num_rows, dtype=np.int64) if rows is None else rows
    others = packed.others.select_idxs(rows) if len(packed.others) else packed.others
    for name, column in packed.tensors.items():
        others.batch[name] = column.take(rows)
    arrays = {name: object_column([values[row] for row in rows]) for name, values in packed.objects.items()}
    return DataProto(others.batch, {**arrays, **others.non_tensor_batch}, dict(packed.meta_info))


# ---- arguments and results of calls ----------------------------------------------------------------------------


@dataclass(frozen=True)
class RowsRef:
    """A reference to rows of a batch in the object store; a rank gets it instead of a DataProto.

    Attributes:
        packed: Reference to a PackedBatch.
        rows: (n,) row indices; None for all.
    """

    packed: ray.ObjectRef
    rows: np.ndarray | None


def send(calls: Sequence[RankCall]) -> list[RankCall]:
    """Prepare the ranks' calls for sending; every batch is put into the object store once."""
    sent: dict[tuple[int, tuple[str, ...] | None], ray.ObjectRef] = {}

    def put(batch: DataProto, columns: tuple[str, ...] | None) -> ray.ObjectRef:
        key = (id(batch), columns)  # `calls` keeps the batch alive, and with it its id
        if key not in sent:
            sent[key] = ray.put(pack_batch(batch, columns))
        return sent[key]

    def as_sent(arg: Any) -> Any:
        if isinstance(arg, BatchRows):
            return RowsRef(put(arg.batch, arg.columns), arg.rows)
        return RowsRef(put(arg, None), None) if isinstance(arg, DataProto) else arg

    return [call.mapped(as_sent) for call in calls]


def receive(call: RankCall, timeout_s: float) -> RankCall:
    """Restore the batches of a received call; runs on a rank.

    Raises:
        ray.exceptions.GetTimeoutError: A batch did not arrive within `timeout_s`.
    """

    def received(arg: Any) -> Any:
        return unpack_batch(ray.get(arg.packed, timeout=timeout_s), arg.rows) if isinstance(arg, RowsRef) else arg

    return call.mapped(received)


def pack_result(result: Any) -> Any:
    """Pack the batches in a method's result, also those in a tuple, list or dict; runs on a rank."""
    if isinstance(result, DataProto):
        return pack_batch(result)
    return _mapped(pack_result, result)


def unpack_result(result: Any) -> Any:
    """Undo `pack_result`; runs on the driver."""
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
