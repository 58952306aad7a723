"""Weights through a file in a folder that two machines share: the shared memory of those that have none together.

The sender writes all buckets into one file and has it written through before a bucket counts as published. A receiver
opens the file anew in every sync, which on network file systems is when it sees what others have written. Whatever a
cache may still hold of an earlier sync has that one's seal, and is refused.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hrl.workers.weight_sync.own_place import OwnPlace
from hrl.workers.weight_sync.sender import SenderTransport
from hrl.workers.weight_sync.wire import Manifest, WeightSyncError

KIND = "shared_file"
_NAME = "hrl-weights"


class SharedFileSender(SenderTransport):
    """Keeps all buckets side by side in a file.

    Args:
        manifest: What will be sent.
        folder: Where the file lies, which goes with the sender. What killed senders have left there is removed.

    Raises:
        WeightSyncError: The folder can't be written.
    """

    stays = True

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._manifest = manifest
        try:
            self._place: OwnPlace | None = OwnPlace(folder.resolve(), _NAME, is_folder=False)
        except OSError as error:
            raise WeightSyncError(
                f"rollout.server.weights_folder={folder}: {error.strerror}; name a folder that this machine can write "
                "and the servers can read"
            ) from error
        self._path = self._place.path
        try:
            # Written, not only made longer: a full disk is an error here, and a signal in a mapped page.
            os.posix_fallocate(self._place.handle, 0, manifest.all_buckets_bytes)
            self._memory: mmap.mmap | None = mmap.mmap(self._place.handle, manifest.all_buckets_bytes)
        except OSError as error:
            self._memory = None
            self.close()
            raise WeightSyncError(
                f"rollout.server.weights_folder={folder} has no room for {manifest.all_buckets_bytes} bytes of weights "
                f"({error.strerror})"
            ) from error
        self._data: Tensor | None = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.depth = len(manifest.buckets)

    def handle(self) -> dict[str, Any]:
        return {"kind": KIND, "path": str(self._path)}

    def buffer(self, index: int) -> Tensor:
        if self._data is None:
            raise WeightSyncError("the shared file of the weight sync is closed")
        return self._manifest.buckets[index].within(self._data)

    def publish(self, index: int) -> None:
        """Have what was written so far on the disk, where other machines see it."""
        if self._memory is not None and self._place is not None:
            self._memory.flush()
            os.fsync(self._place.handle)
            self._place.touch()

    def close(self) -> None:
        self._data = self._memory = None
        place, self._place = self._place, None
        if place is not None:
            place.remove()


class SharedFileReader:
    """The receiver's view of a sender's file."""

    staged, stays = True, False

    def __init__(self, manifest: Manifest, handle: Mapping[str, Any]) -> None:
        self._manifest = manifest
        self._path = Path(handle["path"])
        self._data: Tensor | None = None

    def bucket(self, index: int) -> Tensor:
        """Return the bytes of a published bucket."""
        if self._data is None:
            self._data = self._opened()
        return self._manifest.buckets[index].within(self._data)

    def release(self) -> None:
        """Let the file go, so that the next sync opens it anew."""
        self._data = None

    def _opened(self) -> Tensor:
        size = self._manifest.all_buckets_bytes
        try:
            with self._path.open("rb") as file:
                there = os.fstat(file.fileno()).st_size
                if there != size:
                    raise WeightSyncError(f"{self._path} has {there} bytes instead of {size}: another run's file?")
                # A write would not reach the file. The pages are still the file's: the sender writes no others into it
                # before this sync has ended, unless it gave this reader up, whose version then is another.
                return torch.frombuffer(mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE), dtype=torch.uint8)
        except OSError as error:
            raise WeightSyncError(
                f"cannot open {self._path} ({error.strerror}): rollout.server.weights_folder has to be a folder that "
                "the server sees under the same name"
            ) from error
