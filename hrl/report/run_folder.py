"""The folder of a run, locked for one run at a time; earlier outputs are never overwritten."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import re
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, TypeGuard

import yaml

from hrl.errors import HrlError, RefusedError, system_error
from hrl.files import add_whole, expanded, make_durable, open_itself, remove, unfinished, unfinished_in, write_whole
from hrl.processes.plain_data import is_huge
from hrl.report.environment import describe_environment
from hrl.report.thumbnails import write as write_thumbnails
from hrl.report.unwritten import Unwritten

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
METRICS = "metrics.jsonl"
ALARMS = "alarms.jsonl"
CONFIG = "config.yaml"
MODEL = "model"
"""The folder of the trained model in the folder of a run that was started from Python."""
EARLIER = "earlier"
"""The folder in the folder of a run that holds what earlier runs left there, each in a folder with a number."""
PROFILE = "profile"
"""The folder of the profiles of steps, in the folder of a run."""
NONFINITE = "nonfinite"
"""The folder of batches with numbers that are not finite, in the folder of a run."""
SERVING = "serving.env"
"""The file with address and key of a run that is served, in the folder of a run; it goes with the run."""
RolloutKind = Literal["train", "val"]

_ROLLOUTS = re.compile(r"(?:val_)?step_([0-9]+)\.jsonl")
_PROFILES = re.compile(r"step_([0-9]+)(?:_\w+)?\.(?:json|txt|json\.gz)")
_NONFINITE = re.compile(r"step_([0-9]+)(?:_rank_[0-9]+)?\.[\w-]+\.(?:json|safetensors)")

# Outputs that a second run moves aside. Checkpoints are not moved: a folder with checkpoints is resumed or refused.
_OUTPUTS = (
    METRICS,
    ALARMS,
    CONFIG,
    "environment.json",
    "first_look.json",
    "outcome.json",
    "rollouts",
    NONFINITE,
    PROFILE,
    "reward_curve.png",
    "loss_curve.png",
    "report.html",
    "samples.jsonl",
    "scores.json",
    "trackers.json",
    MODEL,
)


#: Folders of a run that files are written into as a whole, see `hrl.files.write_whole`.
_WRITTEN_INTO = ("rollouts", NONFINITE, PROFILE)
#: What a run removes itself unless it is killed: of a look whether ranks see the disk, of what a store sends, its key.
_LEFTOVERS = (f".probe.{'[0-9a-f]' * 32}", "tmp.run", "fetched/*/tmp.step_*", unfinished(MODEL), SERVING)


class RunFolderError(HrlError, RuntimeError):
    """The run folder is in use, holds checkpoints that this run would not continue, or can't be written."""


class NoRunError(RefusedError, FileNotFoundError):
    """There is no run in this folder."""


class DamagedFileError(HrlError, ValueError):
    """A file that a run wrote can't be read."""


