"""Where a checkpoint lies, when it counts as whole, and which one a run resumes from.

A checkpoint is a folder `checkpoints/step_N`. It is written as `tmp.step_N`, while the run goes on, and renamed when
everything in it is on disk, `manifest.json` last, so a folder with the final name is always whole:

    step_N/
      actor/      sharded model, optimizer and scheduler of the policy, and of each rank a record of what it wrote
      critic/     the same of the critic, where there is one
      hf/         config, weights and tokenizer: transformers and vLLM load it as it is; `written-hf.json` is its record
      state.json  the driver's state: step, position in the data and which data that is, KL coefficient, reward shaping;
                  and what the checkpoint holds
      manifest.json  size and hash of every other file, and how good the validation of the step was

Of a run's checkpoints the newest few stay, and the one with the best validation beside them.

A run that resumes from an older checkpoint makes the later steps again; its metrics and samples of them
move to `checkpoints/superseded/<n>/`, of which the newest ten are kept.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from hrl.cluster.driver_state import check_kinds
from hrl.cluster.manifest import (
    MANIFEST,
    TENSORS,
    Damage,
    Manifest,
    ManifestError,
    damages,
    describe,
    is_whole,
)
from hrl.cluster.patience import UnreadableError, patiently
from hrl.data.order import differences
from hrl.errors import HrlError
from hrl.files import expanded, make_durable, remove
from hrl.report.run_folder import (
    DamagedFileError,
    folders_in,
    make_folder,
    next_numbered,
    numbered_in,
    read_object,
    removed,
)
from hrl.workers.engine.digest import FileDigest

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
SUPERSEDED = "superseded"
"""The folder in the folder of checkpoints that holds what a run has made again, each time in a folder with a number."""
SUPERSEDED_KEPT = 10
"""So many folders of records of steps that were made again are kept: a run that is killed each hour has one a kill."""
#: How long a folder may take to be seen under its new name, in seconds.
RENAME_PATIENCE_S = 5.0
_POLL_S = 0.2
_STEP = re.compile(r"step_(\d+)")


def folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint, on a disk and in a store."""
    return f"step_{step}"


