"""The broadcast over NCCL, from one GPU to another."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from hrl.workers.rollout.scripted import DictWriter, Script
from hrl.workers.weight_sync.broadcast import BroadcastSender
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.sender import WeightSync
from hrl.workers.weight_sync.wire import Manifest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SPECS = [(f"layers.{i}.weight", torch.bfloat16, (33, 17)) for i in range(6)]
MANIFEST = Manifest.build(SPECS, 3000)
VERSIONS = (1, 2)
TIMEOUT_S = 60.0


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [(name, torch.randn(shape, generator=generator)) for name, _, shape in SPECS]


def receive(handle: dict, answers) -> None:
    """The body of the receiving process: which versions it took over whole."""
    torch.cuda.set_device(1)
    writer = DictWriter(Script())
    receiver = WeightReceiver(writer, "test")
    for version in VERSIONS:
        receiver.begin(MANIFEST, handle, version)
        for index in range(len(MANIFEST.buckets)):
            receiver.load(index)
        receiver.commit()
        answers.put(all(torch.equal(writer.weights[name].cpu(), sent.bfloat16()) for name, sent in weights(version)))


def test_every_version_arrives_on_the_other_gpu():
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    sender = BroadcastSender(MANIFEST, 1, device=torch.device("cuda", 0), timeout_s=TIMEOUT_S)
    process = context.Process(target=receive, args=(sender.handle(), answers), daemon=True)
    process.start()
    sync = WeightSync(MANIFEST, sender, timeout_s=TIMEOUT_S)

    for version in VERSIONS:
        assert sync.push(version, weights(version)).tensors == len(SPECS)
        assert answers.get(timeout=TIMEOUT_S) is True

    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    sync.close()