class RunFolder:
    """A locked run folder.

    The lock ends with the process, even if it is killed. Outputs of an earlier run are never overwritten: a resumed
    run appends to them, any other run first moves them to `earlier/<n>/`.

    Args:
        path: The folder; created if missing.
        resume: Whether the run continues from a checkpoint of this folder.
        keeps_refused: Whether log and samples that the disk refuses are kept in memory until it takes them. Else they
            raise a `RunFolderError`.

    Attributes:
        earlier: Where the outputs of an earlier run are now; None if there were none.
        unwritten: Log and samples that the disk refuses.

    Raises:
        RunFolderError: Another live run uses the folder, it holds checkpoints and `resume` is False, or it can't be
            created or written. The folder is then free.
    """

    def __init__(self, path: str | Path, *, resume: bool = False, keeps_refused: bool = False) -> None:
        self.path = expanded(path).resolve()
        self.rollouts = self.path / "rollouts"
        self.earlier: Path | None = None
        self.unwritten = Unwritten(is_kept=keeps_refused)
        self._last_step: int | None = None  # of the metrics, once their file was read
        self._last_written = -1  # of those in the file
        self._new_rollouts: deque[Path] = deque()  # which a crash of the machine may take
        with ExitStack() as failed, writing_to(self.path):
            make_folder(self.path)
            self._lock = lock_folder(self.path)
            failed.callback(self.close)
            if not resume:
                self._move_earlier_run_aside()
            failed.pop_all()

    @property
    def metrics_file(self) -> Path:
        """Path of the metrics file, one JSON object per step."""
        return self.path / METRICS

    @property
    def checkpoints(self) -> Path:
        """Path of the checkpoint folder."""
        return self.checkpoints_in(self.path)

    @staticmethod
    def checkpoints_in(path: str | Path) -> Path:
        """Return the checkpoint folder of a run folder, which need not be open."""
        return expanded(path).resolve() / "checkpoints"

    def close(self) -> None:
        """Release the folder. Harmless when repeated."""
        self._lock.close()

    def write_config(self, config: Mapping[str, Any]) -> Path:
        """Write the resolved configuration to `config.yaml`."""
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        with writing_to(self.path):
            return write_whole(self.path / CONFIG, text)

    def write_environment(self) -> Path:
        """Write versions, machine and git revision to `environment.json`. Environment variables are left out."""
        text = json.dumps(describe_environment(), indent=2) + "\n"
        with writing_to(self.path):
            return write_whole(self.path / "environment.json", text)

    def write_first_look(self, look: Mapping[str, Any]) -> None:
        """Write what the first samples say to `first_look.json`."""
        text = json_line(look)
        self.write(lambda: write_whole(self.path / "first_look.json", text), len(text))

    def write(self, do: Callable[[], object], size_bytes: int) -> None:
        """Write something that a step leaves, now or when the disk takes it; see `Unwritten.write`.

        Raises:
            RunFolderError: The disk refuses, and nothing is to be kept.
        """
        with writing_to(self.path):
            self.unwritten.write(do, size_bytes)

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step to `metrics.jsonl`; an existing record of the step is updated.

        A finished run that only validates again thus has no second record of its last step.

        Raises:
            ValueError: A later step has been written, or a line of the file is not JSON (`DamagedFileError`).
        """
        if self._last_step is None:
            with writing_to(self.path):
                records = read_jsonl(self.metrics_file) if self.metrics_file.exists() else []
            self._last_step = self._last_written = records[-1]["step"] if records else -1
        if step < self._last_step:
            raise ValueError(f"{self.metrics_file} is at step {self._last_step}, so step {step} can't be written")
        self._last_step = step
        record = {"step": step, **metrics}
        line = json_line(record)
        self.write(lambda: self._put_metrics(record, line), len(line))

    def _put_metrics(self, record: dict[str, Any], line: str) -> None:
        if record["step"] == self._last_written:
            records = read_jsonl(self.metrics_file)
            records[-1] |= record
            # Durable, since a name that a crash leads to a file without content would cost the whole log.
            write_whole(self.metrics_file, "".join(map(json_line, records)), durable=True)
        else:
            add_whole(self.metrics_file, line)
        self._last_written = record["step"]

    @property
    def alarms_file(self) -> Path:
        """Path of the file of alarms, one JSON object for each alarm, at the step in which it was first raised."""
        return self.path / ALARMS

    def write_alarm(self, record: Mapping[str, Any]) -> None:
        """Add an alarm to `alarms.jsonl`."""
        line = json_line(record)
        self.write(lambda: add_whole(self.alarms_file, line), len(line))

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]], kind: RolloutKind = "train") -> None:
        """Write samples to `step_<step>.jsonl`, or those of a validation to `val_step_<step>.jsonl`."""
        text = "".join(json_line(record) for record in records)
        self.write(lambda: self._put_rollouts(rollouts_file(self.rollouts, step, kind), text), len(text))

    def write_pictures(self, files: Mapping[Path, bytes]) -> None:
        """Write the pictures that samples show, see `hrl.report.thumbnails`."""
        if files:
            self.write(lambda: write_thumbnails(files), sum(map(len, files.values())))

    def _put_rollouts(self, file: Path, text: str) -> None:
        self.rollouts.mkdir(parents=True, exist_ok=True)
        self._new_rollouts.append(write_whole(file, text))

    def make_log_durable(self) -> None:
        """Have metrics, alarms and samples that were written outlive a crash of the machine; any thread may call it.

        Raises:
            OSError: The disk refuses; names the file.
        """
        while self._new_rollouts:
            with suppress(FileNotFoundError):  # the user has removed it
                make_durable(self._new_rollouts[0])
            self._new_rollouts.popleft()
        for path in (self.rollouts, self.metrics_file, self.alarms_file, self.path):
            with suppress(FileNotFoundError):  # there is none
                make_durable(path)

    def unlogged(self, step: int) -> range:
        """Return the last of the steps up to one that the log does not have, as after a crash of the machine."""
        records = read_metrics(self.path)
        return range(records[-1]["step"] + 1 if records else 1, step + 1)

    def rewind(self, step: int, aside: Path) -> bool:
        """Move metrics, alarms, samples, profiles and batches that were not finite of the steps after `step` aside.

        A resumed run makes these steps again. An unfinished last line left by a crash is moved too.

        Args:
            step: The last step to keep.
            aside: The folder to move them to; created if there is anything to move.

        Returns:
            Whether anything was moved.
        """
        with writing_to(self.path):
            moved = [_rewind(file, step, aside) for file in (self.metrics_file, self.alarms_file)]
            places = (self.rollouts, _ROLLOUTS), (self.path / PROFILE, _PROFILES), (self.path / NONFINITE, _NONFINITE)
            for folder, names in places:
                for file, made in _of_steps(folder, names):
                    if made > step:
                        (aside / folder.name).mkdir(parents=True, exist_ok=True)
                        file.rename(aside / folder.name / file.name)
                        moved.append(True)
            return any(moved)

    def remove_leftovers(self) -> list[Path]:
        """Remove what killed runs left beside their outputs and checkpoints, and return it."""
        places = (self.path, *(self.path / name for name in _WRITTEN_INTO), *self.checkpoints.glob("step_*"))
        partial = (path for place in places for path in unfinished_in(place))
        return removed([*partial, *(path for pattern in _LEFTOVERS for path in self.path.glob(pattern))])

    def _move_earlier_run_aside(self) -> None:
        check_holds_no_checkpoints(self.path)
        target = next_numbered(self.path / EARLIER)
        for entry in outputs_in(self.path):
            self.earlier = target
            target.mkdir(parents=True, exist_ok=True)
            entry.rename(target / entry.name)
            logger.info("moved %s of an earlier run to %s", entry.name, target)


def lock_folder(path: Path) -> IO[str]:
    """Lock a run folder for this process, until the returned file is closed.

    Raises:
        RunFolderError: Another live process has locked it, or its file system has no locks.
        OSError: The folder can't be written to.
    """
    with ExitStack() as failed:
        lock = failed.enter_context(open(open_itself(path / LOCK_NAME, os.O_RDWR | os.O_CREAT), "r+", encoding="utf-8"))
        take_lock(path, lock)
        failed.pop_all()
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _rewind(file: Path, step: int, aside: Path) -> bool:
    """Move the lines after a step, and an unfinished last one; return whether there were any."""
    if not file.exists():
        return False
    records = read_jsonl(file)
    for number, record in enumerate(records, start=1):
        require_kinds(f"{file}, line {number},", record, {"step": WHOLE}, needed=["step"])
    steps = [record["step"] for record in records]
    *lines, unfinished = file.read_text(encoding="utf-8").split("\n")
    later = [f"{line}\n" for line, made in zip(lines, steps, strict=True) if made > step] + [unfinished]
    if not any(later):
        return False
    aside.mkdir(parents=True, exist_ok=True)
    write_whole(aside / file.name, "".join(later), durable=True)
    kept = (f"{line}\n" for line, made in zip(lines, steps, strict=True) if made <= step)
    write_whole(file, "".join(kept), durable=True)
    return True


def outputs_in(folder: Path) -> list[Path]:
    """Return the outputs of an earlier run in a run folder, except checkpoints."""
    return [folder / name for name in _OUTPUTS if os.path.lexists(folder / name)]


def check_holds_no_checkpoints(folder: Path) -> None:
    """Refuse to start a new run in a folder that holds checkpoints.

    Raises:
        RunFolderError: The folder holds checkpoints, or nobody can tell.
    """
    if any(name.startswith("step_") for name in folders_in(RunFolder.checkpoints_in(folder))):
        raise RunFolderError(
            f"{folder} holds checkpoints of an earlier run; continue it with trainer.resume_mode=auto, "
            "or give this run its own trainer.default_local_dir"
        )


def folders_in(checkpoints: Path) -> list[str]:
    """Return the names of folders in a run's folder `checkpoints`, and of links there; none if it is not there.

    Raises:
        RunFolderError: What is there can't be seen, so it is not known whether the run has checkpoints.
    """
    try:
        with os.scandir(checkpoints) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False) or entry.is_symlink()]
    except OSError as error:
        link = f"it is a link to {checkpoints.readlink()}: " if checkpoints.is_symlink() else ""
        if isinstance(error, FileNotFoundError) and not link:
            return []
        raise RunFolderError(
            f"{checkpoints} can't be read: {link}{error.strerror or error}. Checkpoints may lie there, so no run "
            "begins before that is known: mount what is missing, make it readable, remove it, or name another folder "
            "with trainer.default_local_dir"
        ) from error


def removed(leftovers: Iterable[Path]) -> list[Path]:
    """Remove what nobody needs, and return it; what can't be removed is in nobody's way, and is logged.

    Args:
        leftovers: Files, folders and links; what these lead to stays.
    """
    gone = []
    for path in leftovers:
        try:
            remove(path)
        except OSError as error:
            logger.warning("%s, left by a run that was killed, can't be removed: %s", path, error)
        else:
            gone.append(path)
    return gone


def take_lock(folder: Path, lock: IO[str], kind: int = fcntl.LOCK_EX) -> None:
    """Lock the lock file of a run folder, until it is closed.

    Args:
        folder: The run folder.
        lock: The file, open.
        kind: `fcntl.LOCK_EX`, or `fcntl.LOCK_SH` to look whether a run has it.

    Raises:
        RunFolderError: Another live process has locked it, or its file system has no locks.
    """
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        raise RunFolderError(
            f"{folder} is in use by {owner}; wait for it, or give this run its own trainer.default_local_dir"
        ) from None
    except OSError as error:
        raise RunFolderError(
            f"{folder} lies on a file system that locks no files (flock: {error.strerror}), and two runs could write "
            "there at once. Mount it with locks (Lustre: with the option flock; NFS: with a lock daemon), or name a "
            "folder on another file system with trainer.default_local_dir"
        ) from error


@contextmanager
def writing_to(folder: Path, *, is_of_run: bool = True) -> Iterator[None]:
    """Convert an `OSError` in the block to an error that names the folder and what to do.

    Args:
        folder: The run folder, or another.
        is_of_run: Whether its configuration key says where it is.

    Raises:
        RunFolderError: An `OSError` was raised.
    """
    try:
        yield
    except OSError as error:
        raise _unwritable(folder, error, is_of_run=is_of_run) from error
    except Exception as error:  # a tokenizer's library, for one, raises nothing more special
        told = system_error(error)
        if told is None:
            raise
        raise _unwritable(folder, told, is_of_run=is_of_run) from error


def _unwritable(folder: Path, error: OSError, *, is_of_run: bool) -> RunFolderError:
    if error.errno == errno.ELOOP:
        error, advice = OSError(error.errno, f"{error.filename}: {error.strerror}"), "remove the link, or"
    else:
        advice = "make room there, or" if is_full(error) else "make it writable, or"
    what, key = ("the run folder ", " with trainer.default_local_dir") if is_of_run else ("", "")
    return RunFolderError(
        f"{what}{folder} can't be written: {error.strerror or error}; {advice} name a folder in another place{key}"
    )


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, which outlive a crash of the machine; harmless if it is there."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        make_durable(each.parent)


def is_full(error: OSError) -> bool:
    """Return whether a disk, a quota or the largest size of a file was reached."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def existing_folder(folder: Path) -> Path:
    """Return a folder that a command names, with `~` expanded.

    Raises:
        NoRunError: It is not there.
        OSError: Nobody can tell.
    """
    folder = expanded(folder)
    if not folder.is_dir():  # raises where a folder above may not be looked into, so that nobody can tell
        raise NoRunError(f"there is no folder {folder}; a run's first lines name its own, under “run folder”")
    return folder


