"""Processes in which environments live: each call under a deadline, each process killable.

Everything runs in the caller's event loop. Where the user's code holds a process so that nothing else runs in it, the
process is killed and its episodes are lost: whoever plays them begins them again. The kernel kills the processes when
the thread of the loop ends, and a guard of each leaves nothing of what the code has started, in whatever session.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import signal
import subprocess
import time
from collections.abc import Collection, Coroutine, Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hrl.environments.interface import Action, EnvironmentReplyError, Observation, StepResult
from hrl.environments.loading import EnvironmentLoadError, EnvironmentSpec, EnvironmentTraits
from hrl.environments.replies import MOST_CHARACTERS, action_to_plain, observation_from_plain, step_from_plain
from hrl.environments.tools import ToolLimits
from hrl.episodes.clock import EpisodeClock
from hrl.errors import HrlError
from hrl.processes.child import (
    MissingVariableError,
    start_child,
    stop_child,
    values_of_arguments,
    with_values,
    withheld_variable,
)
from hrl.processes.evidence import exit_in_words, why_memory_ended_it
from hrl.processes.messages import GarbledError, encode, open_stream, receive
from hrl.processes.plain_data import to_plain
from hrl.processes.shared_state import SharedState
from hrl.processes.watch import NEEDED, STOPPED, state_of

if TYPE_CHECKING:
    import socket

    from hrl.config.environment import EnvironmentConfig

logger = logging.getLogger(__name__)

Choice = tuple[object, object]
"""A row's `env` and `env_kwargs`; None for what it has not."""
_MODULE = "hrl.episodes.environment_process"
_TITLE = "environment processes"
_NUM_THREADS = 4096
"""Threads of a process whose work its parent can see."""
_LONGEST_REPLY_BYTES = 8 * MOST_CHARACTERS
"""Of a line that a process may send: a character takes up to six bytes, and there is more than texts in it."""
_CHARACTERS_PER_TOKEN = 64
"""Texts are cut here to so many characters for each token that they may have; the rest is cut by tokens."""
_TICK_S = 0.25
"""Interval at which deadlines are checked; a tenth of the deadline if that is shorter."""
_SILENCE_S = 3.0
"""How much longer than the deadline a process may stand still where nobody is known to hold it."""
_STARVED_S = 30.0
"""The same where it works for nobody: the machine is busy with something else."""
_GRACE_S = 3.0
"""How much longer than its deadline a process may take to say that a call is past it."""
_CLOSE_GRACE_S = 1.0
"""How long an episode waits for its environment to be closed; the pool waits for the rest of it."""
_PATIENCE = 10
"""Times its deadline that a call may go unanswered by a process that works for others; its clock is paused then."""
_LAST_WORDS_S = 0.5
"""How long to wait for the exit code of a process that has closed its socket."""
_SHARE_OF_CALLS = 0.9
"""Of the seconds of a step, that all calls of tools in it may take."""
_START_TIMEOUT_S = 60.0
"""How long a process may take to start and load the environment."""
_FAILED_STARTS_ALLOWED = 3
_MOST_RETIRING = 4
"""Times `num_workers` processes that may wait for their last episodes beside those that take new ones."""
_LOOK_S = 0.02
_LOOKS = 10
"""How often, and how long each time, it is watched at least who computes in a process that stands still."""
_MOST_LOOKS = 100
"""How often at most, where the machine is so busy that nobody computes."""
_COMPUTES_TICKS = 3
"""Ticks of processor time, in the least time, of a thread that computes; one that waits has one or none."""
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine)
"""The system call in which threads wait for locks."""


class EnvironmentPoolError(HrlError):
    """No process for environments can be started any more."""


class EnvironmentFaultError(HrlError):
    """Something went wrong in an episode's environment; the kinds say what."""


class EnvironmentFailedError(EnvironmentFaultError):
    """An environment raised, or gave something that is no observation or result."""


class EnvironmentTimeoutError(EnvironmentFaultError, TimeoutError):
    """A call of an environment took longer than its deadline."""


