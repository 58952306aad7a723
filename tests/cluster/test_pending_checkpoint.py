"""A checkpoint is published when all ranks have written their part, and not before."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hrl.cluster.checkpoints import STATE_FILE, CheckpointError, CheckpointStore, CheckpointTimeoutError, state_text
from hrl.cluster.disk import refusal_of_disk
from hrl.cluster.manifest import MANIFEST
from hrl.cluster.pending_checkpoint import PendingCheckpoint
from hrl.report.run_folder import RunFolderError
from hrl.workers.engine.background import write_record
from hrl.workers.engine.digest import FileDigest, Written


class Saving:
    """Two ranks that save step 2 of a run which keeps one checkpoint and has that of step 1."""

    def __init__(self, folder: Path, state: Mapping[str, Any] | None = None, deadline_s: float = 60.0) -> None:
        self.store = CheckpointStore(folder / "checkpoints", keep=1)
        self.store.begin(1)
        self.store.commit(1, state_text({"step": 1}))
        self.actor = self.store.begin(2) / "actor"
        self.actor.mkdir()
        records = map(self.record, (0, 1))
        self.log_was_durable: list[bool] = []
        self.pending = PendingCheckpoint(
            self.store,
            2,
            state or {"step": 2},
            records,
            folder,
            make_log_durable=lambda: self.log_was_durable.append(not self.store.path(2).exists()),
            deadline_s=deadline_s,
        )

    def record(self, rank: int) -> Path:
        return self.actor / f"written-rank-{rank}.json"

    def write(self, rank: int) -> None:
        shard = self.actor / f"shard-{rank}"
        shard.write_bytes(b"weights")
        write_record(self.record(rank), [Written.by_reading(shard)])


def test_it_is_published_when_the_last_rank_has_written(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.write(1)
    assert saving.store.steps() == [1] and not saving.pending.is_over and not saving.log_was_durable
    saving.write(0)
    assert saving.pending.stop(10.0) == saving.store.path(2)
    assert saving.store.steps() == [2], "the one before goes only now"
    assert saving.pending.is_over and saving.pending.seconds > 0
    assert saving.log_was_durable == [True], "the log is on the disk before a checkpoint of its steps counts"
    assert sorted(file.name for file in (saving.store.path(2) / "actor").iterdir()) == [
        "shard-0",
        "shard-1",
        "written-rank-0.json",
        "written-rank-1.json",
    ]


def test_one_that_is_given_up_leaves_the_one_before(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.write(0)
    assert saving.pending.stop() is None
    assert saving.store.choose("auto", None).path == saving.store.path(1)
    assert [path.name for path in saving.store.interrupted()] == ["tmp.step_2"]


def test_a_file_that_is_shorter_than_its_record_says_is_not_there(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.write(1)
    (saving.actor / "shard-0").write_bytes(b"we")
    saving.record(0).write_text(json.dumps({"files": {"shard-0": {"size": 7, "xxh3_128": "0" * 32}}}))
    assert saving.pending.stop(0.3) is None


def test_what_was_written_in_the_last_moment_is_published(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.write(0)
    saving.write(1)
    assert saving.pending.stop() == saving.store.path(2), "all of it was there when the thread was stopped"


def test_a_driver_that_cannot_publish_says_so_and_names_the_folder(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    (saving.store.temporary(2) / "state.json").mkdir()  # what it has to write is not to be written
    saving.write(0)
    saving.write(1)
    with pytest.raises(RunFolderError, match=f"{tmp_path} can't be written"):
        saving.pending.stop(10.0)
    assert saving.store.steps() == [1]


def test_the_state_is_that_of_the_moment_it_was_begun(tmp_path: Path) -> None:
    seen = {"prompts": [3]}  # a sampler's, which goes on
    saving = Saving(tmp_path, {"step": 2, "sampler": seen})
    seen["prompts"].append(4)
    saving.write(0)
    saving.write(1)
    assert json.loads((saving.pending.stop(10.0) / STATE_FILE).read_text())["sampler"] == {"prompts": [3]}


def test_a_state_that_cannot_be_written_is_refused_at_once_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its part 'sampler' is no JSON .*ndarray"):
        Saving(tmp_path, {"step": 2, "sampler": {"seen": np.zeros(2)}})


def test_whatever_goes_wrong_in_the_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> Path:
        raise KeyError("unheard of")

    saving = Saving(tmp_path)
    monkeypatch.setattr(CheckpointStore, "commit", break_down)
    saving.write(0)
    saving.write(1)
    with pytest.raises(KeyError, match="unheard of"):
        saving.pending.stop(10.0)


def test_a_file_system_that_does_not_answer_is_waited_for_no_longer_than_allowed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers, publish = threading.Event(), threading.Event(), CheckpointStore.publish

    def hang(self: CheckpointStore, step: int) -> Path:
        asked.set()
        assert answers.wait(60.0)
        return publish(self, step)

    saving = Saving(tmp_path, deadline_s=0.1)
    monkeypatch.setattr(CheckpointStore, "publish", hang)
    saving.write(0)
    saving.write(1)
    assert asked.wait(60.0)
    with pytest.raises(CheckpointTimeoutError) as hangs:
        saving.pending.stop()
    assert str(hangs.value).startswith(
        f"step 2 is not saved: its files in {tmp_path}/checkpoints were still being synced or read back after 0.1 s "
        "(trainer.timeouts.call_s). "
    )
    assert refusal_of_disk(hangs.value) is None, "nobody removes what may still be written"
    assert saving.store.interrupted() == [saving.store.temporary(2)] and saving.store.steps() == [1]
    answers.set()
    assert saving.pending.stop(10.0) == saving.store.path(2)


def test_one_that_is_not_read_back_in_time_is_what_the_next_start_reads_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers, read, hangs = threading.Event(), threading.Event(), FileDigest.of, True

    def hang(path: Path, *, from_disk: bool = False) -> FileDigest:
        if hangs and from_disk:
            asked.set()
            assert answers.wait(60.0)
        return read(path, from_disk=from_disk)

    saving = Saving(tmp_path, deadline_s=0.1)
    monkeypatch.setattr(FileDigest, "of", hang)
    saving.write(0)
    saving.write(1)
    assert asked.wait(60.0), "it has its name, and is read back"
    with pytest.raises(CheckpointTimeoutError):
        saving.pending.stop()
    assert saving.store.steps() == [1, 2], "the one before stays"
    hangs = False
    assert CheckpointStore(saving.store.folder).choose("auto", None).path == saving.store.path(2)
    answers.set()
    assert saving.pending.stop(10.0) == saving.store.path(2)


def test_a_damaged_older_one_does_not_keep_it_from_being_published(tmp_path: Path, caplog) -> None:
    saving = Saving(tmp_path)
    (saving.store.path(1) / MANIFEST).write_text("{")
    saving.write(0)
    saving.write(1)
    assert saving.pending.stop(10.0) == saving.store.path(2)
    assert f"{saving.store.path(1)} is damaged, and is not one of the 1 that are kept" in caplog.text
    assert saving.store.best() is None


def test_nothing_is_synced_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = Counter[str](), os.fsync

    def count(handle: int) -> None:
        synced[Path(f"/proc/self/fd/{handle}").readlink().name] += 1
        sync(handle)

    saving = Saving(tmp_path)
    (saving.store.temporary(2) / "tokenizer.json").write_text("the driver's own")
    monkeypatch.setattr("os.fsync", count)
    monkeypatch.setattr("secrets.token_hex", lambda _: "new")
    saving.write(0)
    saving.write(1)
    saving.pending.stop(10.0)
    # `write` stands for a rank that has synced its shard.
    assert synced == {
        ".written-rank-0.json.new.partial": 1,
        ".written-rank-1.json.new.partial": 1,
        "tokenizer.json": 1,
        STATE_FILE: 1,
        ".manifest.json.new.partial": 1,
        "actor": 1,
        "tmp.step_2": 2,  # the second time for the manifest's name
        "checkpoints": 1,
        tmp_path.name: 1,
    }