def checked_run_folder(folder: Path) -> Path:
    """Return a folder that holds a run, as an absolute path.

    Raises:
        NoRunError: It holds none.
    """
    folder = existing_folder(folder)
    if not (folder / CONFIG).exists():
        runs = sorted(str(file.parent) for file in folder.glob("*/config.yaml"))
        hint = f"; runs are in {', '.join(runs[:5])}" if runs else ": a run writes config.yaml there when it starts"
        raise NoRunError(f"{folder} holds no run{hint}")
    return folder.resolve()


def next_numbered(parent: Path) -> Path:
    """Return the next of the folders `1`, `2`, … below `parent`; it is not created."""
    taken = numbered_in(parent)
    return parent / str(int(taken[-1].name) + 1 if taken else 1)


def numbered_in(parent: Path) -> list[Path]:
    """Return what lies below `parent` with a number for a name, in the order of the numbers."""
    return sorted((entry for entry in parent.glob("*") if entry.name.isdecimal()), key=lambda entry: int(entry.name))


def rollouts_file(rollouts: Path, step: int, kind: RolloutKind = "train") -> Path:
    """Return the file in the folder `rollouts` for the samples of a step, or of the validation after it."""
    return rollouts / (f"step_{step}.jsonl" if kind == "train" else f"val_step_{step}.jsonl")


