"""The trainer's end of a weight sync."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hrl.workers.weight_sync.wire import (
    Bucket,
    Deadline,
    Manifest,
    ReceiverReport,
    TensorSpec,
    WeightSyncError,
    copy_to_host,
    seal,
)

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 10.0
"""How long an abort waits for a receiver, which may itself be the reason for it."""


@dataclass(frozen=True)
class SyncReport:
    """What a finished sync has sent, as its sender saw it.

    Attributes:
        version: Policy version that is now served.
        tensors: Number of tensors that were sent.
        nbytes: Bytes of these tensors.
        seconds: From begin to commit.
        receivers: Reports of the receivers; empty for a broadcast, and for a rank that drives no engine.
    """

    version: int
    tensors: int
    nbytes: int
    seconds: float
    receivers: tuple[ReceiverReport, ...]


class SenderTransport(ABC):
    """Buffers on the sender's side, and the handle by which receivers find them."""

    depth: int
    """How many buckets can be under way at once; a bucket's buffer is used again `depth` buckets later."""
    stays: bool = False
    """Each bucket has the same memory in every sync, so that views of it are made once."""
    deadline: Deadline
    """Of the sync under way; `buffer` and `flush` wait no longer than that."""

    @abstractmethod
    def handle(self) -> dict[str, Any]:
        """Return how a receiver attaches to the sync that begins: integers and strings in lists and dictionaries."""

    @abstractmethod
    def buffer(self, index: int) -> Tensor:
        """Return the memory for bucket `index`, `(bucket.nbytes,) uint8`, once it is free."""

    @abstractmethod
    def publish(self, index: int) -> None:
        """Make the written bucket visible to receivers."""

    def flush(self) -> None:
        """Wait until everything published has left this process."""

    def abort(self) -> None:
        """Release receivers that wait for a bucket that will not come."""

    def release(self) -> None:
        """Give back the memory that only a sync needs. Called whenever a sync ends, also when it fails."""

    def close(self) -> None:
        """Give all memory back. Harmless when repeated."""
        self.release()


class SyncTarget(Protocol):
    """What a sender talks to: the engine of its process, or another rank that sends to the same engine."""

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        """Announce a sync. A manifest that is not the model's is refused."""

    def weights_load(self, index: int) -> Future[None]:
        """Take a published bucket."""

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        """Serve the new version from here on."""

    def weights_abort(self, reason: str) -> Future[None]:
        """Drop the sync: serve the old version, or nothing until the next good sync."""


