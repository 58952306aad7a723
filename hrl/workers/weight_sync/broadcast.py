"""Weights by a collective broadcast: from one trainer rank to every process of every engine, wherever they run.

The process group has a TCP store of its own and never becomes torch's default group, so it cannot clash with the
trainer's world or with an engine's tensor-parallel one. Rank 0 is the sender; `gloo` on CPU, `nccl` on GPUs.

All waiting happens here, under the deadline of the sync, so that an error names the missing receivers. They meet at the
store before the group forms, because NCCL would wait for a missing rank forever. The group's own timeout is longer than
any deadline, because NCCL's watchdog ends the whole process when it passes.
"""

from __future__ import annotations

import ipaddress
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hrl.workers.rendezvous import address_towards, connect_store, serve_store
from hrl.workers.weight_sync.sender import SenderTransport
from hrl.workers.weight_sync.wire import Deadline, Manifest, WeightSyncError

KIND = "broadcast"
_DEPTH = 2
_PREFIX = "hrl_weights"
_COMPLETE = "complete"


def group_timeout_s(backend: str, timeout_s: float) -> float:
    """Return the process group's own timeout in seconds, longer than that of a sync, whose error says more."""
    # Gloo's also bounds how long the group takes to form once all have come.
    return 2 * timeout_s + 60.0 if backend == "nccl" else timeout_s + 5.0


class BroadcastSender(SenderTransport):
    """The sending rank. It opens the store at once; the group forms in `connect`, when all receivers have come.

    Args:
        manifest: What will be sent.
        num_receivers: Processes that will join, over all engines (engines × tensor-parallel size).
        device: Of the buffers; decides between gloo and nccl.
        timeout_s: For joining and for every broadcast, in seconds.
        address: Where receivers reach this process.
    """

    depth = _DEPTH

    def __init__(
        self,
        manifest: Manifest,
        num_receivers: int,
        *,
        device: torch.device,
        timeout_s: float,
        address: str = "127.0.0.1",
    ) -> None:
        self._manifest = manifest
        self._receivers = range(1, num_receivers + 1)
        self._device = device
        server = serve_store(address, 0, timeout_s)
        self._store = dist.PrefixStore(_PREFIX, server)
        self._handle = {
            "kind": KIND,
            "backend": "nccl" if device.type == "cuda" else "gloo",
            "address": address,
            "port": server.port,
            "world_size": 1 + num_receivers,
            "first_rank": 1,
            "timeout_s": timeout_s,
        }
        self._group: dist.ProcessGroup | None = None
        self._closed = False
        self._buffers: list[Tensor] = []
        self._works: deque[dist.Work] = deque()
        self._syncs = 0

    def handle(self) -> dict[str, Any]:
        """Return the handle of the engine whose processes begin at rank 1; others need their own `first_rank`."""
        return self._handle

    def connect(self) -> None:
        """Form the group, unless it is there, with every receiver."""
        if self._closed:
            raise WeightSyncError("the weight broadcast was aborted or closed; open a new one")
        if self._group is None:
            missing = _missing(self._store, map(_arrival, self._receivers), self._handle["timeout_s"])
            if missing:
                raise _not_joined(self._handle, 0, f"{self._named(missing)} did not come")
            self._store.set(_COMPLETE, "")
            self._group = _join(self._store, self._handle, 0, self._device)

    def buffer(self, index: int) -> Tensor:
        self.connect()
        if not self._buffers:
            size = self._manifest.largest_bucket_bytes
            self._buffers = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(_DEPTH)]
        if index == 0:
            self._syncs += 1
        while len(self._works) >= _DEPTH:
            self._finish(self._works.popleft())
        return self._buffers[index % _DEPTH][: self._manifest.buckets[index].nbytes]

    def publish(self, index: int) -> None:
        data = self._buffers[index % _DEPTH][: self._manifest.buckets[index].nbytes]
        self._works.append(_broadcast(self._group, data))

    def flush(self) -> None:
        while self._works:
            self._finish(self._works.popleft())
        # Gloo counts as sent what may still lie in the socket of a receiver that has ended: ask for receipts.
        keys = [_receipt(self._syncs, rank) for rank in self._receivers]
        missing = _missing(self._store, keys, self.deadline.remaining_s("the last bucket"))
        if missing:
            raise WeightSyncError(
                f"weight broadcast failed at the sender: {self._named(missing)} did not take every bucket within "
                f"{self.deadline.seconds:g} s"
            )
        for key in keys:
            self._store.delete_key(key)

    def abort(self) -> None:
        """Take the group down, so that receivers waiting in a broadcast get an error now and not at their deadline."""
        self._works.clear()
        self._closed = True
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def release(self) -> None:
        if self._device.type == "cuda":  # host memory stays: touching fresh pages costs more than the copy
            self._buffers = []

    def close(self) -> None:
        self.abort()
        self._buffers = []

    def _finish(self, work: dist.Work) -> None:
        left_s = self.deadline.remaining_s("the broadcast of a bucket")
        _wait(work, left_s, "the sender: a receiver is gone, or does not take its bucket")

    def _named(self, ranks: Sequence[int]) -> str:
        return f"receiver {', '.join(map(str, ranks))} of {len(self._receivers)}"