def rollouts_steps(rollouts: Path, kind: RolloutKind = "train") -> list[int]:
    """Return the steps that have samples in the folder `rollouts`, in order."""
    return sorted(step for file, step in _of_steps(rollouts, _ROLLOUTS) if file == rollouts_file(rollouts, step, kind))


def _of_steps(folder: Path, names: re.Pattern[str]) -> list[tuple[Path, int]]:
    """Return the files in a folder that a run named after a step, with the step; other files are somebody else's."""
    matched = ((file, names.fullmatch(file.name)) for file in folder.glob("*"))
    return [(file, int(match[1])) for file, match in matched if match is not None]


def json_line(record: Mapping[str, Any], *, ascii_only: bool = False) -> str:
    """Return a record as one line of strict JSON; NaN and infinity, which JSON lacks, become null."""
    written = plain(record)
    text = json.dumps(written, ensure_ascii=ascii_only, allow_nan=False) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of UTF-16, which only an escape can spell
        return json.dumps(written, allow_nan=False) + "\n"
    return text


_REWRITE = "Put back what the run wrote there, or look at the run's other files."
_WAY_OUT = "Remove the line, or move the file away; the other files of the run do not need it."


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line, without an unfinished last line left by a crash.

    Raises:
        DamagedFileError: Any other line is no JSON object; names file and line.
    """
    records = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{path} is damaged: {error}. {_WAY_OUT}") from error
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline comes nothing, or an unfinished line
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
            raise DamagedFileError(f"{path}, line {number}, is damaged: {error}. {_WAY_OUT}") from error
        if not isinstance(record, dict):
            raise DamagedFileError(f"{path}, line {number}, is damaged: {line[:40]} is no JSON object. {_WAY_OUT}")
        records.append(record)
    return records


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run, nested, from its `config.yaml`.

    Raises:
        DamagedFileError: It is no YAML with keys.
    """
    return _mapping(folder / CONFIG, yaml.safe_load)


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run; an empty one if the run was ended before it wrote the file.

    Raises:
        DamagedFileError: It is no JSON object.
    """
    return _mapping(file, json.loads) if file.exists() else {}


def _mapping(file: Path, read: Callable[[str], Any]) -> dict[str, Any]:
    try:
        found = read(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"{file} is damaged: {' '.join(str(error).split())}. {_REWRITE}") from error
    if not isinstance(found, dict):
        raise DamagedFileError(f"{file} is damaged: it has no keys. {_REWRITE}")
    return found


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's `metrics.jsonl`, one a step; none if it has made no step.

    Raises:
        DamagedFileError: A line is no JSON object, or has no step; names file and line.
    """
    file = folder / METRICS
    records = read_jsonl(file) if file.exists() else []
    for number, record in enumerate(records, start=1):
        if not isinstance(record.get("step"), int):
            raise DamagedFileError(f"{file}, line {number}, is damaged: there is no step. {_WAY_OUT}")
        require_kinds(f"{file}, line {number},", record, dict.fromkeys(record, NUMBER))
    return records


