"""From a command line to an exit status: what `main_ppo`, `main_dpo`, `main_sft` and `main_rm` do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from hrl.cluster.checkpoints import CheckpointError, CheckpointStore, load_state
from hrl.config.compose import compose_kind
from hrl.config.run_kind import KINDS
from hrl.errors import ConfigError, HrlError, NonFiniteError, refusal_of_system
from hrl.masking import begin_masking, masked_text
from hrl.processes.imports import quick_imports
from hrl.processes.signals import EXIT_INTERRUPTED, EXIT_STOPPED, NotBegunError, RunStoppedError, StopRequest
from hrl.processes.terminal import StandardStreams, write_any_text
from hrl.report.display import display_of
from hrl.report.run_folder import RunFolder, RunFolderError
from hrl.trainer.restarts import Attempt, Supervisor

if TYPE_CHECKING:
    from hrl.config.outline import RunConfiguration
    from hrl.trainer.loop import TrainingLoop

logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_NONFINITE = 3
_SAME_COMMAND = "the same command"


def run_command(kind: str, argv: Sequence[str] | None = None, trainer_cls: type[TrainingLoop] | None = None) -> int:
    """Compose the configuration, then train.

    Args:
        kind: `ppo`, `dpo`, `sft` or `rm`.
        argv: Overrides like `trainer.total_epochs=2`; the command line's if None.
        trainer_cls: A subclass of the kind's trainer to run in its place.

    Returns:
        The exit status: 2 for a configuration that can't be composed, otherwise that of `exit_status`.
    """
    arguments = sys.argv[1:] if argv is None else argv
    write_any_text()
    begin_masking(arguments)
    try:
        config = compose_kind(KINDS[kind], arguments)
    except ConfigError as error:
        sys.stderr.write(masked_text(f"{error}\n"))
        return EXIT_CONFIG
    streams = StandardStreams()
    streams.survive()  # from here on, what counts is in the run folder
    attempt: int | Attempt = Attempt()
    if config.trainer.max_restarts > 0:
        try:
            attempt = Supervisor(config.trainer).run()
        except KeyboardInterrupt:  # between two starts: no step is lost by it
            return _ended(config, "interrupted", in_order=True)
    if isinstance(attempt, int):
        return attempt
    stop = StopRequest(config.trainer.grace_s, streams=streams)
    stop.install()  # before the display, which hides the cursor of a terminal

    def whole() -> None:
        display = display_of(config.trainer)
        # Only now: a wrong key is reported before torch and ray are imported, and who waits for them is told so.
        with display.stage("importing PyTorch"), quick_imports():
            from hrl.trainer.run import run
        resuming = _resuming(config, attempt)
        run(kind, resuming, trainer_cls=trainer_cls, display=display, stop=stop, restarts=attempt.restarts)

    return exit_status(config, whole, attempt)  # as it was given: what the same command does is told of that


def _resuming(config: RunConfiguration, attempt: Attempt) -> RunConfiguration:
    """Return the configuration of a run that is started again: it resumes from its own checkpoints, if it has any."""
    if not attempt.restarts or not _checkpoints_of(config).steps():
        return config
    trainer = config.trainer.model_copy(update={"resume_mode": "auto", "resume_from_path": None})
    return config.model_copy(update={"trainer": trainer})


def _checkpoints_of(config: RunConfiguration) -> CheckpointStore:
    return CheckpointStore(RunFolder.checkpoints_in(config.trainer.default_local_dir))


class PresentStandardError(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is now: while a terminal moves at its foot, what is written goes above that."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """Take nothing; the base class sets it once."""

    def format(self, record: logging.LogRecord) -> str:
        return masked_text(super().format(record))


def exit_status(config: RunConfiguration, run: Callable[[], object], attempt: Attempt | None = None) -> int:
    """Run, and return the exit status. Errors that explain themselves go to standard error without a traceback.

    Args:
        config: The validated configuration.
        run: The run.
        attempt: Is told what ended the run.

    Returns:
        0 for success, 1 for a failure that explains itself, 2 if the preflight found something wrong, 3 if numbers
        are not finite, 75 if a signal ended the run in order, or before it had begun, and the same command goes on, 130
        if one ended it in the midst of its work, or if the same command does not go on.
    """
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[PresentStandardError()]
    )
    try:
        return _status_of(config, run, attempt or Attempt())
    except KeyboardInterrupt:  # a signal while it is said how the run ended
        return EXIT_INTERRUPTED


def _status_of(config: RunConfiguration, run: Callable[[], object], attempt: Attempt) -> int:
    try:
        _told(run, attempt)
    except ConfigError as error:
        sys.stderr.write(masked_text(f"{error}\n"))
        return EXIT_CONFIG
    except HrlError as error:
        logger.debug("the run failed", exc_info=error)
        sys.stderr.write(masked_text(f"\n{type(error).__name__}: {error}\n{_resume_hint(config)}"))
        of_numbers = isinstance(error, NonFiniteError) or isinstance(error.__cause__, NonFiniteError)
        return EXIT_NONFINITE if of_numbers else EXIT_FAILURE
    except OSError as error:
        told = refusal_of_system(error)
        if not told:
            raise
        logger.debug("the run failed", exc_info=error)
        sys.stderr.write(masked_text(f"\n{told}\n{_resume_hint(config)}"))
        return EXIT_FAILURE
    except RunStoppedError as stopped:
        return _ended(config, f"stopped after step {stopped.step}", in_order=True)
    except NotBegunError:
        return _ended(config, "interrupted", in_order=True)
    except KeyboardInterrupt:
        return _ended(config, "interrupted", in_order=False)
    return 0


def _told(run: Callable[[], object], attempt: Attempt) -> None:
    try:
        run()
    except Exception as error:
        attempt.failed(error)
        raise


def _ended(config: RunConfiguration, what: str, *, in_order: bool) -> int:
    """Say that a signal ended the run, and what continues it; return the exit status.

    It is 75 only where the very same command continues: whoever starts it again has nobody to change a key.
    """
    hint = _resume_hint(config)
    if in_order and not hint and not _checkpoints_of(config).has_any():
        hint = f"{_SAME_COMMAND} starts again: nothing was there to be saved\n"
    sys.stderr.write(masked_text(f"\n{what}\n{hint}"))
    return EXIT_STOPPED if in_order and hint.startswith(_SAME_COMMAND) else EXIT_INTERRUPTED


def _resume_hint(config: RunConfiguration) -> str:
    """Return what continues the run, or why nobody can tell; nothing where no checkpoint of it does.

    Names and sizes tell: to read what may be terabytes is for the next start, which has the time.
    """
    store = _checkpoints_of(config)
    try:
        steps = store.steps()
    except RunFolderError as error:
        return f"whether anything continues the run can't be told: {error}\n"
    if not steps:
        return ""
    try:
        step = load_state(store.path(steps[-1]), ())["step"]
    except CheckpointError as error:
        return f"this run can't go on: {error}\n"
    how = _SAME_COMMAND if config.trainer.resume_mode == "auto" else "trainer.resume_mode=auto"
    return f"{how} continues after step {step}\n"
