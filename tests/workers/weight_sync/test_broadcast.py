"""The broadcast: one sender, several receivers (here in threads), no default process group."""

from __future__ import annotations

import gc
import os
import queue
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist

from hrl.workers.rollout.scripted import DictWriter, Script
from hrl.workers.weight_sync.broadcast import BroadcastReader, BroadcastSender, _join, group_timeout_s
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.sender import WeightSync
from hrl.workers.weight_sync.wire import Manifest, WeightSyncError
from tests.processes.warm import warm_context

pytestmark = pytest.mark.cluster

SPECS = [(f"layers.{i}.weight", torch.bfloat16, (33, 17)) for i in range(6)]
MANIFEST = Manifest.build(SPECS, 3000)


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [(name, torch.randn(shape, generator=generator)) for name, _, shape in SPECS]


def receive(manifest: dict, handle: dict, versions: list[int], rank_in_engine: int, answers, script: Script) -> None:
    """The body of a receiver."""
    receiver_manifest = Manifest.from_plain(manifest)
    writer = DictWriter(script)
    receiver = WeightReceiver(writer, "test", rank_in_engine)
    try:
        for version in versions:
            receiver.begin(receiver_manifest, handle, version)
            for index in range(len(receiver_manifest.buckets)):
                receiver.load(index)
            receiver.commit()
        right = all(torch.equal(writer.weights[name], sent.bfloat16()) for name, sent in weights(versions[-1]))
        answers.put((rank_in_engine, right, dist.is_initialized()))
    except WeightSyncError as error:
        answers.put((rank_in_engine, str(error), dist.is_initialized()))


def start_receiver(
    sender: BroadcastSender, first: int, rank: int, versions: list[int], answers, script: Script | None = None
) -> threading.Thread:
    args = (MANIFEST.to_plain(), sender.handle() | {"first_rank": first}, versions, rank, answers, script or Script())
    thread = threading.Thread(target=receive, args=args, daemon=True)
    thread.start()
    return thread


def test_two_engines_one_of_two_processes_all_get_every_version():
    answers: queue.Queue = queue.Queue()
    sender = BroadcastSender(MANIFEST, 3, device=torch.device("cpu"), timeout_s=60)
    threads = [start_receiver(sender, first, rank, [1, 2], answers) for first, rank in ((1, 0), (2, 0), (2, 1))]
    sync = WeightSync(MANIFEST, sender, timeout_s=60)

    for version in (1, 2):
        assert sync.push(version, weights(version)).tensors == len(SPECS)
    results = [answers.get(timeout=600) for _ in threads]

    assert sorted(results) == [(0, True, False), (0, True, False), (1, True, False)]
    assert not dist.is_initialized()
    for thread in threads:
        thread.join(10)
    sync.close()


@pytest.mark.parametrize("staged", [True, False])
def test_a_receiver_whose_model_changes_a_tensor_finds_it_out(staged, monkeypatch):
    bucket = BroadcastReader.bucket

    def take(reader, index):  # not staged, as on a GPU: what was loaded is gone when the next bucket comes
        reader.staged = staged
        if not staged and index:
            reader._data[: reader._manifest.buckets[index].start] = 0
        return bucket(reader, index)

    monkeypatch.setattr(BroadcastReader, "bucket", take)
    answers: queue.Queue = queue.Queue()
    sender = BroadcastSender(MANIFEST, 1, device=torch.device("cpu"), timeout_s=60)
    receiver = start_receiver(sender, 1, 0, [1], answers, Script(corrupt_tensor="layers.2.weight"))

    WeightSync(MANIFEST, sender, timeout_s=60).push(1, weights(1))

    assert "'layers.2.weight' reads back differently" in answers.get(timeout=600)[1]
    receiver.join(10)
    sender.close()


def test_a_receiver_that_never_comes_is_an_error_in_time():
    sender = BroadcastSender(MANIFEST, 1, device=torch.device("cpu"), timeout_s=1)
    started = time.monotonic()

    with pytest.raises(WeightSyncError, match="rank 0 of 2 could not join the weight broadcast within 1 s"):
        WeightSync(MANIFEST, sender, timeout_s=5).push(1, weights(1))

    assert time.monotonic() - started < 10
    sender.close()


