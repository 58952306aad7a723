"""Several things that the driver does at once: one of them runs, the others wait for ranks.

Each is an ordinary function in a thread of its own, since it calls ranks and waits for them wherever it likes. Only who
has the turn runs, so that whatever the driver holds (batches, timers, columns that were packed before) has one user at
a time; the turn is free while its owner waits for ranks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from hrl.errors import HrlError

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: How long those that are no longer wanted may take to notice it, once the turn is free: they look once in a second.
_GIVE_UP_S = 10.0
#: How often who waits looks whether anybody wants the result.
_LOOK_S = 1.0


class AbandonedError(BaseException):
    """Ends a thread whose result nobody waits for any more.

    No `Exception`, so that nothing on the way takes it for a failure.
    """


class Ended(NamedTuple):
    """Something that has ended.

    Attributes:
        key: What `begin` was given.
        name: Likewise.
        result: What it returned; None after an error.
        error: What it raised, if it did.
    """

    key: Hashable
    name: str
    result: Any
    error: BaseException | None


class Turns:
    """Functions that run in turns, as a context manager in which the caller has the turn unless it waits for one.

    At the end of the block no thread runs any more. Those that do when it ends by an error are given up: they stop
    waiting for their ranks, which are left to whoever ends the processes, or to the call's own deadline.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._threads: dict[Hashable, threading.Thread] = {}
        self._is_callers = False
        self.is_given_up = False

    def __enter__(self) -> Self:
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.is_given_up = True
        if self._is_callers:  # not if the wait for it was interrupted
            self._leave()
        deadline = time.monotonic() + _GIVE_UP_S
        for thread in self._threads.values():
            if thread.ident is None:  # interrupted before it was started
                continue
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                logger.warning("%s did not stop within %g s, and ends with the process", thread.name, _GIVE_UP_S)
        while not self._ended.empty():
            other = self._ended.get()
            if isinstance(other.error, HrlError):
                logger.error("%s failed too: %s", other.name, getattr(other.error, "summary", other.error))

    @property
    def running(self) -> set[Hashable]:
        """The keys of those that were begun and have not been taken by `next_ended`."""
        return set(self._threads)

    def begin(self, key: Hashable, name: str, work: Callable[[], Any]) -> None:
        """Begin a function, and return when it first waits for ranks, or has ended; it sees the caller's context.

        So functions make their first calls in the order in which they are begun.

        Args:
            key: By which `next_ended` tells it.
            name: For errors.
            work: The function.
        """
        context, seat = copy_context(), _Seat(self)

        def run() -> None:
            _SEAT.set(seat)
            try:
                with self._turn:
                    seat.require_wanted()
                    result = work()
            except BaseException as error:  # noqa: BLE001  the caller's
                self._ended.put(Ended(key, name, None, error))
            else:
                self._ended.put(Ended(key, name, result, None))
            finally:
                seat.has_waited.set()

        thread = threading.Thread(target=context.run, args=(run,), name=name, daemon=True)
        self._threads[key] = thread
        with self._left():
            thread.start()
            seat.has_waited.wait()

    def next_ended(self) -> Ended:
        """Return the next one that ends; the wait has no deadline of its own, as whatever they wait for has one."""
        with self._left():
            ended = self._ended.get()
        self._threads.pop(ended.key).join()
        return ended

    @contextmanager
    def _left(self) -> Iterator[None]:
        """Leave the caller's turn for the duration of the block."""
        self._leave()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self._turn.acquire()
        self._is_callers = True

    def _leave(self) -> None:
        self._is_callers = False
        self._turn.release()


class _Seat:
    """Who takes part in turns.

    Attributes:
        has_waited: Whether it has waited for ranks, or has ended.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.has_waited = threading.Event()

    @contextmanager
    def left(self) -> Iterator[Callable[[], None]]:
        """Leave the turn to others for the duration of the block."""
        self._turns._turn.release()
        self.has_waited.set()
        try:
            yield self.require_wanted
        finally:
            self._turns._turn.acquire()
        self.require_wanted()

    def require_wanted(self) -> None:
        """Raise `AbandonedError` if nobody waits for its result any more."""
        if self._turns.is_given_up:
            raise AbandonedError


_SEAT: ContextVar[_Seat | None] = ContextVar("hrl_seat", default=None)


@contextmanager
def others_have_their_turn() -> Iterator[Callable[[], None]]:
    """Let what else the driver does at this time go on in the block, which touches only what is the caller's own.

    Yields:
        What is to be called now and then while the block waits; it raises if nobody wants the result any more.
    """
    seat = _SEAT.get()
    if seat is None:
        yield _still_wanted
        return
    with seat.left() as require_wanted:
        yield require_wanted


def run_apart(work: Coroutine[Any, Any, T], name: str) -> T:
    """Run a coroutine in a thread with a loop of its own, and return its result; others have their turn meanwhile.

    The caller's thread may have a loop, as in a notebook. An interrupt is not kept waiting: the coroutine is cancelled.

    Args:
        work: The coroutine, whose waits have deadlines.
        name: Of the thread.

    Raises:
        AbandonedError: Nobody wants the result any more.
        BaseException: What the coroutine raises.
    """
    outcome: Future[T] = Future()
    cancel: Future[Callable[[], object]] = Future()

    async def main() -> T:
        task = asyncio.ensure_future(work)
        cancel.set_result(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        return await task

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001  the caller's
            outcome.set_exception(error)

    # A daemon, which no end of the process waits for.
    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        with others_have_their_turn() as require_wanted:
            while not wait([outcome], _LOOK_S).done:
                require_wanted()
    except BaseException:
        with suppress(RuntimeError):  # it has ended by itself, and its loop is closed
            cancel.result(_LOOK_S)()
        raise
    return outcome.result()


def _still_wanted() -> None:
    """Do nothing: whoever does one thing at a time wants it."""
