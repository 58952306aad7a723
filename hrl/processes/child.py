"""Children that run a stranger's code: how one starts under a guard, what it gets, what it says when it fails.

`start_child` is the parent's side, `begin` the child's. Both talk in messages (`hrl.processes.messages`) over a socket,
and the parent reads the child's `SharedState`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from hrl.errors import RefusedError
from hrl.processes.child_environment import child_environment, withheld_names
from hrl.processes.isolation import isolate
from hrl.processes.lifetime import under_guard
from hrl.processes.shared_state import SharedState
from hrl.processes.signals import stay_alone
from hrl.text import without_middle

logger = logging.getLogger(__name__)

# Each arena of glibc's malloc reserves 64 MiB of address space, which is what a memory limit limits, and there would be
# one for each thread, up to eight for each core.
_OF_EVERY_CHILD = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"}
_GUARD_TIMEOUT_S = 15.0
"""How long a guard may take to kill what a process has started; it gives up after 5 s itself."""
_LONGEST_TRACEBACK = 4000


class MissingVariableError(RefusedError, ValueError):
    """An environment variable that a child is to have is not set in this process."""


# ---------------------------------------------------------------------- the parent


def start_child(
    module: str, variables: Mapping[str, str], output: IO[bytes] | None = None, num_threads: int = 0
) -> tuple[subprocess.Popen[bytes], socket.socket, SharedState]:
    """Start `python -m module <socket> <state>`; return its guard, the parent's end of its socket, and its state.

    Args:
        module: Whose `__main__` calls `begin`.
        variables: Environment variables that it gets beside those that libraries need.
        output: File that gets what the process writes; standard error if None.
        num_threads: Places for threads in its state.

    Raises:
        OSError: The system can't start a process.
    """
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as on_failure, theirs:
        on_failure.enter_context(ours)
        shared = SharedState.create(num_threads)
        on_failure.callback(os.close, shared)
        popen = subprocess.Popen(
            under_guard([sys.executable, "-P", "-m", module, str(theirs.fileno()), str(shared)]),
            env=child_environment({**os.environ, **_OF_EVERY_CHILD, **variables}, keep=variables),
            pass_fds=[theirs.fileno(), shared],
            stdin=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches only the parent
        )
        on_failure.pop_all()
    return popen, ours, SharedState(shared)


def stop_child(guard: subprocess.Popen[bytes], title: str) -> None:
    """Kill a child and all that it has started, and wait until that is done.

    Args:
        guard: As `start_child` returned it.
        title: Of the child, for the log.
    """
    guard.terminate()
    guard.send_signal(signal.SIGCONT)  # a guard that somebody has stopped hears of it, too
    try:
        guard.wait(_GUARD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.warning("the guard of %s does not end, and is killed", title)
        guard.kill()
        guard.wait(_GUARD_TIMEOUT_S)


def with_values(variables: Sequence[str], key: str, title: str) -> dict[str, str]:
    """Return the variables of a list such as `reward.env`: those that are only named get this process's value.

    Args:
        variables: `NAME` or `NAME=value`.
        key: Of the list in the configuration.
        title: Of the children, in the plural.

    Raises:
        MissingVariableError: One of these is not set here.
    """
    values = {}
    for variable in variables:
        name, equals, value = variable.partition("=")
        if not equals and name not in os.environ:
            raise MissingVariableError(
                f"{key} names {name}, an environment variable that is not set where the {title} start. "
                f"Export it before the run (on a cluster that runs already, before `ray start` on the driver's node), "
                f"or write {name}=value"
            )
        values[name] = value if equals else os.environ[name]
    return values


def values_of_arguments(named: Mapping[str, str], of: str, title: str) -> dict[str, str]:
    """Return the variables that arguments `env:NAME` stand for, with this process's values.

    Args:
        named: Argument → variable.
        of: Whose arguments they are.
        title: Of the children, in the plural.

    Raises:
        MissingVariableError: One of these is not set here.
    """
    for argument, name in named.items():
        if name not in os.environ:
            raise MissingVariableError(
                f"the argument {argument} of {of} is the environment variable {name}, which is not set "
                f"where the {title} start. Export it before the run; on a cluster that runs already, before "
                "`ray start` on the driver's node"
            )
    return {name: os.environ[name] for name in named.values()}


def withheld_variable(error: str, passed: Collection[str]) -> str | None:
    """Return the environment variable that was withheld from a child and that its error names; None without one."""
    names = withheld_names(keep=passed)
    return next((name for name in names if f"'{name}'" in error or f'"{name}"' in error), None)


# ---------------------------------------------------------------------- the child


def begin(state_number: int) -> SharedState:
    """Isolate this process, before any code of a stranger's runs; return the state that the parent reads."""
    stay_alone()
    isolate()  # the guard that started this process is thus out of its reach
    os.dup2(2, 1)  # what a stranger's code prints must not end up in the parent's output
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # killed at its end, it writes out no buffer
    state = SharedState(state_number)
    state.enter()
    return state


def limit_memory(limit_gib: float | None) -> None:
    """Limit the address space of this process."""
    if limit_gib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (int(limit_gib * 2**30),) * 2)


def describe(error: BaseException, ours: Collection[str]) -> str:
    """Return the traceback from the stranger's first frame on, shortened if very long.

    Args:
        error: What the stranger's code raised.
        ours: Files of which a frame only leads to the stranger's code.
    """
    frames = error.__traceback__
    while frames is not None and _only_leads(frames.tb_frame.f_code.co_filename, ours):
        frames = frames.tb_next
    return shortened("".join(traceback.format_exception(type(error), error, frames)).rstrip())


def shortened(text: str) -> str:
    """Return a traceback without its middle if it is very long."""
    return without_middle(text, _LONGEST_TRACEBACK)


def _only_leads(file: str, ours: Collection[str]) -> bool:
    return file in ours or file.startswith("<frozen importlib")
