"""Files that a rank writes in the background, and the record that tells when they are on disk."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

from hrl.errors import HrlError
from hrl.files import make_durable, write_whole
from hrl.workers.engine.digest import FileDigest, Written

_LOWEST_PRIORITY = 19


class PartError(HrlError, ValueError):
    """A file of a rank's part of a checkpoint is not what a rank of this version of hrl writes."""

    @classmethod
    def of(cls, file: Path, error: Exception) -> PartError:
        """Return the error for a file, and what is wrong with its content."""
        return cls(f"{file} is damaged: {' '.join(str(error).split())}")


class BackgroundWriter:
    """Writes in one thread, one job after the other. It gives way to threads that compute."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=give_way)
        self._jobs: list[Future[None]] = []

    def begin(self, write: Callable[[], Iterable[Written]], record: Path | None = None) -> None:
        """Write files, make them durable, and then write a record of them.

        Args:
            write: Writes files and returns them, with their digests.
            record: See `write_record`.
        """
        self._jobs.append(self._thread.submit(_run, write, record))

    def finish(self, *, wait: bool = True) -> None:
        """Wait for all jobs, or look at those that have ended; raise what went wrong in one, once."""
        while self._jobs and (wait or self._jobs[0].done()):
            job = self._jobs[0]
            try:
                job.result()
            finally:
                if job.done():  # and not Ctrl-C
                    self._jobs.pop(0)

    def abandon(self) -> None:
        """Wait until nothing is written any more, whatever became of it."""
        wait_for(self._jobs)
        self._jobs.clear()


def give_way() -> None:
    """Give this thread the lowest priority.

    It still gets about a hundredth of a busy core, and a whole one while the run waits for it.
    """
    # An engine's threads share each product and wait for the last of them: a writer that takes half of one core costs
    # them half of all. Elsewhere than on Linux the call is for a whole process.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _run(write: Callable[[], Iterable[Written]], record: Path | None) -> None:
    files = list(write())
    for file in files:
        make_durable(file.path)
    for folder in {file.path.parent for file in files}:
        make_durable(folder)
    if record is not None:
        write_record(record, files)


def write_record(record: Path, files: Iterable[Written]) -> None:
    """Say that files are on disk, how large they are and what their hashes are.

    Args:
        record: The file that says it; it appears as a whole.
        files: Below the record's folder.
    """
    said = {str(file.path.relative_to(record.parent)): file.digest.to_plain() for file in files}
    write_whole(record, json.dumps({"files": said}, indent=1, sort_keys=True) + "\n", durable=True)


def is_written(record: Path) -> bool:
    """Return whether the record is there, and the files that it names have their sizes as seen from here."""
    try:
        return all(file.stat().st_size == digest.size for file, digest in recorded(record).items())
    except FileNotFoundError:
        return False


def recorded(record: Path) -> dict[Path, FileDigest]:
    """Return the files that a record names, which are durable, and what they hold.

    Raises:
        FileNotFoundError: There is no such record.
        PartError: It is none.
    """
    match read_part(record):
        case {"files": dict(named)}:
            try:
                return {record.parent / name: FileDigest.of_plain(digest) for name, digest in named.items()}
            except ValueError as error:
                raise PartError.of(record, error) from error
    raise PartError(f"{record} is damaged: it lists no files")


def read_part(file: Path) -> Any:
    """Return the JSON in a file of a rank's part of a checkpoint.

    Raises:
        FileNotFoundError: It is not there.
        PartError: It is no JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PartError.of(file, error) from error
