"""Processes for reward functions: each sample under a deadline, each process killable.

One thread of the parent owns all processes. It starts them, hands each as many samples as it takes at once (one, or
many calls of an async function), and kills the one whose deadline has passed, whatever it is doing, a loop in C
included. The kernel kills them when that thread ends, so they outlive no parent.

A built-in function never fails because of a response: what breaks it scores as a wrong answer does, and is marked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hrl.processes.child_environment import child_environment, withheld_names
from hrl.processes.plain_data import to_plain
from hrl.reward.function import RewardFunctionError, RewardSpec, read_reward
from hrl.reward.process import SharedState, encode, read_frame
from hrl.reward.score import find_scorer

if TYPE_CHECKING:
    from hrl.config.reward import RewardConfig

logger = logging.getLogger(__name__)

_BURST = 4
"""At most so many times `num_workers` processes run while others sit on samples that take long."""
_SLOW_AFTER_S = 1.0
"""A sample counts as taking long after this time, or a quarter of its deadline if that is shorter."""
_TICK_S = 0.05
"""How often deadlines are looked at, or ten times in one if that is shorter."""
_LAST_WORDS_S = 0.5
"""How long a process whose socket has closed may take to end on its own, which tells its exit code."""
_SILENCE_S = 5.0
"""How much longer than a deadline a process may stand still with no sample in it, before it is killed."""
_FAILED_STARTS_ALLOWED = 3
_MAX_ATTEMPTS = 2
_LONGEST_REASON = 300

Status = Literal["ok", "skip", "error", "timeout", "crash"]


@dataclass(frozen=True)
class RewardRow:
    """What is known of a sample before it is generated.

    Attributes:
        key: Unique within its step, e.g. `(uid, sample_index)`.
        data_source, ground_truth, extra_info: Of the prompt's row; plain data.
    """

    key: Hashable
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardOutcome:
    """What became of a sample.

    Attributes:
        status: `ok`; `skip`, the function returned None; `error`, it raised or returned no reward; `timeout`, it was
            killed at its deadline; `crash`, its process died, twice.
        score: The reward, if `ok`; `None` leaves the sample out.
        parts: What the function returned beside it.
        error: A message or traceback for the last three.
        duration_s: Of the last attempt.
        attempts: 2 after a crash.
        unscorable: Why a built-in function could not score the response, whose score is then that of a wrong answer.
    """

    status: Status
    score: float | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    duration_s: float = 0.0
    attempts: int = 1
    unscorable: str | None = None


@dataclass
class _Task:
    """A sample on its way, as its process reads it."""

    number: int
    name: str
    data_source: str
    frame: bytes
    future: Future[RewardOutcome]
    attempts: int = 0
    since: float = 0.0


@dataclass(eq=False)
class _Process:
    """A process, and the samples that it has."""

    popen: subprocess.Popen[bytes]
    state: SharedState
    since: float
    concurrency: int = 0  # 0: the function is not loaded yet
    tasks: dict[int, _Task] = field(default_factory=dict)
    writer: asyncio.StreamWriter = field(init=False)
    tending: asyncio.Task[None] = field(init=False)

    @property
    def has_room(self) -> bool:
        """Whether it takes another sample."""
        return len(self.tasks) < self.concurrency

    @property
    def oldest_s(self) -> float:
        """The moment at which the oldest of its samples was handed over; now, if it has none."""
        return min((task.since for task in self.tasks.values()), default=time.monotonic())


class RewardPool:
    """Runs one reward function in several processes.

    At the deadline of a call an await is cancelled; anything else ends with its process, which is replaced. A function
    that needs more memory than a process may have gets a `MemoryError`.

    Args:
        spec: The function.
        reward: The section `reward`, which has processes, calls at once, deadline and memory.
        num_workers: Processes, where that is not `reward.num_workers`.
        start_timeout_s: For starting a process and loading the function.
    """

    def __init__(
        self,
        spec: RewardSpec,
        reward: RewardConfig,
        *,
        num_workers: int | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._spec = spec
        self._num_workers = num_workers or reward.num_workers
        self._timeout_s = reward.timeout_s
        self._start_timeout_s = start_timeout_s
        self._withheld = withheld_names(keep=spec.env.values())
        self._settings = encode(
            {
                "memory_limit_gib": reward.memory_limit_gib,
                "spec": spec.to_plain(),
                "timeout_s": reward.timeout_s,
                "max_concurrency": reward.max_concurrency,
            }
        )
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._queue: deque[_Task] = deque()
        self._processes: set[_Process] = set()
        self._stopping = False
        self._failed_starts = 0
        self._broken: str | None = None
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)

    def start(self) -> None:
        """Start the processes and wait until one of them has loaded the function.

        Raises:
            RewardFunctionError: The function can't be loaded; with the traceback of the process.
        """
        missing = {name: key for name, key in self._spec.env.items() if key not in os.environ}
        if missing:
            name, key = next(iter(missing.items()))
            raise RewardFunctionError(
                f"reward.custom_reward_function.reward_kwargs.{name} is the environment variable {key}, which is not "
                "set where the reward processes start. Export it before the run; on a cluster that runs already, "
                "before `ray start` on the driver's node"
            )
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        limit_s = self._start_timeout_s * (_FAILED_STARTS_ALLOWED + 1) + _LAST_WORDS_S
        if not self._started.wait(limit_s):
            self._broken = f"no reward process was ready within {limit_s:.0f} s"
        if self._broken is not None:
            self.shutdown()
            raise RewardFunctionError(f"{self._spec.title} can't be loaded: {self._broken}")

    def submit(self, row: RewardRow, solution_str: str, name: str) -> Future[RewardOutcome]:
        """Queue a sample; the future always gets an outcome, also when the process dies or the pool is shut down.

        Args:
            row: The sample's row.
            solution_str: The response's text.
            name: What messages call the sample.

        Raises:
            ValueError: Ground truth or extra info hold something that is no plain data.
            RuntimeError: The pool isn't running.
        """
        number = next(self._numbers)
        frame = encode(
            {
                "id": number,
                "data_source": row.data_source,
                "solution_str": solution_str,
                "ground_truth": to_plain(row.ground_truth, f"ground truth of {name}"),
                "extra_info": to_plain(row.extra_info, f"extra_info of {name}"),
            }
        )
        task = _Task(number, name, row.data_source, frame, Future())
        with self._lock:
            if self._stopping or not self._thread.is_alive():
                raise RuntimeError(f"the reward pool is not running: {self._broken or 'start it first'}")
            self._queue.append(task)
            self._loop.call_soon_threadsafe(self._turn)
        return task.future

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Ids of the processes that run now."""
        return tuple(sorted(process.popen.pid for process in list(self._processes)))

    def shutdown(self) -> None:
        """Kill all processes; samples not yet scored end as crashed. Calling it again does nothing."""
        with self._lock:
            self._stopping = True
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ the thread that owns the processes

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            with self._lock:
                self._stopping = True
            for task in self._queue:
                if task.future.running() or task.future.set_running_or_notify_cancel():  # not cancelled by its owner
                    reason = self._broken or "the reward pool was shut down"
                    task.future.set_result(RewardOutcome("crash", error=reason, attempts=task.attempts))
            self._loop.close()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as self._tending:
            try:
                while not self._stopping:
                    now = time.monotonic()
                    for process in [process for process in self._processes if now >= self._deadline_s(process)]:
                        self._stop(process)
                    self._turn()
                    await asyncio.sleep(min(_TICK_S, self._timeout_s / 10))
            finally:
                for process in list(self._processes):
                    self._kill(process)
                    self._put_back(list(process.tasks.values()), charge=True)

    def _turn(self) -> None:
        """Do what can be done now: start or end processes, and hand out samples."""
        if not self._stopping:
            self._keep_enough_processes()
            self._hand_out()

    def _keep_enough_processes(self) -> None:
        """Replace what was killed; add processes while some sit on slow samples and others wait behind them."""
        slow_since = time.monotonic() - min(_SLOW_AFTER_S, self._timeout_s / 4)
        slow = sum(one.concurrency > 0 and not one.has_room and one.oldest_s < slow_since for one in self._processes)
        wanted = self._num_workers
        if self._queue:
            wanted = min(self._num_workers + slow, self._num_workers * _BURST)
        while len(self._processes) < wanted and self._broken is None:
            self._launch()
        spare = [process for process in self._processes if process.concurrency > 0 and not process.tasks]
        for process in spare[: max(0, len(self._processes) - wanted)]:
            self._kill(process)

    def _launch(self) -> None:
        try:
            popen, ours, state = start_process(self._spec.env.values())
        except OSError as error:
            self._give_up(
                f"the system gives no further process: {error}. Lower reward.num_workers, or raise the limits of "
                "processes, open files or memory (ulimit -a, the container's)"
            )
            return
        process = _Process(popen, state, since=time.monotonic())
        self._processes.add(process)
        process.tending = self._tending.create_task(self._tend(process, ours))

    async def _tend(self, process: _Process, connection: socket.socket) -> None:
        """Read what a process answers, until it ends or is killed, which cancels this."""
        reader, process.writer = await asyncio.open_connection(sock=connection)
        with contextlib.closing(process.writer):
            process.writer.write(self._settings)
            while (message := await read_frame(reader)) is not None:
                self._answered(process, message)
                self._turn()
            self._lost(process)
            self._turn()

    def _hand_out(self) -> None:
        """Give waiting samples to the processes that have the fewest."""
        with_room = [process for process in self._processes if process.has_room]
        while with_room and (task := self._next_task()) is not None:
            process = min(with_room, key=lambda candidate: len(candidate.tasks))
            task.attempts += 1
            task.since = time.monotonic()
            process.tasks[task.number] = task
            process.writer.write(task.frame)
            if not process.has_room:
                with_room.remove(process)

    def _next_task(self) -> _Task | None:
        """Return the next sample that nobody has cancelled."""
        while self._queue:
            task = self._queue.popleft()
            if task.future.running() or task.future.set_running_or_notify_cancel():
                return task
        return None

    def _deadline_s(self, process: _Process) -> float:
        """Return the moment at which a process is killed if nothing changes; infinite for an idle one."""
        if not process.concurrency:
            return process.since + self._start_timeout_s
        if not process.tasks:
            return float("inf")
        # Awaits have their deadlines inside the process. From here only one that stands still is seen.
        holder, since_s, _ = process.state.read()
        return max(since_s, process.oldest_s) + self._timeout_s + (0.0 if holder else _SILENCE_S)

    def _answered(self, process: _Process, message: dict[str, Any]) -> None:
        if "load_error" in message:
            self._kill(process)
            self._give_up(self._with_hint(str(message["load_error"])))
            return
        if "ready" in message:
            process.concurrency = message["ready"]
            self._failed_starts = 0
            self._started.set()
            return
        task = process.tasks.pop(message["id"])
        if "timeout" in message:
            self._finish(task, "timeout", error=f"took longer than {self._timeout_s:g} s and was cancelled")
            if message["stuck"]:  # a call that ignores its cancellation ends with its process
                self._kill(process)
                self._put_back(list(process.tasks.values()), charge=False)
        elif "error" in message:
            *_, blames_response = process.state.read()  # of this sample: the next one is not handed out yet
            self._finish(task, "error", blames_response, error=self._with_hint(message["error"]))
        else:
            status: Status = "skip" if message["score"] is None else "ok"
            self._finish(task, status, score=message["score"], parts=message["parts"])

    def _with_hint(self, error: str) -> str:
        """Add to a function's error that a variable it names was withheld, if so."""
        for name in self._withheld:
            if f"'{name}'" in error or f'"{name}"' in error:
                return (
                    f"{error}\n(the variable {name} looks like a secret, which reward processes get only if it is "
                    f"named: reward.custom_reward_function.reward_kwargs.<argument>=env:{name})"
                )
        return error

    def _finish(self, task: _Task, status: Status, blames_response: bool = False, **outcome: Any) -> None:
        """End a sample; what a response did to a built-in function counts as a wrong answer."""
        duration_s = time.monotonic() - task.since
        if self._spec.is_built_in and blames_response:
            reason = outcome["error"].rstrip().splitlines()[-1][:_LONGEST_REASON]
            logger.info("reward of %s: the response can't be scored: %s", task.name, reason)
            score, parts = read_reward(find_scorer(task.data_source).wrong)
            status, outcome = "ok", {"score": score, "parts": parts | {"unscorable": reason}, "unscorable": reason}
        task.future.set_result(RewardOutcome(status, duration_s=duration_s, attempts=task.attempts, **outcome))

    def _put_back(self, tasks: list[_Task], *, charge: bool) -> None:
        """Queue samples of a process that is gone again; they are not charged where another one ended it."""
        for task in tasks:
            task.attempts -= 0 if charge else 1
        self._queue.extendleft(reversed(tasks))

    def _lost(self, process: _Process) -> None:
        """Take leave of a process that ended by itself; the sample that held it is tried once more, elsewhere."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(_LAST_WORDS_S)
        holder, _, blames_response = process.state.read()
        self._kill(process)
        how = f"its process {process.popen.pid} {describe_exit(process.popen.returncode)}"
        if not process.concurrency:
            self._start_failed(f"{how} while loading")
        guilty = [process.tasks.pop(holder)] if holder in process.tasks else list(process.tasks.values())
        self._put_back([task for task in process.tasks.values() if task not in guilty], charge=False)
        for task in guilty:
            logger.warning("reward of %s: %s", task.name, how)
        self._retry_once(guilty, f"{how}, twice", blames_response)

    def _retry_once(self, tasks: list[_Task], error: str, blames_response: bool = False) -> None:
        """Queue samples again whose process ended at their first attempt, and give up the others."""
        for task in tasks:
            if task.attempts >= _MAX_ATTEMPTS:
                self._finish(task, "crash", blames_response, error=error)
        self._put_back([task for task in tasks if task.attempts < _MAX_ATTEMPTS], charge=True)

    def _stop(self, process: _Process) -> None:
        """Kill a process that is over its deadline; the sample that held it is charged, others are tried again."""
        holder, _, blames_response = process.state.read()
        self._kill(process)
        if not process.concurrency:
            self._start_failed(f"loading took longer than {self._start_timeout_s:g} s")
            return
        guilty = process.tasks.pop(holder, None)
        if guilty is None:
            error = f"its process stood still for {self._timeout_s + _SILENCE_S:g} s, twice"
            self._retry_once(list(process.tasks.values()), error)
            return
        logger.warning("reward of %s: killed after %.1f s", guilty.name, self._timeout_s)
        error = f"took longer than {self._timeout_s:g} s and was killed"
        self._finish(guilty, "timeout", blames_response, error=error)
        self._put_back(list(process.tasks.values()), charge=False)

    def _start_failed(self, reason: str) -> None:
        self._failed_starts += 1
        logger.warning("a reward process did not start: %s", reason)
        if self._failed_starts > _FAILED_STARTS_ALLOWED:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """End the thread, as no process can be had; samples that wait end with the reason."""
        self._broken = reason
        self._stopping = True
        self._started.set()

    def _kill(self, process: _Process) -> None:
        process.tending.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        process.popen.wait()
        process.state.close()
        self._processes.discard(process)


def start_process(env: Collection[str]) -> tuple[subprocess.Popen[bytes], socket.socket, SharedState]:
    """Return a process that waits for its settings, this end of its socket, and the state that it shares.

    Args:
        env: Variables that it gets although they look like secrets.

    Raises:
        OSError: The system refuses one.
    """
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as on_failure, theirs:
        on_failure.enter_context(ours)
        shared = SharedState.create()
        on_failure.callback(os.close, shared)
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "hrl.reward.process", *map(str, (theirs.fileno(), shared, os.getpid()))],
            env=child_environment(keep=env, OMP_NUM_THREADS="1", PYTHONHASHSEED="0"),
            pass_fds=[theirs.fileno(), shared],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that its own children can be killed with it, and Ctrl-C is the parent's
        )
        on_failure.pop_all()
    return popen, ours, SharedState(shared)


def describe_exit(code: int | None) -> str:
    """Return how a process ended, by its exit code."""
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
