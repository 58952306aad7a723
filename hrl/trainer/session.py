"""Around any run: signals, banner, run folder, Ray, and an end that explains itself.

The order is: show what is about to run, lock the run folder, start Ray, train, and take everything down again whatever
happened.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import hrl
from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.machine import choose_device, run_cluster, scarcity
from hrl.config.loggers import JSON_CONSOLE
from hrl.errors import HrlError
from hrl.preflight.findings import PreflightError
from hrl.preflight.folder_plan import plan_run_folder
from hrl.report.console import Display, JsonConsole, RunConsole
from hrl.report.html_report import REWARD, Curve
from hrl.report.reporter import RunReporter
from hrl.report.run_folder import RunFolder
from hrl.workers.engine.nonfinite import NonFiniteStepError

if TYPE_CHECKING:
    from hrl.config.arithmetic import Fact

logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_NONFINITE = 3
EXIT_INTERRUPTED = 130


def run_guarded(config: Any, run: Callable[[], None]) -> int:
    """Run to an exit status.

    Args:
        config: The validated configuration.
        run: The run.

    Returns:
        0 for success, 1 for a failure that explains itself, 2 if the preflight found something wrong, 3 if steps were
        not finite, 130 after Ctrl-C.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _end_on_signals()
    try:
        run()
    except PreflightError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    except HrlError as error:
        logger.debug("the run failed", exc_info=error)
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n{_resume_hint(config)}")
        return EXIT_NONFINITE if isinstance(error.__cause__, NonFiniteStepError) else EXIT_FAILURE
    except KeyboardInterrupt:
        sys.stderr.write(f"\ninterrupted\n{_resume_hint(config)}")
        return EXIT_INTERRUPTED
    return 0


def _end_on_signals() -> None:
    """Ctrl-C and SIGTERM both raise `KeyboardInterrupt`.

    Set explicitly, since a background job of a shell starts with SIGINT ignored; and once more when Ray runs, whose
    core answers SIGTERM with a stack trace and an abort.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _resume_hint(config: Any) -> str:
    steps = CheckpointStore(RunFolder.checkpoints_in(config.trainer.default_local_dir)).steps()
    return f"the same command continues after step {steps[-1]}\n" if steps else ""


def run_session(
    config: Any,
    train: Callable[[RunReporter], None],
    *,
    display: Display,
    facts: Sequence[Fact],
    warnings: Sequence[str],
    num_processes: int,
    train_dataset: Any,
    batch_tokens: int,
    curve: Curve = REWARD,
) -> None:
    """Show what will run, and trains in a locked run folder on a running Ray.

    Args:
        config: The validated configuration.
        train: Gets the reporter.
        display: Where the run is shown.
        facts: For the banner.
        warnings: Shown below it.
        num_processes: Worker processes of the run.
        train_dataset: The rows to train on.
        batch_tokens: In the largest batch, all rows at their full length.
        curve: What the picture of the run shows.
    """
    display.banner(f"hrl {hrl.__version__}", {fact.label: fact.text for fact in facts})
    for warning in warnings:
        display.note(f"warning: {warning}")
    folder = open_run_folder(config, display, train_dataset)
    with (
        RunReporter(
            folder,
            display,
            config.trainer,
            config.model_dump(mode="json"),
            num_devices=num_processes,
            curve=curve,
        ) as reporter,
        run_cluster(config.trainer.ray_kwargs, num_processes, batch_tokens),
    ):
        _end_on_signals()
        train(reporter)


def display_of(config: Any, total_steps: int, phases: Sequence[str]) -> Display:
    """Return where the run is shown: lines for people, unless `trainer.logger` asks for JSON."""
    if JSON_CONSOLE in config.trainer.logger:
        return JsonConsole(total_steps)
    return RunConsole(total_steps, phases=phases)


def device_of(config: Any, reporter: RunReporter) -> str:
    """`cpu` or `cuda` for a run on the running Ray; says so where GPUs are missed."""
    device = choose_device(config.trainer.device)
    scarce = scarcity(config.trainer.device, device, reporter.num_devices)
    if scarce is not None:
        reporter.console.note(scarce)
    return device


def open_run_folder(config: Any, console: Display, train_dataset: Any) -> RunFolder:
    """Lock the run folder and take it back to where the run begins, before its log is opened for appending.

    Only a checkpoint that lies in the folder continues what the folder holds; one of another run starts a new log here.

    Args:
        config: The validated configuration.
        console: Is told what is ignored and what moves.
        train_dataset: Its `fingerprint` is read where a run continues; it costs a pass over all rows.

    Raises:
        CheckpointError: The checkpoint to resume from is missing or torn, or continues the run in other data; the
            folder is then left as it is.
        RunFolderError: The folder is in use, or holds checkpoints that this run would not continue.
    """
    plan = plan_run_folder(config.trainer, train_dataset)
    store = CheckpointStore(RunFolder.checkpoints_in(plan.path))
    folder = RunFolder(plan.path, resume=plan.continues)
    for leftover in store.interrupted():
        console.note(f"ignoring {leftover}, left by an interrupted save")
    if plan.continues:
        step, aside = plan.state["step"], store.next_superseded()
        moved = [folder.rewind(step, aside), store.supersede(step, aside)]
        if any(moved):
            console.note(f"what the run had of steps after {step}, which are made again, is now in {aside}")
    return folder
