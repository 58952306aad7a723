"""Pinned host memory, to and from which a device copies without waiting, and the parameters that are kept there."""

from __future__ import annotations

import mmap
import weakref
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def host_zeros_like(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in host memory, sharded as `tensor` is and pinned for copies to and from `device`.

    Raises:
        RuntimeError: The driver does not pin the memory.
    """
    # torch's own pinned allocator rounds every allocation up to a power of two, to up to twice a model's memory. So the
    # shard gets pages that it shares with nothing else, and these are pinned as they are.
    home = torch.zeros_like(tensor, dtype=dtype, device="cpu", requires_grad=False)
    shard = local(home)
    if shard.numel() == 0:
        return home
    num_bytes = -(-shard.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = torch.zeros(num_bytes + mmap.PAGESIZE, dtype=torch.uint8)
    start = -pages.data_ptr() % mmap.PAGESIZE
    shard.set_(pages[start : start + shard.nbytes].view(dtype).view(shard.shape))
    if device.type == "cuda":
        runtime, address = torch.cuda.cudart(), shard.data_ptr()
        error = runtime.cudaHostRegister(address, num_bytes, 0)
        if error != runtime.cudaError.success:
            raise RuntimeError(
                f"the driver does not pin {num_bytes} bytes of host memory ({error}): is that much free, and does "
                "`ulimit -l` allow it? Offloading (fsdp_config.param_offload, optimizer_offload) needs it"
            )
        weakref.finalize(home, runtime.cudaHostUnregister, address).atexit = False
    return home


class Lane:
    """A stream of the device: one of its own for copies, or the one that computes.

    On a CPU, without streams, everything happens in order anyway.

    Args:
        device: Of the stream.
        computes: Take the stream on which the device computes at present.
    """

    def __init__(self, device: torch.device, *, computes: bool = False) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device) if computes else torch.cuda.Stream(device)

    def copies(self) -> AbstractContextManager[object]:
        """Return a context in which copies are queued on this stream."""
        return torch.cuda.stream(self._stream)  # does nothing without a stream

    def mark(self) -> torch.cuda.Event | None:
        """Return an event at the stream's present end."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let what is queued from here on wait for the event."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def finish(self) -> None:
        """Block until everything that is queued is done."""
        if self._stream is not None:
            self._stream.synchronize()


class HostCopies:
    """A module's parameters while they are off the device. Buffers, which are small, stay on it.

    Host memory is pinned, allocated once and kept. What did not change on the device is not copied back.

    Args:
        module: Sharded, on `device`.
        device: Of its computation.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._homes: dict[Tensor, Tensor] = {}
        self._off = False

    @torch.no_grad()
    def offload(self, *, changed: bool) -> None:
        """Take the parameters off the device. Harmless when repeated.

        Args:
            changed: They may differ from the host's copy, if it has one.
        """
        if self._off:
            return
        for parameter in self._module.parameters():
            is_new = parameter not in self._homes
            if is_new:
                self._homes[parameter] = host_zeros_like(parameter, parameter.dtype, self._device)
            if is_new or (changed and parameter.requires_grad):
                local(self._homes[parameter]).copy_(local(parameter.detach()), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # Detached, because the module keeps the very tensor that it is given.
        self._replace({parameter: home.detach() for parameter, home in self._homes.items()})
        self._off = True

    @torch.no_grad()
    def onload(self) -> None:
        """Bring them back. Harmless when repeated."""
        if self._off:
            self._replace({p: p.detach().to(self._device, non_blocking=True, copy=True) for p in self._homes})
            self._off = False

    def _replace(self, fresh: dict[Tensor, Tensor]) -> None:
        # A tied parameter is met twice and replaced once.
        self._module._apply(lambda tensor: fresh.pop(tensor, tensor))
