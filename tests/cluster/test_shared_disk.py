"""Ranks with a disk of their own are found out: before the first step, and before a checkpoint is published."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.cluster.checkpoints import CheckpointError
from hrl.cluster.shared_disk import require_all_shards, require_shared
from hrl.report.run_folder import RunFolderError
from hrl.workers.engine.background import write_record
from hrl.workers.engine.digest import Written
from hrl.workers.model_worker import file_sizes
from tests.trainer.ppo.driver import Driver, Workers


class Nodes:
    """A group of ranks that see the same paths, each below the root of its node."""

    def __init__(self, *roots: Path) -> None:
        self.roots = roots
        self.roles = ("actor",)
        self.node_ips = [f"10.0.0.{number}" for number in range(len(roots))]

    def folder(self, rank: int, folder: str | Path) -> Path:
        return self.roots[rank] / str(folder).removeprefix("/")

    def files_below(self, folder: str) -> list[dict[str, int]]:
        return [file_sizes(self.folder(rank, folder)) for rank in range(len(self.roots))]


class Saving(Workers):
    """Every rank writes a shard, as large as its number, where its node sees the checkpoint's folder."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__()
        self.trained = [nodes]

    def save(self, folder: Path, contents: list[str]) -> list[Path]:
        for rank in range(len(self.trained[0].roots)):
            mine = self.trained[0].folder(rank, folder / "actor")
            mine.mkdir(parents=True, exist_ok=True)
            (mine / f"shard-{rank}").write_bytes(b"w" * (1 + rank))
            write_record(mine / f"written-{rank}.json", [Written.by_reading(mine / f"shard-{rank}")])
        return [folder / "actor" / f"written-{rank}.json" for rank in range(len(self.trained[0].roots))]


HERE = Path("/")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The root of a node with a disk of its own."""
    return tmp_path / "node"


def test_a_disk_that_all_share_passes_and_nothing_is_left_there(tmp_path: Path) -> None:
    require_shared(tmp_path, [Nodes(HERE, HERE), Nodes(HERE)])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_of_the_run_is_told_without_its_key(tmp_path: Path, elsewhere: Path) -> None:
    with pytest.raises(CheckpointError, match="does not see what the driver writes") as blind:
        require_shared(tmp_path, [Nodes(HERE, elsewhere)], 0.0, is_of_run=False)
    with pytest.raises(RunFolderError, match=f"^{tmp_path}/gone can't be written: No such") as missing:
        require_shared(tmp_path / "gone", [Nodes(HERE)], is_of_run=False)
    assert not any("default_local_dir" in str(told.value) for told in (blind, missing))


def test_a_rank_that_does_not_see_the_run_folder_is_named_before_the_first_step(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hrl.trainer.loop.require_shared", lambda *a: require_shared(*a, patience_s=0.0))
    driver = Driver(tmp_path / "run", "trainer.save_freq=1", workers=Saving(Nodes(HERE, elsewhere)))
    with pytest.raises(CheckpointError, match=r"^rank 1 of actor on node 10\.0\.0\.1 does not .*default_local_dir"):
        driver.fit()
    assert driver.workers.done == []
    assert not list((tmp_path / "run").glob(".probe*"))


def test_a_run_that_saves_nothing_needs_no_shared_disk(tmp_path: Path, elsewhere: Path) -> None:
    Driver(tmp_path / "run", "trainer.save_freq=-1", workers=Saving(Nodes(HERE, elsewhere))).fit()


def test_a_checkpoint_whose_shards_are_on_two_disks_is_not_published(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hrl.trainer.loop.require_shared", lambda *a: None)
    monkeypatch.setattr("hrl.trainer.loop.require_all_shards", lambda *a: require_all_shards(*a, patience_s=0.0))
    driver = Driver(tmp_path / "run", "trainer.save_freq=1", workers=Saving(Nodes(HERE, elsewhere)))
    with pytest.raises(CheckpointError, match=r"rank 1 of actor on node 10\.0\.0\.1 wrote actor/shard-1, .*share"):
        driver.fit()
    assert driver.trainer.checkpoints.steps() == []
    assert driver.trainer.checkpoints.interrupted() == [], "what the driver sees of it is removed"


def test_a_checkpoint_with_the_shards_of_all_ranks_is_published(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "run", "trainer.save_freq=2", workers=Saving(Nodes(HERE, HERE)))
    driver.fit()
    assert driver.trainer.checkpoints.steps() == [2]


def test_a_shard_that_arrives_a_little_later_or_grows_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "tmp.step_1"
    folder.mkdir()
    (folder / "shard").write_bytes(b"half")

    class Late(Nodes):
        def files_below(self, folder: str) -> list[dict[str, int]]:
            return [{"shard": 8}]

    late = Late(HERE)
    with pytest.raises(CheckpointError, match="shard"):
        require_all_shards(folder, [late], tmp_path, patience_s=0.0)
    (folder / "shard").write_bytes(b"complete")
    require_all_shards(folder, [late], tmp_path)
