"""A machine with GPUs, of which each process sees some, in an order of its own; their memory is shared memory."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class FakeDevices:
    """Stands in for ``cuda_ipc.CudaDevices``.

    Args:
        visible: physical number of each device that this process sees.
        current: this process's own, as it counts.
    """

    def __init__(self, visible: Sequence[int], current: int) -> None:
        self._visible = tuple(visible)
        self._current = current
        self.opened: list[str] = []
        self._allocated: list[weakref.ref[Tensor]] = []

    def current(self) -> torch.device:
        return torch.device("cuda", self._current)

    def uuid(self, device: torch.device) -> str:
        return f"GPU-{self._visible[device.index]}"

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        fd = os.memfd_create(self.uuid(device), os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        buffer = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        buffer.descriptor = fd
        buffer.gpu = self.uuid(device)
        self._allocated.append(weakref.ref(buffer, lambda _: os.close(fd)))
        return buffer

    @property
    def open_bytes(self) -> int:
        """Bytes of the buffers that this process has allocated and not let go of."""
        return sum(buffer.numel() for reference in self._allocated if (buffer := reference()) is not None)

    def share(self, buffer: Tensor) -> dict[str, Any]:
        return {"pid": os.getpid(), "fd": buffer.descriptor, "gpu": buffer.gpu, "nbytes": buffer.numel()}

    def open(self, handle: Mapping[str, Any], device: torch.device) -> Tensor:
        assert self.uuid(device) == handle["gpu"], f"{handle['gpu']} opened on {self.uuid(device)}"
        self.opened.append(handle["gpu"])
        try:
            fd = os.open(f"/proc/{handle['pid']}/fd/{handle['fd']}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(str(error)) from error
        try:
            return torch.frombuffer(mmap.mmap(fd, handle["nbytes"]), dtype=torch.uint8)
        finally:
            os.close(fd)

    def synchronize(self, device: torch.device) -> None:
        pass

    def collect(self) -> None:
        pass
