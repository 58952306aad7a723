"""Runs that are killed: as a user starts them, or whole in one process that has torch already, which is quicker.

A run in one process is everything but Ray: its rank, engine, transport and the thread that writes checkpoints are those
of any run, rewards have processes of their own, and `kill -9` takes all of it at once.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from tests.processes.warm import warm_context
from tests.runs.runner import launch, without_owner

#: How long everything of a killed run may take to go.
GONE_S = 15.0
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Driver(Protocol):
    """The process of a run."""

    @property
    def pid(self) -> int | None:
        """Its number."""

    def poll(self) -> int | None:
        """Its exit status once it has ended."""

    def output(self) -> str:
        """What it has written, once it has ended."""


@dataclass
class Forked:
    """A run in one process, a fork of one that has imported torch."""

    process: Any
    said: Path

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def output(self) -> str:
        return self.said.read_text() if self.said.exists() else ""


@dataclass
class Command:
    """A run as a user starts it."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def output(self) -> str:
        return self.process.communicate()[0]


def as_command(arguments: Sequence[str], operation: int | None = None) -> Driver:
    """Start `python -m hrl.trainer.main_ppo`."""
    assert operation is None, "its driver is killed from outside"
    return Command(launch("-m", "hrl.trainer.main_ppo", *arguments))


def in_one_process(
    arguments: Sequence[str],
    operation: int | None = None,
    *,
    kind: str = "ppo",
    before: Callable[[], None] | None = None,
) -> Driver:
    """Start a run in one process.

    Args:
        arguments: Those of the command line; the run folder is among them.
        operation: Which writing operation in the run folder, or in a store beside it whose name begins with the
            folder's, is not made: it kills the process. Counted from 1.
        kind: Of the run.
        before: Called in its process before the run, a function of a module.
    """
    folder = run_folder(arguments)
    said = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.said")
    process = warm_context().Process(target=_live, args=(kind, list(arguments), str(said), operation, before))  # type: ignore[attr-defined]
    process.start()
    return Forked(process, said)


def run_folder(arguments: Sequence[str]) -> Path:
    """The run folder that a command line names."""
    (named,) = [each.partition("=")[2] for each in arguments if each.startswith("trainer.default_local_dir=")]
    return Path(named)


def _live(kind: str, arguments: list[str], said: str, operation: int | None, before: Callable[[], None] | None) -> None:
    os.setsid()
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    os.environ["NO_COLOR"] = "1"
    from hrl.config.compose import compose_kind
    from hrl.config.run_kind import KINDS as RUN_KINDS
    from hrl.trainer.kinds import KINDS
    from hrl.workers.runtime import seed_everything
    from tests.runs.in_process import in_process, run_configured

    if before is not None:
        before()
    folder = run_folder(arguments)
    operations, of_first_step = _kill_at(folder, operation), list[int]()
    with in_process():
        seed_everything(1)  # as a rank that joins its world
        config = compose_kind(RUN_KINDS[kind], [*arguments, "trainer.device=cpu"])
        noted = folder.with_name(f"{folder.name}.generators")
        _note_generators(KINDS[kind].trainer(config), noted, lambda: of_first_step.append(operations()))
        run_configured(kind, config)
    made = [*of_first_step[1:2], operations()]
    folder.with_name(f"{folder.name}.operations").write_text(json.dumps(made))


def let_clock_jump() -> None:
    """Let the time of day be a day late and a day early by turns."""
    now, days = time.time, itertools.cycle((-86400.0, 86400.0))
    time.time = lambda: now() + next(days)


def _kill_at(folder: Path, wanted: int | None) -> Callable[[], int]:
    """Count the operations that write in a folder, and kill the process in place of one of them."""
    inside, made = str(folder), 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal made
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and bool(flags & _WRITES)
        else:
            path, writes = (arguments[0] if arguments else None), event in _CHANGES
        if writes and isinstance(path, str | os.PathLike) and str(path).startswith(inside):
            made += 1
            if made == wanted:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

    sys.addaudithook(watch)
    return lambda: made


_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree"}


def _note_generators(trainer: Any, file: Path, begun: Callable[[], None]) -> None:
    """Write down the states of the generators of Python, numpy and torch when a step begins, and tell that it has."""
    from hashlib import blake2b

    from hrl.workers.engine.checkpoint import _rng_state

    step = trainer.train_step

    def noted(self: Any, *arguments: Any) -> Any:
        begun()
        states = {name: blake2b(bytes(state.tolist())).hexdigest()[:16] for name, state in _rng_state().items()}
        with file.open("a") as opened:
            opened.write(json.dumps({"step": self.global_steps, **states}) + "\n")
        return step(self, *arguments)

    trainer.train_step = noted


@dataclass
class Family:
    """The processes of a run, and the shared memory that was there before it.

    Attributes:
        driver: Its driver.
        seen: All processes below the driver that were ever seen.
    """

    driver: Driver
    memory: set[str]
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def look(self) -> None:
        """Take note of the processes that are there now."""
        try:
            below = psutil.Process(self.driver.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self.seen |= {process.pid: process for process in below}

    def kill(self) -> None:
        """Kill the driver, and nothing else."""
        self.look()
        assert self.driver.pid is not None
        os.kill(self.driver.pid, signal.SIGKILL)

    def left(self, patience_s: float = GONE_S) -> list[str]:
        """What is still there some time after the end of the driver: processes and shared memory."""
        deadline = time.monotonic() + patience_s
        alive = psutil.wait_procs(list(self.seen.values()), timeout=patience_s)[1]
        processes = [told for process in alive if (told := running(process))]
        while left := without_owner(set(os.listdir("/dev/shm")) - self.memory):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return [*processes, *sorted(left)]


def running(process: psutil.Process) -> str | None:
    """Return a process's number and command; None if it has ended, also where nobody has asked for its status yet."""
    try:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None


def family_of(start: Callable[[], Driver]) -> Family:
    """Start a run and watch over it."""
    memory = set(os.listdir("/dev/shm"))
    return Family(start(), memory)
