"""The receiving end of a weight sync, in the process that holds the sampler's weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from hrl.workers.weight_sync import broadcast, cuda_ipc, shared_file, shared_memory
from hrl.workers.weight_sync.wire import (
    Assembler,
    Manifest,
    ReceiverReport,
    WeightSyncError,
    open_sealed,
    tensor_checksums,
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
    stays: bool
    """Each bucket has the same memory in every sync."""

    def bucket(self, index: int) -> Tensor:
        """Return the bytes of a published bucket, `(bucket.nbytes,) uint8`."""

    def release(self) -> None:
        """Give back the memory that only a sync needs. Called whenever a sync ends, also when it fails."""


class WeightReceiver:
    """Receives syncs into one model.

    With a staged transport the old weights stay in place until every bucket is verified, so that the old version is
    still served after an abort. With a streaming one they are overwritten bucket by bucket: after an abort the model is
    a mixture, `intact` is false, and only the next good sync makes it usable.

    Args:
        writer: Access to the model.
        name: Of this process, for reports and errors.
        rank_in_engine: Rank of this process within a tensor-parallel engine.

    Attributes:
        served_version: Policy version of the last good sync.
        intact: Whether all weights of the model are those of `served_version`.
        digest: Of the last good sync's checksums, equal for equal weights; empty before the first one.
    """

    def __init__(self, writer: ModelWriter, name: str, rank_in_engine: int = 0) -> None:
        self._writer = writer
        self._name = f"{name} (pid {os.getpid()})"
        self._rank_in_engine = rank_in_engine
        self._reader: BucketReader | None = None
        self._views: dict[int, list[tuple[str, Tensor]]] = {}  # what buckets hold, where the reader's memory stays
        self._attached: tuple[str, str] | None = None
        self._known_good: Manifest | None = None
        self._sync: _Incoming | None = None
        self._said_nothing_reads_back = False
        self.served_version = 0
        self.digest = ""
        self.intact = True

    @property
    def has_received(self) -> bool:
        """Whether there was a good sync; before it the weights are those that the model was loaded with."""
        return self._known_good is not None

    def manifest_of(self, plain: Mapping[str, Any]) -> Manifest:
        """Return a manifest that came as plain data; that of the last good sync, if it is the same."""
        return Manifest.from_plain(plain, self._known_good)

    def begin(self, manifest: Manifest, handle: Mapping[str, Any], version: int) -> None:
        """Attach to the sender.

        Raises:
            WeightSyncError: A sync is already under way, or its tensors are not those of the last good sync.
        """
        if self._sync is not None:
            raise WeightSyncError(f"{self._name}: a sync to version {self._sync.version} is already under way")
        good = self._known_good
        if good is not None and manifest.fingerprint == good.fingerprint:
            manifest = good  # which has worked out its buckets and its fingerprint
        elif good is not None and (found := good.difference(manifest)):
            raise WeightSyncError(
                f"{self._name}: the weights differ from those of the last good sync: {'; '.join(found)}"
            )
        key = (manifest.fingerprint, repr(sorted(handle.items())))
        if self._reader is None or self._attached != key:
            self._end_sync()
            self._views.clear()
            self._reader = None  # before the next one opens memory of its own
            self._reader = attach(manifest, handle, self._rank_in_engine)
            self._attached = key
        self._sync = _Incoming(manifest, version, self._reader)

    def load(self, index: int) -> None:
        """Take and verify one published bucket.

        Raises:
            WeightSyncError: The bucket is out of order, or its seal does not fit its bytes; names the tensors.
        """
        sync = self._under_way()
        if index != sync.taken:
            raise WeightSyncError(f"{self._name}: expected bucket {sync.taken}, was told to load {index}")
        data, bucket = sync.reader.bucket(index), sync.manifest.buckets[index]
        sync.checksums += open_sealed(data, bucket, index, sync.version)
        sync.device = data.device
        if sync.reader.staged:
            sync.pending.append((index, data))
        else:
            self._write(sync, index, data)
            if data.is_cuda:  # copies are still under way, and the sender writes there again once this returns
                torch.cuda.synchronize(data.device)
        sync.taken += 1

    def commit(self) -> ReceiverReport:
        """Put the new weights into effect.

        Raises:
            WeightSyncError: A bucket is missing, the model lacks a tensor, or it reads back differently.
        """
        sync = self._under_way()
        manifest = sync.manifest
        if sync.taken != len(manifest.buckets):
            raise WeightSyncError(f"{self._name}: {sync.taken} of {len(manifest.buckets)} buckets have arrived")
        for index, data in sync.pending:
            self._write(sync, index, data)
        self._writer.finish(manifest.kept)
        read_back = self._read_back(sync)
        self._known_good, self.served_version, self.intact = manifest, sync.version, True
        self.digest = xxh3_64_hexdigest(repr(sync.checksums).encode())
        self._end_sync()
        return ReceiverReport(self._name, sync.version, len(manifest.tensors), manifest.nbytes, read_back)

    def abort(self) -> bool:
        """Drop the sync under way, if any, and return `intact`."""
        if self._sync is not None and self._sync.writing:
            self._writer.cancel()
        self._end_sync()
        return self.intact

    def _end_sync(self) -> None:
        self._sync = None
        if self._reader is not None:
            self._reader.release()

    def _under_way(self) -> _Incoming:
        if self._sync is None:
            raise WeightSyncError(f"{self._name}: no sync is under way")
        return self._sync

    def _write(self, sync: _Incoming, index: int, data: Tensor) -> None:
        if not sync.writing:
            sync.writing = True
            self.intact = False  # from here to the end of the commit, also if no abort ever comes
            self._writer.begin()
        bucket = sync.manifest.buckets[index]
        weights = self._views.get(index)
        if weights is None:
            weights = list(sync.assembler.join(bucket, data))
            if sync.reader.stays and all(piece.is_whole for piece in bucket.pieces):
                self._views[index] = weights
        if weights:
            self._writer.write(weights)

    def _read_back(self, sync: _Incoming) -> int:
        """Compare what the model has now with what was sent, and return how many tensors could be compared."""
        compared = []
        for piece, checksum in zip(sync.manifest.pieces, sync.checksums, strict=True):
            sent = piece.tensor
            written = self._writer.read_back(sent.name)
            if written is not None and written.dtype == sent.torch_dtype and written.shape == sent.shape:
                part = written if piece.is_whole else written.reshape(-1)[piece.elements]
                compared.append((sent.name, checksum, part))
        found = tensor_checksums([part for *_, part in compared], sync.device)
        for (name, checksum, _), got in zip(compared, found, strict=True):
            if got != checksum:
                raise WeightSyncError(f"{self._name}: {name!r} reads back differently from what was sent")
        if not compared and not self._said_nothing_reads_back:
            self._said_nothing_reads_back = True
            logger.warning("%s: the model holds every tensor fused, sharded or packed: none is read back", self._name)
        return len({name for name, *_ in compared})


@dataclass
class _Incoming:
    """The sync under way.

    Attributes:
        manifest: What is sent.
        version: Policy version of the weights.
        reader: The receiver's end of the transport.
        taken: Buckets that have come and are verified.
        pending: Numbers and bytes of those of a staged transport, which are written at the commit.
        checksums: Of all pieces that have come, for the commit, when a buffer holds another bucket.
        device: Of the buckets.
        assembler: Holds the tensor of which some pieces have come.
        writing: The model is being written.
    """

    manifest: Manifest
    version: int
    reader: BucketReader
    taken: int = 0
    pending: list[tuple[int, Tensor]] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    assembler: Assembler = field(default_factory=Assembler)
    writing: bool = False


def attach(manifest: Manifest, handle: Mapping[str, Any], rank_in_engine: int) -> BucketReader:
    """Return the receiver's end of the transport that `handle` describes."""
    match handle["kind"]:
        case shared_memory.KIND:
            return shared_memory.SharedMemoryReader(manifest, handle)
        case shared_file.KIND:
            return shared_file.SharedFileReader(manifest, handle)
        case cuda_ipc.KIND:
            return cuda_ipc.CudaIpcReader(manifest, handle)
        case broadcast.KIND:
            return broadcast.BroadcastReader(manifest, handle, rank_in_engine)
        case other:
            raise WeightSyncError(f"unknown weight transport {other!r}")
