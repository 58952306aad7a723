"""The trainer ranks of one tensor-parallel engine, which send to it together, each from its own GPU.

The rank that drives the engine is the lead; only it talks to the engine. The others tell the lead where their buffers
are and which bucket they have written, and are told which bucket was loaded. Every rank runs a `WeightSync`. On the
lead its target is the `Lead`, which waits until all ranks are ready and then asks the engine; on every other rank it is
the `FellowRank`, which talks to the lead.

Messages are JSON, over Unix sockets of this machine: the end of a process is noticed at once, no rank waits in a
collective for one that has failed, and nothing is pickled. Every message carries the number of its sync, so that one
left over from a failed sync is not taken for an answer in the next.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from hrl.workers.weight_sync.cuda_ipc import CudaIpcSender
from hrl.workers.weight_sync.sender import SyncReport, SyncTarget, WeightSync
from hrl.workers.weight_sync.wire import Deadline, Manifest, ReceiverReport, WeightSyncError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SEND_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_LONGEST_MESSAGE_BYTES = 1 << 16
_LONGEST_REASON = 4096  # characters, of up to 12 bytes each in JSON


class Link:
    """A connection between the lead and another rank.

    Args:
        connection: A socket that keeps messages apart (`SOCK_SEQPACKET`).
        other: Who is at the other end, for messages.
    """

    def __init__(self, connection: socket.socket, other: str) -> None:
        self._connection = connection
        self.other = other

    def send(self, sync: int, **content: Any) -> None:
        """Send one message.

        Raises:
            WeightSyncError: The other process is gone.
        """
        try:
            self._connection.settimeout(_SEND_TIMEOUT_S)
            self._connection.sendall(json.dumps({"sync": sync, **content}).encode())
        except OSError as error:
            raise WeightSyncError(f"{self.other} is gone: {error}") from error

    def abort(self, sync: int, reason: str) -> None:
        """Say that a sync has failed here and why; a reason that does not fit into a message is cut.

        Raises:
            WeightSyncError: The other process is gone.
        """
        self.send(sync, aborted=reason[:_LONGEST_REASON])

    def receive(self, sync: int, timeout_s: float) -> dict[str, Any]:
        """Return the next message of this sync, skipping those of earlier ones.

        Raises:
            WeightSyncError: The other process is gone, has failed, or is in a later sync.
            TimeoutError: No message came in time.
        """
        end = time.monotonic() + timeout_s
        while True:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            try:
                self._connection.settimeout(left_s)
                message = self._connection.recv(_LONGEST_MESSAGE_BYTES)
            except TimeoutError:
                raise
            except OSError as error:
                raise WeightSyncError(f"{self.other} is gone: {error}") from error
            if not message:
                raise WeightSyncError(f"{self.other} is gone")
            content: dict[str, Any] = json.loads(message)
            if content["sync"] > sync:
                raise WeightSyncError(f"{self.other} is in its sync {content['sync']}, this rank in its {sync}")
            if content["sync"] == sync:
                if "aborted" in content:
                    raise WeightSyncError(f"{self.other} aborted the weight sync: {content['aborted']}")
                return content

    def expect(self, sync: int, timeout_s: float, **content: Any) -> None:
        """Receive the next message of this sync, which must be `content`.

        Raises:
            WeightSyncError: It is another; or as `receive`.
            TimeoutError: As `receive`.
        """
        answer = self.receive(sync, timeout_s)
        if answer != {"sync": sync, **content}:
            raise WeightSyncError(f"{self.other} answered {answer} where {content} was expected")

    def close(self) -> None:
        """Hang up. Harmless when repeated."""
        self._connection.close()


class Lead:
    """The lead's end: the engine's other ranks connect to it; its own `WeightSync` uses it in place of the engine.

    Args:
        others: The ranks that send along.
        timeout_s: Of a sync, in seconds.

    Attributes:
        engine: The engine that this rank drives; its host sets it.
        address: Where the other ranks find it.
    """

    engine: SyncTarget

    def __init__(self, others: Sequence[int], timeout_s: float) -> None:
        self._others = tuple(others)
        self._timeout_s = timeout_s
        self._links: dict[int, Link] = {}
        self._number = 0
        self._deadline = Deadline(timeout_s, "")
        # An abstract name: no file, and gone with the process. `_welcome` turns other users' processes away.
        self.address = f"hrl-weights-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(len(self._others))

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        """Wait for the buffers of all ranks, then announce them to the engine.

        Raises:
            WeightSyncError: A rank is gone, failed, came too late or sends other weights; names it.
        """
        self._number += 1
        self._await_others(Deadline(self._timeout_s, f"weight sync to version {version}"))
        senders = list(handle["senders"])
        for rank, link in sorted(self._links.items()):
            offered = self._next(link, "its buffers")
            if offered["manifest"] != manifest.fingerprint:
                raise WeightSyncError(f"rank {rank} would send other tensors than the rank that drives its engine")
            senders += offered["handle"]["senders"]
        return self.engine.weights_begin(manifest, {**handle, "senders": senders}, version)

    def weights_load(self, index: int) -> Future[None]:
        """Have the engine load bucket `index` when all ranks have written it, and tell them that it did.

        Raises:
            WeightSyncError: As `weights_begin`.
        """
        for link in self._links.values():
            published = self._next(link, f"bucket {index}")["published"]
            if published != index:
                raise WeightSyncError(f"{link.other} has written bucket {published} where {index} was expected")
        return self._told(self.engine.weights_load(index), loaded=index)

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        """Have the engine serve the new version, and tell the other ranks that it does."""
        return self._told(self.engine.weights_commit(), committed=True)

    def weights_abort(self, reason: str) -> Future[None]:
        """Tell those ranks that still live, and the engine, that the sync has failed."""
        self._tell_aborted(reason)
        return self.engine.weights_abort(reason)

    def refuse(self, reason: str, timeout_s: float) -> None:
        """End a sync that other ranks have begun and this rank cannot begin."""
        self._number += 1
        try:
            self._await_others(Deadline(timeout_s, "refusing a weight sync"))
        except WeightSyncError as error:
            logger.warning("weight sync: %s", error)
        self._tell_aborted(reason)

    def close(self) -> None:
        """Hang up. Harmless when repeated."""
        self._listener.close()
        for link in self._links.values():
            link.close()

    def _told(self, done: Future[T], **content: Any) -> Future[T]:
        """Return a future of the same result; whoever waits for it also tells the other ranks."""

        def wait(timeout_s: float) -> T:
            result = done.result(timeout_s)
            for link in self._links.values():
                link.send(self._number, **content)
            return result

        return _Later(wait)

    def _tell_aborted(self, reason: str) -> None:
        for link in self._links.values():
            try:
                link.abort(self._number, reason)
            except WeightSyncError as error:
                logger.warning("weight sync: %s", error)

    def _await_others(self, deadline: Deadline) -> None:
        self._deadline = deadline
        while missing := [rank for rank in self._others if rank not in self._links]:
            doing = f"rank {', '.join(map(str, missing))} of the engine has not come"
            self._listener.settimeout(deadline.remaining_s(doing))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue  # and `remaining_s` raises
            self._welcome(connection, doing)

    def _welcome(self, connection: socket.socket, doing: str) -> None:
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.getuid():
            logger.warning("weight sync: turned a process of user %d away", uid)
            connection.close()
            return
        link = Link(connection, "a rank of the engine")
        rank = self._receive(link, 0, doing)["rank"]
        link.other = f"rank {rank} of the engine"
        self._links[rank] = link

    def _next(self, link: Link, what: str) -> dict[str, Any]:
        return self._receive(link, self._number, f"waiting for {what} of {link.other}")

    def _receive(self, link: Link, sync: int, doing: str) -> dict[str, Any]:
        try:
            return link.receive(sync, self._deadline.remaining_s(doing))
        except TimeoutError:
            raise self._deadline.passed(doing) from None


class FellowRank:
    """The end of every other rank, whose sync talks to the lead instead of the engine.

    Args:
        address: Of the `Lead`.
        rank: Of this process.
        lead_rank: Of the lead, for messages.
        device: Of this rank.
        bucket_bytes: The lead's.
        timeout_s: The lead's, in seconds.
    """

    def __init__(
        self, address: str, rank: int, lead_rank: int, device: torch.device, *, bucket_bytes: int, timeout_s: float
    ) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_SEND_TIMEOUT_S)
        lead = f"rank {lead_rank}, which drives the engine,"
        try:
            connection.connect(f"\0{address}")
        except OSError as error:
            raise WeightSyncError(f"{lead} is gone: {error}") from error
        self._link = Link(connection, lead)
        self._link.send(0, rank=rank)
        self._number = 0
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._sync: WeightSync | None = None

    def push_weights(
        self,
        version: int,
        specs: Iterable[tuple[str, torch.dtype, Sequence[int]]],
        weights: Iterable[tuple[str, Tensor]],
        kept: Sequence[str] = (),
    ) -> SyncReport:
        """Send this rank's part of a sync; see `RolloutHost.push_weights`.

        Raises:
            WeightSyncError: See `WeightSync.push`; also the lead's error, if the sync failed there.
        """
        if self._sync is None:
            manifest = Manifest.build(specs, self._bucket_bytes, kept)
            self._sync = WeightSync(manifest, CudaIpcSender(manifest, self._device), self, timeout_s=self._timeout_s)
        return self._sync.push(version, weights)

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        """Offer this rank's buffers. The lead begins when it has those of all."""
        self._number += 1
        self._link.send(self._number, manifest=manifest.fingerprint, handle=handle)
        return _Later(lambda _: None)

    def weights_load(self, index: int) -> Future[None]:
        """Say that bucket `index` is written; the future is done when the engine has loaded it."""
        self._link.send(self._number, published=index)
        return _Later(partial(self._link.expect, self._number, loaded=index))

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        """Return a future that is done when the engine serves the new version; only the lead gets its reports."""

        def wait(timeout_s: float) -> list[ReceiverReport]:
            self._link.expect(self._number, timeout_s, committed=True)
            return []

        return _Later(wait)

    def weights_abort(self, reason: str) -> Future[None]:
        """Tell the lead that this rank has failed."""
        return _Later(lambda _: self._link.abort(self._number, reason))

    def close(self) -> None:
        """Hang up and give the buffers back. Harmless when repeated."""
        self._link.close()
        if self._sync is not None:
            self._sync.close()


class _Later(Future[T]):
    """A future whose result is `wait(timeout_s)`, called when somebody asks for it."""

    # No thread reads the answers: they come in the order of the questions.

    def __init__(self, wait: Callable[[float], T]) -> None:
        super().__init__()
        self._wait = wait

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            self.set_result(self._wait(_SEND_TIMEOUT_S if timeout is None else timeout))
        return super().result(0)
