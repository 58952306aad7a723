"""A device that this machine does not have: torch's meta tensors, with every copy between it and the host recorded.

Of the device that it has, what tensors hold can be counted likewise.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")


class FakeDevice(TorchDispatchMode):
    """Records what crosses between host and device, and how much memory of the device is held at most.

    Args:
        counted: Type of the device whose memory is counted.

    Attributes:
        copies: (``"in"`` or ``"out"``, bytes), in order.
        held_bytes: of the device's tensors that were made under the mode and live.
        peak_bytes: the most of them at once.
    """

    def __init__(self, counted: str = DEVICE.type) -> None:
        super().__init__()
        self._counted = counted
        self.copies: list[tuple[str, int]] = []
        self.held_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in inputs:
            self._known.add(tensor.untyped_storage()._cdata)  # what was there before
        if func is torch.ops.aten.copy_.default and inputs[1].is_meta and not inputs[0].is_meta:
            self.copies.append(("out", inputs[1].nbytes))  # a meta tensor has nothing to copy
            return args[0]
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        crossing = [t for t in inputs if t.device.type == "cpu" and t.numel() > 0 and any(m.is_meta for m in made)]
        self.copies += [("in", tensor.nbytes) for tensor in crossing]
        for tensor in made:
            storage = tensor.untyped_storage()
            if tensor.device.type == self._counted and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.held_bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return out

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.held_bytes -= nbytes
