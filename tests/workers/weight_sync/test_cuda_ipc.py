"""Weights between two processes on one GPU."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch

from hrl.workers.rollout.scripted import DictWriter, Script
from hrl.workers.weight_sync.base import seal
from hrl.workers.weight_sync.cuda_ipc import CudaIpcReader, CudaIpcSender
from hrl.workers.weight_sync.errors import WeightSyncError
from hrl.workers.weight_sync.manifest import Manifest
from hrl.workers.weight_sync.receiver import WeightReceiver

pytestmark = pytest.mark.gpu

SPECS = [(f"layers.{i}.weight", torch.bfloat16, (33, 17)) for i in range(6)]
MANIFEST = Manifest.build(SPECS, 3000)


def value(index: int, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * version + index)
    return torch.randn(33, 17, generator=generator).bfloat16()


def receive(handle: dict, steps, answers) -> None:
    """The body of the receiving process: loads what it is told to, answers when it is done with a buffer."""
    writer = DictWriter(Script())
    receiver = WeightReceiver(writer, "test")
    while (step := steps.get()) is not None:
        command, argument = step
        if command == "begin":
            receiver.begin(MANIFEST, handle, argument)
        elif command == "load":
            receiver.load(argument)
            torch.cuda.synchronize()
        else:
            receiver.commit()
            answers.put(
                all(torch.equal(writer.weights[name].cpu(), value(i, argument)) for i, (name, _, _) in enumerate(SPECS))
            )
            continue
        answers.put(True)


def test_every_version_arrives_through_the_same_two_buffers():
    context = multiprocessing.get_context("spawn")
    steps, answers = context.Queue(), context.Queue()
    before = set(os.listdir("/dev/shm"))
    sender = CudaIpcSender(MANIFEST, torch.device("cuda", 0))
    process = context.Process(target=receive, args=(sender.handle(), steps, answers), daemon=True)
    process.start()

    names = {name: i for i, (name, _, _) in enumerate(SPECS)}
    for version in (1, 2):
        steps.put(("begin", version))
        assert answers.get(timeout=60)
        for index, bucket in enumerate(MANIFEST.buckets):
            data = sender.buffer(index)
            for piece in bucket.pieces:
                piece.view(data).copy_(value(names[piece.name], version))
            seal(data, bucket, index, version)
            sender.publish(index)
            steps.put(("load", index))
            assert answers.get(timeout=60)
        steps.put(("commit", version))
        assert answers.get(timeout=60)

    steps.put(None)
    process.join(30)
    sender.close()
    assert process.exitcode == 0 and len(MANIFEST.buckets) > 2
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch_")}
    sender.close()  # harmless when repeated


def test_a_gpu_that_is_not_visible_is_named():
    sender = CudaIpcSender(MANIFEST, torch.device("cuda", 0))

    with pytest.raises(WeightSyncError, match="not visible to this engine process"):
        CudaIpcReader(MANIFEST, {**sender.handle(), "gpu_uuid": "GPU-of-another-machine"})
