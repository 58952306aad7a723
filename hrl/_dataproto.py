"""The class `DataProto`; import it from `hrl.protocol`."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from hrl._codec import deserialize_tensordict, load_parts, save_parts, serialize_tensordict
from hrl._columns import (
    batch_shape,
    cat_rows,
    describe,
    leaves,
    merge_meta_info,
    object_array,
    row_indices,
    take_rows,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
)

logger = logging.getLogger(__name__)

_AUTO_PADDING_KEY = "_hrl_auto_padding"


@dataclass(eq=False)
class DataProtoItem:
    """One row of a DataProto: tensors without their batch dimension, objects, and the batch's meta_info."""

    batch: Any = None  # TensorDict or None; typed loosely, because a batch without tensors is the exception
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """Rows of tensors and of Python objects, and what is true of all of them.

    Rows are cut, joined and re-ordered together, whatever holds them. Parts cut from a batch share the memory of their
    tensors where torch does (slices) and never the dictionaries: a column added to a part is not added to the whole.

    Attributes:
        batch: Tensors of equal first dimension (nested tensors and nested TensorDicts too), or None.
        non_tensor_batch: Per name an array with one entry per row, usually of dtype object.
        meta_info: What holds for the batch as a whole. `meta_info["metrics"]` is gathered by `concat`.

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
        """Make a batch of tensors and arrays told apart by their type.

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
        """Make a batch of tensors that agree in their first dimension, and of lists or arrays of as many rows.

        Args:
            tensors: Per name a tensor `(B, ...)`.
            non_tensors: Per name an array or a list; a list becomes an array of dtype object.
            meta_info: What holds for all rows.
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
        meta_info = {**(meta_info or {}), **({_AUTO_PADDING_KEY: True} if auto_padding else {})}
        batch = TensorDict(tensors, batch_size=next(iter(shapes.values()))) if tensors else None
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

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
            raise ValueError(f"keys {twice} stand in more than one of batch, non_tensor_batch and meta_info")
        out = TensorDict({}, batch_size=(len(self),)) if self.batch is None else self.batch.copy()
        for key, column in self.non_tensor_batch.items():
            out[key] = NonTensorStack(*(NonTensorData(value) for value in column))
        for key, value in self.meta_info.items():
            out.set_non_tensor(key, value)
        return out

    def check_consistency(self) -> None:
        """Check that the batch has one dimension and every column as many rows.

        Raises:
            AssertionError: It isn't so; the column is named.
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
        return self.batch is not None and any(column.is_nested for _, column in leaves(self.batch))

    def reorder(self, indices: torch.Tensor | np.ndarray | list[int]) -> None:
        """Put the rows in the given order, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat all rows: 1, 1, 2, 2 when interleaved, else 1, 2, 1, 2."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | torch.Tensor | np.ndarray) -> Self:
        """Repeat row i `repeat_times[i]` times, in place of itself.

        Raises:
            ValueError: There is not exactly one number for each row.
        """
        times = np.asarray(repeat_times)
        if times.shape != (len(self),):
            raise ValueError(f"repeat_times has shape {times.shape}, it needs one number for each of {len(self)} rows")
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

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
            meta_info=merge_meta_info([part.meta_info for part in data]),
        )

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
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

    def is_padding_enabled(self) -> bool:
        """Tell whether the batch was made with `auto_padding=True`."""
        return bool(self.meta_info.get(_AUTO_PADDING_KEY, False))

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Append `padding_size` copies of the `"first"` or the `"last"` row, in place.

        Raises:
            ValueError: The candidate is neither, or there is no row to copy.
        """
        if padding_candidate not in ("first", "last", ""):  # verl's default "" means the last one
            raise ValueError(f"padding_candidate must be 'first' or 'last', got {padding_candidate!r}")
        if padding_size and not len(self):
            raise ValueError("cannot pad a batch without rows")
        copied = 0 if padding_candidate == "first" else len(self) - 1
        self.reorder([*range(len(self)), *[copied] * padding_size])

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
            KeyError: A tensor column is not there. Non-tensor and meta_info keys that are not there are passed over.
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
            KeyError: A key is not there; nothing has been taken out then.
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
            self._require("the batch", [key], holder)
            column = holder[key]
            if column.ndim < 2 or column.shape[1] % n_split:
                raise ValueError(f"column {key!r} of shape {tuple(column.shape)} can't be cut into {n_split} columns")
            unfolded = column.reshape(len(self) * n_split, column.shape[1] // n_split, *column.shape[2:])
            target: Any = repeated.batch if holder is self.batch else repeated.non_tensor_batch
            target[key] = unfolded
        return repeated

    # -- looking, storing, sending -------------------------------------------------------------------------------------

    def get_data_info(self) -> str:
        """Return a table of all columns: shape, dtype, device; and the types in meta_info."""
        return describe(self.batch, self.non_tensor_batch, self.meta_info)

    def print_size(self, prefix: str = "") -> None:
        """Log how much memory the tensors and the arrays take."""
        tensor_bytes = 0 if self.batch is None else self.batch.bytes()
        array_bytes = sum(column.nbytes for column in self.non_tensor_batch.values())
        logger.info("%s tensors %.3f GiB, arrays %.3f GiB", prefix, tensor_bytes / 2**30, array_bytes / 2**30)

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write a safetensors file; whatever is no tensor stands as JSON in its header.

        Raises:
            TypeError: A value is no number, text, list, tuple, dict, array or tensor; the error says where it stands.
        """
        save_parts(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike[str]) -> Self:
        """Read what `save_to_disk` wrote. No pickle is opened.

        Raises:
            ValueError: The file holds something else.
        """
        batch, non_tensor_batch, meta_info = load_parts(filepath)
        return cls(batch=batch, non_tensor_batch=non_tensor_batch, meta_info=meta_info)

    def __getstate__(self) -> dict[str, Any]:
        # As arrays the tensors leave a pickle out of band (protocol 5); tensors themselves would be copied into it.
        return {**self.__dict__, "batch": None if self.batch is None else serialize_tensordict(self.batch)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.batch = None if state["batch"] is None else deserialize_tensordict(state["batch"])
