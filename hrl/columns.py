"""Columns of a batch: take rows, join, compare, unite, and turn into plain arrays for a pickle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

PlainTensor = tuple[str, tuple[int, ...], np.ndarray]
PlainNested = tuple[tuple[str, str], list[PlainTensor]]  # (layout, dtype) and the rows
PlainColumn = PlainTensor | PlainNested
PlainBatch = tuple[tuple[int, ...], str | None, dict[tuple[str, ...], PlainColumn]]


def row_indices(indices: Any, num_rows: int) -> np.ndarray:
    """Turn a list, array or tensor of integers or booleans into row numbers from 0 to `num_rows` - 1.

    Raises:
        IndexError: A row number is out of range, or a mask's length is not the number of rows.
        TypeError: The indices are neither integers nor booleans.
    """
    array = indices.detach().cpu().numpy() if isinstance(indices, torch.Tensor) else np.asarray(indices)
    if array.ndim != 1:
        raise IndexError(f"rows are selected by a one-dimensional index, got shape {array.shape}")
    if array.dtype == bool:
        if len(array) != num_rows:
            raise IndexError(f"the mask has {len(array)} entries and the batch {num_rows} rows")
        return np.flatnonzero(array)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"rows are selected by integers or booleans, got {array.dtype}")
    array = array.astype(np.int64)
    outside = (array < -num_rows) | (array >= num_rows)
    if outside.any():
        raise IndexError(f"row {array[outside][0]} is out of range for a batch of {num_rows} rows")
    return np.where(array < 0, array + num_rows, array)


def batch_shape(column: torch.Tensor | TensorDict, num_batch_dims: int) -> tuple[int, ...]:
    """Return the leading dimensions of a column; strided nested tensors have no `shape`, only their first size."""
    if isinstance(column, torch.Tensor) and column.is_nested:
        return (column.size(0),)
    return tuple(column.shape[:num_batch_dims])


def tensor_leaves(batch: TensorDict, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield all tensors with their paths, those of nested TensorDicts too.

    Raises:
        TypeError: A column is no tensor (TensorDict's own iteration would skip it).
    """
    for key, value in batch.items():
        if isinstance(value, TensorDict):
            yield from tensor_leaves(value, (*prefix, key))
        elif isinstance(value, torch.Tensor):
            yield (*prefix, key), value
        else:
            raise TypeError(
                f"column {key!r} holds {type(value).__name__}: only tensors belong in batch, everything else "
                "in non_tensor_batch"
            )


def nest_tensors(rows: Sequence[torch.Tensor], layout: torch.layout, dtype: torch.dtype) -> torch.Tensor:
    """Make a nested tensor of any number of rows; torch makes a jagged one without rows only from offsets."""
    if rows:
        return torch.nested.as_nested_tensor(list(rows), layout=layout)
    if layout == torch.jagged:
        return torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=dtype), torch.zeros(1, dtype=torch.int64))
    return torch.nested.nested_tensor([], dtype=dtype)


