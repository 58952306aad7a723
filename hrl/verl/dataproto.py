"""The parts of `verl.protocol` that hrl itself never calls: further members of `DataProto`, functions on batches."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from hrl.columns import object_array
from hrl.verl.dataproto_file import load_parts, save_parts

logger = logging.getLogger(__name__)

B = TypeVar("B", bound="VerlDataProto")


class _DataProtoConfig(type):
    auto_padding_key = "_hrl_auto_padding"  # of a batch's meta_info
    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        """Whether every batch may be cut into unequal parts; the variable VERL_AUTO_PADDING=1 switches it on too."""
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("TRUE", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"DataProtoConfig.auto_padding is True or False, got {enabled!r}")
        cls._enabled = enabled


class DataProtoConfig(metaclass=_DataProtoConfig):
    """Settings for all batches of this process: `DataProtoConfig.auto_padding = True`."""


class VerlDataProto:
    """Members of `DataProto` that only users coming from verl need."""

    if TYPE_CHECKING:  # members of `DataProto` that they use
        batch: Any
        non_tensor_batch: dict[str, np.ndarray]
        meta_info: dict[str, Any]

        def __init__(self, batch: Any, non_tensor_batch: dict[str, np.ndarray], meta_info: dict[str, Any]) -> None: ...
        def __len__(self) -> int: ...
        def select_idxs(self, idxs: Any) -> Self: ...
        def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self: ...
        def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self: ...
        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Self: ...

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """Make a batch of a TensorDict: stacks of non-tensors become columns, single non-tensors meta_info."""
        tensors, stacks, meta = {}, {}, dict(meta_info or {})
        for key, value in tensor_dict.items():
            if isinstance(value, NonTensorStack):
                stacks[key] = object_array(value.tolist())
            elif isinstance(value, NonTensorData):
                meta[key] = value.data
            else:
                tensors[key] = value
        return cls.from_dict(tensors=tensors, non_tensors=stacks, meta_info=meta, num_batch_dims=num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """Return one TensorDict of everything, the inverse of `from_tensordict`.

        Raises:
            ValueError: Two parts use the same key.
        """
        names = [*(self.batch.keys() if self.batch is not None else ()), *self.non_tensor_batch, *self.meta_info]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"keys {twice} are in more than one of batch, non_tensor_batch and meta_info")
        out = TensorDict({}, batch_size=(len(self),)) if self.batch is None else self.batch.copy()
        for key, column in self.non_tensor_batch.items():
            out[key] = NonTensorStack(*(NonTensorData(value) for value in column))
        for key, value in self.meta_info.items():
            out.set_non_tensor(key, value)
        return out

    def reorder(self, indices: torch.Tensor | np.ndarray | list[int]) -> None:
        """Put the rows in the given order, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def sample_level_repeat(self, repeat_times: Sequence[int] | torch.Tensor | np.ndarray) -> Self:
        """Repeat row i `repeat_times[i]` times, the copies beside each other.

        Raises:
            ValueError: There is not exactly one number for each row.
        """
        times = np.asarray(repeat_times)
        if times.shape != (len(self),):
            raise ValueError(f"repeat_times has shape {times.shape}, it needs one number for each of {len(self)} rows")
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Cut the second dimension of some columns into `n_split` rows each and repeat the rows of all others.

        `(B, n_split * C)` becomes `(B * n_split, C)`: for rows that hold several samples side by side, such as chosen
        and rejected.

        Raises:
            ValueError: A column to cut has no second dimension, or one that `n_split` doesn't divide.
        """
        repeated = self.repeat(n_split, interleave=True)
        for key in split_keys or ():
            holder: Any = self.batch if self.batch is not None and key in self.batch else self.non_tensor_batch
            if key not in holder:
                raise KeyError(f"the batch has no column {key!r} to cut")
            column = holder[key]
            if column.ndim < 2 or column.shape[1] % n_split:
                raise ValueError(f"column {key!r} of shape {tuple(column.shape)} can't be cut into {n_split} columns")
            unfolded = column.reshape(len(self) * n_split, column.shape[1] // n_split, *column.shape[2:])
            target: Any = repeated.batch if holder is self.batch else repeated.non_tensor_batch
            target[key] = unfolded
        return repeated

    def is_padding_enabled(self) -> bool:
        """Return whether the batch was made with `auto_padding=True`, or `DataProtoConfig.auto_padding` is on."""
        return DataProtoConfig.auto_padding or bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False))

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Append `padding_size` copies of the `"first"` or the `"last"` row, in place.

        Raises:
            ValueError: The candidate is neither of them, or there is no row to copy.
        """
        if padding_candidate not in ("first", "last", ""):  # verl's default "" means the last one
            raise ValueError(f"padding_candidate must be 'first' or 'last', got {padding_candidate!r}")
        if padding_size and not len(self):
            raise ValueError("cannot pad a batch without rows")
        copied = 0 if padding_candidate == "first" else len(self) - 1
        self.reorder([*range(len(self)), *[copied] * padding_size])

    def chunk(self, chunks: int) -> list[Self]:
        """Cut into `chunks` parts of equal size; with padding enabled the last ones may be smaller or empty.

        Raises:
            AssertionError: The rows don't divide, and padding is not enabled.
        """
        if len(self) % chunks and not self.is_padding_enabled():
            raise AssertionError(
                f"{len(self)} rows don't divide into {chunks} equal parts; pad first (pad_dataproto_to_divisor)"
            )
        size = -(-len(self) // chunks)
        return [self.slice(i * size, (i + 1) * size) for i in range(chunks)]

    def split(self, split_size: int) -> list[Self]:
        """Cut into parts of `split_size` rows, the last one smaller if they don't divide."""
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Iterate over mini-batches, `epochs` times, with a torch DataLoader over row numbers.

        Args:
            mini_batch_size: Rows per mini-batch; it must divide the batch.
            epochs: How often to go through all rows.
            seed: Seed of the DataLoader's generator: the same seed gives the same order again.
            dataloader_kwargs: Passed to the DataLoader, such as `{"shuffle": True}`.

        Raises:
            AssertionError: `mini_batch_size` doesn't divide the number of rows.
        """
        if len(self) % mini_batch_size:
            raise AssertionError(f"{len(self)} rows don't divide into mini-batches of {mini_batch_size}")
        loader = torch.utils.data.DataLoader(
            range(len(self)),  # type: ignore[arg-type]  # a range is a map-style dataset of row numbers
            batch_size=mini_batch_size,
            collate_fn=self.select_idxs,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
            **(dataloader_kwargs or {}),
        )
        return (mini_batch for _ in range(epochs) for mini_batch in loader)

    def get_data_info(self) -> str:
        """Return a table of all columns: shape, dtype, device; and the types in meta_info."""
        lines = ["batch"]
        for key, column in () if self.batch is None else self.batch.items():
            shape = "nested" if getattr(column, "is_nested", False) else tuple(column.shape)
            lines.append(f"  {key}: {shape} ({getattr(column, 'dtype', type(column).__name__)}) {column.device}")
        lines.append("non_tensor_batch")
        lines += [f"  {key}: ndarray{array.shape} ({array.dtype})" for key, array in self.non_tensor_batch.items()]
        lines.append("meta_info")
        lines += [f"  {key}: {_type_name(value)}" for key, value in self.meta_info.items()]
        return "\n".join(lines)

    def print_size(self, prefix: str = "") -> None:
        """Log the size of the tensors and of the arrays."""
        tensor_bytes = 0 if self.batch is None else self.batch.bytes()
        array_bytes = sum(column.nbytes for column in self.non_tensor_batch.values())
        logger.info("%s tensors %.3f GiB, arrays %.3f GiB", prefix, tensor_bytes / 2**30, array_bytes / 2**30)

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write a safetensors file, with everything but tensors as JSON in its header.

        Raises:
            TypeError: A value is not a number, text, list, tuple, dict, array or tensor; names its place.
        """
        save_parts(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike[str]) -> Self:
        """Read a file of `save_to_disk`. No pickle is opened.

        Raises:
            ValueError: The file holds something else.
        """
        batch, non_tensor_batch, meta_info = load_parts(filepath)
        return cls(batch=batch, non_tensor_batch=non_tensor_batch, meta_info=meta_info)


def fold_batch_dim(data: B, new_batch_size: int) -> B:
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


def unfold_batch_dim(data: B, batch_dims: int = 2) -> B:
    """Flatten the first `batch_dims` dimensions of every column into rows: the inverse of `fold_batch_dim`."""
    batch = None
    if data.batch is not None:
        batch = data.batch.copy()
        batch.auto_batch_size_(batch_dims=batch_dims)
        batch = batch.view(-1)
    arrays = {key: column.reshape(-1, *column.shape[batch_dims:]) for key, column in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=dict(data.meta_info))


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows into columns: `[{"a": 1}, {"a": 2}]` becomes `{"a": [1, 2]}`.

    Raises:
        AssertionError: The dicts don't all have the same keys.
    """
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for number, row in enumerate(list_of_dict):
        if row.keys() != keys:
            raise AssertionError(f"dict {number} has the keys {sorted(row)} and dict 0 has {sorted(keys)}")
    return {key: [row[key] for row in list_of_dict] for key in keys}


def _type_name(value: Any) -> str:
    """Describe the type of a value and of what it holds, from its first entries."""
    if isinstance(value, list):
        return f"list[{'|'.join(sorted({_type_name(v) for v in value[:3]})) or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(_type_name, value))})"
    if isinstance(value, dict) and value:
        key, first = next(iter(value.items()))
        return f"dict[{_type_name(key)}: {_type_name(first)}]"
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} ({value.dtype})"
    return type(value).__name__