class WeightSync:
    """Sends the trainer's weights over one transport, once for each policy version.

    Args:
        manifest: What every sync sends.
        transport: Carries the buckets.
        target: The receiver, which is told about each bucket. `None` for a broadcast, whose receivers know themselves
            which bucket comes next.
        timeout_s: Seconds after which a sync is aborted.
    """

    def __init__(
        self, manifest: Manifest, transport: SenderTransport, target: SyncTarget | None = None, *, timeout_s: float
    ) -> None:
        self.manifest = manifest
        self._transport = transport
        self._target = target
        self._timeout_s = timeout_s
        self._views: dict[int, list[Tensor]] = {}

    def push(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> SyncReport:
        """Send one version and have it served.

        Args:
            version: Policy version of the weights.
            weights: (name, full tensor) in the manifest's order. It is run to its end even if the sync fails, because
                each item may be a collective of the training ranks.

        Raises:
            WeightSyncError: The weights are not the manifest's, a receiver refused them or reported something else, or
                the deadline passed. The receivers have been told to abort.
        """
        started = time.monotonic()
        deadline = Deadline(self._timeout_s, f"weight sync to version {version}")
        self._transport.deadline = deadline
        source = iter(weights)
        try:
            reports = self._send(version, source, deadline)
        except BaseException as error:  # Ctrl-C included: whatever it is, the receiver has to hear of it
            self._abort(f"{type(error).__name__}: {error}")
            if isinstance(error, Exception):  # on Ctrl-C the other ranks stop as well
                deque(source, maxlen=0)
            raise
        finally:
            self._transport.release()
        return SyncReport(
            version, len(self.manifest.tensors), self.manifest.nbytes, time.monotonic() - started, tuple(reports)
        )

    def close(self) -> None:
        """Give the transport's buffers back."""
        self._views.clear()
        self._transport.close()

    def _send(self, version: int, source: Iterator[tuple[str, Tensor]], deadline: Deadline) -> list[ReceiverReport]:
        transport, target, buckets = self._transport, self._target, self.manifest.buckets
        handle = transport.handle()
        if target is not None:
            deadline.wait(target.weights_begin(self.manifest, handle, version), "begin")
        loads: list[Future[None]] = []
        contents = _contents(self.manifest, source)
        for index, bucket in enumerate(buckets):
            if target is not None and index >= transport.depth:
                self._wait_loaded(loads, index - transport.depth, deadline)
            data = transport.buffer(index)
            seal(data, bucket, index, version, self._fill(index, bucket, data, contents))
            deadline.remaining_s(f"bucket {index} of {len(buckets)}")
            transport.publish(index)
            if target is not None:
                loads.append(target.weights_load(index))
        for _ in contents:  # runs to its end, where it looks for a tensor too many
            pass
        for index in range(len(loads)):
            self._wait_loaded(loads, index, deadline)
        transport.flush()
        if target is None:
            return []
        reports: list[ReceiverReport] = deadline.wait(target.weights_commit(), "commit")
        for report in reports:
            self._check(report, version)
        return reports

    def _fill(self, index: int, bucket: Bucket, data: Tensor, contents: Iterator[Tensor]) -> list[int] | None:
        """Copy tensors into a bucket; return the checksums of its pieces where it lies in host memory."""
        places = self._places(index, bucket, data)
        if data.is_cuda:
            for place in places:
                place.copy_(next(contents))
            return None
        raw = memoryview(data.numpy())
        return [copy_to_host(next(contents), place, raw[run]) for place, run in zip(places, bucket.places, strict=True)]

    def _places(self, index: int, bucket: Bucket, data: Tensor) -> Sequence[Tensor]:
        """Return where the pieces of a bucket lie in its memory."""
        if not self._transport.stays:
            return [piece.view(data) for piece in bucket.pieces]
        if index not in self._views:
            self._views[index] = [piece.view(data) for piece in bucket.pieces]
        return self._views[index]

    def _wait_loaded(self, loads: Sequence[Future[None]], index: int, deadline: Deadline) -> None:
        deadline.wait(loads[index], f"loading bucket {index} of {len(self.manifest.buckets)}")

    def _check(self, report: ReceiverReport, version: int) -> None:
        want = (version, len(self.manifest.tensors), self.manifest.nbytes)
        if (report.version, report.tensors, report.nbytes) != want:
            raise WeightSyncError(
                f"{report.receiver} reports version {report.version}, {report.tensors} tensors, {report.nbytes} bytes; "
                f"sent were version {want[0]}, {want[1]} tensors, {want[2]} bytes"
            )

    def _abort(self, reason: str) -> None:
        self._transport.abort()
        if self._target is None:
            return
        try:
            self._target.weights_abort(reason).result(timeout=ABORT_TIMEOUT_S)
        except (FutureTimeoutError, RuntimeError, OSError) as error:
            # The first failure is the one to report. The receiver counts as unusable from here on.
            logger.warning("weight sync: the receiver did not answer the abort: %s: %s", type(error).__name__, error)


def _contents(manifest: Manifest, source: Iterator[tuple[str, Tensor]]) -> Iterator[Tensor]:
    """Yield what belongs into each piece of the manifest, in order; pieces of a cut tensor are `(elements,)`.

    Raises:
        WeightSyncError: The tensors of `source` are not the manifest's; names the first that is not.
    """
    for spec, pieces in manifest.by_tensor:
        tensor = _take(source, spec)
        flat = None
        for piece in pieces:
            if piece.is_whole:
                yield tensor
            else:
                flat = tensor.reshape(-1) if flat is None else flat
                yield flat[piece.elements]
        del tensor, flat  # before the next one is gathered
    surplus = next(source, None)
    if surplus is not None:
        raise WeightSyncError(f"the trainer sent {surplus[0]!r}, which is not in the manifest")


def _take(source: Iterator[tuple[str, Tensor]], spec: TensorSpec) -> Tensor:
    name, tensor = next(source, (None, None))
    if tensor is None:
        raise WeightSyncError(f"the trainer's weights end before {spec.name!r}")
    if name != spec.name:
        raise WeightSyncError(f"the trainer sent {name!r} where {spec.name!r} was expected")
    if tensor.shape != spec.shape:
        raise WeightSyncError(f"{name!r} has shape {tuple(tensor.shape)}, the manifest says {spec.shape}")
    return tensor
