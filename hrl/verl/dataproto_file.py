"""The file that `DataProto.save_to_disk` writes: tensors as safetensors, everything else as JSON in its header.

No pickle is read from disk: what is loaded is tensors, numbers and text.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDict

from hrl.columns import nest_as, nested_kind, tensor_leaves

_FORMAT = "hrl.DataProto/1"
_TAGS = frozenset({"$tensor", "$array", "$objects", "$scalar", "$tuple", "$dict", "$float", "$nested"})


class _Encoder:
    """Turns values into JSON; tensors and number arrays go to `tensors` and leave their name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def keep(self, tensor: torch.Tensor) -> str:
        name = str(len(self.tensors))
        self.tensors[name] = tensor.detach().cpu().contiguous().clone()  # safetensors refuses shared memory
        return name

    def encode(self, value: Any, where: str) -> Any:
        """Return `value` as JSON, or raise a TypeError that names where it stands."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if type(value) is list:
            return [self.encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if type(value) is tuple:
            return {"$tuple": [self.encode(v, f"{where}[{i}]") for i, v in enumerate(value)]}
        if isinstance(value, dict):
            return self._encode_dict(value, where)
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value)
        if isinstance(value, np.ndarray):
            return self._encode_array(value, where)
        if isinstance(value, np.generic) and value.dtype.kind in "biufU":
            return {"$scalar": [value.dtype.str, self.encode(value.item(), where)]}
        raise TypeError(
            f"{where} holds {type(value).__name__}, which cannot be saved; use numbers, text, lists, tuples, dicts, "
            "arrays or tensors, or take the key out with pop() first"
        )

    def _encode_dict(self, value: dict[Any, Any], where: str) -> Any:
        items = [(key, self.encode(v, f"{where}[{key!r}]")) for key, v in value.items()]
        if all(type(key) is str and key not in _TAGS for key in value):
            return dict(items)
        return {"$dict": [[self.encode(key, f"a key of {where}"), v] for key, v in items]}

    def _encode_tensor(self, value: torch.Tensor) -> Any:
        if not value.is_nested:
            return {"$tensor": self.keep(value)}
        return {"$nested": [nested_kind(value), [self.keep(row) for row in value.unbind()]]}

    def _encode_array(self, value: np.ndarray, where: str) -> Any:
        if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            return {"$array": self.keep(torch.from_numpy(np.ascontiguousarray(value).copy()))}
        if value.dtype.kind not in "OU":
            raise TypeError(f"{where} is an array of {value.dtype}, which cannot be saved")
        flat = [self.encode(v, f"{where}[{i}]") for i, v in enumerate(value.ravel().tolist())]
        return {"$objects": [value.dtype.str, list(value.shape), flat]}


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not value.keys() <= _TAGS:
        return {key: _decode(v, tensors) for key, v in value.items()}
    ((tag, content),) = value.items()
    match tag:
        case "$tensor":
            return tensors[content]
        case "$array":
            return tensors[content].numpy()
        case "$nested":
            kind, names = content
            return nest_as(kind, [tensors[name] for name in names])
        case "$float":
            return float(content)
        case "$tuple":
            return tuple(_decode(v, tensors) for v in content)
        case "$dict":
            return {_decode(key, tensors): _decode(v, tensors) for key, v in content}
        case "$scalar":
            dtype, number = content
            return np.dtype(dtype).type(_decode(number, tensors))
        case _:
            dtype, shape, flat = content
            return _decode_objects(dtype, shape, flat, tensors)


def _decode_objects(dtype: str, shape: list[int], flat: list[Any], tensors: dict[str, torch.Tensor]) -> np.ndarray:
    array = np.empty(len(flat), dtype=np.dtype(dtype))
    for row, value in enumerate(flat):
        array[row] = _decode(value, tensors)
    return array.reshape(shape)


def save_parts(
    path: str | os.PathLike[str],
    batch: TensorDict | None,
    non_tensor_batch: dict[str, np.ndarray],
    meta_info: dict[str, Any],
) -> None:
    """Write one safetensors file with everything else as JSON in its header; it appears whole or not at all."""
    encoder = _Encoder()
    document = {
        "batch_size": None if batch is None else list(batch.batch_size),
        "batch": [
            [list(key), encoder.encode(value, f"batch[{'.'.join(key)}]")]
            for key, value in (() if batch is None else tensor_leaves(batch))
        ],
        "non_tensor_batch": encoder.encode(dict(non_tensor_batch), "non_tensor_batch"),
        "meta_info": encoder.encode(meta_info, "meta_info"),
    }
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        save_file(encoder.tensors, partial, {"format": _FORMAT, "document": json.dumps(document, allow_nan=False)})
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def load_parts(path: str | os.PathLike[str]) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]:
    """Read what `save_parts` wrote.

    Raises:
        ValueError: The file is something else, such as a pickle.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()} if header.get("format") == _FORMAT else {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a saved DataProto, and no safetensors file: {error}") from error
    if header.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a saved DataProto: its format is {header.get('format')!r}, not {_FORMAT!r}")
    document = json.loads(header["document"])
    batch = None
    if document["batch_size"] is not None:
        batch = TensorDict({}, batch_size=document["batch_size"])
        for key, value in document["batch"]:
            batch[tuple(key)] = _decode(value, tensors)
    return batch, _decode(document["non_tensor_batch"], tensors), _decode(document["meta_info"], tensors)
