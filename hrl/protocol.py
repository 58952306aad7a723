"""DataProto: the one thing that travels between the driver and the workers, with the names and meaning verl gave it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hrl._codec import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from hrl._columns import (
    list_of_dict_to_dict_of_list,
    object_array,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
)
from hrl._dataproto import DataProto, DataProtoItem

__all__ = [
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "union_two_dict",
    "unpad_dataproto",
]

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 1800.0


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows, cyclically from the first, until `size_divisor` divides their number.

    Returns:
        The padded batch (the same object when nothing is missing) and how many rows were appended.
    """
    pad_size = -len(data) % size_divisor
    if not len(data):
        logger.warning("a batch without rows can't be padded to a multiple of %d and stays empty", size_divisor)
    if not pad_size:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Take the last `pad_size` rows away again."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshape every column from `(B, ...)` to `(new_batch_size, B / new_batch_size, ...)`.

    Raises:
        AssertionError: `new_batch_size` doesn't divide the number of rows.
    """
    if len(data) % new_batch_size:
        raise AssertionError(f"{len(data)} rows can't be folded into {new_batch_size} rows of equal depth")
    batch = None
    if data.batch is not None:
        batch = data.batch.view(new_batch_size, -1)
        batch.auto_batch_size_(batch_dims=1)
    arrays = {
        key: column.reshape(new_batch_size, -1, *column.shape[1:]) for key, column in data.non_tensor_batch.items()
    }
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=dict(data.meta_info))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flatten the first `batch_dims` dimensions of every column into rows: the inverse of `fold_batch_dim`."""
    batch = None
    if data.batch is not None:
        batch = data.batch.copy()
        batch.auto_batch_size_(batch_dims=batch_dims)
        batch = batch.view(-1)
    arrays = {key: column.reshape(-1, *column.shape[batch_dims:]) for key, column in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=dict(data.meta_info))


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows into a batch.

    Raises:
        ValueError: There are no rows.
        AssertionError: The rows have different columns.
    """
    if not x:
        raise ValueError("cannot collate: the list of rows is empty")
    columns = list_of_dict_to_dict_of_list([row.non_tensor_batch for row in x])
    return DataProto(
        batch=None if x[0].batch is None else torch.stack([row.batch for row in x]).contiguous(),
        non_tensor_batch={key: object_array(values) for key, values in columns.items()},
    )


def _ray_get(futures: list[Any], timeout_s: float) -> list[Any]:
    import ray  # a batch needs no cluster; only a future does

    return ray.get(futures, timeout=timeout_s)


@dataclass
class DataProtoFuture:
    """The result of a call that is still running on the workers; it can be handed to the next call without waiting.

    Attributes:
        collect_fn: Joins the ranks' results into one, such as `DataProto.concat`.
        futures: One reference per rank.
        dispatch_fn: Picks a part of the joined result (see `chunk`), or None for all of it.
        resolve_fn: Waits for the references, as `resolve_fn(futures, timeout_s)`. It must be picklable: a chunk of a
            future is resolved by the worker that receives it.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[Any]
    dispatch_fn: Callable[[Any], Any] | None = None
    resolve_fn: Callable[[list[Any], float], list[Any]] = _ray_get

    @staticmethod
    def concat(data: list[Any]) -> DataProtoFuture:
        """Make the future of the concatenation of the ranks' batches."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=data)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Return a future for each part of the result, without waiting."""
        return [
            DataProtoFuture(self.collect_fn, self.futures, partial(_nth_chunk, n=n, chunks=chunks), self.resolve_fn)
            for n in range(chunks)
        ]

    def get(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Wait for the ranks and return the joined result, or the part that `dispatch_fn` picks."""
        result = self.collect_fn(self.resolve_fn(self.futures, timeout_s))
        return result if self.dispatch_fn is None else self.dispatch_fn(result)


def _nth_chunk(data: DataProto, n: int, chunks: int) -> DataProto:
    return data.chunk(chunks)[n]
