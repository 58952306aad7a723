"""Signals that end a command: at once, or in order where there is something to save.

Who sends what:

* a terminal: SIGINT (Ctrl-C) and SIGHUP (it was closed), to the whole foreground process group;
* Kubernetes, Docker, systemd and most schedulers: SIGTERM, and SIGKILL after a grace period;
* Slurm: SIGCONT and SIGTERM to every process of a step at its time limit and when it is preempted, SIGKILL after
  `KillWait`; with `--signal`, any other signal some time before, such as SIGUSR1;
* the kernel: SIGXCPU once a second from the soft limit of processor time on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn

from hrl.processes import guard
from hrl.processes.terminal import StandardStreams

ENDING = guard.ENDING
"""Signals that ask a command to end."""
EXIT_STOPPED = 75
"""`EX_TEMPFAIL` of sysexits.h: what was asked for is not done, and the same command goes on with it."""
EXIT_INTERRUPTED = 130
"""Of a command that a signal ended in the midst of its work, as a shell has it for SIGINT."""

#: Two signals within this time are one request: `timeout` sends to its child and then to the group that the child is
#: in, and a terminal sends to a parent, which passes it on, and to the child.
_ONE_REQUEST_S = 0.5
#: The part of the grace that the step may have; the rest is for the checkpoint and the end of the processes.
STEP_SHARE = 0.75
#: The part after which nothing is sent to a store any more; the rest is for the end of the process.
SENDING_SHARE = 0.9


_Handler = Callable[[int, FrameType | None], object]


def answer_with(handler: _Handler) -> dict[signal.Signals, Any]:
    """Have all signals that ask for an end received by a handler; return the handlers of before. In the main thread.

    SIGINT is received even if it is ignored, since a background job of a shell starts so. SIGHUP stays ignored
    (`nohup`).
    """
    numbers = [n for n in ENDING if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Have signals that ask for an end do so with a word, until others answer them; where there is nothing to undo.

    While modules are imported, `KeyboardInterrupt` comes in the midst of one: some take it for an error of their own,
    and once it has left code that was made of text, Python ends by SIGINT whatever the status.
    """
    before = answer_with(_end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _end:
                signal.signal(number, handler)


def _end(_: int, __: FrameType | None) -> NoReturn:
    with suppress(OSError):  # nobody reads it
        os.write(2, b"\ninterrupted\n")
    os._exit(EXIT_STOPPED)


class RunStoppedError(KeyboardInterrupt):
    """A run has ended in order because a signal asked for it, and the same command continues it.

    No `Exception`, so that nothing on the way takes it for a failure of a run.

    Attributes:
        step: The last step that was saved.
    """

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class NotBegunError(KeyboardInterrupt):
    """A signal has ended a command before there was anything to lose by it."""


class StopRequest:
    """Whether a run was asked to end. Signals raise `KeyboardInterrupt`, except for the first one `in_order`.

    One that is not installed is never asked: signals do there what they do to the caller.

    Args:
        grace_s: Seconds that the sender of a signal waits before it kills the run; None if it waits as long as a step
            takes.
        clock: Seconds, replaced in tests.
        streams: What of the standard streams the command goes on without; terminals by default.

    Attributes:
        streams: The standard streams.
    """

    def __init__(
        self,
        grace_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        streams: StandardStreams | None = None,
    ) -> None:
        self.grace_s = grace_s
        self._clock = clock
        self._asked_by: signal.Signals | None = None
        self._asked_at = self._latest_at = -float("inf")
        self._to_tell: SimpleQueue[signal.Signals | None] = SimpleQueue()
        self._is_installed = self._has_begun = self._is_in_order = self._step_runs = False
        self.streams = streams or StandardStreams(only_terminals=True)
        self.is_late = False
        """Whether the step's share of the grace has passed."""

    @property
    def is_asked(self) -> bool:
        """Whether the run is to end in order."""
        return self._asked_by is not None

    @property
    def left_s(self) -> float:
        """Seconds until the step's share of the grace has passed; see `left_of`."""
        return self.left_of(STEP_SHARE)

    def left_of(self, share: float) -> float:
        """Return the seconds until so much of the grace has passed; infinite as long as nobody asked or waits."""
        if self._asked_by is None or self.grace_s is None:
            return float("inf")
        return self._asked_at + share * self.grace_s - self._clock()

    def install(self) -> None:
        """Receive signals that ask for an end. Call it before anything that has to be undone, in the main thread."""
        answer_with(self.receive)
        self._is_installed = True
        self.streams.survive()

    def receive(self, number: int, _: FrameType | None = None) -> None:
        """Take a signal.

        Raises:
            NotBegunError: It is the first, and nothing that is done in order has begun.
            KeyboardInterrupt: The command is to end now.
        """
        if number == signal.SIGHUP:
            self.streams.leave_terminal()
        now, is_first = self._clock(), self._latest_at == -float("inf")
        if now - self._latest_at < _ONE_REQUEST_S or (self.is_asked and number == signal.SIGXCPU):
            return
        self._latest_at = now
        if not self._is_in_order or self.is_asked:
            raise NotBegunError if is_first and not self._has_begun else KeyboardInterrupt
        self._asked_by, self._asked_at = signal.Signals(number), now
        self._to_tell.put(self._asked_by)  # a thread says it: this may have come in the midst of a line
        if self._step_runs and self.grace_s is not None:
            signal.setitimer(signal.ITIMER_REAL, STEP_SHARE * self.grace_s)

    @contextmanager
    def in_order(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Only note the first signal that comes within the block, and say so at once.

        Where a grace is given, `KeyboardInterrupt` comes in a step when the step's share of it has passed. What follows
        a block that ended well is the run's end in order: there the first signal is only noted as well, and said in the
        next block.

        Args:
            tell: Takes the name of the signal. It is called on a thread of its own.
        """
        if not self._is_installed:
            yield
            return

        def run() -> None:
            while (number := self._to_tell.get()) is not None:
                tell(number.name)

        thread = threading.Thread(target=run, name="telling of a signal", daemon=True)
        thread.start()
        before = signal.signal(signal.SIGALRM, self._hurry)
        self._has_begun = self._is_in_order = True
        try:
            yield
        except BaseException:
            self._is_in_order = False
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
            self._to_tell.put(None)
            thread.join()

    def _hurry(self, *_: object) -> None:
        self.is_late = True
        raise KeyboardInterrupt

    def step_begins(self) -> None:
        """Let what follows take no longer than the step's share of the grace.

        Raises:
            KeyboardInterrupt: It has passed already: the signal came before the step.
        """
        self._step_runs = True
        if self.is_asked and self.grace_s is not None:
            left_s = self.left_s
            if left_s <= 0:
                self._hurry()
            signal.setitimer(signal.ITIMER_REAL, left_s)

    def step_is_over(self) -> None:
        """Let what follows take its time: the step has ended, or is given up."""
        self._step_runs = False
        if self._is_in_order:  # else the timer is somebody else's
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        self.is_late = False


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Have processes that are started within the block, and their children, not notice signals that ask for an end.

    Schedulers and terminals send them to every process of a job. The run's main process decides what they mean, and the
    others have to be there while it saves. They block them; SIGKILL is what ends them. A signal to this process comes
    when the block ends, to the handler that there was before it.
    """
    # Not Ctrl-C: a start that hangs is to be interrupted. Ray's processes block that by themselves.
    numbers = [number for number in ENDING if number != signal.SIGINT]
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in ENDING}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if is_main and handler is not None:  # None: one that was not set from Python
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_kept() -> None:
    """Have what this process blocks stay blocked when it uses `multiprocessing`; see `kept_from_children`.

    Its resource tracker, which starts where it is first needed, unblocks SIGINT and SIGTERM as it does so.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_alone() -> None:
    """Ignore signals that ask for an end, in this process and not in those that it starts.

    For processes with code of the user's, who may start and end others: what is blocked or ignored is inherited.
    """
    own = os.getpid()

    def ignore(number: int, _: FrameType | None) -> None:
        if os.getpid() != own:  # a fork of this process
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in ENDING:
        signal.signal(number, ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def interrupt_on_signals() -> StopRequest:
    """Have signals that ask for an end raise `KeyboardInterrupt`, so that everything that was started is ended.

    Call it in the main thread, before anything that has to be undone, such as a hidden cursor.

    Returns:
        What `StopRequest.in_order` is called on, where there is something to save.
    """
    stop = StopRequest()
    stop.install()
    return stop
