"""The processes of a tensor-parallel engine and of the trainer ranks that send to it, on GPUs or stand-ins for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from hrl.workers.rollout.scripted import DictWriter, Script
from hrl.workers.weight_sync import cuda_ipc
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.tensor_parallel import FellowRank, Lead
from hrl.workers.weight_sync.wire import Manifest, WeightSyncError
from tests.processes.warm import warm_context
from tests.workers.weight_sync.fake_devices import FakeDevices

SPECS = [(f"layers.{i}.weight", torch.bfloat16, (33, 17)) for i in range(6)] + [("head", torch.bfloat16, (64, 64))]
BUCKET_BYTES = 3072
MANIFEST = Manifest.build(SPECS, BUCKET_BYTES)
TIMEOUT_S = 90.0


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [(name, torch.randn(shape, generator=generator)) for name, _, shape in SPECS]


def use_devices(visible: Sequence[int], current: int, fake: bool) -> None:
    """Has this process see GPUs, stand-ins or real ones, in the given order, and sit on one of them."""
    if fake:
        cuda_ipc.DEVICES = FakeDevices(visible, current)
    else:  # what CUDA_VISIBLE_DEVICES shows was set for it, see `seeing`
        torch.cuda.set_device(current)


def run_engine_worker(rank: int, connection, fake: bool) -> None:
    """One process of the engine. It sees the GPUs in their physical order, and sits on GPU `rank`."""
    use_devices([0, 1], rank, fake)
    writer = DictWriter(Script())
    receiver = WeightReceiver(writer, f"worker {rank}", rank)
    while (command := connection.recv())[0] != "end":
        try:
            connection.send(answer(receiver, writer, command, fake))
        except WeightSyncError as error:
            connection.send(error)


def answer(receiver: WeightReceiver, writer: DictWriter, command: tuple[Any, ...], fake: bool) -> Any:
    """What an engine's process is asked to do, and what came of it."""
    match command:
        case ("begin", manifest, handle, version):
            receiver.begin(Manifest.from_plain(manifest), handle, version)
        case ("load", index):
            receiver.load(index)
            receiver._reader.bucket(index).fill_(0xFF)  # from here on it may be overwritten
        case ("commit",):
            return receiver.commit()
        case ("abort",):
            return receiver.abort()
        case ("check", version):
            right = all(torch.equal(writer.weights[name].cpu(), sent.bfloat16()) for name, sent in weights(version))
            opened = set(cuda_ipc.DEVICES.opened) if fake else {str(writer.weights[SPECS[0][0]].device)}
            return right, opened, receiver._reader._buffers == []
    return True


def run_fellow(address: str, versions: list[int], dies_at: str | None, connection, fake: bool) -> None:
    """Trainer rank 1, on GPU 1. It sees the GPUs the other way round."""
    use_devices([1, 0], 0, fake)
    device = torch.device("cuda", 0)
    rank = FellowRank(address, 1, 0, device, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
    for version in versions:
        rank.push_weights(version, SPECS, dying(weights(version), dies_at))
        held = cuda_ipc.DEVICES.open_bytes if fake else torch.cuda.memory_allocated(device)
        connection.send((version, held))
    rank.close()


def dying(source: list[tuple[str, torch.Tensor]], name: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    for pair in source:
        if pair[0] == name:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair


class EngineTarget:
    """The engine, as its lead sees it: every call goes to all of its processes."""

    def __init__(self, connections) -> None:
        self._connections = connections
        self._pool = ThreadPoolExecutor(1)
        self.aborted: list[str] = []

    def call(self, *command: Any) -> Future[Any]:
        return self._pool.submit(self._ask, *command)

    def _ask(self, *command: Any) -> list[Any]:
        for connection in self._connections:
            connection.send(command)
        answers = [connection.recv() for connection in self._connections]
        for answered in answers:
            if isinstance(answered, WeightSyncError):
                raise answered
        return answers

    def weights_begin(self, manifest, handle, version):
        return self.call("begin", manifest.to_plain(), handle, version)

    def weights_load(self, index):
        return self.call("load", index)

    def weights_commit(self):
        return self.call("commit")

    def weights_abort(self, reason):
        self.aborted.append(reason)
        return self.call("abort")


@contextmanager
def seeing(order: Sequence[int], fake: bool) -> Iterator[None]:
    """Shows processes that are started meanwhile the GPUs in this order."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not fake:
        names = before.split(",") if before else [str(index) for index in range(torch.cuda.device_count())]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in order)
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        elif not fake:
            del os.environ["CUDA_VISIBLE_DEVICES"]


def start_fellow(lead: Lead, versions: list[int], dies_at: str | None = None, *, fake: bool = True):
    """Trainer rank 1 in a process, and where its answers come from."""
    context = warm_context() if fake else multiprocessing.get_context("spawn")  # GPUs are shown by variables
    ours, theirs = context.Pipe()
    fellow = context.Process(target=run_fellow, args=(lead.address, versions, dies_at, theirs, fake), daemon=True)
    with seeing([1, 0], fake):
        fellow.start()
    return fellow, ours


@contextmanager
def engine_of(ranks: int, *, fake: bool = True) -> Iterator[EngineTarget]:
    """An engine of so many processes."""
    context = warm_context() if fake else multiprocessing.get_context("spawn")  # GPUs are shown by variables
    pairs = [context.Pipe() for _ in range(ranks)]
    workers = [
        context.Process(target=run_engine_worker, args=(rank, theirs, fake), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    with seeing(range(ranks), fake):
        for worker in workers:
            worker.start()
    yield EngineTarget([ours for ours, _ in pairs])
    for ours, _ in pairs:
        ours.send(("end",))
    for worker in workers:
        worker.join(10)
        assert worker.exitcode == 0
