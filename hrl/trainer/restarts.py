"""Start a run again that a fault of a machine has ended: a parent process that waits for it.

The parent is forked off before anything large is imported: what goes on as the run is the child, and the parent stays
small. It passes signals on, and takes the run's exit status for its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

from hrl.cluster.checkpoints import CheckpointStore
from hrl.config.trainer import RunConfig
from hrl.errors import may_pass
from hrl.files import expanded
from hrl.masking import masked_text
from hrl.processes.evidence import exit_in_words
from hrl.processes.lifetime import die_with_parent
from hrl.processes.signals import ENDING, answer_with
from hrl.report.run_folder import DamagedFileError, RunFolder, RunFolderError, read_metrics

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
_MOST_TOLD_BYTES = 4096
"""A write of at most so many bytes to a pipe is whole."""
_LONGEST_ERROR = 500
"""Characters of an error that are told: at most 6 bytes each."""


class Attempt:
    """A run, perhaps one that a parent starts again.

    Args:
        restarts: How often it was started again.
        pipe: Takes what ended it; None without a parent.
    """

    def __init__(self, restarts: int = 0, pipe: int | None = None) -> None:
        self.restarts, self._pipe = restarts, pipe

    def failed(self, error: BaseException) -> None:
        """Tell the parent, if there is one, what ended the run."""
        if self._pipe is None:
            return
        what = masked_text(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        told = json.dumps({"error": what[:_LONGEST_ERROR], "may_pass": may_pass(error)}, ensure_ascii=False)
        with suppress(BrokenPipeError):  # the parent is gone, and this process is about to be
            os.write(self._pipe, told.encode(errors="backslashreplace"))  # a lone surrogate, as JSON writes it


class _Ended(NamedTuple):
    status: int
    error: str
    may_pass: bool


class _Progress(NamedTuple):
    """How far a run has come, to be compared."""

    checkpoint: int
    step: int


class Supervisor:
    """Starts a run, and starts it again as long as faults of machines end it and it gets further.

    Args:
        trainer: The section of the configuration.
        wait: Pauses for so many seconds.
        say: Takes what the user is told.
    """

    def __init__(
        self,
        trainer: RunConfig,
        wait: Callable[[float], None] = time.sleep,
        say: Callable[[str], object] = lambda text: sys.stderr.write(text),
    ) -> None:
        self._most, self._folder = trainer.max_restarts, expanded(trainer.default_local_dir)
        self._wait, self._say = wait, say
        self._child = 0
        self._is_asked = False

    def run(self) -> int | Attempt:
        """Return the exit status when all is over. In the child, which is the run, return what it is.

        Raises:
            KeyboardInterrupt: A signal came while no run was there.
        """
        answer_with(self._pass_on)
        before, earlier, restarts = self._progress(_Progress(0, 0)), "", 0
        while True:
            attempt = self._start(restarts)
            if isinstance(attempt, Attempt):
                return attempt
            ended = self._wait_for_end(attempt)
            if self._is_asked or not ended.may_pass:
                return ended.status
            now = self._progress(before)
            refusal = self._refusal(restarts, earlier, ended.error, has_moved=now > before)
            if refusal:
                self._say(f"not started again: {refusal}\n")
                return ended.status
            pause_s = min(FIRST_PAUSE_S * 2**restarts, LONGEST_PAUSE_S)
            restarts, before, earlier = restarts + 1, now, ended.error
            where = f"after step {now.checkpoint}" if now.checkpoint else "at the beginning"
            self._say(
                f"a machine failed: {ended.error}\nrestart {restarts} of {self._most} (trainer.max_restarts) in "
                f"{pause_s:g} s, {where}\n"
            )
            self._wait(pause_s)

    def _refusal(self, restarts: int, earlier: str, error: str, *, has_moved: bool) -> str:
        if restarts == self._most:
            return f"trainer.max_restarts={self._most} is used up, and the last failure was {error}"
        if earlier and not has_moved:
            return f"it failed twice with no new step between\n  1. {earlier}\n  2. {error}"
        return ""

    def _progress(self, before: _Progress) -> _Progress:
        """Return how far the run has come; no further than before where it can't be read.

        The run says itself, when it starts, what can't be read.
        """
        checkpoint, step = before
        with suppress(RunFolderError):
            checkpoint = max(CheckpointStore(RunFolder.checkpoints_in(self._folder)).steps(), default=0)
        with suppress(OSError, DamagedFileError):
            step = max((record["step"] for record in read_metrics(self._folder)), default=0)
        return _Progress(checkpoint, step)

    def _start(self, restarts: int) -> int | Attempt:
        """Fork the run; return the pipe that it tells its end to, and in the child what it is."""
        told, telling = os.pipe()
        os.set_blocking(told, False)
        supervisor = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # none between the fork and knowing of the child
        try:
            self._child = os.fork()
            if self._child:
                os.close(telling)
                return told
            die_with_parent(supervisor)
            os.close(told)
            return Attempt(restarts, telling)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _wait_for_end(self, told: int) -> _Ended:
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        try:
            text = os.read(told, _MOST_TOLD_BYTES)
        except BlockingIOError:  # nothing, and a process that the run left holds the other end
            text = b""
        finally:
            os.close(told)
        code = os.waitstatus_to_exitcode(status)
        if text:
            return _Ended(code, **json.loads(text))
        if code < 0:
            return _Ended(128 - code, f"the run's process {exit_in_words(code)}", may_pass=True)
        # A run that ends in order tells what ended it. Libraries that lose their cluster end the process.
        error = f"the run's process ended with status {code} and without a word"
        return _Ended(code, error, may_pass=code == 1)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._is_asked = True
        if not self._child:
            raise KeyboardInterrupt
        with suppress(ProcessLookupError):
            os.kill(self._child, number)
