"""The trainer's end of a weight sync."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
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
    seal,
)

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 10.0
"""How long an abort waits for a receiver, which may itself be the reason for it."""


@dataclass(frozen=True)
class SyncReport:
    """A finished sync, as its sender saw it.

    Attributes:
        version: Policy version that is now served.
        tensors: Number of tensors that were sent.
        nbytes: Bytes of these tensors.
        seconds: From begin to commit.
        receivers: Reports of the receivers that this sender talks to; empty for a broadcast.
    """

    version: int
    tensors: int
    nbytes: int
    seconds: float
    receivers: tuple[ReceiverReport, ...]


class SenderTransport(ABC):
    """Buffers on the sender's side, and the handle by which receivers find them."""

    depth: int
    """Buckets that can be under way at once; a bucket's buffer is reused `depth` buckets later."""
    deadline: Deadline
    """Of the sync under way; `buffer` and `flush` wait no longer."""

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
        """Release receivers that wait for a bucket which will not come."""

    def release(self) -> None:
        """Give back the memory that only a sync needs. Called whenever a sync has ended, also by an error."""

    @abstractmethod
    def close(self) -> None:
        """Give the buffers back. Harmless when repeated."""


class SyncTarget(Protocol):
    """A receiver that the sender talks to: the rollout engine of the same process."""

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        """Announce a sync. A manifest that is not the model's is refused."""

    def weights_load(self, index: int) -> Future[None]:
        """Take a published bucket."""

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        """Serve the new version from here on."""

    def weights_abort(self, reason: str) -> Future[None]:
        """Drop the sync: serve the old version, or nothing until the next good sync."""