def step_of(name: str) -> int | None:
    """Return the step whose checkpoint a folder of this name is; None if it is no checkpoint's."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


class CheckpointError(HrlError, RuntimeError):
    """A checkpoint is missing, torn, or belongs to another run."""


class CheckpointTimeoutError(CheckpointError):
    """A file system does not answer while a checkpoint is published; whoever waits on it may still write there."""


class DamagedCheckpoint(NamedTuple):
    """A checkpoint that is not as it was written.

    Attributes:
        path: Its folder.
        damages: What is wrong with it; at least one thing.
    """

    path: Path
    damages: tuple[Damage, ...]

    def __str__(self) -> str:
        return f"{self.path} is damaged: {describe(self.damages)}"


@dataclass(frozen=True)
class Choice:
    """The checkpoint that a run resumes from.

    Attributes:
        path: Its folder; None for a fresh start.
        damaged: Newer checkpoints that it can't resume from, the newest first.
    """

    path: Path | None
    damaged: tuple[DamagedCheckpoint, ...] = ()


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: The run's `checkpoints` folder; made on the first save.
        keep: How many to keep, newest first, and the best one beside them; `None` keeps all.

    Attributes:
        busy: Returns steps that somebody still reads; they stay until the next save.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.busy: Callable[[], Collection[int]] = frozenset

    def steps(self) -> list[int]:
        """Return steps with a checkpoint that is whole by its files' names and sizes, oldest first."""
        return [step for step in self._saved() if is_whole(self.path(step))]

    def has_any(self) -> bool:
        """Return whether there is a checkpoint, whole or not."""
        return bool(self._saved())

    def _saved(self) -> list[int]:
        """Return steps with a folder of the final name, whatever it holds, oldest first."""
        return sorted(step for name in folders_in(self.folder) if (step := step_of(name)) is not None)

    def best(self) -> int | None:
        """Return the step with the highest `score`, the newest of several; None if none has a score."""
        scores = {step: self._score(step) for step in self.steps()}
        scored = [(score, step) for step, score in scores.items() if score is not None]
        return max(scored)[1] if scored else None

    def _score(self, step: int) -> float | None:
        folder = self.path(step)
        try:
            score = Manifest.read(folder).score
        except (ManifestError, UnreadableError) as error:
            # Of an older checkpoint than one about to be published, which this need not keep from it.
            logger.warning("step %d counts as one without a validation: %s", step, error)
            return None
        return float(score) if score is not None and math.isfinite(score) else None

    def set_score(self, step: int, score: float | None) -> None:
        """Write down how good the validation of a checkpoint was, if it came after the checkpoint."""
        if score is not None:
            folder = self.path(step)
            Manifest.read(folder).with_score(score).write(folder)
            _remember_undamaged(folder)

    def path(self, step: int) -> Path:
        """Return the final folder of a step's checkpoint."""
        return self.folder / folder_name(step)

    def holds(self, path: Path) -> bool:
        """Return whether a checkpoint is this run's own; another run's is only a starting point.

        A link of a step's name is, wherever it leads. What was superseded or set aside is of a history that this run
        does not have.
        """
        return step_of(path.name) is not None and path.parent.resolve() == self.folder.resolve()

    # ------------------------------------------------------------------ writing one

    def temporary(self, step: int) -> Path:
        """Return the folder of a step's checkpoint as long as it is not whole."""
        return self.folder / f"tmp.{folder_name(step)}"

    def begin(self, step: int) -> Path:
        """Return a fresh temporary folder for a step's checkpoint; what an interrupted save left there is removed."""
        temporary = self.temporary(step)
        if os.path.lexists(temporary):
            logger.warning("removing %s, left by an interrupted save", temporary)
            remove(temporary)
        make_folder(temporary)
        return temporary

    def discard(self, step: int) -> None:
        """Remove what there is of a checkpoint that is not whole; nothing writes there any more.

        Raises:
            OSError: Something of it can't be removed.
        """
        if os.path.lexists(self.temporary(step)):
            remove(self.temporary(step))

    def commit(
        self,
        step: int,
        state: str,
        durable: Mapping[Path, FileDigest | None] | None = None,
        score: float | None = None,
    ) -> Path:
        """Publish a checkpoint, see that it is there, and remove the ones that it makes superfluous.

        The driver's state and the manifest are written, everything is made durable, the folder gets its final name, and
        all of it is read back from the disk. Only then older ones go.

        Args:
            step: Whose checkpoint it is.
            state: The text of the state, see `state_text`.
            durable: Files in the temporary folder that are durable already, with their digests where these are known.
            score: How good the validation of the step was; None without one.

        Raises:
            CheckpointError: There is a checkpoint of this step already; or the file system does not show what was
                written to it.
        """
        temporary, final = self.temporary(step), self.path(step)
        if final.exists():
            raise CheckpointError(f"{final} exists already: a checkpoint is never overwritten")
        durable = durable or {}
        (temporary / STATE_FILE).write_text(state)
        digests = {path: digest for path, digest in durable.items() if digest is not None}
        manifest = Manifest.of(temporary, step, digests, score)
        for path in (temporary, *temporary.rglob("*")):  # folders too: names in them are as new as the files
            if path not in durable:
                make_durable(path)
        manifest.write(temporary)
        self.publish(step)
        self._rotate(step)
        return final

    def publish(self, step: int) -> Path:
        """Give a temporary folder that is durable and has a manifest its final name, and read it back.

        Raises:
            CheckpointError: The file system does not show what was written to it.
        """
        temporary, final = self.temporary(step), self.path(step)
        temporary.rename(final)
        for folder in (self.folder, self.folder.parent):  # which may be as new
            make_durable(folder)
        self._look_again(temporary, final)
        _remember_undamaged(final)
        return final

    def _look_again(self, temporary: Path, final: Path) -> None:
        """Check that a checkpoint that was just published is there, and is what was written; else set it aside."""
        deadline = time.monotonic() + RENAME_PATIENCE_S
        while not is_renamed(temporary, final) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not is_renamed(temporary, final):
            raise CheckpointError(
                f"{temporary} was renamed to {final.name} without an error, and yet {self.folder} does not show it "
                "under that name alone, with all of its files: a save can't be trusted there. Name a folder on another "
                "file system with trainer.default_local_dir"
            )
        with _not_judged_unread(final):
            found = damages(final, from_disk=True, gives_way=True)
        if found:
            aside = self.set_aside(final)
            raise CheckpointError(
                f"{final} is not what was written to it: read back, {describe(found)}. It is now in {aside}, and older "
                "checkpoints stay. Look at the disk, or name a folder on another one with trainer.default_local_dir"
            )

    def _rotate(self, committed: int) -> None:
        if self.keep is None:
            return
        whole = self.steps()
        for step in sorted(set(self._saved()).difference(whole)):
            logger.warning("%s is damaged, and is not one of the %d that are kept", self.path(step), self.keep)
        others, best = [step for step in whole if step != committed], self.best()
        for step in others[: max(0, len(others) + 1 - self.keep)]:
            if step != best and step not in self.busy():
                self._remove(self.path(step))

    def _remove(self, checkpoint: Path) -> None:
        going = self.folder / f"tmp.rotated.{checkpoint.name}"
        try:
            checkpoint.rename(going)  # first, so that it is never there in part
            remove(going)
        except OSError as error:  # the one that made it superfluous is saved
            logger.warning("%s is no longer needed and can't be removed: %s", checkpoint, error)

    # ------------------------------------------------------------------ what others left

    def interrupted(self) -> list[Path]:
        """Return the folders that killed saves and rotations left behind; no run resumes from them."""
        return sorted(self.folder.glob("tmp.*"))

    def remove_interrupted(self) -> list[Path]:
        """Remove what killed saves and rotations left behind, and return it; only for whoever has the run's lock."""
        return removed(self.interrupted())

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged checkpoint, so that no run looks at it again, and return its new folder."""
        aside = self.folder / f"damaged.{path.name}"
        number = 1
        while aside.exists() or aside.is_symlink():
            number += 1
            aside = self.folder / f"damaged.{path.name}.{number}"
        path.rename(aside)
        make_durable(self.folder)
        return aside

    def next_superseded(self) -> Path:
        """Return the folder for records of steps that a run makes again; it does not exist yet."""
        return next_numbered(self.folder / SUPERSEDED)

    def remove_superseded(self, keep: int = SUPERSEDED_KEPT) -> list[Path]:
        """Remove all but the newest folders of records of steps that were made again, and return what is gone."""
        gone = numbered_in(self.folder / SUPERSEDED)[:-keep]
        for path in gone:
            remove(path)
        return gone

    def supersede(self, after: int, aside: Path) -> bool:
        """Move the checkpoints of the steps beyond `after` aside, because these steps are made again.

        Args:
            after: The last step whose checkpoint stays.
            aside: The folder they move to; made if there are any.

        Returns:
            Whether there were any.
        """
        later = [step for step in self._saved() if step > after]
        for step in later:
            aside.mkdir(parents=True, exist_ok=True)
            self.path(step).rename(aside / self.path(step).name)
        return bool(later)

    # ------------------------------------------------------------------ choosing one

    def choose(self, mode: str, resume_from: str | None) -> Choice:
        """Return the checkpoint to resume from, every file of which was read and is what its manifest says.

        Nothing is changed. A folder is not read again while its files have the same names, sizes and times.

        Args:
            mode: `auto` (the newest that is whole; what an interrupted save left does not count), `disable` or
                `resume_path`.
            resume_from: The folder for `resume_path`.

        Raises:
            CheckpointError: The named folder is no checkpoint, or is damaged; or `auto` finds only damaged ones, or one
                that can't be read.
            RunFolderError: Nobody can tell which checkpoints there are.
        """
        if mode == "disable":
            return Choice(None)
        if mode == "resume_path":
            named = expanded(str(resume_from))
            own = self.folder.absolute() / named.name if self.holds(named) else None
            return Choice(self._named(own or named.resolve()))  # absolute, as a worker may run elsewhere
        damaged: list[DamagedCheckpoint] = []
        for step in reversed(self._saved()):
            found = damages_of_checkpoint(self.path(step))
            if not found:
                return Choice(self.path(step), tuple(damaged))
            damaged.append(DamagedCheckpoint(self.path(step), found))
        if damaged:
            raise CheckpointError(
                f"{self.folder} holds checkpoints, but none is whole: {'; '.join(map(str, damaged))}. Put a copy in "
                "the place of one, remove the folder to start from scratch, or set trainer.resume_mode=disable with "
                "another trainer.default_local_dir"
            )
        return Choice(None)

    def newest_undamaged(self) -> int | None:
        """Return the newest step whose checkpoint is undamaged, None if none is; its files are read, the first time."""
        return next((step for step in reversed(self._saved()) if not damages_of_checkpoint(self.path(step))), None)

    def _named(self, path: Path) -> Path:
        if not (path / STATE_FILE).is_file() and not (path / MANIFEST).is_file():
            raise CheckpointError(
                f"trainer.resume_from_path={path} is no whole checkpoint: it has no {STATE_FILE}. "
                "Name a folder like checkpoints/step_20"
            )
        found = damages_of_checkpoint(path)
        if found:
            steps = CheckpointStore(path.parent).steps()
            others = ", ".join(name for name in map(folder_name, steps) if name != path.name)
            raise CheckpointError(
                f"trainer.resume_from_path={path} is damaged: {describe(found)}. Put a copy in its place, or name "
                f"another checkpoint; beside it lie {others or 'none'}"
            )
        return path


_Look = tuple[tuple[str, int, int, int], ...]
#: What was found in folders that were read, and how their files looked then.
_FOUND: dict[Path, tuple[_Look, tuple[Damage, ...]]] = {}


def is_renamed(temporary: Path, final: Path) -> bool:
    """Return whether a folder is there under its final name alone, with all that its manifest lists."""
    return not temporary.exists() and is_whole(final)


def damages_of_checkpoint(path: Path) -> tuple[Damage, ...]:
    """Return what keeps a run from resuming from a checkpoint; every file of it is read, the first time.

    A file that the manifest does not list does no harm where no rank looks for shards; it is logged.

    Raises:
        CheckpointError: Something of it can't be read, so nobody can tell.
    """
    with _not_judged_unread(path):
        look = patiently(lambda: _look_of(path), path)
        if path not in _FOUND or _FOUND[path][0] != look:
            _FOUND[path] = look, tuple(_damages(path))
    return _FOUND[path][1]


def require_undamaged(path: Path, part: str) -> None:
    """Refuse to use a folder of a checkpoint, such as `hf`, that is not what was written; the rest does not matter.

    Raises:
        CheckpointError: Naming the file, and what is wrong with it.
    """
    with _not_judged_unread(path):
        found = damages(path, part, STATE_FILE, needed=(STATE_FILE,))
    found = [damage for damage in found if not damage.is_foreign or _is_loaded(damage.file)]
    if found:
        raise CheckpointError(
            f"{path} is damaged: {describe(found)}. Put a copy of the file in its place, or name another checkpoint"
        )


@contextmanager
def _not_judged_unread(path: Path) -> Iterator[None]:
    """Say of a checkpoint of which something can't be read what that means, and what to do.

    Raises:
        CheckpointError: An `UnreadableError` was raised in the block.
    """
    try:
        yield
    except UnreadableError as error:
        raise CheckpointError(
            f"{error}. {path} may be whole, so it stays, and no other checkpoint takes its place. Start again once the "
            f"file can be read; if it is lost, move {path} away, and the one before it is continued"
        ) from error


def _remember_undamaged(path: Path) -> None:
    """Take a checkpoint, as its files look now, for what was written: this process has just read it back."""
    _FOUND[path] = _look_of(path), ()


def _damages(path: Path) -> Iterable[Damage]:
    found = damages(path, needed=(STATE_FILE,))
    harmless = [damage for damage in found if damage.is_foreign and not _is_among_shards(damage.file)]
    if harmless:
        logger.warning("%s: %s; nothing reads it", path, describe(harmless))
    return [_with_way_out(damage) for damage in found if damage not in harmless]


def _look_of(path: Path) -> _Look:
    """Return what can be known of a folder's files without reading them."""
    looks = ((file, file.stat()) for file in sorted(path.rglob("*")) if file.is_file())
    return tuple((str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino) for file, stat in looks)


