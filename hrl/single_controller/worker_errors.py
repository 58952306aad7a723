"""The errors that the driver raises when a worker fails: which rank, in which call, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from hrl.errors import HrlError

_PHASE: ContextVar[str | None] = ContextVar("hrl_phase", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name the phase that the driver is in, for the errors of workers within the block.

    Args:
        name: The phase of the step (`gen`, `update_actor`), preferably the name of its timer.
    """
    token = _PHASE.set(name)
    try:
        yield
    finally:
        _PHASE.reset(token)


def current_phase(default: str) -> str:
    """Return the innermost `phase` that is open, or `default` outside of all of them."""
    return _PHASE.get() or default


class WorkerError(HrlError, RuntimeError):
    """A method raised an exception on a rank. `__cause__` is the original exception if it could be pickled.

    Attributes:
        rank: The rank that failed first.
        method: The method that was called, with its role in front (`actor.update_actor`).
        phase: The driver's phase (see `phase`), or the method outside of all phases.
        cause: Type and message of the original exception.
        traceback_text: The traceback on the rank.
    """

    def __init__(self, rank: int, method: str, phase: str, cause: str = "", traceback_text: str = "") -> None:
        super().__init__(rank, method, phase, cause, traceback_text)
        self.rank, self.method, self.phase = rank, method, phase
        self.cause, self.traceback_text = cause, traceback_text

    @property
    def _call(self) -> str:
        return self.method if self.phase == self.method else f"{self.method} (phase {self.phase})"

    @property
    def summary(self) -> str:
        """One line: rank, method, phase and cause."""
        return f"rank {self.rank}: {self._call} raised {self.cause}"

    def __str__(self) -> str:
        return f"{self.summary}\n\n{self.traceback_text}" if self.traceback_text else self.summary


class WorkerDiedError(WorkerError):
    """The process of a rank ended while a call needed it.

    Attributes:
        pid: The process id the rank had.
        reason: The cluster's information about the end.
    """

    may_pass = True

    def __init__(self, rank: int, method: str, phase: str, pid: int, reason: str) -> None:
        super().__init__(rank, method, phase)
        self.pid, self.reason = pid, reason
        self.args = (rank, method, phase, pid, reason)

    @property
    def summary(self) -> str:
        """One line: rank, pid, method, phase and the reason for the end."""
        return f"rank {self.rank}: its process (pid {self.pid}) died in {self._call}. {self.reason}"


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A call was not finished by its deadline.

    Attributes:
        ranks: The ranks that were still running; `rank` is the first of them.
        timeout_s: The deadline, in seconds after the start of the call.
    """

    may_pass = True

    def __init__(self, ranks: Sequence[int], method: str, phase: str, timeout_s: float, whereabouts: str = "") -> None:
        super().__init__(ranks[0], method, phase)
        self.ranks, self.timeout_s, self.whereabouts = tuple(ranks), timeout_s, whereabouts
        self.args = (self.ranks, method, phase, timeout_s, whereabouts)

    @property
    def summary(self) -> str:
        """One line: method, phase, deadline, the ranks that were late and where they were."""
        where = f": {self.whereabouts}" if self.whereabouts else ""
        return (
            f"{self._call} was not finished after {self.timeout_s:g} s; still running on rank(s) "
            f"{', '.join(map(str, self.ranks))}{where}. If the call needs longer, raise the group's call_timeout_s."
        )


class WorkerStuckError(WorkerTimeoutError):
    """Python has stood still on a rank for so long that the call can't be expected to end.

    Attributes:
        pid: The process id of `rank`.
    """

    def __init__(
        self, ranks: Sequence[int], method: str, phase: str, silent_s: float, whereabouts: str = "", pid: int = -1
    ) -> None:
        super().__init__(ranks, method, phase, silent_s, whereabouts)
        self.pid = pid
        self.args = (*self.args, pid)

    @property
    def summary(self) -> str:
        """One line: the ranks that stand still, where they were, method and phase."""
        who = ", ".join(map(str, self.ranks))
        where = f" It was last seen here: {self.whereabouts}." if self.whereabouts else ""
        return (
            f"rank {who}: its process (pid {self.pid}) has stood still for {self.timeout_s:g} s in {self._call}: it is "
            f"stopped, or stuck in C code that holds Python's lock, and other ranks wait for it.{where} "
            "`py-spy dump --native --pid` shows a stuck process from outside"
        )


class ClusterLostError(HrlError, RuntimeError):
    """A process of Ray that a run can't do without has ended; the message says which, and how."""

    may_pass = True


class SharedMemoryError(HrlError, RuntimeError):
    """`/dev/shm` is too full for a batch."""


class PlacementError(HrlError, RuntimeError):
    """The cluster lacks the resources of a pool."""


# ---- Ray's errors ----------------------------------------------------------------------------------------------


def cause_of(error: RayError) -> BaseException:
    """Return the exception that the remote method raised, or Ray's own if the method raised none."""
    return error.cause if isinstance(error, RayTaskError) else error


def is_death(error: RayError) -> bool:
    """Return whether the process is gone."""
    return isinstance(error, RayActorError | OutOfMemoryError)


def death_reason(error: RayError) -> str:
    """Return Ray's information about the end of a process, in one line."""
    lines = [line.strip() for line in without_colours(str(error)).splitlines() if line.strip()]
    if isinstance(error, ActorDiedError):  # the head only repeats names that the caller's own message has
        keys = ("class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:")
        lines = [line for line in lines if not line.startswith(keys) and line != ActorDiedError.BASE_ERROR_MSG]
    return " ".join(lines).partition(" Some common causes include")[0]  # what follows is general advice


def without_colours(text: str) -> str:
    """Remove the terminal colours from a text of Ray."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
