"""What the backward pass needs of a layer, kept in pinned host memory between its forward and its backward.

Autograd asks for it by hooks. After a layer's forward its tensors leave on a stream of their own while the next layer
computes, and are dropped from the device when that one is done; so the device has those of two layers. In the backward
pass the first tensor of a layer that is asked for brings the tensors of the layer before it too, so that these come
while this one computes. A layer that is recomputed has saved its input alone, and one that is not all that it computed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from hrl.workers.engine.host_memory import Lane, local

#: Smaller tensors stay on the device.
LEAST_BYTES = 1 << 20


class ActivationOffload:
    """The activations of a module's layers while they are off the device.

    Args:
        device: Where the module computes.
        least_bytes: Smaller tensors stay there.
    """

    def __init__(self, device: torch.device, *, least_bytes: int = LEAST_BYTES) -> None:
        self.device = device
        self.least_bytes = least_bytes
        self.coming, self.going = Lane(device), Lane(device)
        self.leaving: _OfLayer | None = None
        self._last: weakref.ref[_OfLayer] | None = None

    def attach(self, module: nn.Module) -> int:
        """Have every layer's activations leave, those of layers that are recomputed too; return how many layers."""
        layers = [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]
        for layer in layers:
            layer.forward = self._around(layer, layer.forward)
        return len(layers)

    def _around(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            mine = _OfLayer(self, None if self._last is None else self._last(), layer)
            self._last = weakref.ref(mine)
            with saved_tensors_hooks(mine.pack, _unpack):
                out = forward(*args, **kwargs)
            self._leave(mine)
            return out

        return run

    def _leave(self, mine: _OfLayer) -> None:
        """Let go of the layer before, whose copies had the time of this one, and begin to copy this one."""
        if self.leaving is not None:
            self.leaving.let_go()
        mine.send()
        self.leaving = mine


class _OfLayer:
    """The tensors that a layer's forward has saved.

    Args:
        owner: Has the streams.
        before: Those of the layer that ran before, if any of them is still needed.
        layer: Whose parameters are no activations.
    """

    def __init__(self, owner: ActivationOffload, before: _OfLayer | None, layer: nn.Module) -> None:
        self._owner = owner
        self._before = None if before is None else weakref.ref(before)
        # Gathered weights and their transposes are saved too. They are there for the backward pass anyway.
        weights = [*layer.parameters(), *layer.buffers()]
        # What autograd saves of a weight that several ranks hold in parts is this rank's.
        self._weights = {local(weight).untyped_storage()._cdata for weight in weights}
        self._packed: dict[int, _Saved] = {}
        self._saved: list[weakref.ref[_Saved]] = []
        self._gone: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Take a tensor that autograd saves. What several of them share, two halves of a product, is taken once."""
        storage = tensor.untyped_storage()
        is_large = storage.nbytes() >= max(1, self._owner.least_bytes)
        if not is_large or tensor.device.type != self._owner.device.type or storage._cdata in self._weights:
            return tensor
        # While the layer runs, what was saved is held, so nothing else has its place.
        if storage._cdata not in self._packed:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self._packed[storage._cdata] = _Saved(self, whole.set_(storage, 0, (storage.nbytes(),), (1,)))
        saved = self._packed[storage._cdata]
        return _View(saved, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def send(self) -> None:
        """Begin to copy all tensors to host memory."""
        owner = self._owner
        self._saved = [weakref.ref(saved) for saved in self._packed.values()]
        owner.going.wait(Lane(owner.device, computes=True).mark())
        with owner.going.copies():
            for saved in self._packed.values():
                saved.send()
        self._gone = owner.going.mark()

    def let_go(self) -> None:
        """Drop the tensors from the device, once they are copied."""
        for saved in self._packed.values():
            saved.here = None
        self.forget()

    def forget(self) -> None:
        """Hold nothing any more that autograd does not hold."""
        # The memory may be used again after the copies only.
        Lane(self._owner.device, computes=True).wait(self._gone)
        self._packed = {}

    def fetch(self) -> None:
        """Begin to bring back those tensors that are still needed and not there."""
        owner = self._owner
        needed = [saved for each in self._saved if (saved := each()) is not None and saved.here is None]
        if not needed:
            return
        for saved in needed:
            saved.make_room()
        owner.coming.wait(Lane(owner.device, computes=True).mark())
        with owner.coming.copies():
            for saved in needed:
                saved.come_back()
        arrived = owner.coming.mark()
        for saved in needed:
            saved.arrived = arrived

    def reached(self) -> None:
        """Have the layer before come, which the backward pass reaches next."""
        owner = self._owner
        if owner.leaving is self:  # the last layer, which had not left
            self.forget()
            owner.leaving = None
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()


class _Saved:
    """Memory that tensors of a layer lie in: on the device, in host memory, or on its way.

    Attributes:
        here: `(bytes,)` uint8, while it is on the device.
        arrived: When it is back.
    """

    def __init__(self, layer: _OfLayer, tensor: Tensor) -> None:
        self._layer = layer
        self._device = tensor.device
        self._home: Tensor | None = None
        self.here: Tensor | None = tensor
        self.arrived: torch.cuda.Event | None = None

    def send(self) -> None:
        assert self.here is not None, "it has not left before"
        pins = self._device.type == "cuda"
        self._home = torch.empty(self.here.numel(), dtype=torch.uint8, pin_memory=pins)
        self._home.copy_(self.here, non_blocking=True)

    def make_room(self) -> None:
        # Of the computing stream's memory, which is given back to it too.
        assert self._home is not None, "it has left before"
        self.here = torch.empty(self._home.numel(), dtype=torch.uint8, device=self._device)

    def come_back(self) -> None:
        assert self.here is not None and self._home is not None, "there is room for it, and it has left before"
        self.here.copy_(self._home, non_blocking=True)

    def taken(self) -> Tensor:
        """Return it on the device, and have the layer before it come."""
        if self.here is None:
            self._layer.fetch()
        Lane(self._device, computes=True).wait(self.arrived)
        here = self.here
        assert here is not None, "it has come back"
        self._layer.reached()
        return here


class _View(NamedTuple):
    """A tensor in memory that leaves, with the layout that it had."""

    saved: _Saved
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    memory = packed.saved.taken()
    empty = torch.empty(0, dtype=packed.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), packed.offset, packed.shape, packed.stride)