class FellowSenders(Protocol):
    """Other processes that send the same weights to the same receivers, each from its own memory.

    Only the sync that has fellows talks to the receivers. It waits for the others' buckets and tells them the answers.
    """

    def begin(self, manifest: Manifest, handle: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Return one handle for all senders, made of this one's and theirs.

        Raises:
            WeightSyncError: One of them is gone, failed, came too late or sends other weights; names it.
        """

    def wait_published(self, index: int, deadline: Deadline) -> None:
        """Wait until all of them have written bucket `index`; raises as `begin` does."""

    def tell_loaded(self, index: int) -> None:
        """Say that bucket `index` was loaded, so that its buffer is free. Harmless when repeated."""

    def tell_committed(self) -> None:
        """Say that the receivers serve the new version."""

    def tell_aborted(self, reason: str) -> None:
        """Say to those that still live that the sync has failed; raises nothing."""


class WeightSync:
    """Sends the trainer's weights over one transport, once for each policy version.

    Args:
        manifest: What every sync sends.
        transport: Carries the buckets.
        targets: Receivers to be told about each bucket. Empty for a broadcast, whose receivers know themselves which
            bucket comes next.
        timeout_s: Seconds after which a sync is aborted.
        fellows: Processes that send along with this one.
    """

    def __init__(
        self,
        manifest: Manifest,
        transport: SenderTransport,
        targets: Sequence[SyncTarget] = (),
        *,
        timeout_s: float,
        fellows: FellowSenders | None = None,
    ) -> None:
        self.manifest = manifest
        self._transport = transport
        self._targets = tuple(targets)
        self._timeout_s = timeout_s
        self._fellows = fellows

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
        except BaseException as error:
            self._abort(f"{type(error).__name__}: {error}")
            if isinstance(error, Exception):  # on Ctrl-C the other ranks stop as well
                for _ in source:
                    pass
            raise
        finally:
            self._transport.release()
        return SyncReport(
            version, len(self.manifest.tensors), self.manifest.nbytes, time.monotonic() - started, tuple(reports)
        )

    def close(self) -> None:
        """Give the transport's buffers back."""
        self._transport.close()

    def _send(self, version: int, source: Iterator[tuple[str, Tensor]], deadline: Deadline) -> list[ReceiverReport]:
        handle, fellows = self._transport.handle(), self._fellows
        if fellows is not None:
            handle = fellows.begin(self.manifest, handle, deadline)
        for begun in [target.weights_begin(self.manifest, handle, version) for target in self._targets]:
            deadline.wait(begun, "begin")
        loads: list[list[Future[None]]] = []
        filler = Filler(source)
        for index, bucket in enumerate(self.manifest.buckets):
            if index >= self._transport.depth:
                self._wait_loaded(loads, index - self._transport.depth, deadline)
            data = self._transport.buffer(index)
            filler.fill(data, bucket)
            seal(data, bucket, index, version)
            deadline.remaining_s(f"bucket {index} of {len(self.manifest.buckets)}")
            self._transport.publish(index)
            if fellows is not None:
                fellows.wait_published(index, deadline)
            loads.append([target.weights_load(index) for target in self._targets])
        filler.finish()
        for index in range(len(loads)):
            self._wait_loaded(loads, index, deadline)
        self._transport.flush()
        commits = [target.weights_commit() for target in self._targets]
        reports = [report for commit in commits for report in deadline.wait(commit, "commit")]
        for report in reports:
            self._check(report, version)
        if fellows is not None:
            fellows.tell_committed()
        return reports

    def _wait_loaded(self, loads: list[list[Future[None]]], index: int, deadline: Deadline) -> None:
        for load in loads[index]:
            deadline.wait(load, f"loading bucket {index} of {len(self.manifest.buckets)}")
        if self._fellows is not None:
            self._fellows.tell_loaded(index)

    def _check(self, report: ReceiverReport, version: int) -> None:
        want = (version, len(self.manifest.tensors), self.manifest.nbytes)
        if (report.version, report.tensors, report.nbytes) != want:
            raise WeightSyncError(
                f"{report.receiver} reports version {report.version}, {report.tensors} tensors, {report.nbytes} bytes; "
                f"sent were version {want[0]}, {want[1]} tensors, {want[2]} bytes"
            )

    def _abort(self, reason: str) -> None:
        self._transport.abort()
        if self._fellows is not None:
            self._fellows.tell_aborted(reason)
        for future in [target.weights_abort(reason) for target in self._targets]:
            try:
                future.result(timeout=ABORT_TIMEOUT_S)
            except (FutureTimeoutError, RuntimeError, OSError) as error:
                # The first failure is the one to report. The receiver counts as unusable from here on.
                logger.warning("weight sync: a receiver did not answer the abort: %s: %s", type(error).__name__, error)


class Filler:
    """Writes the trainer's tensors into one bucket after another.

    Args:
        source: (name, full tensor) in the manifest's order.
    """

    def __init__(self, source: Iterator[tuple[str, Tensor]]) -> None:
        self._source = source
        self._cut: Tensor | None = None  # a tensor of which pieces are still to be written

    def fill(self, data: Tensor, bucket: Bucket) -> None:
        """Copy the bucket's tensors to their places in `data` `(bucket.nbytes,) uint8`, in the manifest's dtypes.

        Raises:
            WeightSyncError: The tensors end early, or the next one is not the manifest's.
        """
        for piece in bucket.pieces:
            if piece.is_whole:
                piece.view(data).copy_(self._next(piece.tensor))
                continue
            if piece.start == 0:
                self._cut = self._next(piece.tensor).reshape(-1)
            if self._cut is None:
                raise WeightSyncError(f"a middle piece of {piece.name!r} came first")
            piece.view(data).copy_(self._cut[piece.elements])
            if piece.is_last:
                self._cut = None

    def finish(self) -> None:
        """Check that nothing is left.

        Raises:
            WeightSyncError: There is another tensor.
        """
        surplus = next(self._source, None)
        if surplus is not None:
            raise WeightSyncError(f"the trainer sent {surplus[0]!r}, which is not in the manifest")

    def _next(self, spec: TensorSpec) -> Tensor:
        item = next(self._source, None)
        if item is None:
            raise WeightSyncError(f"the trainer's weights end before {spec.name!r}")
        name, tensor = item
        if name != spec.name:
            raise WeightSyncError(f"the trainer sent {name!r} where {spec.name!r} was expected")
        if tuple(tensor.shape) != spec.shape:
            raise WeightSyncError(f"{name!r} has shape {tuple(tensor.shape)}, the manifest says {spec.shape}")
        return tensor
