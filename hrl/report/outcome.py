"""How a run is going or ended: `outcome.json` in its folder."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import psutil

from hrl.files import write_whole
from hrl.masking import masked_text
from hrl.report.run_folder import LOCK_NAME, TEXT, WHOLE, DamagedFileError, read_object, require_kinds

FILE = "outcome.json"
_OWNER = re.compile(r"process (?P<pid>[0-9]{1,9}) on (?P<host>\S+)\n")
Status = Literal["running", "finished", "interrupted", "failed", "ended without a word"]


@dataclass(frozen=True)
class Outcome:
    """How a run is going or ended.

    Attributes:
        status: A run whose process was killed `ended without a word`.
        reason: The error of a failed run.
        total_steps: Number of planned steps; None if nobody wrote it down.
    """

    status: Status
    reason: str = ""
    total_steps: int | None = None

    @classmethod
    def of(cls, error: BaseException | None, total_steps: int | None = None) -> Self:
        """Return the outcome of a run that ended with this error, or None for a run without an error."""
        if error is None:
            return cls("finished", "", total_steps)
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", "", total_steps)
        return cls("failed", masked_text(f"{type(error).__name__}: {error}"), total_steps)

    def write(self, folder: Path) -> Path:
        """Write it into a run folder."""
        return write_whole(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")


def read_outcome(folder: Path) -> Outcome:
    """Return how a run is going or ended, as far as its folder tells.

    Raises:
        DamagedFileError: The file is damaged.
    """
    file = folder / FILE
    if not file.exists():  # of an older version, or a run that was killed before it began
        return Outcome("running" if is_live(folder) else "ended without a word")
    try:
        written = read_object(file)
        require_kinds(str(file), written, {"status": TEXT, "reason": TEXT, "total_steps": WHOLE})
        outcome = Outcome(**written)
    except TypeError as error:  # other keys than it was written with
        raise DamagedFileError(f"{file} is damaged: {error}. Remove it") from error
    if outcome.status == "running" and not is_live(folder):
        return Outcome("ended without a word", "", outcome.total_steps)
    return outcome


def is_live(folder: Path) -> bool:
    """Return whether the process that wrote itself into the folder's lock is alive.

    The lock itself is left alone: trying it could keep a run from starting. Of a process on another machine nothing is
    known, and it counts as alive.
    """
    lock = folder / LOCK_NAME
    owner = _OWNER.fullmatch(lock.read_text(encoding="utf-8", errors="replace")) if lock.is_file() else None
    if owner is None:
        return False
    return owner["host"] != socket.gethostname() or psutil.pid_exists(int(owner["pid"]))
