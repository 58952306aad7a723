"""Whether all ranks write to the driver's disk: asked before the first step, and before a checkpoint counts as whole.

A rank on a node with a disk of its own would write its shards there, under the same path, and nobody would miss them
until a run resumes.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from hrl.cluster.checkpoints import CheckpointError
from hrl.report.run_folder import writing_to
from hrl.workers.model_worker import file_sizes

T = TypeVar("T")

_TOKEN_PATIENCE_S = 5.0
_SHARDS_PATIENCE_S = 60.0
"""NFS clients may take this long (`acdirmax`) to look again into a folder that they have seen before."""
_POLL_S = 0.5


class Ranks(Protocol):
    """What this module needs of a worker group."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The group's only role."""

    @property
    def node_ips(self) -> list[str]:
        """The address of each rank's node."""

    def files_below(self, folder: str) -> list[dict[str, int]]:
        """Return what each rank sees below a folder, see `ModelWorker.files_below`."""


def require_shared(
    folder: Path, groups: Iterable[Ranks], patience_s: float = _TOKEN_PATIENCE_S, *, is_of_run: bool = True
) -> None:
    """Let every rank look for a file that the driver has just written.

    Args:
        folder: The run folder, or another that ranks are to write to.
        groups: Those that write there.
        patience_s: How long to go on looking, in seconds.
        is_of_run: Whether the configuration says where the folder is.

    Raises:
        CheckpointError: A rank does not see it; names rank, node and what to change.
        RunFolderError: The driver can't write there.
    """
    probe = folder / f".probe.{uuid.uuid4().hex}"  # a new name: no node has cached that it is not there
    try:
        with writing_to(folder, is_of_run=is_of_run):
            probe.mkdir()
            (probe / "token").touch()
        written = file_sizes(probe)
        blind = _first(lambda: (rank for rank, seen in _ask(groups, probe) if seen != written), patience_s)
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    if blind is not None:
        advice = _advice(folder, is_of_run=is_of_run)
        raise CheckpointError(f"{blind} does not see what the driver writes to {folder}. {advice}")


def require_all_shards(
    folder: Path, groups: Iterable[Ranks], run_folder: Path, patience_s: float = _SHARDS_PATIENCE_S
) -> None:
    """Check that everything that ranks see of a checkpoint is in the driver's folder, whole.

    Args:
        folder: Of the checkpoint, not yet published.
        groups: Those that wrote it; their writing has ended.
        run_folder: Of the run.
        patience_s: How long to go on looking, in seconds.

    Raises:
        CheckpointError: A file is missing here or has another size; names rank, node and file.
    """
    reports = list(_ask(groups, folder))
    missing = _first(lambda: _missing(reports, file_sizes(folder)), patience_s)
    if missing is not None:
        rank, file = missing
        raise CheckpointError(
            f"{folder} is not whole and is not published: {rank} wrote {file}, which is not there as the driver sees "
            f"it. {_advice(run_folder, is_of_run=True)}"
        )


def _ask(groups: Iterable[Ranks], folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    for group in groups:
        for number, seen in enumerate(group.files_below(str(folder))):
            yield f"rank {number} of {group.roles[0]} on node {group.node_ips[number]}", seen


def _missing(reports: Iterable[tuple[str, Mapping[str, int]]], here: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for rank, seen in reports:
        yield from ((rank, name) for name, size in sorted(seen.items()) if here.get(name) != size)


def _first(failures: Callable[[], Iterator[T]], patience_s: float) -> T | None:
    """Retry for `patience_s` seconds; return the first remaining failure, or None as soon as there is none."""
    deadline = time.monotonic() + patience_s
    while (failure := next(failures(), None)) is not None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return failure


def _advice(folder: Path, *, is_of_run: bool) -> str:
    named = f"trainer.default_local_dir={folder}" if is_of_run else str(folder)
    return (
        f"{named} must be on a disk that all nodes share, under the same path; or keep the trained models on one node, "
        "the driver's"
    )
