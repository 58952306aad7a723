"""Stage ipc: a weight sync into another process, by CUDA IPC handles; on a CPU by shared memory."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from hrl.workers.rollout.scripted import DictWriter, Script
from hrl.workers.weight_sync.cuda_ipc import CudaIpcSender
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.sender import SenderTransport, WeightSync
from hrl.workers.weight_sync.shared_memory import SharedMemorySender
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport
from tests.first_light.report import Findings
from tests.first_light.stages import Setup

TIMEOUT_S = 60.0


def run(setup: Setup, findings: Findings) -> None:
    """Two versions, verified by checksums on the way and read back; then the rate."""
    device = torch.device(setup.device)
    layers, rows, columns, bucket_bytes = (6, 33, 17, 3000) if setup.tiny else (48, 8192, 2048, 256 << 20)
    specs = [(f"layers.{i}.weight", torch.bfloat16, (rows, columns)) for i in range(layers)]
    manifest = Manifest.build(specs, bucket_bytes)
    transport: SenderTransport = (
        CudaIpcSender(manifest, device) if device.type == "cuda" else SharedMemorySender(manifest)
    )
    receiver = Receiver(manifest, setup.device)
    sync = WeightSync(manifest, transport, receiver, timeout_s=TIMEOUT_S)
    try:
        for version in (1, 2, 3):
            started = time.perf_counter()
            report = sync.push(version, weights(manifest, device, version))
            seconds = time.perf_counter() - started
            expected = [float(tensor.float().sum()) for _, tensor in weights(manifest, device, version)]
            apart = max(abs(a - b) for a, b in zip(receiver.sums(), expected, strict=True))
            read_back = report.receivers[0].read_back
            findings.add(
                f"version {version}: tensors read back bit for bit",
                f"{read_back} of {len(specs)}",
                "all",
                read_back == len(specs),
            )
            findings.below(f"version {version}: sums in the other process", apart, 0.0)
            findings.add(
                f"version {version}: {manifest.nbytes / 2**20:.0f} MiB in {len(manifest.buckets)} buckets",
                f"{manifest.nbytes / seconds / 1e9:.2f} GB/s",
            )
    finally:
        sync.close()
        receiver.close()


def weights(manifest: Manifest, device: torch.device, version: int) -> Iterator[tuple[str, Tensor]]:
    """Small whole numbers, whose sums are exact in any order."""
    for index, spec in enumerate(manifest.tensors):
        count = spec.shape[0] * spec.shape[1]
        numbers = (torch.arange(count, device=device) * (2 * version + 1) + index) % 61 - 30
        yield spec.name, numbers.view(spec.shape).to(torch.bfloat16)


class Receiver:
    """The other process, as the sender sees it."""

    def __init__(self, manifest: Manifest, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, manifest, device), daemon=True)
        self._process.start()
        self._thread = ThreadPoolExecutor(1)

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        return self._thread.submit(self._call, "begin", handle, version)

    def weights_load(self, index: int) -> Future[None]:
        return self._thread.submit(self._call, "load", index)

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        return self._thread.submit(lambda: [self._call("commit")])

    def weights_abort(self, reason: str) -> Future[None]:
        return self._thread.submit(self._call, "abort")

    def sums(self) -> list[float]:
        return self._call("sums")

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
        self._thread.shutdown()

    def _call(self, *call: Any) -> Any:
        self._pipe.send(call)
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"the receiving process did not answer {call[0]!r} within {TIMEOUT_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _receive(pipe: Connection, manifest: Manifest, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    writer = DictWriter(Script())
    receiver = WeightReceiver(writer, "first light")
    calls = {
        "begin": lambda handle, version: receiver.begin(manifest, handle, version),
        "load": receiver.load,
        "commit": receiver.commit,
        "abort": receiver.abort,
        "sums": lambda: [float(writer.weights[spec.name].float().sum()) for spec in manifest.tensors],
    }
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = calls[name](*arguments)
            if device == "cuda":
                torch.cuda.synchronize()
            pipe.send(answer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the sender has to hear of it
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
