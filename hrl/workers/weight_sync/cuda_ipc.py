"""Weights to a process on the same GPU: two persistent buffers, shared by CUDA IPC handles.

A handle is the 64 bytes that the driver gives for the buffer's allocation, plus integers; it is never a pickle. The
buffers stay allocated from sync to sync, so a receiver opens them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hrl.workers.weight_sync.base import SenderTransport
from hrl.workers.weight_sync.errors import WeightSyncError
from hrl.workers.weight_sync.manifest import Manifest

KIND = "cuda_ipc"
_DEPTH = 2
# What torch's storages call these, in the order of `UntypedStorage._share_cuda_` and `_new_shared_cuda`.
_FIELDS = (
    "device",
    "memory_handle",
    "nbytes",
    "offset",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


class CudaIpcSender(SenderTransport):
    """Double buffers on the trainer's GPU: bucket i + 1 is gathered into one, bucket i loaded from the other."""

    depth = _DEPTH

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._manifest = manifest
        self._device = device
        size = manifest.largest_bucket_bytes
        self._buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(_DEPTH)]
        shared = [buffer.untyped_storage()._share_cuda_() for buffer in self._buffers]
        self._handle: dict[str, Any] = {
            "kind": KIND,
            "gpu_uuid": str(torch.cuda.get_device_properties(device).uuid),
            "buffers": [dict(zip(_FIELDS, fields, strict=True)) for fields in shared],
        }

    def handle(self) -> dict[str, Any]:
        return self._handle

    def buffer(self, index: int) -> Tensor:
        if not self._buffers:
            raise WeightSyncError("the shared GPU buffers of the weight sync are closed")
        return self._buffers[index % _DEPTH][: self._manifest.buckets[index].nbytes]

    def publish(self, index: int) -> None:
        """Waits for the copies: another process does not see this one's streams."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self._buffers = []
        # torch counts the receivers of a shared buffer in a file of its own in /dev/shm. This has torch remove the file
        # if they are gone. To unlink it here would be wrong: torch aborts the process when it finds its file missing.
        torch.cuda.ipc_collect()


class CudaIpcReader:
    """The receiver's view of the sender's buffers."""

    staged = False

    def __init__(self, manifest: Manifest, handle: Mapping[str, Any]) -> None:
        self._manifest = manifest
        device = _device_of(handle["gpu_uuid"])
        self._buffers = []
        for buffer in handle["buffers"]:
            fields = [buffer[name] for name in _FIELDS]
            fields[0] = device.index
            storage = torch.UntypedStorage._new_shared_cuda(*fields)
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))

    def bucket(self, index: int) -> Tensor:
        """Bytes of a published bucket."""
        return self._buffers[index % _DEPTH][: self._manifest.buckets[index].nbytes]


def _device_of(uuid: str) -> torch.device:
    """This process's number for the sender's GPU: each process may see other devices, in another order."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    raise WeightSyncError(
        f"the trainer's GPU {uuid} is not visible to this engine process; weights by CUDA IPC need trainer and engine "
        "on the same GPU: use the broadcast of separate pools, or make the device visible"
    )
