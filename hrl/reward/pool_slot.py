"""One process of a reward pool, as the pool sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from hrl.processes.child import child_environment
from hrl.reward.event_loop import LoopState
from hrl.reward.sample import RewardOutcome


@dataclass
class Task:
    """A sample on its way, as its process reads it."""

    number: int
    name: str
    data_source: str
    frame: bytes
    future: Future[RewardOutcome]
    attempts: int = 0
    since: float = 0.0
    blames_response: bool = False


@dataclass(eq=False)
class Slot:
    """A process, and the samples that it has."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    state: LoopState
    since: float
    concurrency: int = 0  # 0: not yet ready
    awaits: bool = False
    tasks: dict[int, Task] = field(default_factory=dict)
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)

    @property
    def is_ready(self) -> bool:
        """Whether the function is loaded."""
        return self.concurrency > 0

    @property
    def is_full(self) -> bool:
        """Whether it takes no more samples for now."""
        return len(self.tasks) >= self.concurrency

    @property
    def oldest_s(self) -> float:
        """When the sample that it has had longest was handed over; now, if it has none."""
        return min((task.since for task in self.tasks.values()), default=time.monotonic())


def start_process(env: Collection[str]) -> tuple[subprocess.Popen[bytes], socket.socket, LoopState]:
    """Return a process that waits for its settings, this end of its socket, and what it shows of its event loop.

    Args:
        env: Variables that it gets although they look like secrets.

    Raises:
        OSError: The system refuses one.
    """
    ours, theirs = socket.socketpair()
    with ExitStack() as on_failure, theirs:
        on_failure.enter_context(ours)
        shared = LoopState.create()
        on_failure.callback(os.close, shared)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hrl.reward.pool_process", *map(str, (theirs.fileno(), shared, os.getpid()))],
            env=child_environment(keep=env, OMP_NUM_THREADS="1", PYTHONHASHSEED="0"),
            pass_fds=[theirs.fileno(), shared],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that its own children can be killed with it, and Ctrl-C is the parent's
        )
        on_failure.pop_all()
    return process, ours, LoopState(shared)


def describe_exit(code: int | None) -> str:
    """Return how a process ended, by its exit code."""
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