class EnvironmentLostError(EnvironmentFaultError):
    """The process of an environment died, was stopped or was killed.

    Attributes:
        is_to_blame: Whether this episode held the process then, or may have; others were in it by chance.
    """

    def __init__(self, message: str, is_to_blame: bool = False) -> None:
        super().__init__(message)
        self.is_to_blame = is_to_blame


@dataclass
class PoolCounts:
    """What has happened so far.

    Attributes:
        failures: Calls in which an environment failed.
        timeouts: Calls past their deadline; neither counts those of `close`.
        lost_processes: Processes that died, or were killed for what their episodes did.
        retired_processes: Processes that were replaced because a call that can't be ended still runs there.
        lost_episodes: Episodes that ended with their process.
        failed_closes: Environments whose `close` failed or took too long.
    """

    failures: int = 0
    timeouts: int = 0
    lost_processes: int = 0
    retired_processes: int = 0
    lost_episodes: int = 0
    failed_closes: int = 0

    def since(self, earlier: PoolCounts) -> PoolCounts:
        """Return what has happened since then."""
        return PoolCounts(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


@dataclass(eq=False)
class _Call:
    """A call that was sent and is not answered."""

    episode: LiveEnvironment
    future: asyncio.Future[dict[str, Any]]
    since: float


@dataclass(eq=False)
class _Process:
    """A process and its episodes; `popen` is its guard, which ends as it does.

    `since` is when it was started, then when it was ready. One that is apart has only episodes that were to blame for
    the end of another.
    """

    popen: subprocess.Popen[bytes]
    state: SharedState
    since: float
    ready: asyncio.Future[None]
    is_apart: bool = False
    is_retiring: bool = False
    is_ending: bool = False
    episodes: dict[int, LiveEnvironment] = field(default_factory=dict)
    calls: dict[int, _Call] = field(default_factory=dict)
    writer: asyncio.StreamWriter | None = None
    tending: asyncio.Task[None] = field(init=False)

    @property
    def pid(self) -> int:
        """Its id, or that of its guard before it has begun."""
        return self.state.pid or self.popen.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has loaded the environment."""
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None


def environment_of(settings: EnvironmentConfig, given: object = None) -> EnvironmentSpec:
    """Return the environment of a run.

    Args:
        settings: The section `environment`.
        given: What the run was given as an object, see `EnvironmentSpec.of`; None for what the section names.

    Raises:
        EnvironmentLoadError: It can't be used.
    """
    path = settings.path if given is None else None
    named = settings.row_environments
    # What all calls of a turn may take leaves the step time to answer: the policy is told, and the episode goes on.
    turn_s = _SHARE_OF_CALLS * settings.step_timeout_s
    limits = ToolLimits(settings.tool_timeout_s, turn_s, settings.max_parallel_calls)
    return EnvironmentSpec.of(path, settings.kwargs, settings.tools, limits, given, named)


async def try_environment(
    spec: EnvironmentSpec, settings: EnvironmentConfig, choices: Sequence[Choice] = ()
) -> tuple[EnvironmentTraits, list[str | None]]:
    """Load an environment where it will live, in a process of its own, which then ends.

    Args:
        spec: The environment.
        settings: The section `environment`.
        choices: What rows choose.

    Returns:
        What its class tells; and for each choice why a row must not make it, None where it may.

    Raises:
        EnvironmentLoadError: It can't be loaded.
        ValueError: A choice is no plain data.
    """
    async with EnvironmentPool(spec, settings.model_copy(update={"num_workers": 1}), choices=choices) as pool:
        return pool.traits, pool.refusals


class EnvironmentPool:
    """Processes in which the environments of many episodes live. All of it belongs to one event loop.

    Args:
        spec: The environment.
        settings: The section `environment`, with number of processes, deadlines and memory limit.
        output: File that gets what environments print; standard error if None.
        choices: `env` and `env_kwargs` of rows, plain data, that are looked at before any episode is begun.

    Attributes:
        counts: What has happened so far.
        traits: What the environment's class tells; nothing before `start`.
        refusals: Why a row must not choose each of `choices`, None where it may; nothing before `start`.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        settings: EnvironmentConfig,
        output: IO[bytes] | None = None,
        choices: Sequence[Choice] = (),
    ) -> None:
        self._spec = spec
        self._output = output
        self._num_workers = settings.num_workers
        self._timeout_s = settings.step_timeout_s
        self._variables = settings.env
        self._passed: Mapping[str, str] = {}
        most_tokens = settings.max_observation_tokens
        self._settings = encode(
            {
                "memory_limit_gib": settings.memory_limit_gib,
                "spec": spec.to_plain(),
                "timeout_s": settings.step_timeout_s,
                "processes": settings.num_workers,
                "longest_text": None if most_tokens is None else most_tokens * _CHARACTERS_PER_TOKEN,
                "choices": [[to_plain(part, "a row's choice") for part in choice] for choice in choices],
            }
        )
        self.counts = PoolCounts()
        self.traits = EnvironmentTraits()
        self.refusals: list[str | None] = []
        self._was_ready = False
        self._numbers = itertools.count(1)
        self._processes: set[_Process] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._failed_starts = 0
        self._broken: str | None = None
        self._refusal: str | None = None
        self._is_open = False
        self._suspects: set[Hashable] = set()

    async def start(self) -> None:
        """Start the processes and wait until all of them have loaded the environment.

        Raises:
            EnvironmentLoadError: It can't be loaded, with the traceback of the process; or a variable that it is to
                have is not set.
        """
        try:
            named = values_of_arguments(self._spec.env, self._spec.title, _TITLE)
            self._passed = named | with_values(self._variables, "environment.env", _TITLE)
        except MissingVariableError as error:
            raise EnvironmentLoadError(str(error)) from error
        self._is_open = True
        self._keep_enough_processes()
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._watching.add_done_callback(self._stopped_watching)
        while self._broken is None and not all(process.is_ready for process in self._processes):
            await asyncio.wait({process.ready for process in self._processes if not process.is_ready})
            self._keep_enough_processes()
        if self._broken is not None:
            reason = self._broken
            await self.close()
            if self._refusal is not None:
                raise EnvironmentLoadError(self._refusal)
            between = "\n" if "\n" in reason else " "  # lines of a traceback stand below each other
            raise EnvironmentLoadError(f"{self._spec.title} can't be loaded:{between}{reason}")

    def open(self, key: Hashable, row: Mapping[str, Any], seed: int, sample_seed: int | None = None) -> LiveEnvironment:
        """Return the environment of an episode, in the process with the fewest episodes.

        An episode that was to blame for the end of its process gets one apart from all others: the second time it
        harms nobody else, and is blamed for nobody else.

        Args:
            key: Of the episode; the same when it is begun again.
            row: The row, plain data. Its `env`, if it has one, names another environment than the run's, and its
                `env_kwargs` are arguments of the constructor.
            seed: Of the environment, and of those that play the same beside it.
            sample_seed: Of this one alone; `seed` if None.

        Raises:
            EnvironmentPoolError: No process is left, and none can be started.
            RuntimeError: The pool isn't running.
        """
        if not self._is_open:
            raise RuntimeError("the pool of environments is not running: start it first")
        self._keep_enough_processes()
        is_apart = key in self._suspects
        fitting = [one for one in self._processes if not one.is_retiring and one.is_apart == is_apart]
        if is_apart and len(fitting) < self._num_workers and all(one.episodes for one in fitting):
            fitting += self._launch(is_apart=True)
        if self._broken is not None or not fitting:
            raise EnvironmentPoolError(f"no further process of {self._spec.title} starts: {self._broken}")
        process = min(fitting, key=lambda one: len(one.episodes))
        seeds = {"seed": seed, "sample_seed": seed if sample_seed is None else sample_seed}
        opened = LiveEnvironment(self, process, next(self._numbers), key, row, seeds)
        process.episodes[opened.number] = opened
        return opened

    async def settled(self) -> None:
        """Return once no environment is being closed any more, each within its deadline."""
        while self._ending:
            await asyncio.wait(self._ending)

    async def close(self) -> None:
        """Kill all processes; episodes that still run are lost. Calling it again does nothing."""
        self._is_open = False
        if self._watching is not None:
            self._watching.cancel()
        for process in list(self._processes):
            self._end(process, "the pool of environments was closed", is_fault=False)
        await self.settled()

    async def __aenter__(self) -> EnvironmentPool:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # ------------------------------------------------------------------ processes

    def _keep_enough_processes(self) -> None:
        while (
            self._is_open
            and self._broken is None
            and sum(not (one.is_retiring or one.is_apart) for one in self._processes) < self._num_workers
        ):
            self._launch()

    def _launch(self, is_apart: bool = False) -> list[_Process]:
        """Start a process; an empty list if the system gives none."""
        try:
            popen, ours, state = start_child(_MODULE, self._passed, self._output, _NUM_THREADS)
        except OSError as error:
            self._broken = (
                f"the system gives no further process: {error}. Lower environment.num_workers, or raise the limits of "
                "processes, open files or memory (ulimit -a, the container's)"
            )
            return []
        loop = asyncio.get_running_loop()
        process = _Process(popen, state, time.monotonic(), loop.create_future(), is_apart)
        self._processes.add(process)
        process.tending = loop.create_task(self._tend(process, ours))
        return [process]

    async def _tend(self, process: _Process, connection: socket.socket) -> None:
        """Read a process's answers until it ends; ending the process cancels this task."""
        reader, process.writer = await open_stream(connection, _LONGEST_REPLY_BYTES)
        process.writer.write(self._settings)
        try:
            while (message := await receive(reader)) is not None:
                self._answered(process, message)
        except GarbledError as error:
            # Whoever wrote it was at work then, and its own answer comes after it.
            unanswered = {call.episode.number for call in process.calls.values()}
            said = f"something in its process wrote {error} to the connection that answers calls"
            self._end(process, said, unanswered)
            return
        await self._lost(process)

    def _answered(self, process: _Process, message: dict[str, Any]) -> None:
        if "load_error" in message and not process.is_ready:
            self._broken = self._with_hint(str(message["load_error"]))
            self._refusal = self._broken if message.get("explains_itself") is True else None
            self._end(process, self._broken, is_fault=False)
            return
        if "ready" in message and not process.is_ready:
            refusals = message.get("refusals")
            self.refusals = refusals if isinstance(refusals, list) else []
            traits = message.get("traits")
            self.traits = EnvironmentTraits(**traits) if isinstance(traits, dict) else EnvironmentTraits()
            self._failed_starts, self._was_ready = 0, True
            process.since = time.monotonic()
            NEEDED.add(process.pid, "an environment process")
            process.ready.set_result(None)
            return
        number = message.get("id")
        if isinstance(number, int) and isinstance(message.get("waits"), bool):
            if (waiting := process.calls.get(number)) is not None:  # else it was given up, and leaves the line later
                waiting.episode.stands(message["waits"])
            return
        call = process.calls.pop(number, None) if isinstance(number, int) else None
        if call is None or not message.keys() & {"result", "error", "timeout", "exhausted"}:
            raise GarbledError(str(message)[:300])
        if "exhausted" in message:
            said = f"its process has no memory left (environment.memory_limit_gib): {str(message['exhausted'])[:5000]}"
            process.calls[message["id"]] = call
            self._end(process, said, {call.episode.number})
            return
        if message.get("stuck"):
            self._retire(process)
        if not call.future.done():
            call.future.set_result(message)

    def _retire(self, process: _Process) -> None:
        """Give a process no new episodes, and end it when it has none; something in it can't be ended alone."""
        if process.is_retiring or process.is_ending:
            return
        process.is_retiring = True
        self.counts.retired_processes += 1
        retiring = sorted((one for one in self._processes if one.is_retiring), key=lambda one: one.since)
        for oldest in retiring[: max(0, len(retiring) - _MOST_RETIRING * self._num_workers)]:
            self._end(
                oldest, f"its process {oldest.pid} was replaced, since calls that never end had filled others, too"
            )
        self._keep_enough_processes()

    async def _watch(self) -> None:
        """Check deadlines as long as the pool is open."""
        while True:
            await asyncio.sleep(min(_TICK_S, self._timeout_s / 10))
            for process in list(self._processes):
                if not process.is_ending:
                    self._check(process, time.monotonic())
            self._keep_enough_processes()

    def _stopped_watching(self, watching: asyncio.Task[None]) -> None:
        """Say so where nobody checks deadlines any more: otherwise calls would wait for ever."""
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self._broken = f"the watch over its processes failed: {type(error).__name__}: {error}"
            logger.error("environments: %s", self._broken, exc_info=error)
            for process in list(self._processes):
                self._end(process, self._broken, set())

    def _check(self, process: _Process, now: float) -> None:
        """End a process that stands still, and retire one in which a call can't be ended."""
        if not process.is_ready:
            if now - process.since > _START_TIMEOUT_S:
                self._end(process, f"loading took longer than {_START_TIMEOUT_S:g} s")
            return
        if (process.is_retiring or process.is_apart) and not process.episodes:
            self._end(process, "it is not needed any more", is_fault=False)
            return
        if not process.episodes:
            return
        holder, since, _ = process.state.read()
        still_s = now - max(since, process.since) - self._timeout_s
        if still_s > (0.0 if holder else _SILENCE_S):
            is_busy = holder or process.state.busy_threads()
            if is_busy or still_s > _STARVED_S or _is_stopped(process.pid):
                self._spawn(self._end_still(process))
        elif any(now - call.since > _PATIENCE * self._timeout_s + _GRACE_S for call in process.calls.values()):
            late = {call.episode.number for call in process.calls.values() if now - call.since > self._timeout_s}
            self._end(process, f"its process {process.pid} did not answer", late)
        else:
            # A program that asks the policy itself has until the end of its episode; what still runs then is given up.
            at_leisure = {number for number, episode in process.episodes.items() if episode.is_agent}
            late_since = now - self._timeout_s - _GRACE_S
            threads = process.state.busy_threads()
            if any(thread.since < late_since for thread in threads if thread.holder not in at_leisure):
                self._retire(process)

    async def _end_still(self, process: _Process) -> None:
        """End a process that stands still, and find out for whom it does."""
        process.is_ending = True
        pid, limit_s = process.pid, self._timeout_s
        if _is_stopped(pid):
            self._end(process, f"its process {pid} had been stopped (SIGSTOP)")
            return
        holder, *_ = process.state.read()
        threads = {thread.thread_id: thread.holder for thread in process.state.busy_threads()}
        beat = max(process.state.last_beat, process.since)
        if time.monotonic() - beat > min(_SILENCE_S, limit_s) or not holder:
            # Something holds Python's lock, and others wait for it.
            at_work = ({pid: holder} if holder else {}) | threads
            before = _cpu_ticks(pid)
            waiting: set[int] = set()
            culprits: set[int] = set()
            for looks in range(1, _MOST_LOOKS + 1):
                await asyncio.sleep(_LOOK_S)
                # One that waits wakes up now and then, to ask for the lock.
                waiting |= {number for number in at_work if _waits_for_lock(pid, number)}
                if looks < _LOOKS:
                    continue
                after = _cpu_ticks(pid)
                spent = {number: after.get(number, 0) - before.get(number, 0) for number in at_work}
                culprits = _culprits(spent, waiting, looks)
                if len(culprits) == 1:
                    break
            blamed = {at_work[number] for number in culprits or at_work}
        else:
            blamed = {holder}
        if process in self._processes:
            held = blamed - {0} and process.episodes.keys() & blamed
            how = "something held it" if held else "it stood still"
            self._end(process, f"its process {pid} was killed: {how} for longer than {limit_s:g} s", blamed)

    async def _lost(self, process: _Process) -> None:
        """Clear up behind a process that ended by itself."""
        until = time.monotonic() + _LAST_WORDS_S
        while process.popen.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.01)
        pid, code = process.pid, process.popen.returncode
        how = f"its process {pid} {'closed its connection' if code is None else exit_in_words(code)}"
        if (reason := NEEDED.why_it_ended(pid) or why_memory_ended_it()) is not None:
            how = f"{how} ({reason})"
        # What ends by itself does so for a call, even if that left the end to others, as one that closes all files.
        is_by_itself = process.is_ready and code != -signal.SIGKILL
        unanswered = {call.episode.number for call in process.calls.values()} if is_by_itself else set()
        self._end(process, how, _at_work(process) or unanswered)

    def _end(
        self, process: _Process, error: str, blamed: Collection[int] | None = None, *, is_fault: bool = True
    ) -> None:
        """Kill a process, which loses its episodes.

        Args:
            process: The process.
            error: What happened to it.
            blamed: Episodes that held it; those for which it works now, if None.
            is_fault: Whether something went wrong with it.
        """
        if process not in self._processes:
            return
        self._processes.discard(process)
        process.is_ending = True
        if blamed is None:
            blamed = _at_work(process) if is_fault else set()
        if is_fault:
            self.counts.lost_processes += 1
            self.counts.lost_episodes += len(process.episodes)
            logger.warning("environments: %s", error if process.is_ready else f"{error} while loading")
        if not process.is_ready:
            self._start_failed(error, is_fault)
            process.ready.cancel()
        for number, episode in process.episodes.items():
            episode.lost = EnvironmentLostError(error, number in blamed)
            if number in blamed:
                self._suspects.add(episode.key)
        for call in process.calls.values():
            if not call.future.done() and call.episode.lost is not None:
                call.future.set_exception(call.episode.lost)
        process.tending.cancel()
        if process.writer is not None:
            process.writer.close()
        self._spawn(self._stop(process))
        self._keep_enough_processes()

    async def _stop(self, process: _Process) -> None:
        pid = process.pid
        await asyncio.to_thread(stop_child, process.popen, f"environment process {pid}")
        NEEDED.remove(pid)
        process.state.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    def _start_failed(self, reason: str, is_fault: bool) -> None:
        if not is_fault or self._broken is not None:
            return
        self._failed_starts += 1
        if self._failed_starts > _FAILED_STARTS_ALLOWED or (not self._was_ready and "took longer" in reason):
            self._broken = reason if reason.endswith("while loading") else f"{reason} while loading"

    def _with_hint(self, error: str) -> str:
        """Add a hint to an error that names an environment variable withheld from the process."""
        name = withheld_variable(error, self._passed)
        if name is None:
            return error
        return (
            f"{error}\n(the variable {name} is set, but environment processes get only those that libraries need "
            f"and those that are named: environment.env=[{name}], or <argument>: env:{name} in environment.kwargs)"
        )


