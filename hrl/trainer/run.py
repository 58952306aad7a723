"""From a configuration to an ended run, whatever its kind.

The order is: look at everything, show what is about to run, lock the run folder, start Ray, train, and take everything
down again whatever happened.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.machine import available_cores, choose_device, run_cluster
from hrl.cluster.object_store import shortage
from hrl.cluster.precision import with_dtypes
from hrl.cluster.roles import pool_manager_of
from hrl.cluster.worker_groups import worker_mapping
from hrl.config.arithmetic import Fact
from hrl.config.load import load_kind
from hrl.config.outline import RunConfiguration
from hrl.config.rules import warnings
from hrl.config.saved import saved_config
from hrl.config.trainer import RunConfig
from hrl.masking import remember_environment
from hrl.preflight.earlier_models import with_earlier_models, with_models_of_before
from hrl.preflight.folder_plan import plan_run_folder
from hrl.preflight.given import Given
from hrl.preflight.pictures_look import pictures_of
from hrl.preflight.preflight import Preflight, preflight
from hrl.processes.evidence import count_kills_from_now
from hrl.processes.signals import ENDING, SENDING_SHARE, StopRequest
from hrl.report.console import Display
from hrl.report.display import display_of
from hrl.report.reporter import RunReporter
from hrl.report.run_folder import MODEL, RunFolder
from hrl.single_controller.object_store import store_use
from hrl.trainer.banner import run_facts, title
from hrl.trainer.callbacks import Callback, Callbacks
from hrl.trainer.kinds import KINDS, Kind
from hrl.trainer.loop import TrainingLoop
from hrl.trainer.remote_dir import sending, with_fetched
from hrl.workers.runtime import ALL_BUT_THE_USER, Runtime


def run(
    kind: str,
    config: RunConfiguration,
    given: Given | None = None,
    *,
    trainer_cls: type[TrainingLoop] | None = None,
    display: Display | None = None,
    stop: StopRequest | None = None,
    restarts: int = 0,
) -> Path:
    """Train as configured, and return the run folder; arguments and errors are those of `running`.

    A run that saves no checkpoint leaves the trained model in the folder `model`. `stop` receives the signals that ask
    the run to end; without it they do what the caller has them do. `restarts` counts how often a machine's fault has
    ended the run so far.

    Raises:
        RunStoppedError: A signal asked for the end, and the run was saved.
    """
    with (
        ExitStack() as until_all_has_ended,
        running(kind, config, given, trainer_cls=trainer_cls, display=display, stop=stop) as trainer,
    ):
        trainer.restarts = restarts
        trainer.fit()
        folder, note = trainer.reporter.folder.path, trainer.reporter.console.note
        if config.trainer.save_freq <= 0 and config.trainer.total_training_steps != 0:
            with trainer.stop.in_order(lambda name: note(f"{name}: writing the model, then ending; again to stop now")):
                trainer.export(folder / MODEL)
            note(f"trained model: {folder / MODEL}")
        until_all_has_ended.enter_context(trainer.stop.in_order(partial(_tell_of_late_signal, trainer)))
        return folder


def _tell_of_late_signal(trainer: TrainingLoop, name: str) -> None:
    """Say at once what a run does about a first signal that comes after its last step."""
    sends = ""
    if trainer.uploads is not None and trainer.uploads.steps():
        left_s = trainer.stop.left_of(SENDING_SHARE)
        sends = ", sending checkpoints" + (f" for at most {left_s:.0f} s (trainer.grace_s)" if left_s < inf else "")
    trainer.reporter.console.note(f"{name}: all steps are made; ending the processes{sends}; again to stop now")


@contextmanager
def running(
    kind: str,
    config: RunConfiguration,
    given: Given | None = None,
    *,
    trainer_cls: type[TrainingLoop] | None = None,
    display: Display | None = None,
    callbacks: Sequence[Callback] = (),
    facts: Sequence[Fact] = (),
    stop: StopRequest | None = None,
) -> Iterator[TrainingLoop]:
    """Yield the trainer of a run with its processes started; the run ends with the block.

    Args:
        kind: `ppo`, `dpo`, `sft` or `rm`.
        config: The configuration, composed from a command line or built as an object: what it leaves open gets its
            default, and the rules between keys are checked.
        given: Rows and a reward function that the caller has as objects.
        trainer_cls: A subclass of the trainer to run in its place.
        display: Where the run is shown; on the terminal by default.
        callbacks: Are called at the moments of the run.
        facts: Further lines for the banner.
        stop: As in `run`.

    Raises:
        HrlError: The configuration can't be run (`ConfigError`), or the run failed. Nothing is left running.
    """
    given = given or Given()
    if kind not in KINDS:
        raise ValueError(f"there is no run of kind {kind!r}; there are {', '.join(KINDS)}")
    made_of = KINDS[kind]
    if not isinstance(config, made_of.config.schema):
        schema, found = made_of.config.schema.__name__, type(config).__name__
        raise TypeError(f"a run of kind {kind!r} takes a {schema}, and was given a {found}")
    config = given.named_in(config)
    checked = load_kind(made_of.config, config)
    config = config if checked == config else checked  # which knows where its values come from
    remember_environment()
    count_kills_from_now()
    saved_config(config)  # the secrets in it are masked from now on, in whatever is shown
    display = display or display_of(config.trainer)
    with _files_for(config.trainer):
        config = with_fetched(config, display)
    config = with_models_of_before(config)
    ready = preflight(config, given, display.stage)
    display.expect(ready.total_training_steps, made_of.line(config), made_of.phases(config))
    _show(display, config, ready, kind, facts)
    placement = ready.outline.placement
    handlers = {number: signal.getsignal(number) for number in ENDING}
    with ExitStack() as stack:
        stack.enter_context(_files_for(config.trainer))
        folder = stack.enter_context(closing(open_run_folder(config.trainer, display, ready.train_dataset)))
        config, ready = with_earlier_models(config, ready, folder)
        reporter = stack.enter_context(
            RunReporter(
                folder,
                display,
                config.trainer,
                saved_config(config),
                picture=made_of.picture,
                streams=stop.streams if stop else None,
            )
        )
        uploads = stack.enter_context(sending(config.trainer, folder, display, stop))
        batch_tokens = made_of.batch_tokens(config, ready)
        cluster = run_cluster(config.trainer.ray_kwargs, placement.num_cpus, batch_tokens)
        with _shown(display, "Ray", cluster):
            _restore(handlers)
            if (short := shortage(batch_tokens, store_use())) is not None:
                display.note(short)
            with _trainer(made_of, config, ready, given, trainer_cls or made_of.trainer(config), reporter) as trainer:
                trainer.callbacks, trainer.stop = Callbacks(callbacks), stop or trainer.stop
                if uploads is not None:
                    trainer.uploads, trainer.checkpoints.busy = uploads, uploads.steps
                yield trainer


@contextmanager
def _files_for(trainer: RunConfig) -> Iterator[None]:
    """Have files that this process writes in the block, and those that it starts, be for whom the run is.

    Ranks inherit it from a Ray that is started here. On a cluster that is joined, they do the same themselves.
    """
    if not trainer.private:
        yield
        return
    before = os.umask(ALL_BUT_THE_USER)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _shown(display: Display, name: str, service: AbstractContextManager[object]) -> Iterator[None]:
    """Enter a context, and show its start and its end while they last."""
    with ExitStack() as stack:
        with display.stage(f"starting {name}"):
            stack.enter_context(service)
        try:
            yield
        finally:
            with display.stage(f"ending {name}"):
                stack.close()


def _show(
    display: Display, config: RunConfiguration, ready: Preflight, kind: str, further: Sequence[Fact] = ()
) -> None:
    display.banner(title(config, kind), dict([*further, *run_facts(config, ready)]))
    if ready.findings.changes:
        display.note("\n".join([f"{ready.findings.changed}:", *(f"  {line}" for line in ready.findings.changes)]))
    for warning in (*warnings(config), *ready.findings.notes):
        display.note(f"warning: {warning}")


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Give signals back to the caller: Ray's core, once it runs, answers SIGTERM with a stack trace and an abort."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            if handler is not None:  # one that was not set from Python
                signal.signal(number, handler)


@contextmanager
def _trainer(
    kind: Kind[Any],
    config: RunConfiguration,
    ready: Preflight,
    given: Given,
    trainer_cls: type[TrainingLoop],
    reporter: RunReporter,
) -> Iterator[TrainingLoop]:
    """Build the trainer and start its workers, on a running Ray; they end with the block."""
    device = choose_device(config.trainer.device)
    config = with_dtypes(config, device)
    first, *others = kind.notes(config, ready)
    for note in (f"on {device}: {first}", *others):
        reporter.console.note(note)
    placement = ready.outline.placement
    reporter.num_devices = placement.num_gpus if device == "cuda" else placement.num_devices
    manager = pool_manager_of(placement, use_gpu=device == "cuda")
    runtime = Runtime.of(
        config.trainer,
        ready.outline,
        ready.ids,
        device=device,
        num_cores=available_cores(),
        run_folder=reporter.folder.path,
        packs_rows=ready.packs_rows,
        **pictures_of(config, ready.train_dataset, ready.val_dataset),
    )
    steps = ready.total_training_steps
    folders = ready.folders if ready.served_model is None else {**ready.folders, "rm": ready.served_model}
    with kind.services(config, ready, given) as services:
        trainer = trainer_cls(
            config,
            ready.tokenizer,
            worker_mapping(config, manager.mapping, runtime, folders, steps),
            manager,
            train_dataset=ready.train_dataset,
            val_dataset=ready.val_dataset,
            reporter=reporter,
            total_training_steps=steps,
            **services,
        )
        trainer.inputs = ready.inputs
        trainer.planner = replace(trainer.planner, packs_rows=ready.packs_rows)
        try:
            trainer.init_workers()
            yield trainer
        finally:
            with reporter.stage("ending the processes"):
                trainer.shutdown()


def open_run_folder(trainer: RunConfig, display: Display, train_dataset: Any) -> RunFolder:
    """Lock the run folder and take it back to where the run begins, before its log is opened for appending.

    Only a checkpoint that lies in the folder continues what the folder holds; one of another run starts a new log here.

    Args:
        trainer: The section of the configuration.
        display: Is told what is ignored and what moves.
        train_dataset: Its `fingerprint` is read where a run continues; it costs a pass over all rows.

    Raises:
        CheckpointError: The checkpoint to resume from is missing or torn, or continues the run in other data; the
            folder is then left as it is.
        RunFolderError: The folder is in use, or holds checkpoints that this run would not continue.
    """
    plan = plan_run_folder(trainer, train_dataset)
    store = CheckpointStore(RunFolder.checkpoints_in(plan.path))
    keeps = trainer.on_save_error == "continue"
    with ExitStack() as failed:
        folder = failed.enter_context(closing(RunFolder(plan.path, resume=plan.continues, keeps_refused=keeps)))
        if trainer.private:  # whatever an earlier run let others read in it
            folder.path.chmod(0o777 & ~ALL_BUT_THE_USER)
        for leftover in store.remove_interrupted():
            display.note(f"removed {leftover}, left by an interrupted save")
        for leftover in folder.remove_leftovers():
            display.note(f"removed {leftover}, left by a run that was killed")
        if plan.continues:
            for damaged in plan.damaged:
                display.note(f"{damaged}. It is now {store.set_aside(damaged.path).name}, and no run looks at it")
            step, aside = plan.state["step"], store.next_superseded()
            moved = [folder.rewind(step, aside), store.supersede(step, aside)]
            if any(moved):
                display.note(f"what the run had of steps after {step}, which are made again, is now in {aside}")
            if missing := folder.unlogged(step):
                which = f"step {missing[0]}" if len(missing) == 1 else f"steps {missing[0]} to {missing[-1]}"
                display.note(
                    f"the log lacks {which}, which the checkpoint has and are not made again: the disk did not have "
                    "these lines when the run or the machine was ended"
                )
            if gone := store.remove_superseded():
                display.note(f"removed {', '.join(map(str, gone))}: of steps that were made again, the newest are kept")
        failed.pop_all()
    return folder