class BroadcastReader:
    """One receiving process.

    On a CPU every bucket has its own place and the model is written at the commit. On a GPU that would take the memory
    of a second model, so buckets pass through one buffer and are written as they come.
    """

    def __init__(self, manifest: Manifest, handle: Mapping[str, Any], rank_in_engine: int) -> None:
        self._manifest = manifest
        self._timeout_s: float = handle["timeout_s"]
        self.staged = self.stays = handle["backend"] == "gloo"
        self._device = torch.device("cpu") if self.staged else torch.device("cuda", torch.cuda.current_device())
        self._data: Tensor | None = None
        self._rank: int = handle["first_rank"] + rank_in_engine
        self._syncs = 0
        self._who = f"receiver {self._rank} of {handle['world_size'] - 1}"
        self._sender = f"the trainer at {handle['address']}"
        self._deadline = Deadline(self._timeout_s, "")
        self._store = _reach(handle, self._rank)
        self._group = _join(self._store, handle, self._rank, self._device)

    def bucket(self, index: int) -> Tensor:
        """Take part in the broadcast of bucket `index`."""
        if index == 0:
            self._syncs += 1
            self._deadline = Deadline(self._timeout_s, f"weight broadcast at {self._who}")
        if self._data is None:
            size = self._manifest.all_buckets_bytes if self.staged else self._manifest.largest_bucket_bytes
            self._data = torch.zeros(size, dtype=torch.uint8, device=self._device)
        bucket = self._manifest.buckets[index]
        data = bucket.within(self._data) if self.staged else self._data[: bucket.nbytes]
        awaited = f"bucket {index} from {self._sender}"
        try:
            _wait(_broadcast(self._group, data), self._deadline.remaining_s(awaited), f"{self._who}, at {awaited}")
        except WeightSyncError:
            self._group.abort()  # otherwise a kernel that waits for the sender would never end
            raise
        if index == len(self._manifest.buckets) - 1:
            self._store.set(_receipt(self._syncs, self._rank), "")
        return data

    def release(self) -> None:
        """Free the buffer on a GPU. Host memory stays, as the sender's does."""
        if self._device.type == "cuda":
            self._data = None


def _arrival(rank: int) -> str:
    return f"receiver_{rank}"


def _receipt(sync: int, rank: int) -> str:
    return f"sync_{sync}_receiver_{rank}"


def _missing(store: dist.Store, keys: Iterable[str], timeout_s: float) -> list[int]:
    """Return the receivers, counted from 1, whose key is not set in time."""
    keys = list(keys)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return [rank for rank, key in enumerate(keys, 1) if not store.check([key])]
    return []


def _reach(handle: Mapping[str, Any], rank: int) -> dist.Store:
    """Return the sender's store, when the sender and all receivers have come to it."""
    address, port, timeout_s = handle["address"], handle["port"], handle["timeout_s"]
    try:
        store = dist.PrefixStore(_PREFIX, connect_store(address, port, timeout_s))
    except RuntimeError as error:
        raise WeightSyncError(
            f"receiver {rank} could not reach the trainer's store at {address}:{port} within {timeout_s:g} s: {error}"
        ) from error
    store.set(_arrival(rank), "")
    try:
        store.wait([_COMPLETE], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        others = f"another of the {handle['world_size'] - 1} receivers"
        raise _not_joined(handle, rank, f"the sender has gone, or waits for {others}: {error}") from error
    return store


def _not_joined(handle: Mapping[str, Any], rank: int, why: object) -> WeightSyncError:
    joining = f"rank {rank} of {handle['world_size']} could not join the weight broadcast"
    return WeightSyncError(f"{joining} within {handle['timeout_s']:g} s: {why}")


def _join(store: dist.Store, handle: Mapping[str, Any], rank: int, device: torch.device) -> dist.ProcessGroup:
    """Return the group of the sender and all receivers, who have met at the store."""
    timeout = timedelta(seconds=group_timeout_s(handle["backend"], handle["timeout_s"]))
    try:
        if handle["backend"] == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            torch.cuda.set_device(device)
            group = dist.ProcessGroupNCCL(store, rank, handle["world_size"], options)
        else:
            gloo = dist.ProcessGroupGloo._Options()
            gloo._timeout = timeout
            gloo._devices = [_gloo_device(handle["address"])]
            return dist.ProcessGroupGloo(store, rank, handle["world_size"], gloo)
    except RuntimeError as error:
        raise _not_joined(handle, rank, error) from error
    _connect(group, handle, rank, device)
    return group


def _connect(group: dist.ProcessGroup, handle: Mapping[str, Any], rank: int, device: torch.device) -> None:
    """Have NCCL connect the ranks, which it does in the first broadcast."""
    # NCCL has no timeout for that: a rank that has ended since it came, or a network that lets only the store through,
    # would hang it. So a thread does it; the thread of a group that never forms ends with the process.
    failures: list[RuntimeError] = []

    def first_broadcast() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # every thread has its own
            work = _broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device))
            work.wait(timedelta(seconds=handle["timeout_s"]))
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=first_broadcast, name="connecting the weight broadcast", daemon=True)
    thread.start()
    thread.join(handle["timeout_s"])
    if thread.is_alive():
        why = "all ranks have come, but NCCL does not connect them: NCCL_DEBUG=INFO says where it waits, "
        raise _not_joined(handle, rank, f"{why}NCCL_SOCKET_IFNAME names the network that it takes")
    if failures:
        raise _not_joined(handle, rank, failures[0]) from failures[0]


def _gloo_device(address: str) -> Any:
    """Return the interface that GLOO_SOCKET_IFNAME names, or else the one through which the sender is reached."""
    own = address_towards(address)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface and not ipaddress.ip_address(own).is_loopback:
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    return dist.ProcessGroupGloo.create_device(hostname=own)


def _broadcast(group: dist.ProcessGroup | None, data: Tensor) -> dist.Work:
    if group is None:
        raise WeightSyncError("the weight broadcast is closed")
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([data], options)


def _wait(work: dist.Work, timeout_s: float, who: str) -> None:
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise WeightSyncError(f"weight broadcast failed at {who} ({error})") from error