def test_the_receivers_that_did_not_come_are_named():
    answers: queue.Queue = queue.Queue()
    sender = BroadcastSender(MANIFEST, 3, device=torch.device("cpu"), timeout_s=1)
    present = start_receiver(sender, 2, 0, [1], answers)

    with pytest.raises(WeightSyncError, match="receiver 1, 3 of 3 did not come"):
        WeightSync(MANIFEST, sender, timeout_s=5).push(1, weights(1))

    _, answer, _ = answers.get(timeout=10)
    assert "rank 2 of 4 could not join the weight broadcast within 1 s" in answer
    present.join(10)
    sender.close()


def test_a_receiver_that_finds_no_sender_is_told_where_it_looked():
    sender = BroadcastSender(MANIFEST, 1, device=torch.device("cpu"), timeout_s=1)
    handle = sender.handle()
    del sender  # and its store with it
    gc.collect()

    with pytest.raises(WeightSyncError, match=f"could not reach the trainer's store at 127.0.0.1:{handle['port']}"):
        BroadcastReader(MANIFEST, handle, 0)


def dying(source: Iterable[tuple[str, torch.Tensor]], name: str) -> Iterator[tuple[str, torch.Tensor]]:
    for pair in source:
        if pair[0] == name:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair


def run_sender(connection, dies_at: str) -> None:
    """The body of a trainer that is killed in the middle of a sync."""
    sender = BroadcastSender(MANIFEST, 1, device=torch.device("cpu"), timeout_s=120)
    connection.send(sender.handle())
    WeightSync(MANIFEST, sender, timeout_s=120).push(1, dying(weights(1), dies_at))


def run_receiver(handle: dict, buckets: int) -> None:
    """The body of an engine that is killed when it has taken so many buckets."""
    receiver = WeightReceiver(DictWriter(Script()), "test")
    receiver.begin(MANIFEST, handle, 1)
    for index in range(buckets):
        receiver.load(index)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_sender_that_dies_in_a_sync_is_an_error_at_the_receiver_long_before_the_deadline():
    context = warm_context()
    ours, theirs = context.Pipe()
    trainer = context.Process(target=run_sender, args=(theirs, "layers.4.weight"), daemon=True)
    trainer.start()
    handle = ours.recv()
    receiver = WeightReceiver(DictWriter(Script()), "test")
    receiver.begin(MANIFEST, handle, 1)
    assert len(MANIFEST.buckets) == 3

    with pytest.raises(WeightSyncError, match="receiver 1 of 1, at bucket [12] from the trainer at 127.0.0.1"):
        for index in range(3):
            receiver.load(index)
            trainer_alive_until = time.monotonic()

    assert time.monotonic() - trainer_alive_until < 30
    assert receiver.abort() and receiver.served_version == 0  # staged: nothing was written
    trainer.join(10)
    assert trainer.exitcode == -signal.SIGKILL


def test_a_receiver_that_dies_in_a_sync_is_named_by_the_sender_also_when_its_socket_took_the_rest():
    context = warm_context()
    sender = BroadcastSender(MANIFEST, 1, device=torch.device("cpu"), timeout_s=60)
    engine = context.Process(target=run_receiver, args=(sender.handle(), 1), daemon=True)
    engine.start()
    sender.connect()  # as the first sync does; the deadline below is for what comes after
    seen = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(1):
            seen.append(name)
            if name == "layers.4.weight":
                engine.join(60)
            yield name, tensor

    with pytest.raises(WeightSyncError, match=r"receiver 1 of 1 did not take every bucket|a receiver is gone"):
        WeightSync(MANIFEST, sender, timeout_s=3).push(1, source())

    assert engine.exitcode == -signal.SIGKILL
    assert seen == [name for name, _, _ in SPECS]
    sender.close()


def test_a_sender_that_stops_is_an_error_at_the_receivers_deadline_which_names_the_bucket():
    answers: queue.Queue = queue.Queue()
    sender = BroadcastSender(MANIFEST, 1, device=torch.device("cpu"), timeout_s=1)
    receiver = start_receiver(sender, 1, 0, [1], answers)
    heard = threading.Event()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(1):
            if name == "layers.4.weight":
                heard.wait(30)
            yield name, tensor

    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(WeightSync(MANIFEST, sender, timeout_s=3).push, 1, source())
        _, answer, _ = answers.get(timeout=30)
        heard.set()
        error = str(pushed.exception(60))

    assert "receiver 1 of 1 did not take every bucket" in error or "a receiver is gone" in error
    assert "receiver 1 of 1, at bucket 2 from the trainer at 127.0.0.1" in answer
    receiver.join(10)
    sender.close()