def _with_way_out(damage: Damage) -> Damage:
    return damage._replace(what=f"{damage.what}: remove it") if damage.is_foreign else damage


def _is_among_shards(name: str) -> bool:
    return "/" in name and not name.startswith("hf/")


def _is_loaded(name: str) -> bool:
    """Return whether a file that the manifest does not list would be loaded with those that it does."""
    if _is_among_shards(name):
        return name.endswith(TENSORS)
    return name.endswith((TENSORS, ".bin", ".pt", ".pth")) and not PurePosixPath(name).name.startswith(".")


def load_state(path: Path, parts: Iterable[str]) -> dict[str, Any]:
    """Return the driver's state in a checkpoint folder.

    Args:
        path: The folder.
        parts: What it must hold beside the step.

    Raises:
        CheckpointError: The file is not the JSON object that a save writes, or lacks one of the parts; or the
            checkpoint holds only a model to use, and nothing to train on from.
    """
    file = path / STATE_FILE
    try:
        with _not_judged_unread(path):
            state = patiently(partial(read_object, file), file)
        if "step" not in state:
            raise CheckpointError(f"{file} holds no step: it was not written by a save of hrl")
        check_kinds(file, state)
    except DamagedFileError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror or error}") from error
    if "model" not in state.get("contents", ["model"]):  # older checkpoints do not say, and always hold it
        raise CheckpointError(
            f"{path} was saved with checkpoint.save_contents={json.dumps(state['contents'])}: it holds a model to use, "
            f"and no run continues from it. Start a run with {path / 'hf'} as its model path, in a "
            "trainer.default_local_dir of its own"
        )
    missing = sorted(set(parts) - state.keys() - _OF_OLDER.keys())
    if missing:
        raise CheckpointError(
            f"{path / STATE_FILE} has no {' and no '.join(missing)}: it was saved by another trainer or another "
            "version of hrl. Continue it with that one, or start anew from the model in its hf folder, in a "
            "trainer.default_local_dir of its own"
        )
    return {part: _OF_OLDER[part] for part in parts if part in _OF_OLDER} | state


