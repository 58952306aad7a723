"""A tensor-parallel engine of two processes, sent to by two trainer ranks, on a machine with two stand-ins for GPUs."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hrl.workers.rollout.scripted import DictWriter, Script
from hrl.workers.weight_sync import cuda_ipc
from hrl.workers.weight_sync.cuda_ipc import CudaIpcReader, CudaIpcSender
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.sender import SyncTarget, WeightSync
from hrl.workers.weight_sync.tensor_parallel import FellowRank, Lead
from hrl.workers.weight_sync.wire import Deadline, WeightSyncError
from tests.workers.weight_sync.engine_processes import (
    BUCKET_BYTES,
    MANIFEST,
    SPECS,
    TIMEOUT_S,
    EngineTarget,
    engine_of,
    start_fellow,
    weights,
)
from tests.workers.weight_sync.fake_devices import FakeDevices
from tests.workers.weight_sync.streaming import done


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineTarget]:
    with engine_of(2) as target:
        yield target


@pytest.fixture
def devices(monkeypatch) -> FakeDevices:
    """Trainer rank 0 is this process: on GPU 0, which it knows as its second one."""
    devices = FakeDevices(visible=[1, 0], current=1)
    monkeypatch.setattr(cuda_ipc, "DEVICES", devices)
    return devices


def lead_of(others: list[int], engine: SyncTarget, timeout_s: float = TIMEOUT_S) -> Lead:
    lead = Lead(others, timeout_s)
    lead.engine = engine
    return lead


def test_every_process_of_the_engine_reads_the_trainer_rank_on_its_own_gpu_whatever_each_sees(engine, devices):
    lead = lead_of([1], engine)
    fellow, answers = start_fellow(lead, [1, 2])
    sync = WeightSync(MANIFEST, CudaIpcSender(MANIFEST, devices.current()), lead, timeout_s=TIMEOUT_S)

    for version in (1, 2):
        report = sync.push(version, weights(version))

        assert [receiver.read_back for receiver in report.receivers] == [len(SPECS)] * 2
        assert answers.recv() == (version, 0)  # it knows of the commit, and has freed its buffers
        assert devices.open_bytes == 0
        assert engine.call("check", version).result(10) == [(True, {"GPU-0"}, True), (True, {"GPU-1"}, True)]
    fellow.join(10)
    assert fellow.exitcode == 0
    lead.close()


def test_a_rank_that_dies_while_it_sends_is_named_at_once_and_the_engine_is_told(engine, devices):
    lead = lead_of([1], engine)
    fellow, _ = start_fellow(lead, [3], dies_at="layers.4.weight")  # in a bucket that waits for the engine
    sync = WeightSync(MANIFEST, CudaIpcSender(MANIFEST, devices.current()), lead, timeout_s=TIMEOUT_S)
    seen = []

    with pytest.raises(WeightSyncError, match="rank 1 of the engine is gone"):
        sync.push(3, (seen.append(name) or (name, tensor) for name, tensor in weights(3)))

    fellow.join(10)
    assert fellow.exitcode == -signal.SIGKILL
    assert len(seen) == len(SPECS)  # all ranks gather, so this one has gone on to the end
    assert "rank 1 of the engine is gone" in engine.aborted[-1]
    lead.close()


# ---------------------------------------------------------------------- one process: what is said to whom


class InProcess:
    """An engine of one receiver, which reads the lead's buffers."""

    def __init__(self) -> None:
        self.receiver = WeightReceiver(DictWriter(Script()), "test")

    def weights_begin(self, manifest, handle, version):
        return done(self.receiver.begin, manifest, handle, version)

    def weights_load(self, index):
        return done(self.receiver.load, index)

    def weights_commit(self):
        return done(lambda: [self.receiver.commit()])

    def weights_abort(self, reason):
        return done(self.receiver.abort)


def fellow_of(lead: Lead, rank: int = 1, timeout_s: float = TIMEOUT_S) -> FellowRank:
    device = torch.device("cuda", 0)
    return FellowRank(lead.address, rank, 0, device, bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s)


class Pair:
    """A lead and one fellow, each in a thread."""

    def __init__(self, devices: FakeDevices, timeout_s: float = TIMEOUT_S) -> None:
        self.lead = lead_of([1], InProcess(), timeout_s)
        sender = CudaIpcSender(MANIFEST, devices.current())
        self.sync = WeightSync(MANIFEST, sender, self.lead, timeout_s=timeout_s)
        self.fellow = fellow_of(self.lead, timeout_s=timeout_s)

    def push(self, version: int, lead_sends, fellow_sends) -> tuple[str | None, str | None]:
        """What the two of them say of a sync; nothing if it succeeds."""
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(self.sync.push, version, lead_sends)
            second = pool.submit(self.fellow.push_weights, version, SPECS, fellow_sends)
            errors = [future.exception(timeout=TIMEOUT_S) for future in (first, second)]
        assert all(error is None or isinstance(error, WeightSyncError) for error in errors)
        return tuple(str(error) if error else None for error in errors)

    def close(self) -> None:
        self.fellow.close()
        self.lead.close()


@pytest.fixture
def pair(devices) -> Iterator[Pair]:
    pair = Pair(devices)
    yield pair
    pair.close()


def renamed(version: int, index: int) -> list[tuple[str, torch.Tensor]]:
    return [("other" if i == index else name, tensor) for i, (name, tensor) in enumerate(weights(version))]


