"""A checkpoint is published when all ranks have written their part, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.pending_checkpoint import PendingCheckpoint
from hrl.report.run_folder import RunFolderError
from hrl.workers.engine.background import write_record


class Saving:
    """Two ranks that save step 2 of a run which keeps one checkpoint and has that of step 1."""

    def __init__(self, folder: Path) -> None:
        self.store = CheckpointStore(folder / "checkpoints", keep=1)
        self.store.begin(1)
        self.store.commit(1, {"step": 1})
        self.actor = self.store.begin(2) / "actor"
        self.actor.mkdir()
        self.pending = PendingCheckpoint(self.store, 2, {"step": 2}, map(self.record, (0, 1)), folder)

    def record(self, rank: int) -> Path:
        return self.actor / f"written-rank-{rank}.json"

    def write(self, rank: int) -> None:
        shard = self.actor / f"shard-{rank}"
        shard.write_bytes(b"weights")
        write_record(self.record(rank), [shard])


def test_it_is_published_when_the_last_rank_has_written(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.write(1)
    assert saving.store.steps() == [1] and not saving.pending.is_over
    saving.write(0)
    assert saving.pending.stop(10.0) == saving.store.path(2)
    assert saving.store.steps() == [2], "the one before goes only now"
    assert saving.pending.is_over and saving.pending.seconds > 0
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
    assert saving.store.find("auto", None) == saving.store.path(1)
    assert [path.name for path in saving.store.interrupted()] == ["tmp.step_2"]


def test_a_file_that_is_shorter_than_its_record_says_is_not_there(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.write(1)
    (saving.actor / "shard-0").write_bytes(b"we")
    saving.record(0).write_text('{"files": {"shard-0": 7}}')
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
