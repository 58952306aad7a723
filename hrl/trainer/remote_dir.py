"""What a run does with its remote store before its first step and after its last one."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar, cast

from xxhash import xxh3_64_hexdigest

from hrl.cluster.checkpoints import CheckpointStore, damages_of_checkpoint
from hrl.cluster.manifest import Manifest
from hrl.cluster.remote_checkpoints import Uploads, fetch, fetch_newer, superseded_in_words
from hrl.cluster.remote_store import RemoteStore, RemoteStoreError, is_in_store, named_checkpoint
from hrl.config.outline import RunConfiguration
from hrl.config.trainer import RunConfig
from hrl.files import expanded
from hrl.processes.signals import SENDING_SHARE, RunStoppedError, StopRequest
from hrl.report.console import Display
from hrl.report.run_folder import RunFolder, lock_folder, removed, writing_to

RunC = TypeVar("RunC", bound=RunConfiguration)

#: Seconds that a run which failed waits for what is on its way to the store.
_RESCUE_S = 30.0
_FETCHED = "fetched"


def with_fetched(config: RunC, display: Display) -> RunC:
    """Bring the checkpoint that a run begins with to this machine, if only a store has it.

    Args:
        config: The validated configuration.
        display: Shows what is fetched.

    Returns:
        The configuration, in which `resume_from_path` names a folder.

    Raises:
        RemoteStoreError: The store can't be read, or lacks what is named.
        RunFolderError: The run folder is in use, or can't be written to.
    """
    trainer = config.trainer
    folder = expanded(trainer.default_local_dir).resolve()
    named = trainer.resume_from_path or ""
    if trainer.resume_mode == "resume_path" and is_in_store(named):
        store, step = named_checkpoint(named)
        checkpoints = CheckpointStore(folder / _FETCHED / xxh3_64_hexdigest(store.address.encode()))
        with display.stage(f"fetching {named}"), _locked(folder):
            if not _was_fetched(store, step, checkpoints):
                shutil.rmtree(checkpoints.path(step), ignore_errors=True)
                fetch(store, step, checkpoints, folder)
            for older in removed(_fetched_beside(checkpoints.path(step))):
                display.note(f"removed {older}, which an earlier start has fetched")
        fetched = {"resume_from_path": str(checkpoints.path(step))}
        return cast("RunC", config.model_copy(update={"trainer": trainer.model_copy(update=fetched)}))
    if trainer.resume_mode == "auto" and trainer.default_remote_dir is not None:
        store = RemoteStore(trainer.default_remote_dir)
        with display.stage(f"looking for checkpoints in {store.address}"), _locked(folder):
            fetch_newer(store, CheckpointStore(RunFolder.checkpoints_in(folder)), folder, display.note)
    return config


def _fetched_beside(kept: Path) -> list[Path]:
    """Return what else was fetched into a run folder than this checkpoint; the store still has what was whole."""
    there = (*kept.parent.iterdir(), *kept.parent.parent.iterdir())
    return [path for path in there if path not in (kept, kept.parent)]


def _was_fetched(store: RemoteStore, step: int, checkpoints: CheckpointStore) -> bool:
    """Return whether a checkpoint was fetched before, is undamaged, and is still the one of the store."""
    there = checkpoints.path(step)
    if not there.exists() or damages_of_checkpoint(there):
        return False
    return Manifest.read(there).text == store.manifest(step).text


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
    with closing(lock):
        yield


@contextmanager
def sending(
    trainer: RunConfig, folder: RunFolder, display: Display, stop: StopRequest | None = None
) -> Iterator[Uploads | None]:
    """Send checkpoints to the remote store, if there is one, and wait at the end of the block until all are there.

    Args:
        trainer: The section of the configuration.
        folder: The run folder, taken back to where the run begins.
        display: Is told what is sent.
        stop: Shortens the waiting to what is left of the grace once a signal has asked for the end.

    Raises:
        RemoteStoreError: The store can't be written to; or the newest checkpoint is not there at the end.
        RunStoppedError: It is not there because a signal shortened the waiting; the next start sends it.
    """
    if trainer.default_remote_dir is None:
        yield None
        return
    store, run, stop = RemoteStore(trainer.default_remote_dir), uuid.uuid4().hex, stop or StopRequest()
    checkpoints = CheckpointStore(folder.checkpoints)
    with display.stage(f"claiming {store.address}"):
        before = store.claim(run)
        begins = max(checkpoints.steps(), default=0)
        later = [step for step in store.steps() if step > begins]
        goes_back = trainer.resume_mode == "resume_path"
        if goes_back:
            store.supersede(later)
    if before is not None:
        display.note(f"{store.address} was the store of {before}; if that still runs, it sends nothing more")
    if later and goes_back:
        display.note(superseded_in_words(store, later))
    uploads = Uploads(
        store,
        run,
        checkpoints,
        trainer.max_ckpt_to_keep,
        display.note,
        stops=trainer.on_save_error == "stop",
        # Nobody asked to go back before these: they seemed damaged, and the next start may find that they are not.
        passed_over=() if goes_back else later,
    )
    for step in sorted(set(checkpoints.steps()) - set(store.steps())):  # what an earlier start could not send
        uploads.send(step)
    try:
        yield uploads
    except BaseException as error:
        if isinstance(error, RunStoppedError):
            patience_s = trainer.timeouts.call_s
        else:
            patience_s = 0.0 if isinstance(error, KeyboardInterrupt) else _RESCUE_S
        _finish(uploads, display, store, patience_s, stop)
        raise
    missing = _finish(uploads, display, store, trainer.timeouts.call_s, stop)
    newest = max(checkpoints.steps(), default=0)
    if newest in missing:
        if stop.is_asked and newest in uploads.steps():
            raise RunStoppedError(newest)
        raise RemoteStoreError(
            f"{store.address} lacks the newest checkpoint, which is whole in {checkpoints.path(newest)}: "
            f"{missing[newest]}"
        )


def _finish(
    uploads: Uploads, display: Display, store: RemoteStore, patience_s: float, stop: StopRequest
) -> dict[int, str]:
    """Wait for what is on its way; tell of what does not arrive, and return it with the reasons."""
    with display.stage(f"sending checkpoints to {store.address}") if uploads.steps() else nullcontext():
        missing = uploads.close(patience_s, lambda: stop.left_of(SENDING_SHARE))
    for step, reason in missing.items():
        display.note(f"step {step} is not in {store.address}: {reason}")
    return missing
