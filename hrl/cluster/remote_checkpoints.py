"""A run's checkpoints in its remote store: sent while the run goes on, fetched where another machine goes on with it."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue

from hrl.cluster.checkpoints import CheckpointError, CheckpointStore
from hrl.cluster.remote_store import DamagedObjectError, GivenUpError, RemoteStore, RemoteStoreError
from hrl.report.run_folder import ALARMS, CONFIG, METRICS, read_jsonl, writing_to

logger = logging.getLogger(__name__)

#: Files of a run that lie beside its checkpoints in the store: with them another machine continues the log.
BESIDE = (METRICS, ALARMS, CONFIG)

#: Checkpoints that may wait for the store; a run that saves faster than they are sent waits at its next save.
_MAX_WAITING = 2


class Uploads:
    """Sends checkpoints one after the other, and removes older ones there as the run does here.

    Args:
        store: Where they go; claimed for this run.
        run: The name that the store was claimed with.
        keep: How many stay there, the newest, and the one with the best validation beside them; None keeps all.
        beside: Files of the run that go on with a checkpoint, by their name.

    Attributes:
        done: Steps that were sent since this was last emptied, and how long each took in seconds.
    """

    def __init__(self, store: RemoteStore, run: str, keep: int | None, beside: Mapping[str, Path]) -> None:
        self.done: dict[int, float] = {}
        self._store, self._run, self._keep, self._beside = store, run, keep, beside
        self._waiting: dict[int, Path] = {}
        self._change = threading.Condition()
        self._errors: SimpleQueue[RemoteStoreError] = SimpleQueue()
        self._is_over = False
        self._began = 0.0
        self._thread = threading.Thread(target=self._work, name="uploading checkpoints", daemon=True)
        self._thread.start()

    @property
    def steps(self) -> frozenset[int]:
        """Steps that are on their way: their folders have to stay."""
        with self._change:
            return frozenset(self._waiting)

    def send(self, step: int, folder: Path, patience_s: float) -> None:
        """Queue a checkpoint; wait first while too many are on their way.

        Args:
            step: Whose it is.
            folder: Its folder.
            patience_s: How long to wait.

        Raises:
            RemoteStoreError: Those before it were not sent in time.
        """
        with self._change:
            if not self._change.wait_for(lambda: len(self._waiting) < _MAX_WAITING, patience_s):
                raise RemoteStoreError(
                    f"{self._store.address} takes checkpoints slower than the run makes them: those of steps "
                    f"{', '.join(map(str, self._waiting))} were not sent within {patience_s:g} s. Save less often "
                    "(trainer.save_freq), or less (save_contents)"
                )
            self._waiting[step] = folder
            self._change.notify_all()

    def take_error(self) -> RemoteStoreError | None:
        """Return what kept a checkpoint from being sent, once; None if nothing did."""
        return None if self._errors.empty() else self._errors.get()

    def metrics(self) -> dict[str, float]:
        """Return `checkpoint/upload_…`: bytes sent and attempts repeated so far, and checkpoints that wait."""
        transfers = self._store.transfers
        return {
            "checkpoint/upload_bytes": float(transfers.nbytes),
            "checkpoint/upload_retries": float(transfers.retries),
            "checkpoint/uploads_waiting": float(len(self.steps)),
        }

    def close(self, patience_s: float) -> tuple[int, ...]:
        """Wait until all are sent, end the thread, and return the steps that were not.

        Args:
            patience_s: How long to wait; what is under way then is given up.
        """
        with self._change:
            self._is_over = True
            self._change.notify_all()
        try:
            self._thread.join(patience_s)
        finally:  # also on Ctrl-C
            self._store.give_up.set()
        self._thread.join(patience_s)
        return tuple(sorted(self.steps))

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._is_over)
                if not self._waiting:
                    return
                step, folder = next(iter(self._waiting.items()))
            began = time.perf_counter()
            try:
                self._store.require_owner(self._run)
                self._store.upload(folder, step, self._beside)
                self._rotate(step)
            except GivenUpError:
                return
            except RemoteStoreError as error:
                self._errors.put(error)
            else:
                self.done[step] = time.perf_counter() - began
            with self._change:
                del self._waiting[step]
                self._change.notify_all()

    def _rotate(self, sent: int) -> None:
        """Remove what interrupted uploads left, and checkpoints that are no longer needed."""
        for step in self._store.torn():
            self._store.remove(step)
        if self._keep is None:
            return
        steps = self._store.steps()
        scores = {step: self._store.manifest(step).score for step in steps}
        best = max(((score, step) for step, score in scores.items() if score is not None), default=(0.0, sent))[1]
        for step in steps[: max(0, len(steps) - self._keep)]:
            if step not in (best, sent):
                self._store.remove(step)


def fetch_newer(store: RemoteStore, checkpoints: CheckpointStore, run_folder: Path, tell: Callable[[str], None]) -> None:
    """Fetch the newest checkpoint of a store that is as its manifest says, if the disk has none that is as new.

    Args:
        store: The run's.
        checkpoints: Those on the disk.
        run_folder: The run folder, which gets the files beside the checkpoint too. Nobody else may use it meanwhile.
        tell: Is told what was damaged and what was fetched.

    Raises:
        RemoteStoreError: The store can't be read.
        CheckpointError: The store has checkpoints, all damaged, and the disk has none.
        RunFolderError: The run folder can't be written to.
    """
    here = max(checkpoints.steps(), default=-1)
    newer = [step for step in store.steps() if step > here]
    for step in reversed(newer):
        with writing_to(run_folder):
            temporary = checkpoints.begin(step)
            try:
                store.fetch(step, temporary)
            except DamagedObjectError as error:
                tell(f"{store.address_of(step)} is not used: {error}")
                shutil.rmtree(temporary)
                continue
            checkpoints.publish(step)
            _continue_log(store, run_folder)
        tell(f"fetched {store.address_of(step)}")
        return
    if newer and here < 0:
        raise CheckpointError(
            f"{store.address} holds checkpoints, but none is as its manifest says. Name another store with "
            "trainer.default_remote_dir, or remove these"
        )


def _continue_log(store: RemoteStore, run_folder: Path) -> None:
    """Take over the files beside a checkpoint, unless the log here goes on further."""
    arriving = run_folder / "tmp.run"
    shutil.rmtree(arriving, ignore_errors=True)
    arriving.mkdir()
    fetched = store.fetch_beside(BESIDE, arriving)
    if len(_records(arriving / METRICS)) > len(_records(run_folder / METRICS)):
        for name in fetched:
            (arriving / name).replace(run_folder / name)
    shutil.rmtree(arriving)


def _records(file: Path) -> list[dict[str, object]]:
    return read_jsonl(file) if file.exists() else []
