"""Weights that pass through files: a file of buckets, and a folder that any engine loads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
    assert digests[0] != digests[1] == digests[2]
    assert len(list(writer.folder.parent.iterdir())) == 3
    writer.drop_earlier()
    assert list(writer.folder.parent.iterdir()) == [writer.folder]
    writer.close()
    assert list(place.iterdir()) == []


def test_what_is_not_sent_is_missed_in_a_folder(tmp_path, model):
    writer = begun_with(tmp_path, model)
    with pytest.raises(WeightSyncError, match="1 tensors that are not trained, such as 'tower', are not sent"):
        writer.finish(["tower"])
    writer.cancel()
    assert all(not list(own.iterdir()) for own in tmp_path.glob("hrl-model-*"))


def begun_with(place: Path, model: Path) -> SavedFolderWriter:
    writer = SavedFolderWriter(model, place)
    writer.begin()
    writer.write([("norm", torch.ones(3))])
    return writer


def test_what_a_killed_process_left_is_removed_and_what_lives_stays(tmp_path, model):
    left = tmp_path / "hrl-model-0123456789abcdef"
    left.mkdir()
    (tmp_path / "hrl-weights-0123456789abcdef").touch()
    first = begun_with(tmp_path, model)
    second = begun_with(tmp_path, model)
    manifest = Manifest.build([("norm", torch.float32, (3,))], 1 << 20)
    senders = [SharedFileSender(manifest, tmp_path) for _ in range(2)]
    assert not left.exists()
    assert len(list(tmp_path.glob("hrl-model-*"))) == 2 and len(list(tmp_path.glob("hrl-weights-*"))) == 2
    for each in (first, second, *senders):
        each.close()
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
