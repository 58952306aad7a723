"""The trainer ranks of one tensor-parallel engine, which send to it together, each from its own GPU.

The rank that drives the engine is the lead; only it talks to the engine. The others tell the lead where their buffers
are and which bucket they have written, and hear from it which one was loaded. Every rank runs a `WeightSync`: the
lead's has the others as its `FellowSenders`, and another rank's has the lead as its `SyncTarget`.

They talk over Unix sockets of this machine, in lines of JSON: the end of a process is noticed at once, no rank waits in
a collective for one that has failed, and nothing is pickled. Every line carries the number of its sync, so that lines
left over from a failed sync are not taken for answers in the next.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from hrl.workers.weight_sync.cuda_ipc import CudaIpcSender, merge_handles
from hrl.workers.weight_sync.sender import SyncReport, WeightSync
from hrl.workers.weight_sync.wire import Deadline, Manifest, ReceiverReport, WeightSyncError

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Link:
    """A connection between the lead and another rank.

    Args:
        connection: The socket.
        other: Who is at the other end, for messages.
    """

    def __init__(self, connection: socket.socket, other: str) -> None:
        self._connection = connection
        self._received = bytearray()
        self.other = other

    def send(self, sync: int, **content: Any) -> None:
        """Send one line.

        Raises:
            WeightSyncError: The other process is gone.
        """
        line = json.dumps({"sync": sync, **content}).encode() + b"\n"
        try:
            self._connection.settimeout(_SEND_TIMEOUT_S)
            self._connection.sendall(line)
        except OSError as error:
            raise WeightSyncError(f"{self.other} is gone: {error}") from error

    def receive(self, sync: int, timeout_s: float) -> dict[str, Any]:
        """Return the next line of this sync, skipping lines of earlier ones.

        Raises:
            WeightSyncError: The other process is gone, has failed, or is in a later sync.
            TimeoutError: No line came in time.
        """
        end = time.monotonic() + timeout_s
        while True:
            content = self._line(end)
            if content["sync"] > sync:
                raise WeightSyncError(f"{self.other} is in its sync {content['sync']}, this rank in its {sync}")
            if content["sync"] == sync:
                if "aborted" in content:
                    raise WeightSyncError(f"{self.other} aborted the weight sync: {content['aborted']}")
                return content

    def close(self) -> None:
        """Hang up. Harmless when repeated."""
        self._connection.close()

    def _line(self, end: float) -> dict[str, Any]:
        while b"\n" not in self._received:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                self._connection.settimeout(left)
                chunk = self._connection.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError as error:
                raise WeightSyncError(f"{self.other} is gone: {error}") from error
            if not chunk:
                raise WeightSyncError(f"{self.other} is gone")
            self._received += chunk
        line, _, rest = self._received.partition(b"\n")
        self._received = bytearray(rest)
        content: dict[str, Any] = json.loads(line)
        return content


class Lead:
    """The lead's end: the engine's other ranks connect to it; to the lead's sync it is their `FellowSenders`.

    Args:
        others: The ranks that send along.
    """

    def __init__(self, others: Sequence[int]) -> None:
        self._others = tuple(others)
        self._links: dict[int, Link] = {}
        self._sync = 0
        self._told = 0
        # An abstract name: no file, and gone with the process. `_welcome` turns other users' processes away.
        self.address = f"hrl-weights-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(len(self._others))

    def begin(self, manifest: Manifest, handle: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """See `FellowSenders`."""
        self._sync += 1
        self._told = 0
        self._await_others(deadline)
        handles = [handle]
        for rank, link in sorted(self._links.items()):
            offered = self._next(link, deadline, "its buffers")
            if offered["manifest"] != manifest.fingerprint:
                raise WeightSyncError(f"rank {rank} would send other tensors than the rank that drives its engine")
            handles.append(offered["handle"])
        return merge_handles(handles)

    def wait_published(self, index: int, deadline: Deadline) -> None:
        """See `FellowSenders`."""
        for link in self._links.values():
            published = self._next(link, deadline, f"bucket {index}")["published"]
            if published != index:
                raise WeightSyncError(f"{link.other} has written bucket {published} where {index} was expected")

    def tell_loaded(self, index: int) -> None:
        """See `FellowSenders`."""
        if index >= self._told:
            self._told = index + 1
            for link in self._links.values():
                link.send(self._sync, loaded=index)

    def tell_committed(self) -> None:
        """See `FellowSenders`."""
        for link in self._links.values():
            link.send(self._sync, committed=True)

    def tell_aborted(self, reason: str) -> None:
        """See `FellowSenders`."""
        for link in self._links.values():
            try:
                link.send(self._sync, aborted=reason)
            except WeightSyncError as error:
                logger.warning("weight sync: %s", error)

    def refuse(self, reason: str, timeout_s: float) -> None:
        """End a sync, for the ranks that have begun it, which this rank cannot begin."""
        self._sync += 1
        try:
            self._await_others(Deadline(timeout_s, "refusing a weight sync"))
        except WeightSyncError as error:
            logger.warning("weight sync: %s", error)
        self.tell_aborted(reason)

    def close(self) -> None:
        """Hang up. Harmless when repeated."""
        self._listener.close()
        for link in self._links.values():
            link.close()

    def _await_others(self, deadline: Deadline) -> None:
        while missing := [rank for rank in self._others if rank not in self._links]:
            doing = f"rank {', '.join(map(str, missing))} of the engine has not come"
            self._listener.settimeout(deadline.remaining_s(doing))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue  # and `remaining_s` raises
            self._welcome(connection, deadline, doing)

    def _welcome(self, connection: socket.socket, deadline: Deadline, doing: str) -> None:
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.getuid():
            logger.warning("weight sync: turned a process of user %d away", uid)
            connection.close()
            return
        link = Link(connection, "a rank of the engine")
        try:
            rank = link.receive(0, deadline.remaining_s(doing))["rank"]
        except TimeoutError:
            raise deadline.passed(doing) from None
        link.other = f"rank {rank} of the engine"
        self._links[rank] = link

    def _next(self, link: Link, deadline: Deadline, what: str) -> dict[str, Any]:
        doing = f"waiting for {what} of {link.other}"
        try:
            return link.receive(self._sync, deadline.remaining_s(doing))
        except TimeoutError:
            raise deadline.passed(doing) from None


class FellowRank:
    """The end of a rank that sends to the engine which its lead drives; to its own sync the lead is a `SyncTarget`.

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
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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
            sender = CudaIpcSender(manifest, self._device)
            self._sync = WeightSync(manifest, sender, [self], timeout_s=self._timeout_s)
        return self._sync.push(version, weights)

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        """Offer this rank's buffers. The lead begins when it has those of all."""
        self._number += 1
        self._link.send(self._number, manifest=manifest.fingerprint, handle=handle)
        return _done(None)

    def weights_load(self, index: int) -> Future[None]:
        """Say that bucket `index` is written; done when the engine has loaded it."""
        self._link.send(self._number, published=index)
        return _Answer(self._link, self._number, "loaded", index, None)

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        """Done when the engine serves the new version. The reports are the lead's."""
        return _Answer(self._link, self._number, "committed", True, [])

    def weights_abort(self, reason: str) -> Future[None]:
        """Tell the lead that this rank has failed."""
        try:
            self._link.send(self._number, aborted=reason)
        except WeightSyncError as error:
            return _done(error)
        return _done(None)

    def close(self) -> None:
        """Hang up and give the buffers back. Harmless when repeated."""
        self._link.close()
        if self._sync is not None:
            self._sync.close()


def _done(error: WeightSyncError | None) -> Future[None]:
    """Return a future that is done, or has failed with `error`."""
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


class _Answer(Future[Any]):
    """A line that the lead will send. It is read when it is waited for: answers come in the order of the questions."""

    def __init__(self, link: Link, sync: int, key: str, value: Any, outcome: Any) -> None:
        super().__init__()
        self._link, self._number = link, sync
        self._expected = (key, value)
        self._outcome = outcome

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            key, value = self._expected
            answer = self._link.receive(self._number, _SEND_TIMEOUT_S if timeout is None else timeout)
            if answer.get(key) != value:
                raise WeightSyncError(f"{self._link.other} answered {answer} where {key}={value} was expected")
            self.set_result(self._outcome)
        return super().result(0)
