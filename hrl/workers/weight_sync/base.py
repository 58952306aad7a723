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

from hrl.workers.weight_sync.errors import WeightSyncError
from hrl.workers.weight_sync.manifest import Bucket, Manifest, seal

__all__ = ["Deadline", "ReceiverReport", "SenderTransport", "SyncReport", "SyncTarget", "WeightSync", "WeightSyncError"]

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 10.0
"""How long an abort waits for a receiver that may itself be the reason of the abort."""


@dataclass(frozen=True)
class ReceiverReport:
    """What one receiving process wrote.

    Attributes:
        receiver: who, e.g. ``"vllm worker 0 (pid 71)"``.
        version: that it now serves.
        tensors: received, verified against their checksums and written.
        nbytes: of these tensors.
        read_back: how many of them were also read back out of the model, bit for bit.
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
        version: policy version that is now served.
        tensors: number of tensors sent.
        nbytes: their bytes.
        seconds: from begin to commit.
        receivers: reports of the receivers this sender talks to itself; empty for a broadcast.
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
            WeightSyncError: none are.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise self._passed(doing)
        return left

    def wait(self, future: Future[Any], doing: str) -> Any:
        """The future's result, by the deadline."""
        try:
            return future.result(timeout=self.remaining_s(doing))
        except FutureTimeoutError:
            raise self._passed(doing) from None

    def _passed(self, doing: str) -> WeightSyncError:
        return WeightSyncError(f"{self.what} took longer than {self.seconds:g} s (weight_sync.timeout_s), at: {doing}")


class SenderTransport(ABC):
    """Buffers on the sender's side, and the handle by which receivers find them."""

    depth: int
    """Buckets that can be under way at once; a bucket's buffer is reused `depth` buckets later."""
    deadline: Deadline
    """Of the sync under way: what waits in `buffer` and `flush` waits no longer."""

    @abstractmethod
    def handle(self) -> dict[str, Any]:
        """How a receiver attaches: integers, strings and bytes only."""

    @abstractmethod
    def buffer(self, index: int) -> Tensor:
        """Bytes to write bucket `index` into, ``(bucket.nbytes,) uint8``. Waits until the buffer is free."""

    @abstractmethod
    def publish(self, index: int) -> None:
        """Makes the written bucket visible to receivers."""

    def flush(self) -> None:
        """Returns when everything published has left this process."""

    def abort(self) -> None:
        """Frees receivers that wait for a bucket which will not come."""

    @abstractmethod
    def close(self) -> None:
        """Gives the buffers back. Harmless when repeated."""


class SyncTarget(Protocol):
    """A receiver that the sender talks to itself: the rollout engine of the same process."""

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        """Announces a sync; refuses a manifest that is not the model's."""

    def weights_load(self, index: int) -> Future[None]:
        """Takes a published bucket."""

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        """Serves the new version from here on."""

    def weights_abort(self, reason: str) -> Future[None]:
        """Forgets the sync: serves the old version, or nothing until the next good sync."""


class WeightSync:
    """Sends the trainer's weights, again and again, over the same buffers.

    Args:
        manifest: what every sync sends.
        transport: where it is written.
        targets: receivers to be told about each bucket. Empty for a broadcast, whose receivers run the receiving side
            of the protocol by themselves.
        timeout_s: a sync that takes longer is aborted.
    """

    def __init__(
        self, manifest: Manifest, transport: SenderTransport, targets: Sequence[SyncTarget] = (), *, timeout_s: float
    ) -> None:
        self.manifest = manifest
        self._transport = transport
        self._targets = tuple(targets)
        self._timeout_s = timeout_s

    def push(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> SyncReport:
        """One sync.

        Args:
            version: policy version of the weights.
            weights: (name, full tensor) in the manifest's order. Always run to its end, also when the sync fails,
                because every item can be a collective of the training ranks.

        Raises:
            WeightSyncError: the weights are not the manifest's, a receiver refused or reported something else, or the
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
        return SyncReport(
            version, len(self.manifest.tensors), self.manifest.nbytes, time.monotonic() - started, tuple(reports)
        )

    def close(self) -> None:
        """Gives the transport's buffers back."""
        self._transport.close()

    def _send(self, version: int, source: Iterator[tuple[str, Tensor]], deadline: Deadline) -> list[ReceiverReport]:
        handle = self._transport.handle()
        for begun in [target.weights_begin(self.manifest, handle, version) for target in self._targets]:
            deadline.wait(begun, "begin")
        loads: list[list[Future[None]]] = []
        for index, bucket in enumerate(self.manifest.buckets):
            if index >= self._transport.depth:
                self._wait_loaded(loads, index - self._transport.depth, deadline)
            data = self._transport.buffer(index)
            fill(data, bucket, source)
            seal(data, bucket, index, version)
            deadline.remaining_s(f"bucket {index} of {len(self.manifest.buckets)}")
            self._transport.publish(index)
            loads.append([target.weights_load(index) for target in self._targets])
        surplus = next(source, None)
        if surplus is not None:
            raise WeightSyncError(f"the trainer sent {surplus[0]!r}, which is not in the manifest")
        for index in range(len(loads)):
            self._wait_loaded(loads, index, deadline)
        self._transport.flush()
        commits = [target.weights_commit() for target in self._targets]
        reports = [report for commit in commits for report in deadline.wait(commit, "commit")]
        for report in reports:
            self._check(report, version)
        return reports

    def _wait_loaded(self, loads: list[list[Future[None]]], index: int, deadline: Deadline) -> None:
        for load in loads[index]:
            deadline.wait(load, f"loading bucket {index} of {len(self.manifest.buckets)}")

    def _check(self, report: ReceiverReport, version: int) -> None:
        want = (version, len(self.manifest.tensors), self.manifest.nbytes)
        if (report.version, report.tensors, report.nbytes) != want:
            raise WeightSyncError(
                f"{report.receiver} reports version {report.version}, {report.tensors} tensors, {report.nbytes} bytes; "
                f"sent were version {want[0]}, {want[1]} tensors, {want[2]} bytes"
            )

    def _abort(self, reason: str) -> None:
        self._transport.abort()
        for future in [target.weights_abort(reason) for target in self._targets]:
            try:
                future.result(timeout=ABORT_TIMEOUT_S)
            except (FutureTimeoutError, RuntimeError, OSError) as error:
                # The first failure is the one to report; the receiver counts as unusable from here on.
                logger.warning("weight sync: a receiver did not answer the abort: %s: %s", type(error).__name__, error)


def fill(data: Tensor, bucket: Bucket, source: Iterator[tuple[str, Tensor]]) -> None:
    """Copies the bucket's tensors from `source` to their places in `data`, cast to their wire dtype.

    Raises:
        WeightSyncError: `source` ends early, or its next tensor is another one.
    """
    for spec in bucket.tensors:
        item = next(source, None)
        if item is None:
            raise WeightSyncError(f"the trainer's weights end before {spec.name!r}")
        name, tensor = item
        if name != spec.name:
            raise WeightSyncError(f"the trainer sent {name!r} where {spec.name!r} was expected")
        if tuple(tensor.shape) != spec.shape:
            raise WeightSyncError(f"{name!r} has shape {tuple(tensor.shape)}, the manifest says {spec.shape}")
        spec.view(data).copy_(tensor)