NUMBER, TEXT, WHOLE, OBJECT, TEXTS = "a number", "a text", "a whole number", "an object", "a list of texts"
LIST, OBJECTS = "a list", "a list of objects"
"""Kinds of fields, in the words of an error."""


def require_kinds(place: str, record: Mapping[str, Any], kinds: Mapping[str, str], needed: Iterable[str] = ()) -> None:
    """Refuse a record whose fields are not what a run writes; null is of every kind, but for what is needed.

    Args:
        place: The file, and the line if it has several records; the beginning of the error.
        record: The record.
        kinds: Field → its kind; other fields may be anything.
        needed: Fields that must be there.

    Raises:
        DamagedFileError: A field is of another kind, or missing.
    """
    for name in needed:
        if record.get(name) is None:
            raise DamagedFileError(f"{place} is damaged: there is no {name}. {_WAY_OUT}")
    for name, kind in kinds.items():
        value = record.get(name)
        if value is not None and not _IS_OF_KIND[kind](value):
            raise DamagedFileError(f"{place} is damaged: {name[:80]} is not {kind}. {_WAY_OUT}")


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is a number that a float holds."""
    if isinstance(value, int):
        return value.bit_length() < 1024  # a float holds it
    return isinstance(value, float)


_IS_OF_KIND: dict[str, Callable[[Any], bool]] = {
    NUMBER: is_number,
    TEXT: lambda value: isinstance(value, str),
    WHOLE: lambda value: isinstance(value, int) and is_number(value),
    OBJECT: lambda value: isinstance(value, dict),
    TEXTS: lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    LIST: lambda value: isinstance(value, list),
    OBJECTS: lambda value: isinstance(value, list) and all(isinstance(item, dict) for item in value),
}


def plain(value: Any) -> Any:
    """Convert numpy and torch scalars, arrays and mappings to JSON types; an integer of thousands of digits to text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_huge(value):
        return hex(value)
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return plain(value.tolist())
    return str(value)