#: Parts that older checkpoints lack, each with what it was in the runs that made them.
_OF_OLDER = {"nonfinite_in_a_row": 0}
#: What every checkpoint has of the driver, beside the state of the trainer. `score` is in older checkpoints; those
#: that are older still lack the configuration.
PARTS = ("step", "data_position", "data", "contents", "score", "config", "inputs", "ranks")


def check_parts(path: Path, state: Mapping[str, Any], parts: Iterable[str]) -> None:
    """Refuse to continue from a state with a part that this run has no place for: it would be lost without a word.

    Args:
        path: Of the checkpoint, which is the run's own.
        state: The driver's state in it.
        parts: What the trainer restores, beside `PARTS`.

    Raises:
        CheckpointError: Naming the parts, and the ways out.
    """
    unknown = sorted(state.keys() - {*PARTS, *parts})
    if unknown:
        raise CheckpointError(
            f"{path / STATE_FILE} has the state of {', '.join(unknown)}, which this run has not (its configuration, "
            "its trainer or its version of hrl is another one): continuing would lose it. Continue with what it was "
            f"saved with; or begin another run with its model, in a trainer.default_local_dir of its own: "
            f"trainer.resume_mode=resume_path with trainer.resume_from_path={path}"
        )


def check_data(path: Path, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse to continue in other data: rows would repeat or never come, or be worth something else.

    Args:
        path: Of the checkpoint.
        saved: The fingerprint of the data that it was saved with, see `hrl.data.order.fingerprint`.
        present: That of the data at hand.

    Raises:
        CheckpointError: Naming what differs, and the ways out.
    """
    changes = differences(saved, present)
    if changes:
        raise CheckpointError(
            f"{path} was saved with other training data: {'; '.join(changes)}. The steps after it would be "
            "those of another run. Continue with the data it was saved with; or train on this data from its beginning, "
            f"in a trainer.default_local_dir of its own: trainer.resume_mode=resume_path with "
            f"trainer.resume_from_path={path} takes the model along, trainer.resume_mode=disable starts from scratch"
        )


def state_text(state: Mapping[str, Any]) -> str:
    """Return the driver's state as it is written.

    Raises:
        CheckpointError: A part of it is no JSON; names the part.
    """
    try:
        return json.dumps(state, indent=1, sort_keys=True)
    except (TypeError, ValueError) as error:
        part = next((name for name, value in state.items() if not _is_json(value)), "")
        raise CheckpointError(
            f"the run's state can't be saved: its part {part!r} is no JSON ({error}). A state_dict of your own has to "
            "return numbers, strings, None, and lists and dicts of these"
        ) from error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        return False
    return True
