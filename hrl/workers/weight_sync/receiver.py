"""The receiving end of a weight sync, in the process that holds the sampler's weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hrl.workers.weight_sync import broadcast, cuda_ipc, shared_memory
from hrl.workers.weight_sync.wire import (
    Assembler,
    Manifest,
    Piece,
    ReceiverReport,
    WeightSyncError,
    open_sealed,
    sealed_checksums,
    tensor_checksum,
)

logger = logging.getLogger(__name__)


class ModelWriter(Protocol):
    """Writes weights into a model in use: vLLM's layers, a transformers model, a dictionary."""

    def begin(self) -> None:
        """Prepare for a complete set of weights."""

    def write(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Take some of the weights. The tensors are views of a buffer that may change after the call.

        Raises:
            WeightSyncError: The model has no such tensor.
        """

    def finish(self, kept: Collection[str] = ()) -> None:
        """Put everything written into effect.

        Args:
            kept: Names of tensors that are not sent and stay as they are.

        Raises:
            WeightSyncError: A parameter was neither written nor kept; names it.
        """

    def cancel(self) -> None:
        """Give up. The model is left with a mixture of old and new weights, which must not be sampled from."""

    def read_back(self, name: str) -> Tensor | None:
        """Return the parameter as the model has it; None, or another shape, where it is fused, sharded or packed."""


class BucketReader(Protocol):
    """The receiver's end of a transport."""

    staged: bool
    """Buckets stay readable until the commit, so that nothing is written before all of it is verified."""

    def bucket(self, index: int) -> Tensor:
        """Return the bytes of a published bucket, `(bucket.nbytes,) uint8`."""

    def release(self) -> None:
        """Give back the memory that only a sync needs. Called whenever a sync has ended, also by an error."""


class WeightReceiver:
    """Receives syncs into one model.

    With a staged transport the old weights stay in place until every bucket is verified, so that the old version is
    still served after an abort. With a streaming one they are overwritten bucket by bucket: after an abort the model is
    a mixture, `intact` is false, and only the next good sync makes it usable.

    Args:
        writer: Access to the model.
        name: Of this process, for reports and errors.
        rank_in_engine: Number of this process within a tensor-parallel engine.
    """

    def __init__(self, writer: ModelWriter, name: str, rank_in_engine: int = 0) -> None:
        self._writer = writer
        self._name = f"{name} (pid {os.getpid()})"
        self._rank_in_engine = rank_in_engine
        self._reader: BucketReader | None = None
        self._attached: tuple[str, str] | None = None
        self._known_good: Manifest | None = None
        self._manifest: Manifest | None = None
        self._version = 0
        self.served_version = 0
        self._pending: list[list[tuple[Piece, Tensor]]] = []
        self._assembler = Assembler()
        self._loaded: list[int] = []
        self._checksums: list[int] = []
        self._said_nothing_reads_back = False
        self._writing = False
        self.intact = True

    def begin(self, manifest: Manifest, handle: Mapping[str, Any], version: int) -> None:
        """Attach to the sender.

        Raises:
            WeightSyncError: A sync is already under way, or its tensors are not those of the last good sync.
        """
        if self._manifest is not None:
            raise WeightSyncError(f"{self._name}: a sync to version {self._version} is already under way")
        found = self._known_good.difference(manifest) if self._known_good is not None else []
        if found:
            raise WeightSyncError(
                f"{self._name}: the weights differ from those of the last good sync: {'; '.join(found)}"
            )
        self._attach(manifest, handle)
        self._manifest, self._version = manifest, version
        self._pending, self._loaded, self._checksums = [], [], []
        self._assembler = Assembler()

    def load(self, index: int) -> None:
        """Take and verify one published bucket.

        Raises:
            WeightSyncError: The bucket is out of order, or its seal does not fit its bytes; names the tensors.
        """
        manifest, reader = self._under_way()
        if index != len(self._loaded):
            raise WeightSyncError(f"{self._name}: expected bucket {len(self._loaded)}, was told to load {index}")
        data, bucket = reader.bucket(index), manifest.buckets[index]
        pieces = open_sealed(data, bucket, index, self._version)
        # Kept for the commit, when a streaming transport's buffer holds another bucket.
        self._checksums += sealed_checksums(data, bucket)
        if reader.staged:
            self._pending.append(pieces)
        else:
            self._write(pieces)
            if data.is_cuda:  # copies are still under way, and the sender writes there again once this returns
                torch.cuda.synchronize(data.device)
        self._loaded.append(index)

    def commit(self) -> ReceiverReport:
        """Put the new weights into effect.

        Raises:
            WeightSyncError: A bucket is missing, the model lacks a tensor, or it reads back differently.
        """
        manifest, _ = self._under_way()
        if len(self._loaded) != len(manifest.buckets):
            raise WeightSyncError(f"{self._name}: {len(self._loaded)} of {len(manifest.buckets)} buckets have arrived")
        for pieces in self._pending:
            self._write(pieces)
        self._writer.finish(manifest.kept)
        read_back = self._read_back(manifest)
        report = ReceiverReport(self._name, self._version, len(manifest.tensors), manifest.nbytes, read_back)
        self._known_good, self._manifest, self._pending = manifest, None, []
        self._checksums = []
        self._writing, self.intact, self.served_version = False, True, self._version
        self._release()
        return report

    def abort(self) -> bool:
        """Drop the sync under way, if any, and return whether all weights are those of `served_version`."""
        if self._writing:
            self._writer.cancel()
            self.intact, self._writing = False, False
        self._manifest, self._pending, self._loaded, self._checksums = None, [], [], []
        self._release()
        return self.intact

    def detach(self) -> None:
        """Let go of the sender's memory or process group."""
        self._release()
        self._reader, self._attached = None, None

    def _release(self) -> None:
        self._assembler = Assembler()
        if self._reader is not None:
            self._reader.release()

    def _under_way(self) -> tuple[Manifest, BucketReader]:
        if self._manifest is None or self._reader is None:
            raise WeightSyncError(f"{self._name}: no sync is under way")
        return self._manifest, self._reader

    def _attach(self, manifest: Manifest, handle: Mapping[str, Any]) -> None:
        key = (manifest.fingerprint, repr(sorted(handle.items())))
        if self._attached == key:
            return
        self.detach()
        self._reader = attach(manifest, handle, self._rank_in_engine)
        self._attached = key

    def _write(self, pieces: Sequence[tuple[Piece, Tensor]]) -> None:
        if not self._writing:
            self._writing = True
            self._writer.begin()
        weights = list(self._assembler.join(pieces))
        if weights:
            self._writer.write(weights)

    def _read_back(self, manifest: Manifest) -> int:
        """Compare what the model has now with what was sent, and return how many tensors could be compared."""
        names, sent, found = [], [], []
        for piece, sealed in zip(manifest.pieces, self._checksums, strict=True):
            written = self._writer.read_back(piece.name)
            if written is None or (written.dtype, tuple(written.shape)) != (
                piece.tensor.torch_dtype,
                piece.tensor.shape,
            ):
                continue
            names.append(piece.name)
            sent.append(sealed)
            found.append(tensor_checksum(written if piece.is_whole else written.reshape(-1)[piece.elements]))
        for name, want, got in zip(names, sent, torch.stack(found).tolist() if found else (), strict=True):
            if want != got:
                raise WeightSyncError(f"{self._name}: {name!r} reads back differently from what was sent")
        if not names and not self._said_nothing_reads_back:
            self._said_nothing_reads_back = True
            logger.warning("%s: the model holds every tensor fused, sharded or packed: none is read back", self._name)
        return len(set(names))


def attach(manifest: Manifest, handle: Mapping[str, Any], rank_in_engine: int) -> BucketReader:
    """Return the receiver's end of the transport that `handle` describes."""
    match handle["kind"]:
        case shared_memory.KIND:
            return shared_memory.SharedMemoryReader(manifest, handle)
        case cuda_ipc.KIND:
            return cuda_ipc.CudaIpcReader(manifest, handle)
        case broadcast.KIND:
            return broadcast.BroadcastReader(manifest, handle, rank_in_engine)
        case other:
            raise WeightSyncError(f"unknown weight transport {other!r}")