@pytest.mark.parametrize("timeout_s", [1.0, 300.0])
def test_a_sync_ends_by_its_own_deadline_before_the_groups_timeout_which_ends_the_process_on_a_gpu(timeout_s):
    """NCCL's watchdog takes the process down when a collective has run for the group's timeout."""
    assert group_timeout_s("nccl", timeout_s) >= timeout_s + 60
    assert group_timeout_s("gloo", timeout_s) > timeout_s


class NcclStandIn:
    """A group whose ranks have all come; `broadcast` is what becomes of the first one."""

    class Options:
        pass

    def __init__(self, *_: object) -> None:
        pass


def join_by(broadcast, monkeypatch) -> None:
    monkeypatch.setattr(NcclStandIn, "broadcast", broadcast, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclStandIn, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    handle = {"backend": "nccl", "address": "127.0.0.1", "world_size": 2, "timeout_s": 0.2}
    _join(dist.HashStore(), handle, 0, torch.device("cpu"))


def test_a_group_that_nccl_never_connects_is_an_error_in_time(monkeypatch):
    ended = threading.Event()
    started = time.monotonic()

    def hang(*_: object) -> None:
        ended.wait(60)
        raise RuntimeError("the group is gone")

    told = "^rank 0 of 2 could not join the weight broadcast within 0.2 s: all ranks have come"
    with pytest.raises(WeightSyncError, match=told):
        join_by(hang, monkeypatch)

    assert time.monotonic() - started < 30
    ended.set()


def test_a_group_that_nccl_refuses_to_connect_says_why(monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("no route to host")

    with pytest.raises(WeightSyncError, match="rank 0 of 2 could not join .*: no route to host"):
        join_by(refuse, monkeypatch)


def test_receivers_hear_of_an_aborted_broadcast_before_their_deadline():
    answers: queue.Queue = queue.Queue()
    sender = BroadcastSender(MANIFEST, 1, device=torch.device("cpu"), timeout_s=120)
    receiver = start_receiver(sender, 1, 0, [1], answers)
    sync = WeightSync(MANIFEST, sender, timeout_s=120)
    renamed = [*weights(1)[:-1], ("other", torch.zeros(33, 17))]

    with pytest.raises(WeightSyncError, match="'other' where 'layers.5.weight' was expected"):
        sync.push(1, renamed)
    started = time.monotonic()
    _, answer, _ = answers.get(timeout=600)

    assert time.monotonic() - started < 30
    assert "weight broadcast failed at receiver 1 of 1" in answer
    with pytest.raises(WeightSyncError, match="open a new one"):
        sync.push(2, weights(2))
    receiver.join(10)


def test_a_sender_on_a_gpu_keeps_no_buffers_after_a_sync_and_one_on_a_cpu_keeps_them():
    """Touching fresh pages of host memory costs more than the copy; a GPU's memory belongs to others between syncs."""
    answers: queue.Queue = queue.Queue()
    sender = BroadcastSender(MANIFEST, 1, device=torch.device("cpu"), timeout_s=30)
    thread = start_receiver(sender, 1, 0, [1, 2], answers)
    sync = WeightSync(MANIFEST, sender, timeout_s=30)
    sync.push(1, weights(1))
    assert [buffer.nbytes for buffer in sender._buffers] == [MANIFEST.largest_bucket_bytes] * 2
    sender._device = torch.device("cuda")  # only for what is kept
    sender.release()
    assert sender._buffers == []
    sender._device = torch.device("cpu")
    sync.push(2, weights(2))
    assert answers.get(timeout=30) == (0, True, False)
    thread.join(10)
    sync.close()
    assert sender._buffers == []


def test_the_store_listens_on_its_own_address_only():
    sender = BroadcastSender(MANIFEST, 1, device=torch.device("cpu"), timeout_s=5)

    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]

    assert [c.laddr.ip for c in listening if c.laddr.port == sender.handle()["port"]] == ["127.0.0.1"]
    sender.close()