def take_tensor(column: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Return the given rows of a dense or nested column."""
    if column.is_nested:
        components = column.unbind()
        return nest_tensors([components[row] for row in rows], column.layout, column.dtype)
    return column[torch.from_numpy(rows).to(column.device)]


def cat_tensors(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join dense or nested columns along their rows."""
    if columns[0].is_nested:
        rows = [row for column in columns for row in column.unbind()]
        return nest_tensors(rows, columns[0].layout, columns[0].dtype)
    return torch.cat(list(columns), dim=0)


def take_rows(batch: TensorDict, rows: np.ndarray) -> TensorDict:
    """Return a new TensorDict of the given rows."""
    taken = {
        key: take_rows(value, rows) if isinstance(value, TensorDict) else take_tensor(value, rows)
        for key, value in batch.items()
    }
    return TensorDict(taken, batch_size=(len(rows), *batch.batch_size[1:]), device=batch.device)


def cat_rows(batches: Sequence[TensorDict]) -> TensorDict:
    """Join TensorDicts of the same keys along their rows.

    Raises:
        ValueError: The keys differ; the first key that one of them lacks is named.
    """
    first = batches[0]
    for number, batch in enumerate(batches):
        differing = set(batch.keys()) ^ set(first.keys())
        if differing:
            raise ValueError(
                f"cannot concatenate: columns {sorted(map(str, differing))} are in only one of part 0 and part {number}"
            )
    joined = {
        key: cat_rows([b[key] for b in batches])
        if isinstance(value, TensorDict)
        else cat_tensors([b[key] for b in batches])
        for key, value in first.items()
    }
    num_rows = sum(batch.batch_size[0] for batch in batches)
    return TensorDict(joined, batch_size=(num_rows, *first.batch_size[1:]), device=first.device)


def object_array(values: Any) -> np.ndarray:
    """Turn a sequence into an array of objects; rows that are equally long sequences become a second dimension."""
    try:
        return np.array(values, dtype=object)
    except ValueError:  # numpy refuses rows such as arrays of shape (2, 3) and (2, 4), which agree in one size only
        return object_column(values)


def object_column(values: Sequence[Any]) -> np.ndarray:
    """Return values of any kind as an array `(B,)` of objects, lists among them as one object each."""
    return np.fromiter(values, dtype=object, count=len(values))


def deep_equal(a: Any, b: Any, _open: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Compare values of any nesting: same type, same content, NaN equal to NaN; cycles end."""
    if type(a) is not type(b):
        return False
    pair = (id(a), id(b))
    if pair in _open:  # this pair is being compared further out, and that comparison decides
        return True
    inner = _open | {pair}
    if isinstance(a, float | np.floating):
        return bool(a == b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, torch.Tensor):
        return tensors_equal(a, b)
    if isinstance(a, np.ndarray):
        return _arrays_equal(a, b, inner)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(deep_equal(a[key], b[key], inner) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(deep_equal(x, y, inner) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _arrays_equal(a: np.ndarray, b: np.ndarray, _open: frozenset[tuple[int, int]]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == object:
        return all(deep_equal(x, y, _open) for x, y in zip(a.flat, b.flat, strict=True))
    return np.array_equal(a, b, equal_nan=np.issubdtype(a.dtype, np.inexact))


def tensors_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare two dense or nested tensors: dtype, shape and content, NaN equal to NaN."""
    if a is b:
        return True
    if a.dtype != b.dtype or a.is_nested != b.is_nested:
        return False
    if a.is_nested:
        rows_a, rows_b = a.unbind(), b.unbind()
        return len(rows_a) == len(rows_b) and all(map(tensors_equal, rows_a, rows_b))
    if a.shape != b.shape:
        return False
    b = b.to(a.device)
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Put the columns of the second TensorDict into the first, and return the first.

    Raises:
        AssertionError: The batch sizes differ, or a key that both have holds different values. The first is unchanged.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise AssertionError(
            f"cannot unite tensors of batch size {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        )
    new = {}
    for key, value in tensor_dict2.items():
        if key not in tensor_dict1:
            new[key] = value
        elif isinstance(value, TensorDict):
            union_tensor_dict(tensor_dict1[key].copy(), value)
            new[key] = value
        elif not tensors_equal(tensor_dict1[key], value):
            raise AssertionError(f"cannot unite: both batches have a column {key!r}, with different values")
    for key, value in new.items():
        tensor_dict1[key] = value
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Put the arrays of the second dict into the first, and return the first.

    Raises:
        AssertionError: A key that both have holds different values. The first is unchanged.
    """
    return _union(tensor_dict1, tensor_dict2, what="a non-tensor column")


def union_two_dict(dict1: dict[str, Any], dict2: dict[str, Any]) -> dict[str, Any]:
    """Put the items of the second dict into the first, and return the first.

    Raises:
        AssertionError: A key that both have holds different values. The first is unchanged.
    """
    return _union(dict1, dict2, what="a meta_info key")


def _union(target: dict[str, Any], other: dict[str, Any], what: str) -> dict[str, Any]:
    for key, value in other.items():
        if key in target and not deep_equal(target[key], value):
            raise AssertionError(f"cannot unite: both sides have {what} {key!r}, with different values")
    target.update({key: value for key, value in other.items() if key not in target})
    return target


# ---- as plain arrays, for pickles ------------------------------------------------------------------------------


def serialize_single_tensor(tensor: torch.Tensor) -> PlainTensor:
    """Return dtype, shape and bytes; the bytes are a numpy array, which pickle 5 ships out of band without a copy."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def deserialize_single_tensor(plain: PlainTensor) -> torch.Tensor:
    """Undo `serialize_single_tensor`. The tensor can be written to, also when the bytes came from read-only memory."""
    dtype_name, shape, data = plain
    array = np.asarray(data, dtype=np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(_dtype_named(dtype_name)).view(shape)


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown tensor dtype {name!r}")
    return dtype


def serialize_tensordict(batch: TensorDict) -> PlainBatch:
    """Return batch size, device and the columns as plain arrays; TensorDicts inside are flattened to tuple keys.

    Raises:
        TypeError: A column is no tensor.
    """
    columns: dict[tuple[str, ...], PlainColumn] = {}
    for key, value in tensor_leaves(batch):
        if value.is_nested:
            columns[key] = (nested_kind(value), [serialize_single_tensor(row) for row in value.unbind()])
        else:
            columns[key] = serialize_single_tensor(value)
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), columns


def deserialize_tensordict(plain: PlainBatch) -> TensorDict:
    """Undo `serialize_tensordict`. A device that this process lacks becomes the CPU."""
    batch_size, device, columns = plain
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        device = "cpu"
    batch = TensorDict({}, batch_size=batch_size, device=device)
    for key, column in columns.items():
        if len(column) == 3:
            batch[key] = deserialize_single_tensor(column)
        else:
            kind, rows = column
            batch[key] = nest_as(kind, [deserialize_single_tensor(row) for row in rows])
    return batch


def nested_kind(tensor: torch.Tensor) -> tuple[str, str]:
    """Return the names of a nested tensor's layout and dtype."""
    return str(tensor.layout).removeprefix("torch."), str(tensor.dtype).removeprefix("torch.")


def nest_as(kind: tuple[str, str], rows: list[torch.Tensor]) -> torch.Tensor:
    """Make a nested tensor of rows, of the kind that `nested_kind` returned."""
    layout, dtype = kind
    return nest_tensors(rows, {"jagged": torch.jagged, "strided": torch.strided}[layout], _dtype_named(dtype))
