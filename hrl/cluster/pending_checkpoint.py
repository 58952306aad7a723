"""A checkpoint that the ranks are still writing, and the thread that publishes it as soon as they have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hrl.cluster.checkpoints import CheckpointStore, CheckpointTimeoutError, state_text
from hrl.report.run_folder import writing_to
from hrl.workers.engine.background import give_way, is_written, recorded
from hrl.workers.engine.digest import FileDigest

_POLL_S = 0.05


class PendingCheckpoint:
    """Publishes a checkpoint when every record of it is there, see `hrl.workers.engine.background.write_record`.

    Publishing is `CheckpointStore.commit`, which also removes older checkpoints; neither holds up the run.

    Args:
        store: The checkpoints of the run, in which `begin` was called for the step.
        step: Whose weights they are.
        state: The driver's state after this step. Parts of it may belong to others, who change them later.
        records: Files that ranks write when everything else of theirs is on disk.
        run_folder: Of the run, for errors.
        make_log_durable: Has the log of the steps that are in the checkpoint outlive a crash, before it counts.
        score: How good the validation of the step was; None without one.
        deadline_s: How long `stop` waits for what the thread is in the midst of (`trainer.timeouts.call_s`).

    Raises:
        CheckpointError: The state is no JSON.
    """

    def __init__(
        self,
        store: CheckpointStore,
        step: int,
        state: Mapping[str, Any],
        records: Iterable[Path],
        run_folder: Path,
        score: float | None = None,
        *,
        make_log_durable: Callable[[], object],
        deadline_s: float,
    ) -> None:
        self.step = step
        self.folder = store.temporary(step)
        self._store, self._state, self._run_folder = store, state_text(state), run_folder
        self._records, self._make_log_durable = list(records), make_log_durable
        self._score, self._deadline_s = score, deadline_s
        self._durable: dict[Path, FileDigest | None] = {}
        self._began = time.perf_counter()
        self._final: Path | None = None
        self._error: Exception | None = None
        self._give_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publishing a checkpoint", daemon=True)
        self._thread.start()

    #: Seconds from its beginning until it was whole, once it is.
    seconds = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it is published, or publishing has failed."""
        return not self._thread.is_alive()

    def stop(self, patience_s: float = 0.0) -> Path | None:
        """End the thread, and return the published checkpoint; None if it lacks something.

        Args:
            patience_s: How long to wait for what it lacks.

        Raises:
            CheckpointTimeoutError: The thread does not come back from the file system, such as an NFS whose server is
                gone.
            Exception: What kept it from being published, such as an `HrlError`.
        """
        try:
            self._thread.join(patience_s)
        finally:  # also on Ctrl-C
            self._give_up.set()
        self._thread.join(self._deadline_s)
        if self._thread.is_alive():
            raise CheckpointTimeoutError(
                f"step {self.step} is not saved: its files in {self._store.folder} were still being synced or read "
                f"back after {self._deadline_s:g} s (trainer.timeouts.call_s). Look whether the file system there "
                "answers; for one that is slow, allow more time, or name a folder in another place with "
                "trainer.default_local_dir"
            )
        if self._error is not None:
            raise self._error
        return self._final

    def publish(self) -> Path:
        """Publish it now; its thread has stopped."""
        with writing_to(self._run_folder):
            self._make_log_durable()
            final = self._store.commit(self.step, self._state, self._durable, self._score)
        self.seconds = time.perf_counter() - self._began
        return final

    def _run(self) -> None:
        try:
            give_way()
            while not self._is_whole():
                if self._give_up.wait(_POLL_S) and not self._is_whole():
                    return
            self._final = self.publish()
        except Exception as error:  # noqa: BLE001  `stop` raises it, where the run can end
            self._error = error

    def _is_whole(self) -> bool:
        with writing_to(self._run_folder):
            written = {record for record in self._records if is_written(record)}
            for record in written:
                self._durable |= {record: None, **recorded(record)}
            self._records = [record for record in self._records if record not in written]
        return not self._records
