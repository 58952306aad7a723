"""Decide whether the run folder will be created, continued or refused, without writing anything."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hrl.cluster.checkpoints import SUPERSEDED, CheckpointStore, DamagedCheckpoint, check_data, load_state
from hrl.cluster.remote_checkpoints import require_step
from hrl.cluster.remote_store import RemoteStore, RemoteStoreError, is_in_store, named_checkpoint
from hrl.config.arithmetic import Fact
from hrl.config.trainer import RunConfig
from hrl.files import expanded, open_itself
from hrl.preflight.findings import Findings
from hrl.report.run_folder import (
    LOCK_NAME,
    DamagedFileError,
    RunFolder,
    RunFolderError,
    check_holds_no_checkpoints,
    outputs_in,
    read_config,
    read_metrics,
    take_lock,
    writing_to,
)


@dataclass(frozen=True)
class FolderPlan:
    """How a run begins.

    Attributes:
        path: The run folder.
        checkpoint: The checkpoint to resume from; None to start from the beginning.
        continues: Whether that checkpoint is in the run folder, so that its log is continued.
        state: The driver's state in the checkpoint.
        damaged: Newer checkpoints of the folder that are not as they were written, and are set aside.
    """

    path: Path
    checkpoint: Path | None = None
    continues: bool = False
    state: Mapping[str, Any] = field(default_factory=dict)
    damaged: tuple[DamagedCheckpoint, ...] = ()

    def __str__(self) -> str:
        """Return the plan in words, for `hrl check`."""
        if self.continues:
            aside = "".join(f"; {damaged}, and will be set aside" for damaged in self.damaged)
            return f"{self.path}, continued after step {self.state['step']}{aside}"
        start = "" if self.checkpoint is None else f", from the model of {self.checkpoint}"
        if outputs_in(self.path):
            return f"{self.path}{start}; what an earlier run left there moves to earlier/"
        return f"{self.path}, {'there' if self.path.is_dir() else 'new'}{start}"


def plan_run_folder(trainer: RunConfig, train_dataset: Any) -> FolderPlan:
    """Decide where a run begins, and check that its folder can be used.

    Args:
        trainer: The section `trainer`.
        train_dataset: The data set whose `fingerprint` is compared when a run continues; None skips this check.

    Raises:
        CheckpointError: The checkpoint to resume from is missing or damaged, or is of a run on other data.
        RunFolderError: The folder is in use, can't be written, or holds checkpoints that this run would not continue.
    """
    path = expanded(trainer.default_local_dir).resolve()
    check_writable(path)
    store = CheckpointStore(RunFolder.checkpoints_in(path))
    choice = store.choose(trainer.resume_mode, trainer.resume_from_path)
    checkpoint = choice.path
    if checkpoint is None:
        check_holds_no_checkpoints(path)
        if trainer.resume_mode == "auto":
            _check_lost_no_checkpoints(path)
        return FolderPlan(path)
    continues, state = store.holds(checkpoint), load_state(checkpoint, ("data",))
    if not continues:
        check_holds_no_checkpoints(path)
    elif train_dataset is not None:
        check_data(checkpoint, state["data"], train_dataset.fingerprint)
    return FolderPlan(path, checkpoint, continues, state, choice.damaged)


def _check_lost_no_checkpoints(path: Path) -> None:
    """Refuse to begin anew where an earlier run has saved, and no checkpoint is left in the folder of its checkpoints.

    If it is empty, that is how the place of a disk looks that is not mounted. Whoever wants to begin anew removes the
    folder as well.

    Raises:
        RunFolderError: The run has continued a checkpoint; or two saves of it were due, so that the first had been
            published. None is there.
    """
    checkpoints = RunFolder.checkpoints_in(path)
    if not checkpoints.is_dir():
        return
    left = [entry.name for entry in checkpoints.iterdir()]
    if SUPERSEDED in left:
        raise RunFolderError(
            f"{checkpoints} has no checkpoint left but what lies in {SUPERSEDED}/, from before the run there went back "
            "to one that is gone. Put that one back; or begin with one of these, in a trainer.default_local_dir of its "
            f"own: trainer.resume_mode=resume_path; to begin from scratch, remove {checkpoints}"
        )
    if not all(name.startswith("damaged.") for name in left):  # a save that was interrupted, the first
        return
    try:
        before, records = read_config(path).get("trainer"), read_metrics(path)
    except (OSError, DamagedFileError):  # nobody can tell
        return
    if not records or not isinstance(before, dict) or before.get("on_save_error") != "stop":
        return
    save_freq, step = before.get("save_freq"), records[-1]["step"]
    if isinstance(save_freq, int) and 0 < 2 * save_freq <= step:
        what = "has no checkpoint that is whole" if left else "is empty"
        raise RunFolderError(
            f"{checkpoints} {what}, and the run there has made {step} steps, with a checkpoint every {save_freq}. "
            f"If they lie on a disk, mount it; to begin from scratch, remove {checkpoints}"
        )


def check_writable(path: Path) -> None:
    """Refuse a run folder that can't be created or written, or that a live run uses.

    Raises:
        RunFolderError: The folder can't be used; says what to do.
    """
    advice = "name a folder in another place with trainer.default_local_dir"
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not there.is_dir():
        raise RunFolderError(f"the run folder {path} can't be created: {there} is a file; {advice}")
    with writing_to(path), tempfile.TemporaryFile(dir=there):
        pass  # only a write shows missing rights, a read-only disk or a full one; the file has no name
    lock = path / LOCK_NAME
    if not lock.is_file() and not lock.is_symlink():
        return
    with writing_to(path), open(open_itself(lock, os.O_RDONLY), encoding="utf-8") as opened:
        take_lock(path, opened, fcntl.LOCK_SH)  # released with the file, at the end of the block


def has_checkpoints(trainer: RunConfig) -> bool:
    """Return whether there is a checkpoint to read, which may take its time."""
    named = trainer.resume_mode == "resume_path"
    checkpoints = RunFolder.checkpoints_in(trainer.default_local_dir)
    # `glob` alone raises where a folder above may not be looked into, which is told when the run folder is looked at.
    return named or (os.path.isdir(checkpoints) and any(checkpoints.glob("step_*")))


def look_at_run_folder(findings: Findings, trainer: RunConfig, train_dataset: Any) -> FolderPlan | None:
    """Check that the run folder can be used, and return what becomes of it; see `plan_run_folder`.

    None if it can't be used, or begins with a checkpoint that is yet to be fetched from a store.
    """
    resumed = trainer.resume_mode == "resume_path"
    with findings.about("trainer.resume_from_path" if resumed else "trainer.default_local_dir"):
        if resumed and is_in_store(trainer.resume_from_path):
            require_step(*named_checkpoint(str(trainer.resume_from_path)))
            start = f"from the model of {trainer.resume_from_path}, which is fetched first"
            findings.facts.append(Fact("run folder", f"{trainer.default_local_dir}, {start}"))
            return None
        plan = plan_run_folder(trainer, train_dataset)
        findings.facts.append(Fact("run folder", str(plan)))
        return plan
    return None


def look_at_store(findings: Findings, trainer: RunConfig, plan: FolderPlan | None) -> None:
    """Check that the remote store, if there is one, can be written, read and cleaned up, and is this run's to use."""
    if trainer.default_remote_dir is None:
        return
    with findings.about("trainer.default_remote_dir"):
        store = RemoteStore(trainer.default_remote_dir)
        findings.facts.append(Fact("remote store", store.probe()))
        # Without a plan, the run begins with a checkpoint of a store, or its folder can't be used, which was told.
        begins_anew = is_in_store(trainer.resume_from_path) if plan is None else not plan.continues
        if trainer.resume_mode != "auto" and begins_anew and store.steps():
            raise RemoteStoreError(
                f"{store.address} holds checkpoints of an earlier run; continue it with trainer.resume_mode=auto, or "
                "give this run its own trainer.default_remote_dir"
            )
