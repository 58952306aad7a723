"""The sending half of a weight sync."""

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

from hrl.workers.weight_sync.manifest import Bucket, Manifest, TensorSpec, WeightSyncError, seal

__all__ = ["Deadline", "ReceiverReport", "SenderTransport", "SyncReport", "SyncTarget", "WeightSync", "WeightSyncError"]

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 10.0
"""How long an abort waits for a receiver that may itself be the reason of the abort."""


@dataclass(frozen=True)
class ReceiverReport:
    """What one receiving process wrote.

    Attributes:
        receiver: Who, e.g. `"vllm worker 0 (pid 71)"`.
        version: That it now serves.
        tensors: Received, verified against their checksums and written.
        nbytes: Of these tensors.
        read_back: How many of them were also read back out of the model, bit for bit.
    """

    receiver: str
    version: int
    tensors: int
    nbytes: int
    read_back: int


@dataclass(frozen=True)
class SyncReport:
    """A finished sync, from the sender's side.

    Attributes:
        version: Policy version that is now served.
        tensors: Number of tensors sent.
        nbytes: Their bytes.
        seconds: From begin to commit.
        receivers: Reports of the receivers this sender talks to itself; empty for a broadcast.
    """

    version: int
    tensors: int
    nbytes: int
    seconds: float
    receivers: tuple[ReceiverReport, ...]


class Deadline:
    """A point in time and what has to be done by then."""

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = seconds
        self.what = what
        self._end = time.monotonic() + seconds

    def remaining_s(self, doing: str) -> float:
        """Seconds left.

        Raises:
            WeightSyncError: None are.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.passed(doing)
        return left

    def wait(self, future: Future[Any], doing: str) -> Any:
        """Return the future's result, by the deadline."""
        try:
            return future.result(timeout=self.remaining_s(doing))
        except FutureTimeoutError:
            raise self.passed(doing) from None

    def passed(self, doing: str) -> WeightSyncError:
        """Return the error for what was not done by then."""
        return WeightSyncError(f"{self.what} took longer than {self.seconds:g} s (weight_sync.timeout_s), at: {doing}")


class SenderTransport(ABC):
    """Buffers on the sender's side, and the handle by which receivers find them."""

    depth: int
    """Buckets that can be under way at once; a bucket's buffer is reused `depth` buckets later."""
    deadline: Deadline
    """Of the sync under way: what waits in `buffer` and `flush` waits no longer."""

    @abstractmethod
    def handle(self) -> dict[str, Any]:
        """Return how a receiver attaches to the sync that begins: integers and strings, in lists and dictionaries."""

    @abstractmethod
    def buffer(self, index: int) -> Tensor:
        """Bytes to write bucket `index` into, `(bucket.nbytes,) uint8`. Waits until the buffer is free."""

    @abstractmethod
    def publish(self, index: int) -> None:
        """Make the written bucket visible to receivers."""

    def flush(self) -> None:
        """Return when everything published has left this process."""

    def abort(self) -> None:
        """Free receivers that wait for a bucket which will not come."""

    def release(self) -> None:
        """Give back the memory that only a sync needs; called when one has ended, well or not."""

    @abstractmethod
    def close(self) -> None:
        """Give the buffers back. Harmless when repeated."""


class SyncTarget(Protocol):
    """A receiver that the sender talks to itself: the rollout engine of the same process."""

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        """Announces a sync; refuses a manifest that is not the model's."""

    def weights_load(self, index: int) -> Future[None]:
        """Take a published bucket."""

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        """Serve the new version from here on."""

    def weights_abort(self, reason: str) -> Future[None]:
        """Forgets the sync: serves the old version, or nothing until the next good sync."""


class FellowSenders(Protocol):
    """Other processes that send the same weights to the same receivers, each from memory of its own.

    The sync here tells the receivers, so it waits for the others' buckets and passes on what the receivers answer.
    """

    def begin(self, manifest: Manifest, handle: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """One handle of all senders, made of this one's and the others'.

        Raises:
            WeightSyncError: Another one is gone, failed, came too late or sends other weights; names it.
        """

    def wait_published(self, index: int, deadline: Deadline) -> None:
        """Return when every other one has written bucket `index`; raises as `begin`."""

    def tell_loaded(self, index: int) -> None:
        """Bucket `index` was loaded: its buffer is free. Harmless when repeated."""

    def tell_committed(self) -> None:
        """The receivers serve the new version."""

    def tell_aborted(self, reason: str) -> None:
        """The sync has failed. Reaches all that still live, and raises nothing."""


class WeightSync:
    """Sends the trainer's weights, again and again, over the same transport.

    Args:
        manifest: What every sync sends.
        transport: Where it is written.
        targets: Receivers to be told about each bucket. Empty for a broadcast, whose receivers run the receiving side
            of the protocol by themselves.
        timeout_s: A sync that takes longer is aborted.
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
        """One sync.

        Args:
            version: Policy version of the weights.
            weights: (name, full tensor) in the manifest's order. Always run to its end, also when the sync fails,
                because every item can be a collective of the training ranks.

        Raises:
            WeightSyncError: The weights are not the manifest's, a receiver refused or reported something else, or the
                deadline passed. The receivers were told to abort.
        """
        started = time.monotonic()
        deadline = Deadline(self._timeout_s, f"weight sync to version {version}")
        self._transport.deadline = deadline
        source = iter(weights)
        try:
            reports = self._send(version, source, deadline)
        except BaseException as error:
            self._abort(f"{type(error).__name__}: {error}")
            if isinstance(error, Exception):  # on Ctrl-C the other ranks are stopping too
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
                # The first failure is the one to report; the receiver counts as unusable from here on.
                logger.warning("weight sync: a receiver did not answer the abort: %s: %s", type(error).__name__, error)


class Filler:
    """Writes the trainer's tensors, as they come, into bucket after bucket.

    Args:
        source: (name, full tensor) in the manifest's order.
    """

    def __init__(self, source: Iterator[tuple[str, Tensor]]) -> None:
        self._source = source
        self._cut: Tensor | None = None

    def fill(self, data: Tensor, bucket: Bucket) -> None:
        """Copy the bucket's tensors to their places in `data` `(bucket.nbytes,) uint8`, cast to their wire dtype.

        A tensor that is cut is held until its last piece was written.

        Raises:
            WeightSyncError: The tensors end early, or the next one is another one.
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
            WeightSyncError: There is a further tensor.
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
