"""A run's checkpoints in its remote store: sent while it runs, fetched where another machine goes on with it."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.remote_store import DamagedObjectError, GivenUpError, RemoteStore, RemoteStoreError
from hrl.report.run_folder import ALARMS, CONFIG, METRICS, read_jsonl, writing_to

logger = logging.getLogger(__name__)

#: Files of a run that lie beside its checkpoints in the store: with them another machine continues the log.
BESIDE = (METRICS, ALARMS, CONFIG)

#: Checkpoints that may wait for the store; a run that saves faster than they are sent waits at its next save.
_MAX_WAITING = 2
#: Seconds that the chunk under way may take when an upload is given up.
_LAST_CHUNK_S = 10.0


class Uploads:
    """Sends checkpoints one after the other, and removes older ones there as the run does here.

    Args:
        store: Where they go; claimed for this run.
        run: The name that the store was claimed with.
        checkpoints: Those of the run, on the disk.
        keep: How many stay there, the newest, and the one with the best validation beside them; None keeps all.
        tell: Is told what was sent, and what was not where the run goes on without it.
        stops: Whether the run ends if a checkpoint can't be sent.
        patience_s: How long a save waits for those before it.
    """

    def __init__(
        self,
        store: RemoteStore,
        run: str,
        checkpoints: CheckpointStore,
        keep: int | None,
        tell: Callable[[str], None],
        *,
        stops: bool,
        patience_s: float,
    ) -> None:
        self._store, self._run, self._checkpoints, self._keep = store, run, checkpoints, keep
        self._tell, self._stops, self._patience_s = tell, stops, patience_s
        self._waiting: dict[int, None] = {}
        self._change = threading.Condition()
        self._sent: SimpleQueue[tuple[int, float]] = SimpleQueue()
        self._errors: SimpleQueue[RemoteStoreError] = SimpleQueue()
        self._beside = {name: checkpoints.folder.parent / name for name in BESIDE}
        self._failed: dict[int, str] = {}
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="uploading checkpoints", daemon=True)
        self._thread.start()

    def steps(self) -> frozenset[int]:
        """Return the steps that are on their way: their folders have to stay."""
        with self._change:
            return frozenset(self._waiting)

    def send(self, step: int) -> None:
        """Queue the checkpoint of a step; wait first while too many are on their way.

        Raises:
            RemoteStoreError: Those before it were not sent in time.
        """
        with self._change:
            if not self._change.wait_for(lambda: len(self._waiting) < _MAX_WAITING, self._patience_s):
                raise RemoteStoreError(
                    f"{self._store.address} takes checkpoints slower than the run makes them: those of steps "
                    f"{', '.join(map(str, self._waiting))} were not sent within {self._patience_s:g} s. Save less "
                    "often (trainer.save_freq), or less (save_contents)"
                )
            self._waiting[step] = None
            self._change.notify_all()

    def look(self) -> dict[str, float]:
        """Tell what became of checkpoints since the last look; return `checkpoint/…` metrics.

        Raises:
            RemoteStoreError: One can't be sent, and the run is to end then.
        """
        self._tell_of_sent()
        while not self._errors.empty():
            error = self._errors.get()
            if self._stops:
                raise error
            self._tell(f"{error}. The run goes on (trainer.on_save_error=continue)")
        return {
            "checkpoint/upload_gb": self._store.transfers.nbytes / 1e9,
            "checkpoint/upload_retries": float(self._store.transfers.retries),
            "checkpoint/failed_uploads": float(len(self._failed)),
            "checkpoint/uploads_waiting": float(len(self.steps())),
        }

    def close(self, patience_s: float) -> dict[int, str]:
        """Wait until all are sent and end the thread; return the steps that were not, and why.

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
        self._thread.join(_LAST_CHUNK_S)
        self._tell_of_sent()
        late = f"the run ended before all of it was sent, and waited {patience_s:g} s"
        return self._failed | dict.fromkeys(self.steps(), late)

    def _tell_of_sent(self) -> None:
        while not self._sent.empty():
            step, seconds = self._sent.get()
            self._tell(f"sent {self._store.address_of(step)} in {seconds:.1f} s")

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._is_over)
                if not self._waiting:
                    return
                step = next(iter(self._waiting))
            began = time.perf_counter()
            try:
                self._store.require_owner(self._run)
                self._store.upload(self._checkpoints.path(step), step, self._beside)
                self._rotate(step)
            except GivenUpError:
                return
            except RemoteStoreError as error:
                self._failed[step] = str(error)
                self._errors.put(error)
            else:
                self._failed.pop(step, None)
                self._sent.put((step, time.perf_counter() - began))
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


def fetch_newer(
    store: RemoteStore, checkpoints: CheckpointStore, run_folder: Path, tell: Callable[[str], None]
) -> None:
    """Fetch the newest checkpoint of a store that is as its manifest says, if the disk has none that is as new.

    Args:
        store: The run's.
        checkpoints: Those on the disk.
        run_folder: The run folder, which gets the files beside the checkpoint too. Nobody else may use it meanwhile.
        tell: Is told what was damaged and what was fetched.

    Raises:
        RemoteStoreError: The store can't be read; or it has checkpoints, all damaged, and the disk has none.
        RunFolderError: The run folder can't be written to.
    """
    here = checkpoints.newest_undamaged()
    newer = [step for step in store.steps() if here is None or step > here]
    for step in reversed(newer):
        try:
            fetch(store, step, checkpoints, run_folder)
        except DamagedObjectError as error:
            tell(f"{store.address_of(step)} is not used: {error}")
            continue
        with writing_to(run_folder):
            _continue_log(store, run_folder)
        tell(f"fetched {store.address_of(step)}")
        return
    if newer and here is None:
        raise RemoteStoreError(
            f"{store.address} holds checkpoints, but none is as its manifest says. Name another store with "
            "trainer.default_remote_dir, or remove these"
        )


def fetch(store: RemoteStore, step: int, checkpoints: CheckpointStore, run_folder: Path) -> Path:
    """Fetch a checkpoint, and return its folder.

    Raises:
        DamagedObjectError: It is not as its manifest says.
        RemoteStoreError: The store can't be read, or does not have it.
        RunFolderError: The folder can't be written to.
    """
    require_step(store, step)
    with writing_to(run_folder):
        temporary = checkpoints.begin(step)
        try:
            store.fetch(step, temporary)
        except RemoteStoreError:
            checkpoints.discard(step)
            raise
        if checkpoints.path(step).exists():  # damaged: an undamaged one would not be fetched again
            checkpoints.set_aside(checkpoints.path(step))
        return checkpoints.publish(step)


def require_step(store: RemoteStore, step: int) -> None:
    """Check that a store has a checkpoint.

    Raises:
        RemoteStoreError: It has not; names those that it has.
    """
    steps = store.steps()
    if step not in steps:
        there = f"those of steps {', '.join(map(str, steps))}" if steps else "none"
        raise RemoteStoreError(f"{store.address_of(step)} is no whole checkpoint; the store has {there}")


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
