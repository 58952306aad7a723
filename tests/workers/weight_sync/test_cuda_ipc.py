"""Weights between processes on the same GPUs."""

from __future__ import annotations

import os

import pytest
import torch

from hrl.workers.weight_sync.cuda_ipc import CudaIpcReader, CudaIpcSender
from hrl.workers.weight_sync.sender import WeightSync
from hrl.workers.weight_sync.tensor_parallel import Lead
from hrl.workers.weight_sync.wire import WeightSyncError, open_sealed, seal
from tests.workers.weight_sync.engine_processes import (
    BUCKET_BYTES,
    MANIFEST,
    SPECS,
    TIMEOUT_S,
    engine_of,
    start_fellow,
    weights,
)

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def test_every_version_arrives_and_the_buffers_go_with_it():
    before = set(os.listdir("/dev/shm"))
    torch.cuda.init()
    held = torch.cuda.memory_allocated(CUDA)
    with engine_of(1, fake=False) as engine:
        sync = WeightSync(MANIFEST, CudaIpcSender(MANIFEST, CUDA), engine, timeout_s=TIMEOUT_S)
        for version in (1, 2, 3):
            report = sync.push(version, [(name, tensor.to(CUDA)) for name, tensor in weights(version)])

            assert report.receivers[0].read_back == len(SPECS)
            assert engine.call("check", version).result(TIMEOUT_S) == [(True, {"cuda:0"}, True)]
            torch.cuda.ipc_collect()
            assert torch.cuda.memory_allocated(CUDA) == held
    sync.close()
    sync.close()  # harmless when repeated
    assert any(not piece.is_whole for piece in MANIFEST.pieces) and len(MANIFEST.buckets) > 3
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch_")}


@needs_two
def test_every_process_of_an_engine_reads_the_trainer_rank_on_its_own_gpu():
    lead = Lead([1], TIMEOUT_S)
    fellow, answers = start_fellow(lead, [1, 2], fake=False)
    with engine_of(2, fake=False) as engine:
        lead.engine = engine
        sync = WeightSync(MANIFEST, CudaIpcSender(MANIFEST, CUDA), lead, timeout_s=TIMEOUT_S)
        for version in (1, 2):
            sync.push(version, weights(version))

            assert answers.recv() == (version, 0)
            assert engine.call("check", version).result(TIMEOUT_S) == [
                (True, {"cuda:0"}, True),
                (True, {"cuda:1"}, True),
            ]
    fellow.join(10)
    assert fellow.exitcode == 0
    lead.close()


def test_buffers_hold_two_buckets_and_only_during_a_sync():
    held = torch.cuda.memory_allocated(CUDA)
    sender = CudaIpcSender(MANIFEST, CUDA)
    assert torch.cuda.memory_allocated(CUDA) == held

    sender.handle()

    assert 0 < torch.cuda.memory_allocated(CUDA) - held <= 2 * (BUCKET_BYTES + 1024)
    sender.release()
    assert torch.cuda.memory_allocated(CUDA) == held


def test_a_gpu_of_no_trainer_rank_is_named():
    sender = CudaIpcSender(MANIFEST, CUDA)
    handle = sender.handle()
    elsewhere = {**handle, "senders": [{**handle["senders"][0], "gpu_uuid": "GPU-of-another-machine"}]}

    with pytest.raises(WeightSyncError, match="they are on GPU-of-another-machine"):
        CudaIpcReader(MANIFEST, elsewhere)
    sender.close()


def test_sealing_a_bucket_makes_nobody_wait():
    """The host goes on to gather; it waits once for a bucket, when it is published."""
    bucket = MANIFEST.buckets[0]
    data = torch.full((bucket.nbytes,), 7, dtype=torch.uint8, device=CUDA)
    seal(data, bucket, 0, 1)  # the first one makes the checksum's weights
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        seal(data, bucket, 0, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(open_sealed(data, bucket, 0, 2)) == len(bucket.pieces)
