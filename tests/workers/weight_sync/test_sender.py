"""A whole sync into a dictionary: what arrives, what is noticed, what is served afterwards."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from hrl.workers.rollout.scripted import DictWriter, Script
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.sender import SenderTransport, WeightSync
from hrl.workers.weight_sync.shared_memory import SharedMemoryReader, SharedMemorySender
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport, WeightSyncError
from tests.workers.weight_sync.streaming import StreamingSender, StreamingTarget, done, stream

SPECS = [(f"layers.{i}.weight", torch.bfloat16, (33, 17)) for i in range(9)] + [("norm", torch.float32, (5,))]
MANIFEST = Manifest.build(SPECS, 3000)


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [(name, torch.randn(shape, generator=generator)) for name, _, shape in SPECS]


class Target:
    """A receiver in this thread."""

    def __init__(self, script: Script | None = None) -> None:
        self.writer = DictWriter(script or Script())
        self.receiver = WeightReceiver(self.writer, "test")
        self.aborted: list[str] = []

    def weights_begin(self, manifest, handle, version):
        return done(self.receiver.begin, manifest, handle, version)

    def weights_load(self, index):
        return done(self.receiver.load, index)

    def weights_commit(self):
        return done(lambda: [self.receiver.commit()])

    def weights_abort(self, reason):
        self.aborted.append(reason)
        return done(self.receiver.abort)

    def assert_serves(self, version: int) -> None:
        assert self.receiver.intact and self.receiver.served_version == version
        for (name, sent), (_, dtype, _) in zip(weights(version), SPECS, strict=True):
            assert torch.equal(self.writer.weights[name], sent.to(dtype)), name


@pytest.fixture(params=["staged", "streaming"])
def sender(request, monkeypatch):
    if request.param == "streaming":
        stream(monkeypatch)
        transport: SenderTransport = StreamingSender(MANIFEST)
    else:
        transport = SharedMemorySender(MANIFEST)
    yield transport
    transport.close()


def test_every_sync_delivers_all_tensors_cast_to_their_wire_dtype(sender):
    target = Target()
    sync = WeightSync(MANIFEST, sender, target, timeout_s=10)

    for version in (1, 2, 5):
        report = sync.push(version, weights(version))

        assert (report.version, report.tensors, report.nbytes) == (version, len(SPECS), MANIFEST.nbytes)
        assert report.receivers[0].version == version
        target.assert_serves(version)
    assert len(MANIFEST.buckets) > 3


def test_large_tensors_of_the_same_and_of_another_dtype_arrive_whole_and_in_pieces():
    given = {"same": torch.randn(300, 301).bfloat16(), "cast": torch.randn(300, 301), "turned": torch.randn(300, 301)}
    given["turned"] = given["turned"].bfloat16().t()
    for limit in (1 << 30, 100_000):  # bytes of a bucket; each tensor has 180,600
        manifest = Manifest.build([(name, torch.bfloat16, each.shape) for name, each in given.items()], limit)
        target, transport = Target(), SharedMemorySender(manifest)
        sync = WeightSync(manifest, transport, target, timeout_s=10)
        for version in (1, 2):
            assert sync.push(version, iter(given.items())).receivers[0].read_back == len(given)
            for name, sent in given.items():
                assert torch.equal(target.writer.weights[name], sent.bfloat16()), name
        sync.close()


def test_a_missing_an_extra_and_a_renamed_tensor_are_named_and_the_old_version_stays_when_staged():
    target = Target()
    sync = WeightSync(MANIFEST, SharedMemorySender(MANIFEST), target, timeout_s=10)
    sync.push(1, weights(1))
    new = weights(2)

    with pytest.raises(WeightSyncError, match="end before 'norm'"):
        sync.push(2, new[:-1])
    with pytest.raises(WeightSyncError, match="'surplus', which is not in the manifest"):
        sync.push(2, [*new, ("surplus", torch.zeros(1))])
    with pytest.raises(WeightSyncError, match="'layer.4' where 'layers.4.weight' was expected"):
        sync.push(2, [*new[:4], ("layer.4", new[4][1]), *new[5:]])
    with pytest.raises(WeightSyncError, match=r"'layers.3.weight' has shape \(17, 33\)"):
        sync.push(2, [*new[:3], ("layers.3.weight", new[3][1].T), *new[4:]])

    assert len(target.aborted) == 4
    target.assert_serves(1)
    sync.push(2, new)
    target.assert_serves(2)


@pytest.mark.parametrize("bucket", [0, 2])
def test_a_corrupted_tensor_is_named_and_never_served(sender, bucket, monkeypatch):
    target = Target()
    sync = WeightSync(MANIFEST, sender, target, timeout_s=10)
    sync.push(1, weights(1))
    publish = sender.publish

    def corrupt(index):
        if index == bucket:
            spec = MANIFEST.buckets[index].pieces[1]
            sender.buffer(index)[spec.offset + 7] ^= 1
        publish(index)

    monkeypatch.setattr(sender, "publish", corrupt)
    with pytest.raises(WeightSyncError, match=f"'{MANIFEST.buckets[bucket].pieces[1].name}'.*corrupted"):
        sync.push(2, weights(2))

    # Staged buckets are written only when all are good; streamed ones before the bad one were written.
    if isinstance(sender, SharedMemorySender) or bucket == 0:
        target.assert_serves(1)
    else:
        assert not target.receiver.intact
    monkeypatch.undo()
    if isinstance(sender, SharedMemorySender):
        sync.push(3, weights(3))
        target.assert_serves(3)


def test_a_good_sync_heals_a_model_that_an_aborted_one_left_mixed(monkeypatch):
    stream(monkeypatch)
    target = Target()
    sync = WeightSync(MANIFEST, StreamingSender(MANIFEST), target, timeout_s=10)
    with pytest.raises(WeightSyncError):
        sync.push(1, weights(1)[:-1])
    assert not target.receiver.intact

    sync.push(1, weights(1))

    target.assert_serves(1)


@pytest.mark.parametrize("bucket_bytes", [256, 1024, 3000])
def test_buffers_are_not_read_once_their_load_is_acknowledged_and_hold_no_more_than_a_bucket(bucket_bytes, monkeypatch):
    """At that moment they turn into NaNs, as otherwise, a little later, into the next bucket. Tensors are cut."""
    stream(monkeypatch)
    manifest = Manifest.build(SPECS, bucket_bytes)
    sender, writer = StreamingSender(manifest, poison=True), DictWriter(Script())
    sync = WeightSync(manifest, sender, StreamingTarget(writer, sender), timeout_s=10)

    for version in (1, 2):
        report = sync.push(version, weights(version))

        for (name, sent), (_, dtype, _) in zip(weights(version), SPECS, strict=True):
            assert torch.equal(writer.weights[name], sent.to(dtype)), name
        assert (report.tensors, report.receivers[0].read_back) == (len(SPECS), len(SPECS))
        assert sender.buffers == []  # given back
    assert any(not piece.is_whole for piece in manifest.pieces) == (bucket_bytes < 33 * 17 * 2)
    assert sender.largest_bytes <= 2 * (bucket_bytes + 8 * (3 + len(SPECS)))


def test_a_receiver_that_reads_a_buffer_after_its_load_is_caught_by_the_poison(monkeypatch):
    class Keeps(DictWriter):
        def write(self, weights):
            super().write(weights)
            self.weights |= dict(weights)  # views of the buffer

    stream(monkeypatch)
    manifest = Manifest.build(SPECS, 3000)
    sender = StreamingSender(manifest, poison=True)
    target = StreamingTarget(Keeps(Script()), sender)

    with pytest.raises(WeightSyncError, match=r"'layers\.0\.weight' reads back differently"):
        WeightSync(manifest, sender, target, timeout_s=10).push(1, weights(1))


def test_a_cut_tensor_is_put_together_before_the_model_is_given_it_and_one_at_a_time(monkeypatch):
    class Watching(DictWriter):
        def write(self, weights):
            calls.append([name for name, _ in weights])
            super().write(weights)

    calls: list[list[str]] = []

    stream(monkeypatch)
    specs = [("small", torch.float32, (4,)), ("large", torch.bfloat16, (40, 44)), ("next", torch.float32, (4,))]
    manifest = Manifest.build(specs, 1024)
    sender, writer = StreamingSender(manifest), Watching(Script())
    large = torch.randn(44, 40).T  # not contiguous, as a gathered weight may be

    WeightSync(manifest, sender, StreamingTarget(writer, sender), timeout_s=10).push(
        1, [("small", torch.zeros(4)), ("large", large), ("next", torch.ones(4))]
    )

    assert calls == [["small"], ["large", "next"]]
    assert torch.equal(writer.weights["large"], large.bfloat16())


def test_a_sync_that_failed_within_a_cut_tensor_leaves_nothing_of_it_to_the_next(monkeypatch):
    stream(monkeypatch)
    manifest = Manifest.build([("large", torch.bfloat16, (40, 50))], 1024)
    sender, writer = StreamingSender(manifest), DictWriter(Script())
    target = StreamingTarget(writer, sender)
    sync = WeightSync(manifest, sender, target, timeout_s=10)
    good, publish = torch.randn(40, 50), sender.publish

    def corrupt(index):
        if index == 2:
            sender.buffer(index)[3] ^= 1

    sender.publish = corrupt
    with pytest.raises(WeightSyncError, match="checksum of 'large' differs"):
        sync.push(1, [("large", torch.zeros(40, 50))])
    sender.publish = publish
    sync.push(2, [("large", good)])

    assert torch.equal(writer.weights["large"], good.bfloat16())


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(drop_tensor="layers.2.weight"), "sent nothing for layers.2.weight"),
        (Script(corrupt_tensor="layers.2.weight"), "'layers.2.weight' reads back differently"),
    ],
)
def test_a_receiver_that_drops_or_changes_a_tensor_is_found_out(sender, script, message):
    target = Target(script)
    sync = WeightSync(MANIFEST, sender, target, timeout_s=10)

    with pytest.raises(WeightSyncError, match=message):
        sync.push(1, weights(1))

    assert not target.receiver.intact


def test_every_tensor_that_the_model_holds_as_it_is_sent_is_read_back(sender):
    target = Target()
    sync = WeightSync(MANIFEST, sender, target, timeout_s=10)

    assert [sync.push(version, weights(version)).receivers[0].read_back for version in (1, 2)] == [len(SPECS)] * 2


def test_what_the_model_holds_fused_is_not_read_back_and_said_once(sender, caplog):
    target = Target()
    sync = WeightSync(MANIFEST, sender, target, timeout_s=10)
    target.writer.read_back = lambda name: None if name == "norm" else target.writer.weights[name].flatten()

    assert [sync.push(version, weights(version)).receivers[0].read_back for version in (1, 2)] == [0, 0]
    assert caplog.text.count("none is read back") == 1


def test_weights_of_another_model_are_refused_before_anything_is_written():
    target = Target()
    WeightSync(MANIFEST, SharedMemorySender(MANIFEST), target, timeout_s=10).push(1, weights(1))
    other = Manifest.build([*SPECS[:-1], ("head", torch.float32, (5,))], 3000)

    with pytest.raises(WeightSyncError, match="'head' is extra; 'norm' is missing"):
        WeightSync(other, SharedMemorySender(other), target, timeout_s=10).push(2, weights(2))

    target.assert_serves(1)


def test_a_tensor_is_let_go_before_the_next_one_is_asked_for_whole_or_cut():
    manifest = Manifest.build(SPECS, 1024)
    held = []

    def source():
        for name, tensor in weights(1):
            full = tensor.clone()
            reference = weakref.ref(full)
            yield name, full
            del full
            held.append(reference() is not None)

    WeightSync(manifest, SharedMemorySender(manifest), Target(), timeout_s=10).push(1, source())

    assert held == [False] * len(SPECS) and any(not piece.is_whole for piece in manifest.pieces)


def test_the_iterator_runs_to_its_end_also_when_the_sync_fails():
    seen = []

    def source():
        for name, tensor in weights(1):
            seen.append(name)
            yield ("wrong" if name == "layers.1.weight" else name), tensor

    with pytest.raises(WeightSyncError, match="'wrong'"):
        WeightSync(MANIFEST, SharedMemorySender(MANIFEST), Target(), timeout_s=10).push(1, source())

    assert seen == [name for name, _, _ in SPECS]


def test_a_receiver_that_does_not_answer_is_aborted_at_the_deadline():
    class Stuck(Target):
        def weights_load(self, index):
            return Future() if index == 1 else super().weights_load(index)

    target = Stuck()
    started = time.monotonic()

    with pytest.raises(WeightSyncError, match=r"version 1 took longer than 0.3 s .*loading bucket 1 of"):
        WeightSync(MANIFEST, SharedMemorySender(MANIFEST), target, timeout_s=0.3).push(1, weights(1))

    assert time.monotonic() - started < 30
    assert target.aborted and target.receiver.served_version == 0


def test_a_receiver_that_reports_less_than_was_sent_is_not_believed():
    class Liar(Target):
        def weights_commit(self):
            report = super().weights_commit().result()[0]
            return done(lambda: [ReceiverReport(report.receiver, report.version, report.tensors - 1, report.nbytes, 0)])

    with pytest.raises(WeightSyncError, match=f"{len(SPECS) - 1} tensors"):
        WeightSync(MANIFEST, SharedMemorySender(MANIFEST), Liar(), timeout_s=10).push(1, weights(1))


def test_a_second_sync_during_the_first_is_refused():
    receiver, sender = Target().receiver, SharedMemorySender(MANIFEST)
    receiver.begin(MANIFEST, sender.handle(), 1)

    with pytest.raises(WeightSyncError, match="already under way"):
        receiver.begin(MANIFEST, sender.handle(), 2)


def test_a_bucket_out_of_order_and_a_commit_before_the_last_are_refused():
    receiver, sender = Target().receiver, SharedMemorySender(MANIFEST)
    receiver.begin(MANIFEST, sender.handle(), 1)

    with pytest.raises(WeightSyncError, match="expected bucket 0, was told to load 1"):
        receiver.load(1)
    with pytest.raises(WeightSyncError, match=f"0 of {len(MANIFEST.buckets)} buckets have arrived"):
        receiver.commit()
    assert receiver.abort()
    with pytest.raises(WeightSyncError, match="no sync is under way"):
        receiver.load(0)


def shared_memory_with_a_name() -> list[str]:
    """What this process has mapped of /dev/shm."""
    return [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]


def weights_without_a_name() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "hrl-weights" in line]


def test_shared_memory_has_no_name_and_goes_with_its_last_user():
    gc.collect()
    named, descriptors = shared_memory_with_a_name(), len(os.listdir("/proc/self/fd"))
    of_others = weights_without_a_name()
    sender = SharedMemorySender(MANIFEST)
    reader = SharedMemoryReader(MANIFEST, sender.handle())
    sender.buffer(0)[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)

    assert reader.bucket(0)[:4].tolist() == [1, 2, 3, 4]
    assert shared_memory_with_a_name() == named
    handle = sender.handle()
    sender.close()
    assert reader.bucket(0)[:4].tolist() == [1, 2, 3, 4]
    del reader
    gc.collect()

    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert weights_without_a_name() == of_others
    with pytest.raises(WeightSyncError, match="cannot open|not the memory"):
        SharedMemoryReader(MANIFEST, handle)


def test_a_descriptor_that_was_reused_is_not_taken_for_the_senders_memory(tmp_path):
    sender = SharedMemorySender(MANIFEST)
    other = SharedMemorySender(MANIFEST)
    handle = {**sender.handle(), "fd": other.handle()["fd"]}

    with pytest.raises(WeightSyncError, match="not the memory that was announced"):
        SharedMemoryReader(MANIFEST, handle)


def test_handles_and_manifests_are_plain_data():
    def plain(value) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        return isinstance(value, int | float | str | bytes)

    assert plain(SharedMemorySender(MANIFEST).handle()) and plain(MANIFEST.to_plain())


def test_threads_are_not_left_behind():
    before = threading.active_count()
    WeightSync(MANIFEST, SharedMemorySender(MANIFEST), Target(), timeout_s=10).push(1, weights(1))
    assert threading.active_count() == before
