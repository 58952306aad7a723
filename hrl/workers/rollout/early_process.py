"""The process of a vLLM engine, started before vLLM asks for one.

vLLM's modules take seconds to import, and both sides need them: the process that sends requests and the one that runs
the model, which vLLM starts when its own imports are done. Started early, the second one imports at the same time as
the first, and waits for what vLLM would have started it with.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from hrl.processes.imports import quick_imports
from hrl.processes.lifetime import die_with_parent

#: What vLLM's engine process imports on a CPU.
MODULES = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "hrl.workers.rollout.vllm_worker")

_EXIT_TIMEOUT_S = 5.0


class EarlyProcess(SpawnProcess):
    """A process that imports vLLM and waits for its work.

    Its environment is that of the moment at which it is made. The thread that makes it has to live as long as it.

    Args:
        name: As vLLM names it.
    """

    def __init__(self, name: str) -> None:
        work, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
        super().__init__(target=_import_and_wait, args=(work,), name=name)
        super().start()
        work.close()
        self._work = sender  # only now: what this object has at its start goes to the process too
        self._handed_over: tuple[Callable[..., Any], Mapping[str, Any]] | None = None
        # A process without work ends when nobody can send any. At this one's exit that comes before waiting for it.
        self._drop = util.Finalize(self, self._work.close, exitpriority=100)

    def give(self, target: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        """Say what it will run once it is started."""
        self._handed_over = (target, kwargs)

    def start(self) -> None:
        """Let it begin.

        Raises:
            ChildProcessError: The process has ended.
        """
        assert self._handed_over is not None, "work is given before the start"
        try:
            # vLLM sets variables for it while it reads its own arguments.
            self._work.send((*self._handed_over, dict(os.environ)))
        except BrokenPipeError as error:
            self.join(_EXIT_TIMEOUT_S)
            raise ChildProcessError(f"its process ended with exit code {self.exitcode} before it had work") from error
        self.drop()

    def drop(self) -> None:
        """Let it end, if it has no work yet."""
        self._drop()

    def end(self, grace_s: float) -> None:
        """Wait until it has ended, and kill it where that takes longer than `grace_s`."""
        self.drop()
        self.join(grace_s)
        if self.is_alive():
            self.kill()
            self.join(grace_s)


def _import_and_wait(work: Connection) -> None:
    die_with_parent()
    with quick_imports():
        for name in MODULES:
            importlib.import_module(name)
    try:
        target, kwargs, environment = work.recv()
    except EOFError:  # nobody wanted it
        return
    os.environ.update(environment)
    target(**kwargs)


class _Context:
    """vLLM's multiprocessing context, whose first process is there already."""

    def __init__(self, early: EarlyProcess) -> None:
        self._early: EarlyProcess | None = early
        self._spawn: SpawnContext = multiprocessing.get_context("spawn")

    def Process(self, **wanted: Any) -> SpawnProcess:
        early, self._early = self._early, None
        kwargs = wanted["kwargs"]
        if early is None or kwargs.get("tensor_queue") is not None:  # a queue can only be inherited
            return self._spawn.Process(**wanted)
        early.name = wanted["name"]
        early.give(wanted["target"], kwargs)
        return early

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spawn, name)


@contextmanager
def taken_by_vllm(early: EarlyProcess | None) -> Iterator[None]:
    """Let vLLM take `early` where it would start an engine process inside the block; one that it left ends."""
    if early is None:
        yield
        return
    from vllm.v1.engine import utils

    context, before = _Context(early), utils.get_mp_context
    utils.get_mp_context = lambda: context
    try:
        yield
    finally:
        utils.get_mp_context = before
        early.drop()
