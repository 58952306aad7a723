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
move to `checkpoints/superseded/<n>/`.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hrl.cluster.manifest import MANIFEST, Manifest, ManifestError
from hrl.data.order import differences
from hrl.errors import HrlError
from hrl.report.run_folder import DamagedFileError, next_numbered, read_object
from hrl.workers.engine.background import make_durable
from hrl.workers.engine.digest import FileDigest

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
_STEP = re.compile(r"step_(\d+)")


class CheckpointError(HrlError, RuntimeError):
    """A checkpoint is missing, torn, or belongs to another run."""


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: The run's `checkpoints` folder; made on the first save.
        keep: How many to keep, newest first, and the best one beside them; `None` keeps all.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Return steps with a whole checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        named = ((_STEP.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match, path in named if match and (path / STATE_FILE).is_file())

    def best(self) -> int | None:
        """Return the step with the highest `score` in its state, the newest of several; None if none has a score."""
        scores = {step: self._score(step) for step in self.steps()}
        scored = [(score, step) for step, score in scores.items() if score is not None]
        return max(scored)[1] if scored else None

    def _score(self, step: int) -> float | None:
        folder = self.path(step)
        try:
            if (folder / MANIFEST).exists():
                score = Manifest.read(folder).score
            else:  # of an older version of hrl, which had no manifest
                score = read_object(folder / STATE_FILE).get("score")
        except (ManifestError, DamagedFileError) as error:  # of an older checkpoint than one about to be published
            logger.warning("step %d counts as one without a validation: %s", step, error)
            return None
        return float(score) if isinstance(score, int | float) and math.isfinite(score) else None

    def set_score(self, step: int, score: float | None) -> None:
        """Write down how good the validation of a checkpoint was, if it came after the checkpoint."""
        if score is not None:
            folder = self.path(step)
            Manifest.read(folder).with_score(score).write(folder)

    def path(self, step: int) -> Path:
        """Return the final folder of a step's checkpoint."""
        return self.folder / f"step_{step}"

    def holds(self, path: Path) -> bool:
        """Return whether a checkpoint is this run's own; another run's is only a starting point."""
        return path.resolve().is_relative_to(self.folder.resolve())

    def temporary(self, step: int) -> Path:
        """Return the folder of a step's checkpoint as long as it is not whole."""
        return self.folder / f"tmp.step_{step}"

    def begin(self, step: int) -> Path:
        """Return a fresh temporary folder for a step's checkpoint; what an interrupted save left there is removed."""
        temporary = self.temporary(step)
        if temporary.exists():
            logger.warning("removing %s, left by an interrupted save", temporary)
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        return temporary

    def commit(
        self,
        step: int,
        state: str,
        durable: Mapping[Path, FileDigest | None] | None = None,
        score: float | None = None,
    ) -> Path:
        """Write the driver's state and the manifest, make everything durable and give the folder its final name.

        Args:
            step: Whose checkpoint it is.
            state: The text of the state, see `state_text`.
            durable: Files in the temporary folder that are durable already, with their digests where these are known.
            score: How good the validation of the step was; None without one.

        Raises:
            CheckpointError: There is a checkpoint of this step already.
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
        temporary.rename(final)
        make_durable(self.folder)
        self._rotate(step)
        return final

    def _rotate(self, committed: int) -> None:
        if self.keep is None:
            return
        others, best = [step for step in self.steps() if step != committed], self.best()
        for step in others[: max(0, len(others) + 1 - self.keep)]:
            if step != best:
                self._remove(self.path(step))

    @staticmethod
    def _remove(checkpoint: Path) -> None:
        try:
            (checkpoint / STATE_FILE).unlink()  # first, because a folder without it counts as torn
            shutil.rmtree(checkpoint)
        except OSError as error:  # the one that made it superfluous is saved
            logger.warning("%s is no longer needed and can't be removed: %s", checkpoint, error)

    def interrupted(self) -> list[Path]:
        """Return the folders that killed saves left behind; no run resumes from them."""
        return sorted(self.folder.glob("tmp.step_*"))

    def next_superseded(self) -> Path:
        """Return the folder for records of steps that a run makes again; it does not exist yet."""
        return next_numbered(self.folder / "superseded")

    def supersede(self, after: int, aside: Path) -> bool:
        """Move the checkpoints of the steps beyond `after` aside, because these steps are made again.

        Args:
            after: The last step whose checkpoint stays.
            aside: The folder they move to; made if there are any.

        Returns:
            Whether there were any.
        """
        later = [step for step in self.steps() if step > after]
        for step in later:
            aside.mkdir(parents=True, exist_ok=True)
            self.path(step).rename(aside / self.path(step).name)
        return bool(later)

    def find(self, mode: str, resume_from: str | None) -> Path | None:
        """Return the checkpoint to resume from, or `None` for a fresh start.

        Args:
            mode: `auto` (the newest, if any; what an interrupted save left does not count), `disable` or
                `resume_path`.
            resume_from: The folder for `resume_path`.

        Raises:
            CheckpointError: The named folder is no whole checkpoint, or `auto` finds only torn ones.
        """
        if mode == "disable":
            return None
        if mode == "resume_path":
            path = Path(str(resume_from)).expanduser().resolve()  # workers may run in another folder than the driver
            if not (path / STATE_FILE).is_file():
                raise CheckpointError(
                    f"trainer.resume_from_path={path} is no whole checkpoint: it has no {STATE_FILE}. "
                    "Name a folder like checkpoints/step_20"
                )
            return path
        steps = self.steps()
        if not steps and any(_STEP.fullmatch(path.name) for path in self.folder.glob("step_*")):
            raise CheckpointError(
                f"{self.folder} holds checkpoints, but none is whole. Remove the folder to start from scratch, "
                "or set trainer.resume_mode=disable with another trainer.default_local_dir"
            )
        return self.path(steps[-1]) if steps else None


def load_state(path: Path, parts: Iterable[str]) -> dict[str, Any]:
    """Return the driver's state in a checkpoint folder.

    Args:
        path: The folder.
        parts: What it must hold beside the step.

    Raises:
        CheckpointError: The file is not the JSON object that a save writes, or lacks one of the parts; or the
            checkpoint holds only a model to use, and nothing to train on from.
    """
    try:
        state = json.loads((path / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / STATE_FILE} cannot be read: {error}") from error
    if not isinstance(state, dict) or "step" not in state:
        raise CheckpointError(f"{path / STATE_FILE} holds no step: it was not written by a save of hrl")
    if "model" not in state.get("contents", ["model"]):  # older checkpoints do not say, and always hold it
        raise CheckpointError(
            f"{path} was saved with checkpoint.save_contents={json.dumps(state['contents'])}: it holds a model to use, "
            f"and no run continues from it. Start a run with {path / 'hf'} as its model path, in a "
            "trainer.default_local_dir of its own"
        )
    missing = sorted(set(parts) - state.keys())
    if missing:
        raise CheckpointError(
            f"{path / STATE_FILE} has no {' and no '.join(missing)}: it was saved by another trainer or another "
            "version of hrl. Continue it with that one, or start anew from the model in its hf folder, in a "
            "trainer.default_local_dir of its own"
        )
    return state


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
    """Refuse to continue in other data: rows would repeat or never come.

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
            f"{path} was saved with other training data: {'; '.join(changes)}. Its position means nothing in these "
            "rows. Continue with the data it was saved with; or train on this data from its beginning, in a "
            f"trainer.default_local_dir of its own: trainer.resume_mode=resume_path with "
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
