"""DataProto: the batch sent between the driver and the workers, with verl's names and meaning."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict

from hrl.columns import (
    batch_shape,
    cat_rows,
    deep_equal,
    deserialize_tensordict,
    object_array,
    row_indices,
    serialize_tensordict,
    take_rows,
    tensor_leaves,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
)
from hrl.columns import deserialize_single_tensor as deserialize_single_tensor  # verl has these names here too
from hrl.columns import serialize_single_tensor as serialize_single_tensor
from hrl.verl.dataproto import DataProtoConfig, VerlDataProto, list_of_dict_to_dict_of_list
from hrl.verl.dataproto import fold_batch_dim as fold_batch_dim
from hrl.verl.dataproto import unfold_batch_dim as unfold_batch_dim

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 1800.0


@dataclass(eq=False)
class DataProtoItem:
    """One row of a DataProto: tensors without their batch dimension, objects, and the batch's meta_info."""

    batch: Any = None  # TensorDict or None; typed loosely, because a batch without tensors is the exception
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto(VerlDataProto):
    """Rows of tensors and Python objects, with metadata of the whole batch.

    All columns are split, joined and reordered together. A part of a batch may share the memory of its tensors (slices)
    but never the dictionaries: a column added to a part is not added to the whole.

    Attributes:
        batch: Tensors of equal first dimension (nested tensors and nested TensorDicts too), or None.
        non_tensor_batch: Per name an array with one entry per row, usually of dtype object.
        meta_info: Metadata of the whole batch. `meta_info["metrics"]` is gathered by `concat`.

    Raises:
        AssertionError: The columns differ in their number of rows (see `check_consistency`).
    """

    batch: Any = None  # TensorDict or None; typed loosely, because a batch without tensors is the exception
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    # -- making and checking -------------------------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls,
        data: dict[str, torch.Tensor | np.ndarray],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Make a batch of tensors and arrays, told apart by their type.

        Raises:
            ValueError: A value is neither a tensor nor an array.
        """
        for key, value in data.items():
            if not isinstance(value, torch.Tensor | np.ndarray):
                raise ValueError(f"column {key!r} is a {type(value).__name__}; give a tensor or a numpy array")
        return cls.from_dict(
            tensors={key: value for key, value in data.items() if isinstance(value, torch.Tensor)},
            non_tensors={key: value for key, value in data.items() if isinstance(value, np.ndarray)},
            meta_info=meta_info,
            auto_padding=auto_padding,
        )

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Make a batch of tensors that agree in their first dimension, and of lists or arrays with that many rows.

        Args:
            tensors: Per name a tensor `(B, ...)`.
            non_tensors: Per name an array or a list; a list becomes an array of dtype object.
            meta_info: Metadata of the whole batch.
            num_batch_dims: How many leading dimensions must agree; more than 1 only checks, as a batch has one.
            auto_padding: Allow `chunk` into unequal parts.

        Raises:
            AssertionError: The tensors disagree in their leading dimensions.
        """
        tensors = tensors or {}
        shapes = {key: batch_shape(tensor, num_batch_dims) for key, tensor in tensors.items()}
        if num_batch_dims < 1 or len(set(shapes.values())) > 1:
            raise AssertionError(f"all tensors must agree in their first {num_batch_dims} dimensions, got {shapes}")
        arrays = {
            key: value if isinstance(value, np.ndarray) else object_array(value)
            for key, value in (non_tensors or {}).items()
        }
        meta_info = {**(meta_info or {}), **({DataProtoConfig.auto_padding_key: True} if auto_padding else {})}
        batch = TensorDict(tensors, batch_size=next(iter(shapes.values()))) if tensors else None
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    def check_consistency(self) -> None:
        """Check that the batch has one batch dimension and that all columns have the same number of rows.

        Raises:
            AssertionError: A column has another number of rows; the message names it.
        """
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise AssertionError(f"a batch has one batch dimension, got batch_size {tuple(self.batch.batch_size)}")
        for key, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray):
                raise AssertionError(f"non-tensor column {key!r} is a {type(column).__name__}, not a numpy array")
            if column.ndim == 0 or len(column) != len(self):
                raise AssertionError(
                    f"non-tensor column {key!r} has shape {column.shape}, the batch has {len(self)} rows"
                )

    def _like(self, batch: TensorDict | None, non_tensor_batch: dict[str, np.ndarray]) -> Self:
        return type(self)(batch=batch, non_tensor_batch=non_tensor_batch, meta_info=dict(self.meta_info))

    # -- rows ----------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of rows; 0 when there is only meta_info."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __getitem__(self, item: Any) -> DataProto | DataProtoItem:
        """Return one row for an integer, otherwise (slice, list, array, tensor) a DataProto of those rows.

        Raises:
            TypeError: Indexing with something else.
            IndexError: A row is out of range.
        """
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            row = int(row_indices([item], len(self))[0])
            return DataProtoItem(
                batch=None if self.batch is None else self.batch[row],
                non_tensor_batch={key: column[row] for key, column in self.non_tensor_batch.items()},
                meta_info=self.meta_info,
            )
        if isinstance(item, list | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        raise TypeError(
            f"cannot index a DataProto with {type(item).__name__}; use an int, slice, list, array or tensor"
        )

    def select_idxs(self, idxs: list[int] | list[bool] | np.ndarray | torch.Tensor) -> Self:
        """Return a copy of the given rows: row numbers (negative ones from the end), or a mask over all rows."""
        rows = row_indices(idxs, len(self))
        return self._like(
            None if self.batch is None else take_rows(self.batch, rows),
            {key: column[rows] for key, column in self.non_tensor_batch.items()},
        )

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return the rows of a slice; dense tensors are views."""
        rows = slice(start, end, step)
        if (step is not None and step < 0) or self._has_nested_column():
            return self.select_idxs(np.arange(len(self))[rows])
        return self._like(
            None if self.batch is None else self.batch[rows],
            {key: column[rows] for key, column in self.non_tensor_batch.items()},
        )

    def _has_nested_column(self) -> bool:
        return self.batch is not None and any(column.is_nested for _, column in tensor_leaves(self.batch))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat all rows: 1, 1, 2, 2 when interleaved, else 1, 2, 1, 2."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Join batches along their rows. meta_info is merged; `metrics` are gathered into one list per name.

        Raises:
            ValueError: There is nothing to join, or the batches have different columns.
            AssertionError: Two batches disagree on a key of meta_info.
        """
        if not data:
            raise ValueError("cannot concatenate: the list of batches is empty")
        batches = [part.batch for part in data]
        columns = set(data[0].non_tensor_batch)
        for number, part in enumerate(data):
            if (part.batch is None) != (batches[0] is None) or set(part.non_tensor_batch) != columns:
                raise ValueError(
                    f"cannot concatenate: part {number} has {'no ' if part.batch is None else ''}tensors and the "
                    f"non-tensor columns {sorted(part.non_tensor_batch)}, part 0 has "
                    f"{'no ' if batches[0] is None else ''}tensors and {sorted(columns)}"
                )
        return type(data[0])(
            batch=None if batches[0] is None else cat_rows(batches),
            non_tensor_batch={
                key: np.concatenate([part.non_tensor_batch[key] for part in data]) for key in data[0].non_tensor_batch
            },
            meta_info=_merge_meta_info([part.meta_info for part in data]),
        )

    # -- columns -------------------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> Self:
        """Move the tensors to a device, in place, and return the batch."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return a batch of some columns; None takes all of a kind, `deepcopy` copies their content too.

        Raises:
            KeyError: A tensor column is missing. Missing non-tensor and meta_info keys are ignored.
        """
        batch = None if self.batch is None else self.batch.copy()
        if batch_keys is not None:
            self._require("batch", batch_keys, () if batch is None else batch.keys())
            batch = None if batch is None else batch.select(*batch_keys)
        non_tensors, meta_info = (
            dict(full) if keys is None else {key: value for key, value in full.items() if key in set(keys)}
            for full, keys in ((self.non_tensor_batch, non_tensor_batch_keys), (self.meta_info, meta_info_keys))
        )
        if deepcopy:
            batch = None if batch is None else batch.clone()
            non_tensors, meta_info = copy.deepcopy(non_tensors), copy.deepcopy(meta_info)
        return type(self)(batch=batch, non_tensor_batch=non_tensors, meta_info=meta_info)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Take columns and meta_info out of this batch and return them as a batch of their own.

        Raises:
            KeyError: A key is missing; nothing has been taken out then.
        """
        batch_keys, non_tensor_keys, meta_keys = (
            list(keys or ()) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)
        )
        self._require("batch", batch_keys, () if self.batch is None else self.batch.keys())
        self._require("non_tensor_batch", non_tensor_keys, self.non_tensor_batch)
        self._require("meta_info", meta_keys, self.meta_info)
        return type(self).from_dict(
            tensors={key: self.batch.pop(key) for key in batch_keys} if self.batch is not None else {},
            non_tensors={key: self.non_tensor_batch.pop(key) for key in non_tensor_keys},
            meta_info={key: self.meta_info.pop(key) for key in meta_keys},
        )

    @staticmethod
    def _require(part: str, wanted: Sequence[str], present: Any) -> None:
        missing = [key for key in wanted if key not in present]
        if missing:
            raise KeyError(f"{part} has no {missing}; it has {sorted(map(str, present))}")

    def rename(self, old_keys: str | list[str], new_keys: str | list[str]) -> Self:
        """Rename tensor columns, in place, and return the batch.

        Raises:
            TypeError: The keys are neither a string nor a list.
            ValueError: There are not as many new keys as old ones.
            KeyError: An old key is not there.
        """
        for keys in (old_keys, new_keys):
            if not isinstance(keys, str | list):
                raise TypeError(f"keys must be a string or a list of strings, got {type(keys).__name__}")
        old, new = ([keys] if isinstance(keys, str) else keys for keys in (old_keys, new_keys))
        if len(old) != len(new):
            raise ValueError(f"{len(old)} old keys {old} and {len(new)} new keys {new}: give as many of each")
        self._require("batch", old, () if self.batch is None else self.batch.keys())
        columns = [self.batch.pop(key) for key in old] if self.batch is not None else []
        for key, column in zip(new, columns, strict=True):
            self.batch[key] = column  # type: ignore[index]  # columns is empty when batch is None
        return self

    def union(self, other: DataProto) -> Self:
        """Put the columns and meta_info of another batch of the same rows into this one, in place, and return it.

        Raises:
            AssertionError: The numbers of rows differ, or a key that both have holds different values (NaN equals NaN).
                Nothing has been changed then.
        """
        has_rows = [side.batch is not None or bool(side.non_tensor_batch) for side in (self, other)]
        if all(has_rows) and len(self) != len(other):
            raise AssertionError(f"cannot unite a batch of {len(self)} rows with one of {len(other)} rows")
        batch = None if self.batch is None else self.batch.copy()
        if other.batch is not None:
            batch = other.batch.copy() if batch is None else union_tensor_dict(batch, other.batch)
        non_tensors = union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        meta_info = union_two_dict(dict(self.meta_info), other.meta_info)
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensors, meta_info
        return self

    # -- sending -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # As arrays the tensors leave a pickle out of band (protocol 5); tensors themselves would be copied into it.
        return {**self.__dict__, "batch": None if self.batch is None else serialize_tensordict(self.batch)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.batch = None if state["batch"] is None else deserialize_tensordict(state["batch"])


def _merge_meta_info(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the meta_info of the parts of a batch; their `metrics` are gathered, one list per name.

    Raises:
        AssertionError: Two parts disagree on a key other than `metrics`.
    """
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for meta in metas:
        for key, value in meta.items():
            if key == "metrics":
                _gather_metrics(metrics, value)
            elif key not in merged:
                merged[key] = value
            elif not deep_equal(merged[key], value):
                raise AssertionError(f"Conflicting values for meta_info key '{key}': {merged[key]!r} and {value!r}")
    return {**merged, "metrics": metrics} if metrics else merged


def _gather_metrics(gathered: dict[str, list[Any]], metrics: Any) -> None:
    """Add one part's metrics: None, a dict, or a list of dicts. Lists among the values come from an earlier concat."""
    for entry in metrics if isinstance(metrics, list) else [metrics] if metrics is not None else []:
        for name, value in entry.items():
            gathered.setdefault(name, []).extend(value if isinstance(value, list) else [value])


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows, cyclically from the first, until `size_divisor` divides their number.

    Returns:
        The padded batch (the same object if no padding is needed) and the number of appended rows.
    """
    pad_size = -len(data) % size_divisor
    if not len(data):
        logger.warning("a batch without rows can't be padded to a multiple of %d and stays empty", size_divisor)
    if not pad_size:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Remove the last `pad_size` rows."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


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
