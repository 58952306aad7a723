"""What every trainer does around its steps: resume, count, time, validate, report, save.

A trainer defines a step (`train_step`), how it validates, and its state.
"""

from __future__ import annotations

import copy
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hrl.batching.planner import MicroBatchLimits, Planner, lengths_of
from hrl.cluster.checkpoints import CheckpointError, CheckpointStore, check_data, check_parts, load_state
from hrl.cluster.disk import gigabytes, in_words, refusal_of_disk, require_room
from hrl.cluster.object_store import StoreWatch
from hrl.cluster.pending_checkpoint import PendingCheckpoint
from hrl.cluster.remote_checkpoints import Uploads
from hrl.cluster.roles import ResourcePoolManager, Role
from hrl.cluster.shared_disk import require_all_shards, require_shared
from hrl.cluster.worker_groups import WorkerGroups
from hrl.config.outline import outline_of
from hrl.config.saved import saved_config
from hrl.data.order import Position, differences
from hrl.errors import DatasetError, HrlError
from hrl.metrics import StepMetrics
from hrl.models.whole_folder import whole_model
from hrl.processes.signals import STEP_SHARE, RunStoppedError, StopRequest
from hrl.profiling.operators import Profile
from hrl.protocol import DataProto
from hrl.report.phases import Tokens
from hrl.report.run_folder import RunFolderError, make_folder, writing_to
from hrl.single_controller.worker import RayClassWithInitArgs
from hrl.single_controller.worker_errors import WorkerDiedError
from hrl.single_controller.worker_errors import phase as worker_phase
from hrl.single_controller.worker_group import RayWorkerGroup
from hrl.trainer.callbacks import Callback, CallbackError, RunState
from hrl.trainer.phases import StepPhase, run_phases
from hrl.workers.engine.nonfinite import FOLDER as NONFINITE_FOLDER
from hrl.workers.model_worker import file_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.config.outline import RunConfiguration
    from hrl.report.reporter import RunReporter

logger = logging.getLogger(__name__)

#: Phases in which models and optimizers are those of the step before.
_BEFORE_LEARNING = frozenset({"step", "profile", "gen", "reward", "old_log_prob", "ref", "values", "adv"})
#: How long a run that fails waits for a checkpoint that is being written.
_RESCUE_S = 30.0


class _WholeStep(NamedTuple):
    """What is left of a step that is done, for a checkpoint of it while the next one runs."""

    step: int
    position: Position
    state: dict[str, Any]
    metrics: Mapping[str, float]
    seconds: float


class _Measured(NamedTuple):
    """A step that is done and waits for its validation, to be written down with it."""

    step: int
    metrics: dict[str, float]
    ended_at: float


