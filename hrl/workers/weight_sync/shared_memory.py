"""Weights through this machine's memory: one anonymous file that the sender owns and receivers map.

The memory is a memfd, which receivers reach as `/proc/<pid>/fd/<fd>`. It has no name in `/dev/shm` and lives only as
long as a process has it open or mapped, so nothing is left behind, even after SIGKILL.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hrl.workers.weight_sync.sender import SenderTransport
from hrl.workers.weight_sync.wire import Manifest, WeightSyncError

KIND = "shared_memory"


class SharedMemorySender(SenderTransport):
    """Keeps all buckets side by side, so that receivers need not write before the last one is verified.

    The pages are kept from sync to sync: touching fresh ones costs several times as much as the copy.
    """

    stays = True

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._fd = os.memfd_create("hrl-weights", os.MFD_CLOEXEC)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, manifest.all_buckets_bytes)
        self._data: Tensor | None = _map(self._fd, manifest)
        self.depth = len(manifest.buckets)

    def handle(self) -> dict[str, Any]:
        return {"kind": KIND, "pid": os.getpid(), "fd": self._fd, "inode": os.fstat(self._fd).st_ino}

    def buffer(self, index: int) -> Tensor:
        if self._data is None:
            raise WeightSyncError("the shared memory of the weight sync is closed")
        return self._manifest.buckets[index].within(self._data)

    def publish(self, index: int) -> None:
        """Do nothing: whoever maps the memory sees what was written."""

    def close(self) -> None:
        self._data = None
        self._close_fd()


class SharedMemoryReader:
    """The receiver's mapping of a sender's memory."""

    staged = stays = True

    def __init__(self, manifest: Manifest, handle: Mapping[str, Any]) -> None:
        self._manifest = manifest
        path = f"/proc/{handle['pid']}/fd/{handle['fd']}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WeightSyncError(f"cannot open the sender's memory at {path}: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if (status.st_ino, status.st_size) != (handle["inode"], manifest.all_buckets_bytes):
                raise WeightSyncError(f"{path} is not the memory that was announced: the sender has closed it")
            self._data = _map(fd, manifest)
        finally:
            os.close(fd)

    def bucket(self, index: int) -> Tensor:
        """Return the bytes of a published bucket."""
        return self._manifest.buckets[index].within(self._data)

    def release(self) -> None:
        """Keep the mapping: touching fresh pages costs several times as much as the copy."""


def _map(fd: int, manifest: Manifest) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, manifest.all_buckets_bytes), dtype=torch.uint8)
