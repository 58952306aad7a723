"""The process of a vLLM engine on a CPU, started before vLLM asks for one.

vLLM's modules take seconds to import, and both sides need them: the process that sends requests and the one that runs
the model, which vLLM starts when its own imports are done. Started early, the second one imports at the same time as
the first, and waits for what vLLM would have started it with.

A rank that will have an engine begins with it (`begin`), before it imports torch; so this module imports little.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from hrl.processes.child_environment import changed_environment
from hrl.processes.imports import quick_imports
from hrl.processes.lifetime import die_with_parent

ENGINE_PROCESS_NAME = "EngineCore"
"""How vLLM names the process of an engine."""
#: What it imports on a CPU.
MODULES = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "hrl.workers.rollout.vllm_worker")

_EXIT_TIMEOUT_S = 5.0


_begun: EarlyProcess | None = None


def begin(num_threads: int) -> None:
    """Start the process of the engine that this rank will have; `take` gives it to the engine.

    Args:
        num_threads: Of the engine.
    """
    global _begun
    _begun = started(engine_environment(True, num_threads))


def take() -> EarlyProcess | None:
    """Return the process that `begin` started, once."""
    global _begun
    early, _begun = _begun, None
    return early


def started(environment: Mapping[str, str | None]) -> EarlyProcess | None:
    """Return a process that has begun its imports; None without vLLM.

    Args:
        environment: See `engine_environment`.
    """
    if importlib.util.find_spec("vllm") is None:
        return None
    with changed_environment(environment):
        return EarlyProcess(ENGINE_PROCESS_NAME)


def engine_environment(
    on_cpu: bool, num_threads: int | None, *, ranks: int = 1, visible_devices: str | None = None
) -> dict[str, str | None]:
    """Return environment variables for an engine's processes; `None` stands for one that they must not have.

    Args:
        on_cpu: Whether the model runs on a CPU.
        num_threads: Of all processes of the engine together; None leaves a GPU's to vLLM, and is all cores on a CPU.
        ranks: Processes of the engine.
        visible_devices: `CUDA_VISIBLE_DEVICES`, where it is not that of this process.
    """
    devices = {} if visible_devices is None else {"CUDA_VISIBLE_DEVICES": visible_devices}
    if num_threads is None and on_cpu:
        num_threads = len(os.sched_getaffinity(0))
    values: dict[str, str | None] = {
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # Ray gives an actor with one CPU OMP_NUM_THREADS=1. On a CPU, vLLM's own binding would leave one core to a
        # scheduler process that is idle while the model runs. On a GPU, vLLM loads with many threads and serves with
        # one, unless the variable is set.
        "OMP_NUM_THREADS": None if num_threads is None else str(max(1, num_threads // ranks)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if on_cpu:
        values["LD_PRELOAD"] = _with_openmp_of_torch(os.environ.get("LD_PRELOAD", ""))
    return devices | values


def _with_openmp_of_torch(preloaded: str) -> str | None:
    """Return LD_PRELOAD with torch's OpenMP, so that vLLM's kernels share its threads.

    vLLM sets that itself, but only when the early process is there already.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or any(name in preloaded for name in ("libomp", "libgomp", "libiomp")):
        return preloaded or None
    beside = Path(torch.origin).parent
    found = [*beside.parent.glob("torch.libs/libgomp*.so*"), *beside.glob("lib/libgomp*.so*")][:1]
    return ":".join(filter(None, [preloaded, *map(str, found)])) or None


class EarlyProcess(SpawnProcess):
    """A process that imports vLLM and waits for its work.

    Its environment is that of the moment at which it is made. The thread that makes it has to live as long as it.

    Args:
        name: As vLLM names it.
    """

    def __init__(self, name: str) -> None:
        work, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
        super().__init__(target=_import_and_wait, args=(work,), name=name)
        with _without_main():
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


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the file of `__main__`: a process that is spawned runs it first, and that of a rank imports Ray."""
    main = sys.modules["__main__"]
    hidden = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update({"__spec__": None} | hidden)


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
