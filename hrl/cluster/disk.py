"""Whether there is room for a checkpoint, and what is said when a disk refuses one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from hrl.cluster.checkpoints import CheckpointError, CheckpointTimeoutError
from hrl.report.run_folder import RunFolderError, is_full
from hrl.single_controller.worker_errors import WorkerError

#: Room for what is not tensors: tokenizer, states, manifest.
_BESIDE_TENSORS_BYTES = 64 << 20


def require_room(folder: Path, sizes: Mapping[str, int]) -> None:
    """Refuse to begin a checkpoint that there is no room for.

    Args:
        folder: The run folder.
        sizes: Bytes of a checkpoint, by what it holds (`checkpoint.save_contents`).

    Raises:
        CheckpointError: Naming what it takes, what is free, and the keys to change.
    """
    needed, free = sum(sizes.values()) + _BESIDE_TENSORS_BYTES, room_in(folder)
    if needed > free:
        raise CheckpointError(
            f"a checkpoint takes {gigabytes(needed)} ({in_words(sizes)}), and where {folder} lies there are "
            f"{gigabytes(free)} left. Make room, save less (checkpoint.save_contents), keep fewer "
            "(trainer.max_ckpt_to_keep), or name a folder in another place with trainer.default_local_dir"
        )


def room_in(folder: Path) -> int:
    """Return the free bytes of the disk on which a folder lies; a quota is not known before it is reached."""
    return shutil.disk_usage(folder).free


def in_words(sizes: Mapping[str, int]) -> str:
    """Return sizes by name, as in `model 1.2 GB, optimizer 2.4 GB`."""
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in sizes.items())


def gigabytes(size: int) -> str:
    """Return a number of bytes in words; small ones are not 0."""
    return f"{size / 1e9:.2f} GB" if size >= 5_000_000 else f"{size / 1e6:.2f} MB"


def refusal_of_disk(error: BaseException) -> str | None:
    """Return in one line how a disk refused a save; None for an error of any other kind.

    No answer is no refusal: the part can't be removed while somebody may still write it.

    Args:
        error: What was raised while a checkpoint was written or published, on the driver or on a rank.
    """
    if isinstance(error, CheckpointTimeoutError):
        return None
    if isinstance(error, RunFolderError | CheckpointError):
        return str(error)  # a single line
    cause = error.__cause__ if isinstance(error, WorkerError) else error
    if not isinstance(cause, OSError) or cause.errno is None or isinstance(cause, TimeoutError | ConnectionError):
        return None
    who = f"rank {error.rank} of {error.method.partition('.')[0]}" if isinstance(error, WorkerError) else "a rank"
    advice = "make room there" if is_full(cause) else "make it writable"
    return (
        f"{who} can't write {cause.filename or 'its part'}: {cause.strerror}; {advice}, or name a folder in another "
        "place with trainer.default_local_dir"
    )
