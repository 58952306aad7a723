"""What is said when there is no room, and which errors are the disk's."""

from __future__ import annotations

import copy
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hrl.cluster.checkpoints import STATE_FILE, CheckpointError, CheckpointStore, Choice, state_text
from hrl.cluster.disk import gigabytes, in_words, refusal_of_disk, require_room
from hrl.report.run_folder import RunFolderError, writing_to
from hrl.single_controller.worker_errors import WorkerError, WorkerTimeoutError
from hrl.workers.engine.digest import DigestingFile


def worker_error(cause: BaseException) -> WorkerError:
    error = WorkerError(3, "critic.finish_save", "save_checkpoint", repr(cause), "Traceback …")
    error.__cause__ = copy.copy(cause)  # which pickles as it does, as it comes from a rank
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            worker_error(OSError(30, "Read-only file system", "/run/shard")),
            "rank 3 of critic can't write /run/shard: Read-only file system; make it writable, or name a folder in "
            "another place with trainer.default_local_dir",
        ),
        (worker_error(OSError(122, "Disk quota exceeded", "/s")), "rank 3 of critic can't write /s: Disk quota excee"),
        (
            worker_error(OSError(27, "File too large", "/s")),
            "rank 3 of critic can't write /s: File too large; make",
        ),
        (OSError(28, "No space left on device", "/s"), "a rank can't write /s: No space left on device; make room the"),
        (RunFolderError("the run folder x can't be written"), "the run folder x can't be written"),
        (CheckpointError("step_2 is not what was written to it"), "step_2 is not what was written to it"),
        (worker_error(KeyError("what")), None),
        (worker_error(ConnectionResetError(104, "Connection reset by peer")), None),
        (WorkerTimeoutError([1], "actor.finish_save", "save_checkpoint", 5.0), None),
        (KeyError("what"), None),
    ],
)
def test_an_error_of_the_disk_is_told_in_one_line_and_any_other_is_none(error: BaseException, said: str | None) -> None:
    told = refusal_of_disk(error)
    assert told is None if said is None else told is not None and told.startswith(said) and "\n" not in told


def test_there_is_room_for_what_fits_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"model": 40 << 20, "optimizer": 80 << 20}
    for free, fits in ((184 << 20, True), ((184 << 20) - 1, False)):  # 64 MiB for what is no tensor
        monkeypatch.setattr("hrl.cluster.disk.room_in", lambda folder, free=free: free)
        if fits:
            require_room(tmp_path, sizes)
            continue
        with pytest.raises(CheckpointError, match=r"takes 0\.19 GB \(model 0\.04 GB, optimizer 0\.08 GB\).*left"):
            require_room(tmp_path, sizes)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 kB."""
    disk = tmp_path / "run" / "checkpoints"
    disk.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"nobody mounts a disk here: {mounted.stderr.decode()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("full_at", ["a shard", "the manifest"])
def test_a_disk_that_is_full_leaves_the_checkpoint_before_and_nothing_else(small_disk: Path, full_at: str) -> None:
    store = CheckpointStore(small_disk, keep=1)
    (store.begin(1) / "weights").write_bytes(b"w" * 60_000)
    store.commit(1, state_text({"step": 1}))
    shard = store.begin(2) / "shard"
    with pytest.raises(OSError, match=f"No space left on device: '{shard}'"):  # noqa: SIM117
        with DigestingFile(shard) as file:
            while True:
                file.write(b"w" * 4096)
    if full_at == "the manifest":
        os.truncate(shard, shard.stat().st_size // 4096 * 4096 - 4096)  # one page, for the state
    with pytest.raises(RunFolderError) as refused, writing_to(small_disk.parent):
        store.commit(2, state_text({"step": 2}))
    assert (store.temporary(2) / STATE_FILE).stat().st_size == (
        len(state_text({"step": 2})) if full_at == "the manifest" else 0
    )
    assert "No space left on device" in str(refused.value) and "trainer.default_local_dir" in str(refused.value)
    store.discard(2)
    assert [path.name for path in small_disk.iterdir()] == ["step_1"]
    assert store.choose("auto", None) == Choice(store.path(1))


def test_a_limit_on_the_size_of_files_names_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with (
            pytest.raises(OSError, match=f"File too large: '{tmp_path}/shard'"),
            DigestingFile(tmp_path / "shard") as file,
        ):
            file.write(b"w" * 50_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_small_sizes_are_not_nothing() -> None:
    assert (gigabytes(12_300_000_000), gigabytes(60_000), in_words({})) == ("12.30 GB", "0.06 MB", "")