def test_what_either_rank_finds_wrong_the_other_reports_with_its_name_and_the_next_sync_is_good(pair):
    lead_says, fellow_says = pair.push(1, renamed(1, 4), weights(1))
    assert "'other' where 'layers.4.weight' was expected" in lead_says
    assert "rank 0, which drives the engine, aborted the weight sync" in fellow_says and "'other'" in fellow_says

    lead_says, fellow_says = pair.push(2, weights(2), renamed(2, 4))
    assert "rank 1 of the engine aborted the weight sync" in lead_says and "'other'" in lead_says
    assert "'other' where 'layers.4.weight' was expected" in fellow_says

    assert pair.push(3, weights(3), weights(3)) == (None, None)


def test_a_sync_that_the_lead_cannot_begin_ends_for_the_others_too_and_is_not_confused_with_the_next(pair):
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(pair.fellow.push_weights, 1, SPECS, weights(1))
        pair.lead.refuse("the engine did not wake up", 10.0)
        assert "aborted the weight sync: the engine did not wake up" in str(refused.exception(timeout=TIMEOUT_S))

    assert pair.push(1, weights(1), weights(1)) == (None, None)


def test_a_reason_too_long_for_a_message_is_cut_and_not_mistaken_for_an_end(pair):
    names = "; ".join(f"'läyers.{i}.😀' is missing" for i in range(20_000))
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(pair.fellow.push_weights, 1, SPECS, weights(1))
        pair.lead.refuse(names, 10.0)
        assert f"aborted the weight sync: {names[:1000]}" in str(refused.exception(timeout=TIMEOUT_S))

    assert pair.push(1, weights(1), weights(1)) == (None, None)


def test_a_rank_that_never_comes_is_named_at_the_deadline(devices):
    lead = lead_of([1, 2], InProcess(), 0.5)
    fellow = fellow_of(lead, rank=2)
    sync = WeightSync(MANIFEST, CudaIpcSender(MANIFEST, devices.current()), lead, timeout_s=0.5)
    started = time.monotonic()

    with pytest.raises(WeightSyncError, match=r"longer than 0\.5 s .*at: rank 1 of the engine has not come"):
        sync.push(1, weights(1))

    assert time.monotonic() - started < 30
    fellow.close()
    lead.close()


def test_a_rank_that_stops_half_way_is_named_with_the_bucket_that_is_awaited(devices):
    pair = Pair(devices, timeout_s=1.0)
    go_on = threading.Event()

    def slow():
        for index, item in enumerate(weights(1)):
            if index == 4:
                go_on.wait(20)
            yield item

    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(pair.fellow.push_weights, 1, SPECS, slow())
        with pytest.raises(
            WeightSyncError, match=r"longer than 1 s .*at: waiting for bucket 2 of rank 1 of the engine"
        ):
            pair.sync.push(1, weights(1))
        go_on.set()
        assert isinstance(stuck.exception(timeout=TIMEOUT_S), WeightSyncError)
    pair.close()


def test_a_lead_that_is_gone_is_named(devices):
    lead = Lead([1], TIMEOUT_S)
    fellow = fellow_of(lead)
    lead._await_others(Deadline(5, "test"))
    lead.close()

    with pytest.raises(WeightSyncError, match="rank 0, which drives the engine, is gone"):
        fellow.push_weights(1, SPECS, weights(1))
    with pytest.raises(WeightSyncError, match="rank 0, which drives the engine, is gone"):
        fellow_of(lead)


def test_ranks_that_would_send_different_tensors_are_told_so(pair):
    fewer = SPECS[:-1]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(pair.fellow.push_weights, 1, fewer, weights(1)[:-1])
        with pytest.raises(WeightSyncError, match="rank 1 would send other tensors"):
            pair.sync.push(1, weights(1))
        assert "rank 1 would send other tensors" in str(sent.exception(timeout=TIMEOUT_S))


def test_an_engine_process_on_a_gpu_of_no_trainer_rank_is_told_which_there_are(devices):
    sender = CudaIpcSender(MANIFEST, devices.current())
    handle = sender.handle()
    cuda_ipc.DEVICES = FakeDevices(visible=[2], current=0)

    with pytest.raises(WeightSyncError, match=r"no trainer rank of this engine is on its GPU GPU-2 .* are on GPU-0"):
        CudaIpcReader(MANIFEST, handle)


def test_a_trainer_rank_that_has_ended_is_said_when_its_buffers_are_opened(devices):
    sender = CudaIpcSender(MANIFEST, devices.current())
    handle = sender.handle()
    sender.release()

    with pytest.raises(WeightSyncError, match="trainer rank on GPU GPU-0 cannot be opened: it has ended"):
        CudaIpcReader(MANIFEST, handle)


def test_buffers_hold_two_buckets_and_only_during_a_sync(pair, devices):
    sender = CudaIpcSender(MANIFEST, devices.current())
    assert devices.open_bytes == 0

    sender.handle()

    assert devices.open_bytes == 2 * MANIFEST.largest_bucket_bytes < 2 * BUCKET_BYTES + 256
    sender.release()
    assert devices.open_bytes == 0
    with pytest.raises(WeightSyncError, match="no sync is under way"):
        sender.buffer(0)


def test_a_sync_that_fails_keeps_no_buffers(devices):
    sync = WeightSync(MANIFEST, CudaIpcSender(MANIFEST, devices.current()), InProcess(), timeout_s=TIMEOUT_S)
    with pytest.raises(WeightSyncError, match="end before"):
        sync.push(1, weights(1)[:-1])
    gc.collect()  # the error's frames
    assert devices.open_bytes == 0
