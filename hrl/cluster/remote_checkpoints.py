"""A run's checkpoints in its remote store: sent while it runs, fetched where another machine goes on with it."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue

from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.disk import require_room
from hrl.cluster.remote_store import (
    DamagedObjectError,
    GivenUpError,
    MissingObjectError,
    RemoteStore,
    RemoteStoreError,
    UnsendableError,
)
from hrl.report.run_folder import ALARMS, CONFIG, METRICS, read_jsonl, writing_to

#: Files of a run that lie beside its checkpoints in the store: with them another machine continues the log.
BESIDE = (METRICS, ALARMS, CONFIG)

#: Checkpoints that may be on their way, the one that is sent included. Where another comes, those between are left out.
_MAX_WAITING = 2
#: Seconds after which a checkpoint that could not be sent is sent again, unless a newer one is there by then.
_AGAIN_S = 60.0
#: Seconds between two looks at how much time is left.
_LOOK_S = 0.1
#: Seconds that the chunk under way may take when an upload is given up.
_LAST_CHUNK_S = 10.0


class Uploads:
    """Sends checkpoints one after the other, and removes older ones there as the run does here.

    Nothing here waits but `close`. A checkpoint that can't be sent is sent again and again until a newer one is there,
    so a store may be away for as long as the run takes from one save to the next.

    Args:
        store: Where they go; claimed for this run.
        run: The name that the store was claimed with.
        checkpoints: Those of the run, on the disk.
        keep: How many stay there, the newest, and the one with the best validation beside them; None keeps all.
        tell: Is told what was sent, and what was not where the run goes on without it.
        stops: Whether the run ends if a checkpoint can't be sent.
        passed_over: Steps there which the run makes again. They count until it has saved beyond where it begins.
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
        passed_over: Iterable[int] = (),
    ) -> None:
        self._store, self._run, self._checkpoints, self._keep = store, run, checkpoints, keep
        self._tell, self._stops = tell, stops
        self._begins, self._passed_over = max(checkpoints.steps(), default=0), sorted(passed_over)
        self._beside = {name: checkpoints.folder.parent / name for name in BESIDE}
        self._change = threading.Condition()
        self._waiting: dict[int, int] = {}
        """Step → how many checkpoints were queued before, since one step may be queued again while it is sent."""
        self._queued = 0
        self._under_way: int | None = None
        self._failed: dict[int, str] = {}
        self._left_out = 0
        self._news: SimpleQueue[str] = SimpleQueue()
        self._errors: SimpleQueue[RemoteStoreError] = SimpleQueue()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="uploading checkpoints", daemon=True)
        self._thread.start()

    def steps(self) -> frozenset[int]:
        """Return the steps that are on their way: their folders have to stay."""
        with self._change:
            return frozenset(self._waiting)

    def send(self, step: int) -> None:
        """Queue the checkpoint of a step as it is now; nothing if there is none."""
        if not self._checkpoints.path(step).is_dir():
            return
        with self._change:
            self._waiting.pop(step, None)
            between = [each for each in self._waiting if each != self._under_way]
            for each in between[: max(0, len(self._waiting) + 1 - _MAX_WAITING)]:
                del self._waiting[each]
                self._left_out += 1
                self._news.put(f"step {each} is not sent to {self._store.address}: a newer checkpoint was there first")
            self._queued += 1
            self._waiting[step] = self._queued
            self._change.notify_all()

    def look(self) -> dict[str, float]:
        """Tell what became of checkpoints since the last look; return `checkpoint/…` metrics.

        Raises:
            RemoteStoreError: One can't be sent, and the run is to end then.
        """
        self._tell_news()
        while not self._errors.empty():
            error = self._errors.get()
            if self._stops:
                raise error
            self._tell(f"{error}. The run goes on (trainer.on_save_error=continue)")
        return {
            "checkpoint/upload_gb": self._store.transfers.nbytes / 1e9,
            "checkpoint/upload_retries": float(self._store.transfers.retries),
            "checkpoint/failed_uploads": float(len(self._failed) + self._left_out),
            "checkpoint/uploads_waiting": float(len(self.steps())),
        }

    def close(self, patience_s: float, left_s: Callable[[], float] = lambda: math.inf) -> dict[int, str]:
        """Wait until all are sent and end the thread; return the steps that were not, and why.

        Args:
            patience_s: How long to wait; what is under way then is given up.
            left_s: Is asked again and again how long there is still time, if that may become less meanwhile.
        """
        began = time.monotonic()
        with self._change:
            self._is_over = True
            self._change.notify_all()
        try:
            while self._thread.is_alive() and (wait_s := min(began + patience_s - time.monotonic(), left_s())) > 0:
                self._thread.join(min(wait_s, _LOOK_S))
        finally:  # also on Ctrl-C
            self._store.give_up.set()
        waited_s = time.monotonic() - began
        self._thread.join(_LAST_CHUNK_S)
        self._tell_news()
        late = f"the run ended before all of it was sent, and waited {waited_s:.0f} s"
        return self._failed | {step: self._failed.get(step, late) for step in self.steps()}

    def _tell_news(self) -> None:
        while not self._news.empty():
            self._tell(self._news.get())

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._is_over)
                if not self._waiting:
                    return
                step, queued = next(iter(self._waiting.items()))
                self._under_way = step
            try:
                error = self._sent(step)
            except GivenUpError:
                return
            with self._change:
                self._under_way = None
                if error is not None and self._waits_for_another_try(step, error):
                    continue
                if self._waiting.get(step) == queued:  # and not queued again meanwhile
                    del self._waiting[step]
            if error is not None:
                self._failed[step] = str(error)
                self._errors.put(error)

    def _sent(self, step: int) -> RemoteStoreError | None:
        """Send a checkpoint; return what kept it from being sent.

        Raises:
            GivenUpError: The run ends.
        """
        began = time.perf_counter()
        try:
            self._supersede_passed_over(step)
            self._store.upload(self._checkpoints.path(step), step, self._beside, self._run)
            self._rotate(step)
        except GivenUpError:
            raise
        except RemoteStoreError as error:
            return error
        except Exception as error:  # noqa: BLE001  such as of the disk; without this the thread would die
            return RemoteStoreError(f"{self._checkpoints.path(step)} can't be sent: {type(error).__name__}: {error}")
        self._failed.pop(step, None)
        self._news.put(f"sent {self._store.address_of(step)} in {time.perf_counter() - began:.1f} s")
        return None

    def _waits_for_another_try(self, step: int, error: RemoteStoreError) -> bool:
        """Wait until a step is to be sent again; False if it is not. `_change` is held, and let go while it waits."""
        if isinstance(error, UnsendableError):
            return False
        self._news.put(f"{error}. Step {step} is sent again until a newer checkpoint is there")
        self._change.wait_for(lambda: len(self._waiting) > 1 or self._is_over, _AGAIN_S)
        return len(self._waiting) == 1 and not self._is_over

    def _supersede_passed_over(self, saved: int) -> None:
        """Let checkpoints that the run has passed over count no longer, once it has saved one of its own.

        That is before the upload, which sends no file again that a whole checkpoint of the same step has.
        """
        if self._passed_over and saved > self._begins:
            self._store.require_owner(self._run)
            self._store.supersede(self._passed_over)
            self._news.put(superseded_in_words(self._store, self._passed_over))
            self._passed_over = []

    def _rotate(self, sent: int) -> None:
        """Remove what interrupted uploads and earlier branches left, and checkpoints that are no longer needed."""
        for step in (*self._store.torn(), *(step for step in self._store.superseded() if step < sent)):
            self._store.remove(step)
        if self._keep is None:
            return
        steps = self._store.steps()
        scores = {step: self._store.manifest(step).score for step in steps}
        best = max(((score, step) for step, score in scores.items() if score is not None), default=(0.0, sent))[1]
        for step in steps[: max(0, len(steps) - self._keep)]:
            if step not in (best, sent):
                self._store.remove(step)


def superseded_in_words(store: RemoteStore, steps: Iterable[int]) -> str:
    """Return what is said of checkpoints that a run makes again."""
    return (
        f"checkpoints of steps {', '.join(map(str, steps))} in {store.address}, which are made again, count no longer"
    )


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
        except (DamagedObjectError, MissingObjectError) as error:
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
        MissingObjectError: A file of it is not there.
        RemoteStoreError: The store can't be read, or does not have it.
        RunFolderError: The folder can't be written to, or has no room.
    """
    require_step(store, step)
    with writing_to(run_folder):
        run_folder.mkdir(parents=True, exist_ok=True)
    require_room(run_folder, {"checkpoint": store.manifest(step).size})
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
