"""The trainer ranks of one tensor-parallel engine, which send to it together, each from its own GPU.

The rank that drives the engine is the lead: it alone talks to the engine. The others tell the lead where their buffers
are and which bucket they have written, and hear from it which one was loaded. So each of them runs the lead's own
`WeightSync`: for the lead, the others are `FellowSenders`; for another rank, the lead is its `SyncTarget`.

They talk over Unix sockets of this machine, in lines of JSON: the end of a process is noticed at once, no rank waits in
a collective for one that has failed, and nothing is pickled. Every line carries the number of its sync, so that what
is left of a failed one is not taken for an answer in the next.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from hrl.workers.weight_sync.base import Deadline, ReceiverReport, SyncReport, WeightSync, WeightSyncError
from hrl.workers.weight_sync.cuda_ipc import CudaIpcSender
from hrl.workers.weight_sync.manifest import Manifest

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

Merge = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]


class Link:
    """A connection between the lead and another rank.

    Args:
        connection: The socket.
        other: Who is at its other end, for errors.
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
        """Return the next line of this sync; older ones are left over from failed syncs.

        Raises:
            WeightSyncError: The other process is gone, has failed, or is in a later sync.
            TimeoutError: There was none in time.
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
        """Hangs up. Harmless when repeated."""
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
    """The lead's end: where the engine's other ranks come to, and their `FellowSenders`.

    Args:
        others: The ranks that send along.
        merge: Makes one handle of those of all senders, the lead's first.
    """

    def __init__(self, others: Sequence[int], merge: Merge) -> None:
        self._others = tuple(others)
        self._merge = merge
        self._links: dict[int, Link] = {}
        self._sync = 0
        self._told = 0
        # An abstract name: no file, and gone with the process. Processes of other users are turned away by `_accept`.
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
        return self._merge(handles)

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
        """End a sync that this rank cannot even begin, for the ranks that have begun it."""
        self._sync += 1
        try:
            self._await_others(Deadline(timeout_s, "refusing a weight sync"))
        except WeightSyncError as error:
            logger.warning("weight sync: %s", error)
        self.tell_aborted(reason)

    def close(self) -> None:
        """Hangs up. Harmless when repeated."""
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


class LeadTarget:
    """The lead, as another rank's `WeightSync` sees it: the target that takes its buckets.

    Args:
        address: Of the `Lead`.
        rank: Of this process.
        lead_rank: For errors.
    """

    def __init__(self, address: str, rank: int, lead_rank: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_SEND_TIMEOUT_S)
        lead = f"rank {lead_rank}, which drives the engine,"
        try:
            connection.connect(f"\0{address}")
        except OSError as error:
            raise WeightSyncError(f"{lead} is gone: {error}") from error
        self._link = Link(connection, lead)
        self._link.send(0, rank=rank)
        self._sync = 0

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        """Offers this rank's buffers; the lead begins when it has those of all."""
        self._sync += 1
        self._link.send(self._sync, manifest=manifest.fingerprint, handle=handle)
        begun: Future[None] = Future()
        begun.set_result(None)
        return begun

    def weights_load(self, index: int) -> Future[None]:
        """Say that bucket `index` is written; done when the engine has loaded it."""
        self._link.send(self._sync, published=index)
        return _Answer(self._link, self._sync, "loaded", index, None)

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        """Done when the engine serves the new version. The reports are the lead's."""
        return _Answer(self._link, self._sync, "committed", True, [])

    def weights_abort(self, reason: str) -> Future[None]:
        """Tell the lead that this rank has failed."""
        done: Future[None] = Future()
        try:
            self._link.send(self._sync, aborted=reason)
        except WeightSyncError as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def close(self) -> None:
        """Hangs up. Harmless when repeated."""
        self._link.close()


class _Answer(Future[Any]):
    """A line that the lead will send; read when it is waited for, since answers come in the order of the questions."""

    def __init__(self, link: Link, sync: int, key: str, value: Any, outcome: Any) -> None:
        super().__init__()
        self._read = lambda timeout_s: link.receive(sync, timeout_s)
        self._expected = (key, value)
        self._outcome = outcome
        self._other = link.other

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            key, value = self._expected
            answer = self._read(_SEND_TIMEOUT_S if timeout is None else timeout)
            if answer.get(key) != value:
                raise WeightSyncError(f"{self._other} answered {answer} where {key}={value} was expected")
            self.set_result(self._outcome)
        return super().result(0)


class FellowRank:
    """A rank that sends to the engine that its lead drives.

    Args:
        lead: The way to it.
        device: Of this rank.
        bucket_bytes: As the lead's.
        timeout_s: As the lead's.
    """

    def __init__(self, lead: LeadTarget, device: torch.device, *, bucket_bytes: int, timeout_s: float) -> None:
        self._lead = lead
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
        """This rank's part of a sync; see `RolloutHost.push_weights`.

        Raises:
            WeightSyncError: See `WeightSync.push`; also what befell the lead.
        """
        if self._sync is None:
            manifest = Manifest.build(specs, self._bucket_bytes, kept)
            sender = CudaIpcSender(manifest, self._device)
            self._sync = WeightSync(manifest, sender, [self._lead], timeout_s=self._timeout_s)
        return self._sync.push(version, weights)

    def close(self) -> None:
        """Hangs up and gives the buffers back."""
        self._lead.close()
        if self._sync is not None:
            self._sync.close()