class TrainingLoop(ABC):
    """`fit` and what it needs, for any trainer.

    Args:
        config: The validated configuration; the loop reads its `trainer` section and `data.train_batch_size`.
        tokenizer: Saved beside the weights of a checkpoint.
        role_worker_mapping: The worker class of every role, with its arguments (`RayClassWithInitArgs`).
        resource_pool_manager: Which role runs on which pool.
        ray_worker_group_cls: Starts the processes of a pool.
        train_dataset: Rows to train on, with their `order` and `fingerprint`.
        val_dataset: Rows to validate on, `None` for no validation.
        reporter: Timers, metrics and pictures of the run.
        total_training_steps: Where the run ends.

    Attributes:
        learners: Roles whose models learn and are saved, where the run has them; the first is exported.
        planner: Decides which rank runs which rows, in which micro-batches.
        limits: How large the micro-batches of every pass may be; see `micro_batches` of the configuration.
        global_steps: Steps done, the running one included.
        data_position: Where the next batch starts.
        keeps_validation_samples: Whether the samples of a validation belong to the run folder.
        stop: Says when a signal has asked for the end.
        inputs: What the run depends on beside its configuration and rows, see `hrl.preflight.run_inputs`.
        restarts: How often the run was started again after a machine's fault.
        uploads: Sends every checkpoint to the remote store; None without one.
    """

    config: RunConfiguration
    learners: ClassVar[tuple[Role, ...]]

    def __init__(
        self,
        config: RunConfiguration,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: Mapping[Role, RayClassWithInitArgs],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
        *,
        train_dataset: Any,
        val_dataset: Any | None,
        reporter: RunReporter,
        total_training_steps: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.reporter = reporter
        self.total_training_steps = total_training_steps
        self.planner = Planner(share_prefix=outline_of(config).model.share_prefix)
        self.limits = {
            name: MicroBatchLimits(each.budget, each.max_rows, each.tokens_key, each.processes, each.slices)
            for name, each in config.micro_batches().items()
        }
        self.checkpoints = CheckpointStore(reporter.folder.checkpoints, config.trainer.max_ckpt_to_keep)
        self.uploads: Uploads | None = None
        self._pending: PendingCheckpoint | None = None
        self._save_sizes: dict[str, int] | None = None
        self._failed_saves = 0
        self._failed_step: int | None = None
        self._saved_step = 0  # the one that the run began after, if it has saved none
        self._workers: WorkerGroups | None = None
        self.global_steps = 0
        self.data_position = Position()
        self._upcoming: tuple[DataProto, Position] | None = None
        self._in_validation: int | None = None
        self._measured: _Measured | None = None
        self.keeps_validation_samples = True
        self.inputs: Mapping[str, Any] = {}
        self.callbacks: Callback = Callback()
        self.run_state = RunState(total_training_steps, reporter.folder.path)
        self.stop = StopRequest()
        self.restarts = 0
        self._whole: _WholeStep | None = None
        self._step_began_at = 0.0
        self._is_learning = False
        self._is_prepared = False

    # ------------------------------------------------------------------ what a trainer is

    #: What goes on before the first step or validation, in words.
    beginning: ClassVar[str] = "taking the weights to start from"

    def before_load(self) -> None:
        """Use the model that the run starts from. Called once, before a checkpoint's weights are loaded."""

    def begin(self) -> None:
        """Get ready. Called once, with the weights that the run goes on from, before the first validation or step."""

    @abstractmethod
    def train_step(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        """Learn from one batch, in timed phases, and return the batch as it is to be reported."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Return the `val/...` metrics of the present weights; none if there is nothing to validate on."""

    @abstractmethod
    def describe(self, batch: DataProto) -> dict[str, float]:
        """Return the metrics of a finished step's batch."""

    @abstractmethod
    def validation_score(self, metrics: Mapping[str, float]) -> float | None:
        """Return how good a validation was, more being better; None without one. It decides which checkpoint is best.

        Args:
            metrics: Those of a step, with `val/...` if there was a validation after it.
        """

    @property
    def looks_ahead(self) -> bool:
        """Whether the next batch can be drawn ahead of its step, and `look_ahead` has a use for it."""
        return False

    def look_ahead(self, upcoming: DataProto) -> None:
        """Begin what can be begun of the next step. Called before a validation of the weights that it starts with.

        Args:
            upcoming: The batch that the step will get.
        """

    @property
    def validates_beside(self) -> bool:
        """Whether a validation may go on while the next step is made, which then calls `end_validation`."""
        return False

    def finish_validation(self, step: int) -> dict[str, float]:
        """Return the `val/...` metrics of a validation that was begun ahead, see `look_ahead`.

        Args:
            step: After which it comes. The engines still have the weights of that step.
        """
        raise NotImplementedError(f"{type(self).__name__} validates beside nothing")

    def report_samples(self, batch: DataProto) -> None:
        """Give the reporter the samples of a step, if there are any. Called after the step was reported."""

    @property
    @abstractmethod
    def save_contents(self) -> Sequence[str]:
        """What a checkpoint holds (`checkpoint.save_contents`)."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has of the driver beside step and position in the data, as plain JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""

    def on_step_end(self, batch: DataProto, metrics: dict[str, float]) -> None:
        """Look at a finished step, or add to its metrics. Called before they are reported."""

    # ------------------------------------------------------------------ the loop

    def init_workers(self) -> None:
        """Start the processes of every pool and load the models of every role into them."""
        with self.reporter.stage("starting the processes"):
            self._workers = WorkerGroups.start(
                self.role_worker_mapping,
                self.resource_pool_manager,
                self.config.trainer.timeouts,
                self.ray_worker_group_cls,
                self.learners,
            )
        self.workers.init_models(self.reporter.stage)

    def fit(self) -> None:
        """Train to `total_training_steps`, from the newest checkpoint if there is one.

        If no step is left, validate once.

        Raises:
            RunStoppedError: A signal asked for the end (`stop`), and the run was saved.
        """
        self.prepare()
        self._saved_step = self.global_steps
        self.run_state._advance(self.global_steps)
        self._tell_of_steps_without_profile()
        with self.reporter.run(self.global_steps), self._finishing_saves():
            self._fit()
        if self.stop.is_asked and self.global_steps < self.total_training_steps:
            raise RunStoppedError(self._saved_step)

    def _fit(self) -> None:
        if self.global_steps >= self.total_training_steps:
            self.validate_only()
        elif self.config.trainer.val_before_train and self.global_steps == 0:
            self._look_ahead()
            self.validate_alone()
        if self._is_stopped():
            return
        with self.stop.in_order(self._tell_of_signal):
            try:
                self._make_steps()
            except KeyboardInterrupt:
                if not self._gives_step_up():
                    raise
            self.finish_save()

    def _make_steps(self) -> None:
        store = StoreWatch()
        self._remember_whole({})
        for batch in self.batches():
            self.global_steps += 1
            self._step_begins()
            self.run_state._advance(self.global_steps)
            metrics = StepMetrics()
            with self.reporter.step(self.global_steps), self._measured_step_is_kept():
                batch, profiles = self._timed_step(batch, metrics)
            metrics |= self.describe(batch) | self.data_metrics() | self._metrics_of_run(store)
            self._report_step(batch, metrics)
            if profiles:
                self.reporter.profile(self.global_steps, profiles, metrics)
            if self._ends_after(batch, metrics):
                return

    def _timed_step(self, batch: DataProto, metrics: StepMetrics) -> tuple[DataProto, dict[str, list[Profile]]]:
        """Train a step, and validate if that is due; return its batch, and the profiles of every pool if it has any."""
        if self.global_steps in self.config.trainer.profile:
            batch, profiles = self._profiled_step(batch, metrics)
        else:
            profiles = {}
            with self.phase("step"):
                batch = self.train_step(batch, metrics)
        if self.is_due(self.config.trainer.test_freq, self.config.trainer.validates_last):
            metrics |= self._validate_in_time()
        self.stop.step_is_over()  # what is made is not given up while it is written down
        metrics.observe(*self.workers.peak_memory())
        self.on_step_end(batch, metrics)
        return batch, profiles

    def _profiled_step(self, batch: DataProto, metrics: StepMetrics) -> tuple[DataProto, dict[str, list[Profile]]]:
        """Train a step while all processes are profiled; return its batch, and the profiles of every pool."""
        with self.phase("profile"):
            self.workers.start_profile()
        with self.phase("step"):
            batch = self.train_step(batch, metrics)
        with self.phase("profile"):
            return batch, self.workers.stop_profile(self.global_steps)

    def _metrics_of_run(self, store: StoreWatch) -> dict[str, float]:
        """Return what a step's record has of the run as a whole: uploads, restarts, saves, Ray's object store.

        Raises:
            RemoteStoreError: A checkpoint can't be sent, and the run is to end then.
        """
        metrics = {} if self.uploads is None else self.uploads.look()
        if self.config.trainer.max_restarts > 0:
            metrics["run/restarts"] = float(self.restarts)
        if self.config.trainer.save_freq > 0:
            metrics["checkpoint/failed_saves"] = float(self._failed_saves)
        of_store, news = store.look(self.global_steps)
        if news is not None:
            self.reporter.console.note(news)
        return metrics | of_store

    def _report_step(self, batch: DataProto, metrics: StepMetrics) -> None:
        """Complete the metrics of a finished step, and log and show them."""
        self._tell_of_skipped_steps(metrics)
        prompt_lens, response_lens = lengths_of(batch)
        tokens = Tokens(int(response_lens.sum()), int(prompt_lens.sum() + response_lens.sum()))
        metrics |= self.reporter.own_metrics(tokens)
        self._measured = _Measured(self.global_steps, metrics, perf_counter())
        if self._in_validation is None:
            self._write_down()

    def _write_down(self) -> None:
        """Log and show the step that was measured last."""
        measured, self._measured, self._in_validation = self._measured, None, None
        if measured is not None:
            step, metrics, ended_at = measured
            metrics |= self._count_nonfinite(step, metrics)
            metrics |= self.reporter.judge(step, metrics)
            self.reporter.step_done(step, metrics, ended_at)

    def end_validation(self) -> None:
        """Wait for the validation that goes on beside this step, if one does, and write down the step that it is of."""
        if self._measured is not None:
            self._measured.metrics.update(self.finish_validation(self._measured.step))
            self._write_down()

    @contextmanager
    def _measured_step_is_kept(self) -> Iterator[None]:
        """Write down a step whose validation is not over if the block, which makes the next one, fails."""
        try:
            yield
        except BaseException:
            self._write_down()
            raise

    def _ends_after(self, batch: DataProto, metrics: StepMetrics) -> bool:
        """Call the callbacks and save, as a logged step asks for; return whether the run ends with it.

        Raises:
            CallbackError: A callback failed; the step is saved first.
        """
        failed = self._tell_callbacks(batch, metrics)
        self._look_after_save()
        if self.run_state.stop_reason is not None and not _is_validated(metrics):
            metrics |= self._validate_the_end()
        self._remember_whole(metrics)
        # After the log, so that no checkpoint has a step that the log lacks.
        saved = self.is_due(self.config.trainer.save_freq, self.config.trainer.save_freq > 0) or (
            failed is not None and self.config.trainer.save_freq > 0
        )
        if saved:
            self.save(metrics)
        ends = self.stop.is_asked  # now: what is asked for from here on comes after the next step
        if ends:
            self.end_validation()
        if ends and not saved and self.global_steps < self.total_training_steps:
            self._save_to_continue(metrics)
        if failed is not None:
            raise failed
        if self.run_state.stop_reason is not None and not _is_validated(metrics):  # when it was saved
            self.finish_save()
            self._set_score(self.validation_score(self._validate_the_end()))
            self._send(self.global_steps)
        return self._is_stopped() or ends

    def _is_stopped(self) -> bool:
        """Return whether a callback asked for the end, and say so."""
        reason = self.run_state.stop_reason
        if reason is not None:
            self.reporter.console.note(f"stopped after step {self.global_steps}: {reason}")
        return reason is not None

    def _tell_callbacks(self, batch: DataProto, metrics: dict[str, float]) -> CallbackError | None:
        """Report the samples of a finished step and call the callbacks; return what one of them raised."""
        failed = None
        for tell in (
            lambda: self.callbacks.on_validation(self.run_state, metrics),
            lambda: self.callbacks.on_step_end(self.run_state, metrics),
            lambda: self.report_samples(batch),
        ):
            try:
                tell()
            except CallbackError as error:
                failed = failed or error
        return failed

    def _validate_the_end(self) -> dict[str, float]:
        """Validate after a step that turned out to be the last one; return the metrics."""
        return self.validate_alone() if self.config.trainer.validates_last else {}

    def prepare(self) -> None:
        """Take the weights that the run goes on from, and give them to the engines; only the first call does it."""
        if self._is_prepared:
            return
        if self.config.trainer.save_freq > 0:
            require_shared(self.reporter.folder.path, self.workers.trained)
            self._look_for_room()
        with self.reporter.stage(self.beginning):
            self.restore()
            self.begin()
        self._is_prepared = True

    def evaluate(self, rows: Any | None = None) -> dict[str, float]:
        """Return the `val/...` metrics of the present weights.

        Args:
            rows: Rows, or names of sources, to validate on in place of the run's own. Their samples are not written to
                the run folder, which has those of its own rows.
        """
        self.prepare()
        if rows is None:
            return self.validate()
        own = self.val_dataset, self.keeps_validation_samples
        self.val_dataset, self.keeps_validation_samples = self.other_rows(rows), False
        try:
            return self.validate()
        finally:
            self.val_dataset, self.keeps_validation_samples = own

    def other_rows(self, rows: Any) -> Any:
        """Return a data set of other rows than the run's own, ready to be validated on.

        Raises:
            DatasetError: They can't be used, or show pictures in a run whose own rows show none.
        """
        return self.seen(self.train_dataset.of_other_rows(rows))

    def seen(self, dataset: Any) -> Any:
        """Return a data set of other rows; refuse pictures that the models of this run were not made to look at.

        Raises:
            DatasetError: Its rows show pictures, and the run's own show none.
        """
        own = [rows for rows in (self.train_dataset, self.val_dataset) if rows is not None]
        if dataset.has_pictures and not any(rows.has_pictures for rows in own):
            raise DatasetError(
                "these rows show pictures, and the rows of the run show none, so that its model would not look at "
                "them: begin the run with rows that show pictures, for training or for validation"
            )
        return dataset

    def batches(self) -> Iterator[DataProto]:
        """Yield the remaining batches of training rows, from the current position in the data."""
        while self.global_steps < self.total_training_steps:
            yield self.next_batch()

    def next_batch(self) -> DataProto:
        """Return the batch at the current position in the data, which moves on."""
        batch, self.data_position = self._upcoming or self._batch_at_position()
        self._upcoming = None
        return batch

    def _batch_at_position(self) -> tuple[DataProto, Position]:
        indices, position = self.draw(self.data_position, self.config.data.train_batch_size)
        return self.train_dataset.batch(indices), position

    def _look_ahead(self) -> None:
        """Let the next step begin, if there is one.

        The position in the data stays where it is, so that a checkpoint is the same as without it.
        """
        step, stopped = self.global_steps + 1, self.run_state.stop_reason is not None
        if step > self.total_training_steps or stopped or self.val_dataset is None:
            return
        if self.looks_ahead and step not in self.config.trainer.profile:  # which is to show all of the step
            self._upcoming = self._batch_at_position()
            self.look_ahead(self._upcoming[0])

    def draw(self, position: Position, batch_size: int) -> tuple[list[int], Position]:
        """Return the rows of the next batch, and the position in the data after it."""
        return self.train_dataset.draw(position, batch_size)  # type: ignore[no-any-return]

    def data_metrics(self) -> dict[str, float]:
        """Return the position in the data in epochs, and how many rows were left out or cut."""
        epoch = self.data_position.epoch + self.data_position.offset / len(self.train_dataset)
        return {"data/epoch": epoch} | self.train_dataset.metrics()

    def validate_only(self) -> None:
        """Validate once in a run that has no step left, and say so."""
        self.reporter.console.note(
            f"no step left: at step {self.global_steps}, trainer.total_training_steps={self.total_training_steps}; "
            + ("nothing to validate on" if self.val_dataset is None else "validating once")
        )
        self.validate_alone()

    def validate_alone(self) -> dict[str, float]:
        """Validate before the first step, or if no step is left, and report the metrics on their own; return them."""
        if self.val_dataset is None:
            return {}
        with self.reporter.stage("validating"):
            metrics = self.validate()
        metrics |= self._count_nonfinite(self.global_steps, metrics)
        self.reporter.validation_done(self.global_steps, metrics)
        self.callbacks.on_validation(self.run_state, metrics)
        return metrics

    # ------------------------------------------------------------------ when a signal asks for the end

    def _tell_of_signal(self, name: str) -> None:
        """Say at once what the run does about the first signal."""
        within = ""
        if self.stop.grace_s is not None:
            within = f" if it is done within {self.stop.left_s:.0f} s (trainer.grace_s)"
        note = f"{name}: stopping after step {self.global_steps}{within}, saved; again to stop now"
        self.reporter.console.note(note)

    def _step_begins(self) -> None:
        self._step_began_at, self._is_learning = perf_counter(), False
        self.stop.step_begins()

    def _remember_whole(self, metrics: Mapping[str, float]) -> None:
        """Keep what a checkpoint of this step needs of the driver, where the next step may be given up."""
        if self.stop.grace_s is not None:
            state, seconds = copy.deepcopy(self.state()), metrics.get("timing_s/step", 0.0)
            self._whole = _WholeStep(self.global_steps, self.data_position, state, metrics, seconds)

    def _validate_in_time(self) -> dict[str, float]:
        """Validate within a step, unless a signal asks for the end and the time is limited."""
        note = f"step {self.global_steps} is not validated, to be saved within trainer.grace_s={self.stop.grace_s}"
        if self.stop.is_asked and self.stop.grace_s is not None:
            self.reporter.console.note(note)
            return {}
        try:
            self._look_ahead()
            if self._goes_on_beside_validation:
                self._in_validation = self.global_steps
                return {}
            return self.validate()
        except KeyboardInterrupt:
            if not self.stop.is_late:
                raise
            self.reporter.console.note(note)
            return {}

    @property
    def _goes_on_beside_validation(self) -> bool:
        """Whether nothing asks for the validation before the next step has ended: no checkpoint, callback or signal."""
        is_saved = self.is_due(self.config.trainer.save_freq, self.config.trainer.save_freq > 0)
        waited_for = is_saved or self.callbacks.listens or self.stop.is_asked or self.stop.grace_s is not None
        is_of_step = self.global_steps > 0 and self._upcoming is not None
        return is_of_step and self.validates_beside and not waited_for

    def _look_at_the_time(self, phase: str) -> None:
        """Give a step up before one of its phases if it can't be done within the grace, by the time of the last one.

        Raises:
            KeyboardInterrupt: It is given up.
        """
        self._is_learning = self._is_learning or phase not in _BEFORE_LEARNING
        if self._whole is None or self._is_learning or phase == "profile":
            return
        if self._whole.seconds - (perf_counter() - self._step_began_at) > self.stop.left_s:
            self.stop.is_late = True
            raise KeyboardInterrupt

    def _gives_step_up(self) -> bool:
        """Go back to the last whole step, and save it where it is not; called when the running step is interrupted.

        Returns:
            Whether the step was given up; False if the run is to end now.
        """
        whole, lost = self._whole, self.global_steps
        if not self.stop.is_late or whole is None:
            return False
        self.stop.step_is_over()
        self.global_steps = whole.step
        self.run_state._advance(whole.step)
        late = f"it is not done within {STEP_SHARE:.0%} of trainer.grace_s={self.stop.grace_s:g}"
        if self._is_learning or not type(self).train_step.__module__.startswith("hrl."):
            newest = self._saved_step if self._pending is None else self._pending.step
            others = "" if newest == whole.step else f"; so is what came after step {newest}, which was not saved"
            self.reporter.console.note(f"step {lost} is lost: {late}, and has begun to change the weights{others}")
            return True
        self.reporter.console.note(f"step {lost} is given up: {late}; the run is saved as it was after {whole.step}")
        self.data_position = whole.position
        self.load_state(whole.state)
        is_pending = self._pending is not None and self._pending.step == whole.step
        if whole.metrics and not is_pending and not self.checkpoints.path(whole.step).exists():
            self._save_to_continue(whole.metrics)
        return True

    # ------------------------------------------------------------------ checkpoints

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Begin a checkpoint of this step: every trained role's state, a transformers folder, the driver's state.

        It is written while the run goes on, and counts as soon as all of it is on disk (`PendingCheckpoint`). The next
        save and the end of the run wait for it. A run whose callbacks look at checkpoints waits for each at once.

        Args:
            metrics: Those of the step.
        """
        started = perf_counter()
        with self.reporter.stage(f"saving step {self.global_steps}"):
            self.finish_save()
            with self._told_if_refused(self.global_steps):
                self._pending = self._begin_checkpoint(metrics or {})
            if self.callbacks.look_at_checkpoints:
                self.finish_save()
        self.reporter.stood_still("save_checkpoint", perf_counter() - started)

    def _save_to_continue(self, metrics: Mapping[str, float]) -> None:
        """Begin a checkpoint of the last step of a run that a signal ends, whatever `trainer.save_freq` says."""
        require_shared(self.reporter.folder.path, self.workers.trained)
        self.save(metrics)

    def finish_save(self) -> None:
        """Wait for the checkpoint that was begun last, if it is still pending, and tell of it.

        Raises:
            CheckpointError: It can't be written or published, and `trainer.on_save_error` is `stop`.
            WorkerError: A rank failed in another way.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        final = None
        with self._told_if_refused(pending.step):
            try:
                if not pending.is_over:
                    with worker_phase("save_checkpoint"):
                        self.workers.finish_save()
            finally:
                final = pending.stop()
            if final is None:
                require_all_shards(pending.folder, self.workers.trained, self.reporter.folder.path)
                final = pending.publish()
        if final is not None:
            self._saved_step = pending.step
            took = f"{pending.seconds:.1f} s"
            if self._failed_step == pending.step:  # it was refused, and tried again
                self._failed_step = None
            self.reporter.console.note(f"saved {final} in {took}, {self._sizes(final)}; {self._kept()}")
            self.callbacks.on_checkpoint(self.run_state, final)
            self._send(pending.step)

    def _set_score(self, score: float | None) -> None:
        """Write down how good the last step is, whose checkpoint is there; end the run or go on if the disk refuses."""
        if not self.checkpoints.path(self.global_steps).exists():  # it was refused, which was told
            return
        try:
            with writing_to(self.reporter.folder.path):
                self.checkpoints.set_score(self.global_steps, score)
        except RunFolderError as error:
            message = f"step {self.global_steps} is saved without the score of its validation: {error}"
            if self.config.trainer.on_save_error == "stop":
                raise CheckpointError(message) from error
            self.reporter.console.note(f"{message} (trainer.on_save_error=continue)")

    @contextmanager
    def _told_if_refused(self, step: int) -> Iterator[None]:
        """Remove what there is of a checkpoint that the disk refuses, and end the run or go on, as configured."""
        try:
            yield
        except (OSError, HrlError) as error:
            refusal = refusal_of_disk(error)
            if refusal is None:
                raise
            with worker_phase("save_checkpoint"):
                self.workers.abandon_save()
            try:
                self.checkpoints.discard(step)
            except OSError as left:
                logger.warning("what there is of step %d can't be removed: %s", step, left)
            message = f"step {step} is not saved: {refusal}; {self._kept()}"
            if self.config.trainer.on_save_error == "stop":
                raise CheckpointError(message) from error
            self._failed_saves += 1
            self._failed_step = step
            self.reporter.console.note(f"{message}. The run goes on (trainer.on_save_error=continue)")

    def _send(self, step: int) -> None:
        """Let the remote store, if there is one, have a checkpoint as it is now."""
        if self.uploads is not None:
            self.uploads.send(step)

    def _begin_checkpoint(self, metrics: Mapping[str, float]) -> PendingCheckpoint:
        run_folder, step = self.reporter.folder.path, self.global_steps
        require_room(run_folder, self._bytes_to_save())
        with writing_to(run_folder):
            folder = self.checkpoints.begin(step)
        with worker_phase("save_checkpoint"):
            records = self.workers.save(folder, self.save_contents)
        of_loop = {
            "step": step,
            "data_position": self.data_position.to_dict(),
            "data": self.train_dataset.fingerprint,
            "contents": list(self.save_contents),
            "config": saved_config(self.config),
            "inputs": self.inputs,
            "ranks": self.workers.ranks(),
        }
        if "hf_model" in self.save_contents:
            with writing_to(run_folder):  # at once, because a tokenizer serves one thread at a time
                self.tokenizer.save_pretrained(folder / "hf")
        state, score = of_loop | self.state(), self.validation_score(metrics)
        return PendingCheckpoint(
            self.checkpoints,
            step,
            state,
            records,
            run_folder,
            score,
            make_log_durable=self.reporter.folder.make_log_durable,
            deadline_s=self.config.trainer.timeouts.call_s,
        )

    def _look_after_save(self) -> None:
        """Tell of a pending checkpoint that is whole by now; raise what went wrong in one that is not."""
        pending = self._pending
        if pending is None:
            return
        if pending.is_over:
            self.finish_save()
            return
        with self._told_if_refused(pending.step):
            try:
                with worker_phase("save_checkpoint"):
                    self.workers.finish_save(wait=False)
            except (OSError, HrlError):
                self._pending = None  # there is nothing to wait for
                pending.stop()
                raise

    @contextmanager
    def _finishing_saves(self) -> Iterator[None]:
        """Wait for the pending checkpoint at the end of the block; for some time if it fails or is interrupted."""
        try:
            yield
        except BaseException as error:
            pending, self._pending = self._pending, None
            if pending is not None:
                in_a_hurry = isinstance(error, WorkerDiedError) or self.stop.is_asked
                self._rescue(pending, 0.0 if in_a_hurry else _RESCUE_S)
            raise
        self.finish_save()
        if self._failed_step == self.global_steps:
            raise CheckpointError(
                f"the run ends without a checkpoint of its last step, {self.global_steps}; {self._kept()}"
            )

    def _rescue(self, pending: PendingCheckpoint, patience_s: float) -> None:
        """Save what a failed run had begun to save, if that takes no longer; a second Ctrl-C ends the waiting."""
        try:
            with self.reporter.stage(f"saving step {pending.step}"):
                final = pending.stop(patience_s)
        except Exception as error:  # noqa: BLE001  the run's own error is the one to raise
            final = None
            logger.warning("step %d is not saved: %s", pending.step, error)
        if final is not None:
            self._send(pending.step)
        self.reporter.console.note(
            f"step {pending.step} is not saved: the run ended before all of it was written"
            if final is None
            else f"saved {final} in {pending.seconds:.1f} s"
        )

    def _look_for_room(self) -> None:
        """Refuse, or tell of, a disk that has no room for a single checkpoint, before the first step is made."""
        try:
            require_room(self.reporter.folder.path, self._bytes_to_save())
        except CheckpointError as error:
            if self.config.trainer.on_save_error == "stop":
                raise
            self.reporter.console.note(f"warning: {error}")

    def _bytes_to_save(self) -> dict[str, int]:
        """Return the bytes of a checkpoint's tensors, by what it holds; they are the same in every step."""
        if self._save_sizes is None:
            with worker_phase("save_checkpoint"):
                self._save_sizes = self.workers.bytes_to_save(self.save_contents)
        return self._save_sizes

    def _sizes(self, checkpoint: Path) -> str:
        """Return how large a checkpoint is, and what takes how much of it."""
        whole = gigabytes(sum(file_sizes(checkpoint).values()))
        return f"{whole} ({in_words(self._bytes_to_save())})"

    def _kept(self) -> str:
        best = self.checkpoints.best()
        steps = [f"{step} (the best)" if step == best else str(step) for step in self.checkpoints.steps()]
        return f"kept: step {', '.join(steps)}" if steps else "there is no other checkpoint"

    def export(self, folder: Path) -> Path:
        """Write the present weights and the tokenizer as a folder that transformers and vLLM load, or nothing."""
        self.prepare()
        is_of_run = folder.is_relative_to(self.reporter.folder.path)
        with writing_to(folder, is_of_run=is_of_run):
            make_folder(folder.parent)
        require_shared(folder.parent, self.workers.trained, is_of_run=is_of_run)
        with writing_to(folder, is_of_run=is_of_run), whole_model(folder) as unfinished:
            with worker_phase("save_checkpoint"):
                self.workers.export(unfinished)
            self.tokenizer.save_pretrained(unfinished)
        return folder

    def restore(self) -> None:
        """Continue from the checkpoint that `trainer.resume_mode` names, if any, and say so."""
        trainer = self.config.trainer
        choice = self.checkpoints.choose(trainer.resume_mode, trainer.resume_from_path)
        path = choice.path
        if choice.damaged:  # since the run folder was opened, where the log was taken back to the right step
            raise CheckpointError(f"{choice.damaged[0]}. Move it out of {self.checkpoints.folder}, and start again")
        if path is None:
            self.before_load()
            return
        state = load_state(path, ("data_position", "data", *self.state()))
        if self.checkpoints.holds(path):
            check_parts(path, state, self.state())
        self.global_steps = state["step"]
        self.data_position = self._position_after(path, state)
        self.load_state(state)
        self.before_load()
        self.workers.load(path)
        self.reporter.console.note(f"resumed from {path}: continuing after step {self.global_steps}")
        self._tell_of_other_ranks(state.get("ranks", {}))

    def _tell_of_other_ranks(self, saved: Mapping[str, int]) -> None:
        for name, present in self.workers.ranks().items():
            if saved.get(name, present) != present:
                self.reporter.console.note(
                    f"{name} was saved by {saved[name]} ranks and goes on with {present}: weights, moments and "
                    "schedule are the same; what each rank draws at random starts anew from trainer.seed"
                )

    def _position_after(self, path: Path, state: dict[str, Any]) -> Position:
        """Return where to go on in the data: at the beginning, if the checkpoint is another run's with other data.

        Raises:
            CheckpointError: The checkpoint is this run's, and was made with other data.
        """
        present = self.train_dataset.fingerprint
        if self.checkpoints.holds(path):
            check_data(path, state["data"], present)
        changes = differences(state["data"], present)
        if changes:
            self.reporter.console.note(f"other training data than {path} ({'; '.join(changes)}): from its beginning")
            return Position()
        return Position.from_dict(state["data_position"])

    # ------------------------------------------------------------------ small things

    def _tell_of_steps_without_profile(self) -> None:
        first, last = self.global_steps + 1, self.total_training_steps
        missed = sorted({step for step in self.config.trainer.profile if not first <= step <= last})
        if missed:
            named = ", ".join(map(str, missed))
            steps = f"makes the steps {first} to {last}" if first <= last else "makes no step"
            self.reporter.console.note(f"trainer.profile: nothing is profiled in step {named}; this run {steps}")

    def _count_nonfinite(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Tell of metrics that are not finite, which the log has as null, and count them."""
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        if not broken:
            return {}
        named = ", ".join(broken[:3]) + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")
        self.reporter.console.note(f"step {step}: metrics that are not finite: {named}")
        return {"nonfinite/metrics": float(len(broken))}

    def _tell_of_skipped_steps(self, metrics: Mapping[str, float]) -> None:
        for name, count in metrics.items():
            if name.endswith("/skipped_steps") and count > 0:
                where = self.reporter.folder.path / NONFINITE_FOLDER / f"step_{self.global_steps}_rank_*"
                self.reporter.console.note(
                    f"step {self.global_steps}: {count:g} optimizer step(s) of {name.partition('/')[0]} not applied: "
                    f"the loss or gradient was not finite. The rows are in {where}"
                )

    @property
    def workers(self) -> WorkerGroups:
        """The worker groups, once `init_workers` has started them."""
        if self._workers is None:
            raise RuntimeError("call init_workers() before the workers are used")
        return self._workers

    def shutdown(self) -> None:
        """End every process that `init_workers` started."""
        if self._workers is not None:
            try:
                self.finish_save()
            finally:
                self._workers.shutdown()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase as `timing_s/<name>` and show it while it lasts."""
        self._look_at_the_time(name)
        return self.reporter.phase(name)

    def run_phases(
        self,
        phases: Iterable[StepPhase],
        batch: DataProto,
        metrics: StepMetrics,
        over: Callable[[DataProto, str], None] = lambda batch, name: None,
    ) -> DataProto:
        """Run the phases of a list, each timed and shown; see `run_phases` of `hrl.trainer.phases`."""
        begin, timed = self._look_at_the_time, self.reporter.phase
        return run_phases([*phases], batch, metrics, begin=begin, timed=timed, over=over)

    def is_due(self, every: int, also_last: bool = False) -> bool:
        """Return whether something that happens every `every` steps (never, if not positive) happens after this one."""
        last = self.global_steps == self.total_training_steps or self.run_state.stop_reason is not None
        return (every > 0 and self.global_steps % every == 0) or (also_last and last)


def _is_validated(metrics: Mapping[str, float]) -> bool:
    return any(name.startswith("val/") for name in metrics)
