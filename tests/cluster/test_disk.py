"""What is said when there is no room, and which errors are the disk's."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from hrl.cluster.checkpoints import CheckpointError
from hrl.cluster.disk import gigabytes, in_words, refusal_of_disk, require_room
from hrl.report.run_folder import RunFolderError
from hrl.single_controller.worker_errors import WorkerError, WorkerTimeoutError


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


def test_small_sizes_are_not_nothing() -> None:
    assert (gigabytes(12_300_000_000), gigabytes(60_000), in_words({})) == ("12.30 GB", "0.06 MB", "")
