"""Weights that pass through files: a file of buckets, and a folder that any engine loads."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hrl.workers.weight_sync import own_place
from hrl.workers.weight_sync.own_place import OwnPlace, remove_what_was_left, this_machine
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.saved_folder import SavedFolderWriter
from hrl.workers.weight_sync.sender import WeightSync
from hrl.workers.weight_sync.shared_file import SharedFileReader, SharedFileSender
from hrl.workers.weight_sync.wire import Deadline, Manifest, WeightSyncError, seal
from tests.workers.weight_sync.test_sender import MANIFEST, SPECS, Target, weights


def test_a_sync_through_a_file_brings_what_was_sent_and_leaves_nothing(tmp_path):
    sender, target = SharedFileSender(MANIFEST, tmp_path), Target()
    sync = WeightSync(MANIFEST, sender, target, timeout_s=10.0)
    for version in (1, 2):
        (report,) = sync.push(version, weights(version)).receivers
        assert (report.version, report.read_back) == (version, len(SPECS))
    for (name, tensor), (_, dtype, _) in zip(weights(2), SPECS, strict=True):
        assert torch.equal(target.writer.weights[name], tensor.to(dtype))
    assert len(list(tmp_path.iterdir())) == 1
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_an_earlier_sync_or_of_another_length_is_refused(tmp_path):
    sender, target = SharedFileSender(MANIFEST, tmp_path), Target()
    sender.deadline = Deadline(10.0, "test")
    for index, bucket in enumerate(MANIFEST.buckets):
        seal(sender.buffer(index), bucket, index, 1)
        sender.publish(index)
    target.weights_begin(MANIFEST, sender.handle(), 2).result()
    with pytest.raises(WeightSyncError, match="expected bucket 0 of version 2, found bucket 0 of version 1"):
        target.weights_load(0).result()
    reader = SharedFileReader(MANIFEST, sender.handle())
    os.truncate(sender.handle()["path"], 100)
    with pytest.raises(WeightSyncError, match="has 100 bytes instead of"):
        reader.bucket(0)
    sender.close()
    with pytest.raises(WeightSyncError, match="has to be a folder that the server sees under the same name"):
        reader.bucket(0)


@pytest.mark.parametrize("make", [lambda place: SharedFileSender(MANIFEST, place), lambda place: begun(place)])
def test_a_place_that_can_not_be_written_is_told_by_its_key(tmp_path, make):
    (tmp_path / "file").touch()
    with pytest.raises(
        WeightSyncError, match="rollout.server.weights_folder=.*file.*folder that (this machine|the run)"
    ):
        make(tmp_path / "file")


def begun(place: Path) -> SavedFolderWriter:
    writer = SavedFolderWriter(place.parent, place)
    writer.begin()
    return writer


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"old weights")
    return folder


def test_a_saved_folder_has_the_new_weights_beside_the_models_other_files(tmp_path, model):
    place = tmp_path / "place"
    place.mkdir()
    writer = SavedFolderWriter(model, place)
    receiver, digests = WeightReceiver(writer, "folder"), []
    target = Target()
    target.receiver = receiver
    from hrl.workers.weight_sync.shared_memory import SharedMemorySender

    sync = WeightSync(MANIFEST, SharedMemorySender(MANIFEST), target, timeout_s=10.0)
    for version in (1, 2, 2):
        (report,) = sync.push(version, weights(version)).receivers
        assert report.read_back == len(SPECS)
        digests.append(writer.digest)
        index = json.loads((writer.folder / "model.safetensors.index.json").read_text())["weight_map"]
        there = {
            name: tensor for file in set(index.values()) for name, tensor in load_file(writer.folder / file).items()
        }
        for (name, tensor), (_, dtype, _) in zip(weights(version), SPECS, strict=True):
            assert torch.equal(there[name], tensor.to(dtype)) and name in index
        assert {"config.json", "tokenizer.json"} <= {file.name for file in writer.folder.iterdir()}
        assert (writer.folder / "model.safetensors").exists() is False
        assert list(writer.folder.parent.iterdir()) == [writer.folder]  # one copy at any time
    assert digests[0] != digests[1] == digests[2]
    (own,) = place.iterdir()
    writer.drop()
    assert list(own.iterdir()) == [] and writer.folder is None
    writer.close()
    assert list(place.iterdir()) == []


def test_what_is_not_sent_comes_from_the_models_folder(tmp_path, model):
    save_file({"tower": torch.arange(4.0), "norm": torch.zeros(3)}, model / "model.safetensors")
    writer = begun_with(tmp_path, model)
    for _ in range(2):
        writer.finish(["tower"])
        index = json.loads((writer.folder / "model.safetensors.index.json").read_text())["weight_map"]
        found = {name: load_file(writer.folder / file)[name] for name, file in index.items()}
        assert torch.equal(found["tower"], torch.arange(4.0)) and torch.equal(found["norm"], torch.ones(3))
        assert found.keys() == {"tower", "norm"}
        writer.drop()
        writer.begin()
        writer.write([("norm", torch.ones(3))])
    with pytest.raises(WeightSyncError, match="1 tensors that are not trained, such as 'other', are not sent, and"):
        writer.finish(["tower", "other"])
    writer.cancel()
    writer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def begun_with(place: Path, model: Path) -> SavedFolderWriter:
    writer = SavedFolderWriter(model, place)
    writer.begin()
    writer.write([("norm", torch.ones(3))])
    return writer


def test_what_a_killed_process_left_is_removed_and_what_lives_stays(tmp_path, model):
    left = tmp_path / f"hrl-model-{this_machine()}-0123456789abcdef"
    (left / "1").mkdir(parents=True)
    (tmp_path / f"hrl-weights-{this_machine()}-0123456789abcdef").touch()
    first = begun_with(tmp_path, model)
    second = begun_with(tmp_path, model)
    manifest = Manifest.build([("norm", torch.float32, (3,))], 1 << 20)
    senders = [SharedFileSender(manifest, tmp_path) for _ in range(2)]
    assert not left.exists()
    assert len(list(tmp_path.glob("hrl-model-*"))) == 2 and len(list(tmp_path.glob("hrl-weights-*"))) == 2
    for each in (first, second, *senders):
        each.close()
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def aged(path: Path, days: float) -> Path:
    then = time.time() - days * 86_400
    os.utime(path, (then, then))
    return path


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_another_machine_left_goes_after_a_week_without_a_sign_of_life(tmp_path, is_folder):
    """Its locks may not be seen here; those of this machine are."""
    names = [f"kind-{machine}-{n:016x}" for machine in ("other.12345678", "third.") for n in range(3)]
    for name in names:
        (tmp_path / name).mkdir() if is_folder else (tmp_path / name).touch()
    old = [aged(tmp_path / name, 8.0) for name in names if not name.endswith("0")]
    living = OwnPlace(tmp_path, "kind", is_folder=is_folder)
    assert not any(path.exists() for path in old) and sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [names[0], names[3], living.path.name]
    )
    aged(living.path, 8.0)
    remove_what_was_left(tmp_path, "kind")
    assert living.path.exists()  # its lock is held
    living.touch()
    assert time.time() - living.path.stat().st_mtime < 60.0
    living.remove()
    assert not living.path.exists()


@pytest.mark.parametrize("is_folder", [True, False])
def test_nobody_finds_a_place_that_is_not_locked_yet(tmp_path, monkeypatch, is_folder):
    """Another process looks just before the lock is taken, and once it is."""
    lock, seen = own_place.fcntl.flock, []

    def looks_first(handle: int, how: int) -> None:
        monkeypatch.setattr(own_place.fcntl, "flock", lock)
        remove_what_was_left(tmp_path, "kind")
        lock(handle, how)
        seen.append(sorted(path.name[0] for path in tmp_path.iterdir()))

    monkeypatch.setattr(own_place.fcntl, "flock", looks_first)
    place = OwnPlace(tmp_path, "kind", is_folder=is_folder)
    assert seen == [["."]]
    remove_what_was_left(tmp_path, "kind")
    assert place.path.exists() and [path.name for path in tmp_path.iterdir()] == [place.path.name]
    place.remove()
    (tmp_path / f".kind-{this_machine()}-{1:016x}").touch()  # of a process that was killed before it could name it
    remove_what_was_left(tmp_path, "kind")
    assert len(list(tmp_path.iterdir())) == 1
    aged(tmp_path / f".kind-{this_machine()}-{1:016x}", 0.1)
    remove_what_was_left(tmp_path, "kind")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["hrl-model-sft-final", "hrl-model-0123456789abcdef", "hrl-model-a.b-backup"])
def test_what_a_user_named_like_ours_stays_however_old_it_is(tmp_path, name):
    (tmp_path / name).mkdir()
    os.utime(tmp_path / name, (0, 0))
    remove_what_was_left(tmp_path, "hrl-model")
    assert (tmp_path / name).is_dir()
