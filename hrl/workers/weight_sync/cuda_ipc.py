"""Weights to processes on the same GPUs: two buffers of one bucket on each GPU, shared by CUDA IPC handles.

Every trainer rank of a tensor-parallel engine sends from buffers on its own GPU, and every process of the engine reads
those on its own. GPUs are told apart by their UUID, since each process may see a different set in a different order.

A handle is the 64 bytes that the driver gives for a buffer's allocation, plus integers; it is never a pickle. Both
sides free the buffers when a sync ends: between syncs the memory belongs to the optimizer and the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hrl.workers.weight_sync.sender import SenderTransport
from hrl.workers.weight_sync.wire import Manifest, WeightSyncError

KIND = "cuda_ipc"
_DEPTH = 2
# In the order of `UntypedStorage._share_cuda_` and `_new_shared_cuda`.
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


class CudaDevices:
    """What the transport asks of the GPUs that this process sees. Tests put stand-ins here."""

    def current(self) -> torch.device:
        """Return the device of this process."""
        return torch.device("cuda", torch.cuda.current_device())

    def uuid(self, device: torch.device) -> str:
        """Return the GPU's UUID, the same in every process."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Return bytes `(nbytes,) uint8` that can be shared."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def share(self, buffer: Tensor) -> dict[str, Any]:
        """Return the buffer's handle: integers and strings."""
        fields = dict(zip(_FIELDS, buffer.untyped_storage()._share_cuda_(), strict=True))
        return {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}

    def open(self, handle: Mapping[str, Any], device: torch.device) -> Tensor:
        """Return the buffer of another process on the same GPU, `(nbytes,) uint8`.

        Raises:
            RuntimeError: That process has ended, or memory cannot be shared.
        """
        fields = [bytes.fromhex(value) if isinstance(value := handle[name], str) else value for name in _FIELDS]
        fields[0] = device.index  # the sender's number for it may differ
        storage = torch.UntypedStorage._new_shared_cuda(*fields)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def synchronize(self, device: torch.device) -> None:
        """Wait for what was queued on the device: another process does not see this one's streams."""
        torch.cuda.current_stream(device).synchronize()

    def collect(self) -> None:
        """Free what was shared and is no longer open anywhere."""
        # torch counts the receivers of a shared buffer in a file in /dev/shm, and removes it here once they are gone.
        # Never unlink that file elsewhere: torch aborts the process when it finds it missing.
        torch.cuda.ipc_collect()


DEVICES = CudaDevices()


class CudaIpcSender(SenderTransport):
    """Double buffers on the trainer's GPU: bucket i + 1 is gathered into one, bucket i loaded from the other."""

    depth = _DEPTH

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._manifest = manifest
        self._device = device
        self._buffers: list[Tensor] = []
        self._exports = 0

    def handle(self) -> dict[str, Any]:
        self.release()
        size = self._manifest.largest_bucket_bytes
        self._buffers = [DEVICES.allocate(size, self._device) for _ in range(_DEPTH)]
        self._exports += 1
        own = {"gpu_uuid": DEVICES.uuid(self._device), "buffers": [DEVICES.share(buffer) for buffer in self._buffers]}
        # The driver may give new buffers the same handle as old ones; the number tells a receiver to open them again.
        return {"kind": KIND, "export": self._exports, "senders": [own]}

    def buffer(self, index: int) -> Tensor:
        if not self._buffers:
            raise WeightSyncError("the shared GPU buffers of the weight sync are not there: no sync is under way")
        return self._buffers[index % _DEPTH][: self._manifest.buckets[index].nbytes]

    def publish(self, index: int) -> None:
        DEVICES.synchronize(self._device)

    def release(self) -> None:
        if self._buffers:
            self._buffers = []
            DEVICES.collect()


class CudaIpcReader:
    """The receiver's end: the buffers on its own GPU."""

    staged = stays = False

    def __init__(self, manifest: Manifest, handle: Mapping[str, Any]) -> None:
        self._manifest = manifest
        device = DEVICES.current()
        own = DEVICES.uuid(device)
        sender = next((sender for sender in handle["senders"] if sender["gpu_uuid"] == own), None)
        if sender is None:
            there = ", ".join(sender["gpu_uuid"] for sender in handle["senders"])
            raise WeightSyncError(
                f"no trainer rank of this engine is on its GPU {own} ({device}): they are on {there}. Weights by CUDA "
                "IPC need trainer and engine on the same GPUs; use separate pools, whose weights are broadcast"
            )
        try:
            self._buffers = [DEVICES.open(buffer, device) for buffer in sender["buffers"]]
        except RuntimeError as error:
            raise WeightSyncError(
                f"the buffers of the trainer rank on GPU {own} cannot be opened: it has ended, or the two processes "
                f"cannot share memory ({error})"
            ) from error

    def bucket(self, index: int) -> Tensor:
        """Return the bytes of a published bucket."""
        return self._buffers[index % _DEPTH][: self._manifest.buckets[index].nbytes]

    def release(self) -> None:
        """Close the sender's buffers, which cannot be freed before that."""
        if self._buffers:
            self._buffers = []
            DEVICES.collect()