class LiveEnvironment:
    """The environment of one episode, in its process. Its methods are called one after the other.

    Attributes:
        key: Of the episode.
        is_agent: Whether it asks the policy itself, so that what it runs may take as long as the episode.
        lost: Why its process is gone, if it is.
        clock: Of the episode; it stands while a call waits in line behind those of others.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        process: _Process,
        number: int,
        key: Hashable,
        row: Mapping[str, Any],
        seeds: Mapping[str, int],
    ) -> None:
        self._pool = pool
        self._process = process
        self._row = row
        self._seeds = seeds
        self._was_reset = self._is_closed = False
        self.number = number
        self.key = key
        self.is_agent = False
        self.lost: EnvironmentLostError | None = None
        self.clock: EpisodeClock | None = None
        self._stands = False

    @property
    def title(self) -> str:
        """The episode in messages."""
        return f"environment of episode {self.key}"

    async def reset(self) -> Observation:
        """Begin the episode.

        Raises:
            EnvironmentFailedError: The class raised, or returned something that is no observation.
            EnvironmentTimeoutError: It took too long.
            EnvironmentLostError: Its process is gone.
            ValueError: The row is no plain data.
        """
        fields = {
            "env": self._row.get("env"),
            "env_kwargs": to_plain(self._row.get("env_kwargs"), f"env_kwargs of the {self.title}"),
            # One by one, as the data set has checked them: together they would be nested a level deeper.
            "row": {name: to_plain(value, f"column {name} of the {self.title}") for name, value in self._row.items()},
            "seeds": self._seeds,
        }
        first: Observation = self._read(observation_from_plain, await self._call("reset", fields))
        self.is_agent = first.is_agent
        return first

    async def step(self, action: Action) -> StepResult:
        """Take the policy's turn. The result's observation is an `Observation`, or None where the episode is over.

        Raises:
            EnvironmentFailedError, EnvironmentTimeoutError, EnvironmentLostError: As for `reset`.
        """
        read = functools.partial(step_from_plain, num_tokens=len(action.token_ids))
        return self._read(read, await self._call("step", {"action": action_to_plain(action)}))

    async def close(self) -> None:
        """Let go of the environment; what its `close` does wrong is counted and logged.

        One that takes long goes on behind this call, within its deadline.
        """
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.wait({self._pool._spawn(self._close())}, timeout=_CLOSE_GRACE_S)

    async def _close(self) -> None:
        try:
            if self._was_reset and self.lost is None:
                limit_s = 2 * self._pool._timeout_s + _GRACE_S  # a call that was given up may still have its own time
                await asyncio.wait_for(self._call("close", {}), limit_s)
        except (EnvironmentFaultError, TimeoutError) as error:
            self._pool.counts.failed_closes += 1
            said = error if isinstance(error, HrlError) else "its close is not answered"
            logger.warning("%s: %s", self.title, said)
        finally:
            self._process.episodes.pop(self.number, None)
            if self.lost is None:
                self._pool._suspects.discard(self.key)

    async def _call(self, method: str, fields: Mapping[str, Any]) -> object:
        if not self._process.is_ready and self.lost is None:
            await asyncio.wait({self._process.ready})
        if self.lost is not None:
            raise self.lost
        assert self._process.writer is not None
        number = next(self._pool._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._process.calls[number] = _Call(self, future, time.monotonic())
        self._was_reset = True
        self._process.writer.write(encode({"id": number, "episode": self.number, "do": method, **fields}))
        try:
            answer = await future
        finally:
            self.stands(False)
        if "timeout" in answer:
            self._pool.counts.timeouts += method != "close"
            where = f", in\n{str(answer['timeout'])[:5000]}" if answer["timeout"] else ""
            raise EnvironmentTimeoutError(
                f"{method} took longer than {self._pool._timeout_s:g} s (environment.step_timeout_s){where}"
            )
        if "error" in answer:
            self._pool.counts.failures += method != "close"
            raise EnvironmentFailedError(self._pool._with_hint(str(answer["error"])[:5000]))
        return answer["result"]

    def stands(self, waits: bool) -> None:
        """Take that the present call waits in line from now on, or no longer does."""
        if self.clock is None or waits == self._stands:
            return
        self._stands = waits
        if waits:
            self.clock.stop()
        else:
            self.clock.go_on()

    def _read(self, read: Any, plain: object) -> Any:
        """Check what came from a process that may have sent anything."""
        try:
            return read(plain)
        except EnvironmentReplyError as error:
            self._pool.counts.failures += 1
            raise EnvironmentFailedError(f"its process {error}") from error


def _at_work(process: _Process) -> set[int]:
    """Return the episodes that a process works for now."""
    holder, *_ = process.state.read()
    return {holder, *(thread.holder for thread in process.state.busy_threads())} - {0}


def _is_stopped(pid: int) -> bool:
    state = state_of(pid)
    return state is not None and state.letter == STOPPED


def _culprits(spent: Mapping[int, int], waiting: Collection[int], looks: int) -> set[int]:
    """Return the threads of which one may hold Python's lock.

    Args:
        spent: Thread → ticks of processor time since the first look.
        waiting: Those that were seen to wait for a lock; what holds Python's may wait for another one.
        looks: How often it was looked.
    """
    computing = [number for number, ticks in spent.items() if ticks * _LOOKS >= _COMPUTES_TICKS * looks]
    if not computing:  # on a busy machine nobody has that much; who waits has still less
        computing = [number for number, ticks in spent.items() if number not in waiting and ticks >= _COMPUTES_TICKS]
    if computing:
        return {max(computing, key=lambda number: spent[number])}
    return spent.keys() - waiting


def _waits_for_lock(pid: int, thread_id: int) -> bool:
    """Return whether a thread waits for a lock; False where the system doesn't say."""
    try:
        return Path(f"/proc/{pid}/task/{thread_id}/syscall").read_text().partition(" ")[0] == _FUTEX
    except OSError:
        return False


def _cpu_ticks(pid: int) -> dict[int, int]:
    """Return the processor time of each thread of a process, in ticks."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended while we looked
            fields = path.read_text().rpartition(")")[2].split()
            found[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    return found
