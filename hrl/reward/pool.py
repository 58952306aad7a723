"""Processes for reward functions: each sample under a deadline, each process killable.

One thread of the parent owns all processes. It starts them, hands each as many samples as it takes at once (one, or
many for an async function), and kills a process at its deadline whatever it is doing, even in a loop in C. The kernel
kills the processes when that thread ends, so they never outlive the parent. Each has a guard, which leaves nothing of
what the function has started, in whatever session.

A built-in function never fails because of a response: a response that it can't score gets the score of a wrong answer
and is marked.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Literal

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
from hrl.reward.function import PICTURES, RewardFunctionError, read_reward
from hrl.reward.scorers.base import UNSCORABLE
from hrl.reward.spec import RewardSpec

if TYPE_CHECKING:
    from hrl.config.reward import RewardConfig

logger = logging.getLogger(__name__)

_BURST = 4
"""While some processes are busy with slow samples, at most this many times `num_workers` processes run."""
_SLOW_AFTER_S = 1.0
"""A sample counts as slow after this time, or after a quarter of its deadline if that is shorter."""
_TICK_S = 0.05
"""Interval at which deadlines are checked; a tenth of the deadline if that is shorter."""
_LAST_WORDS_S = 0.5
"""How long to wait for the exit code of a process that has closed its socket."""
_SILENCE_S = 5.0
"""How much longer than the deadline a process may be blocked outside of any sample before it is killed."""
_START_TIMEOUT_S = 60.0
"""How long a process may take to start and load the function."""
_FAILED_STARTS_ALLOWED = 3
_MAX_ATTEMPTS = 2
_TITLE = "reward processes"
_LONGEST_REASON = 300

Status = Literal["ok", "skip", "unscorable", "error", "timeout", "crash"]


@dataclass(frozen=True)
class RewardRow:
    """The part of a sample that is known before its response is generated.

    Attributes:
        key: Unique within its step, e.g. `(uid, sample_index)`.
        data_source, ground_truth, extra_info: From the prompt's row; plain data.
        columns: Every column of the row, as it was read; plain data.
        prompt: Its messages; plain data.
        pictures: The files of the pictures that it shows, for a function that takes them.
    """

    key: Hashable
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    prompt: Sequence[Mapping[str, Any]] = ()
    pictures: Sequence[bytes] = ()


@dataclass(frozen=True)
class PlayedEpisode:
    """What reward functions may see of an episode, beside the policy's last turn.

    Attributes:
        turns: What the policy wrote in each turn.
        conversation: All messages, from the first that the policy was shown to its last; plain data.
    """

    turns: Sequence[str]
    conversation: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class RewardOutcome:
    """Result of scoring a sample.

    Attributes:
        status: `ok`; `skip`, the function returned None; `unscorable`, a built-in function failed on the response,
            which scores as a wrong answer; `error`, the function raised or returned something that isn't a reward;
            `timeout`, it was killed at its deadline; `crash`, its process died twice.
        score: The reward, if `ok` or `unscorable`; `None` leaves the sample out.
        parts: Other values that the function returned; with `unscorable`, the reason has that name.
        turn_scores: Of an episode, what each of its turns is worth beside the score; `None` if the function said
            nothing of turns.
        error: A message or traceback if `error`, `timeout` or `crash`.
        duration_s: Duration of the last attempt.
        attempts: Number of attempts, 2 after a crash.
    """

    status: Status
    score: float | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    turn_scores: Sequence[float] | None = None
    error: str | None = None
    duration_s: float = 0.0
    attempts: int = 1


@dataclass
class _Task:
    """A submitted sample in the form that its process reads."""

    number: int
    name: str
    data_source: str
    frame: bytes
    future: Future[RewardOutcome]
    attempts: int = 1
    since: float = 0.0


@dataclass(eq=False)
class _Process:
    """A process and its samples; `popen` is its guard, which ends as it does."""

    popen: subprocess.Popen[bytes]
    state: SharedState
    since: float
    concurrency: int = 0  # 0: the function is not loaded yet
    is_limited: bool = False  # the function itself allows no more at once
    tasks: dict[int, _Task] = field(default_factory=dict)
    writer: asyncio.StreamWriter = field(init=False)
    tending: asyncio.Task[None] = field(init=False)

    @property
    def pid(self) -> int:
        """Its id, or that of its guard before it has begun."""
        return self.state.pid or self.popen.pid

    @property
    def has_room(self) -> bool:
        """Whether it takes another sample."""
        return len(self.tasks) < self.concurrency

    @property
    def oldest_s(self) -> float:
        """Time at which the oldest of its samples was handed over; now if it has none."""
        return min((task.since for task in self.tasks.values()), default=time.monotonic())


class RewardPool:
    """Runs one reward function in several processes.

    At its deadline an async call is cancelled at its await; otherwise its process is killed and replaced. A function
    that exceeds the memory limit of its process gets a `MemoryError`.

    Args:
        spec: The function.
        reward: The section `reward`, with number of processes, concurrency, deadline and memory limit.
        output: File that gets what the functions print; standard error if None.

    Attributes:
        takes_pictures: Whether the function names the pictures of a prompt; known once the pool is started.
    """

    def __init__(self, spec: RewardSpec, reward: RewardConfig, output: IO[bytes] | None = None) -> None:
        self._spec = spec
        self._output = output
        self._num_workers = reward.num_workers
        self._timeout_s = reward.timeout_s
        self._variables = reward.env
        self._passed: Mapping[str, str] = {}
        self._settings = encode(
            {
                "memory_limit_gib": reward.memory_limit_gib,
                "processes": reward.num_workers,
                "spec": spec.to_plain(),
                "timeout_s": reward.timeout_s,
                "max_concurrency": reward.max_concurrency,
            }
        )
        self.takes_pictures = False
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
            RewardFunctionError: The function can't be loaded, with the traceback of the process; or a variable that it
                is to have is not set.
        """
        try:
            given = with_values(self._variables, "reward.env", _TITLE)
            others = {argument: name for argument, name in self._spec.env.items() if name not in given}
            self._passed = given | values_of_arguments(others, self._spec.source.title, _TITLE)
        except MissingVariableError as error:
            raise RewardFunctionError(str(error)) from error
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        limit_s = _START_TIMEOUT_S * (_FAILED_STARTS_ALLOWED + 1) + _LAST_WORDS_S
        if not self._started.wait(limit_s):
            self._broken = f"no reward process was ready within {limit_s:.0f} s"
        if self._broken is not None:
            self.shutdown()
            raise RewardFunctionError(f"{self._spec.source.title} can't be loaded: {self._broken}")

    def submit(
        self, row: RewardRow, solution_str: str, name: str, played: PlayedEpisode | None = None
    ) -> Future[RewardOutcome]:
        """Queue a sample; the future always gets an outcome, even if the process dies or the pool is shut down.

        Args:
            row: The sample's row.
            solution_str: The response's text.
            name: Name of the sample in messages.
            played: What an episode was; None of a single response.

        Raises:
            ValueError: Ground truth or extra info is not plain data.
            RuntimeError: The pool isn't running.
        """
        number = next(self._numbers)
        if played is None:
            chat = [*row.prompt, {"role": "assistant", "content": solution_str}]
        else:
            chat = [*played.conversation]
        frame = encode(
            {
                "id": number,
                "data_source": row.data_source,
                "solution_str": solution_str,
                "turns": None if played is None else list(played.turns),
                "conversation": chat,  # came as JSON, or was looked at as a row: nothing in it ends the run
                "ground_truth": to_plain(row.ground_truth, f"ground truth of {name}"),
                "extra_info": to_plain(row.extra_info, f"extra_info of {name}"),
                # One by one, as the data set has checked them: together they would be nested a level deeper.
                "columns": {
                    column: to_plain(value, f"column {column} of {name}") for column, value in row.columns.items()
                },
                **(
                    {PICTURES: [base64.b64encode(file).decode() for file in row.pictures]}
                    if self.takes_pictures
                    else {}
                ),
            }
        )
        task = _Task(number, name, row.data_source, frame, Future())
        with self._lock:
            if self._stopping or not self._thread.is_alive():
                raise RuntimeError(f"the reward pool is not running: {self._broken or 'start it first'}")
            self._queue.append(task)
            self._loop.call_soon_threadsafe(self._turn)
        return task.future

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
            while (task := self._next_task()) is not None:
                reason = self._broken or "the reward pool was shut down"
                task.future.set_result(RewardOutcome("crash", error=reason, attempts=task.attempts))
            self._loop.close()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as self._tending:
            try:
                while not self._stopping:
                    now = time.monotonic()
                    for process in [process for process in self._processes if now >= self._deadline_s(process)]:
                        self._too_late(process)
                    self._turn()
                    await asyncio.sleep(min(_TICK_S, self._timeout_s / 10))
            finally:
                for process in list(self._processes):
                    self._kill(process)
                    self._put_back(process)

    def _turn(self) -> None:
        """Start and end processes and hand out samples, as far as possible now."""
        if not self._stopping:
            self._keep_enough_processes()
            self._hand_out()

    def _keep_enough_processes(self) -> None:
        """Replace killed processes; add some while slow samples keep others waiting."""
        slow_since = time.monotonic() - min(_SLOW_AFTER_S, self._timeout_s / 4)
        full = [one for one in self._processes if one.concurrency > 0 and not one.has_room and not one.is_limited]
        slow = sum(one.oldest_s < slow_since for one in full)
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
            popen, ours, state = start_child("hrl.reward.process", self._passed, self._output)
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
        """Read a process's answers until it ends; killing the process cancels this task."""
        reader, process.writer = await open_stream(connection)
        with contextlib.closing(process.writer):
            process.writer.write(self._settings)
            garbled = ""
            try:
                while (message := await receive(reader)) is not None:
                    self._answered(process, message)
                    self._turn()
            except GarbledError as error:
                garbled = f"something in its process wrote {error} to the connection that answers samples"
            if garbled:
                self._end(process, garbled if process.concurrency else f"{garbled} while loading")
            else:
                self._lost(process)
            self._turn()

    def _hand_out(self) -> None:
        """Give waiting samples to the processes with the fewest samples."""
        with_room = [process for process in self._processes if process.has_room]
        while with_room and (task := self._next_task()) is not None:
            process = min(with_room, key=lambda candidate: len(candidate.tasks))
            task.since = time.monotonic()
            process.tasks[task.number] = task
            process.writer.write(task.frame)
            if not process.has_room:
                with_room.remove(process)

    def _next_task(self) -> _Task | None:
        """Return the next sample that is not cancelled."""
        while self._queue:
            task = self._queue.popleft()
            if task.future.running() or task.future.set_running_or_notify_cancel():
                return task
        return None

    def _deadline_s(self, process: _Process) -> float:
        """Return the time at which to kill a process; infinite for an idle one."""
        if not process.concurrency:
            return process.since + _START_TIMEOUT_S
        if not process.tasks:
            return float("inf")
        # Deadlines of awaits are enforced inside the process. The parent only sees that its event loop is blocked.
        holder, since_s, _ = process.state.read()
        return max(since_s, process.oldest_s) + self._timeout_s + (0.0 if holder else _SILENCE_S)

    def _answered(self, process: _Process, message: dict[str, Any]) -> None:
        if "load_error" in message:
            self._kill(process)
            self._give_up(self._with_hint(str(message["load_error"])))
            return
        if "ready" in message:
            process.concurrency, process.is_limited = message["ready"], message["is_limited"]
            self.takes_pictures = message["takes_pictures"]
            self._failed_starts = 0
            NEEDED.add(process.pid, "a reward process")
            self._started.set()
            return
        if message.get("id") not in process.tasks or not message.keys() & {"timeout", "error", "score"}:
            raise GarbledError(str(message)[:_LONGEST_REASON])
        task = process.tasks.pop(message["id"])
        if "timeout" in message:
            self._finish(task, "timeout", error=f"took longer than {self._timeout_s:g} s and was cancelled")
            if message["stuck"]:  # the call ignores its cancellation, so kill its process
                self._kill(process)
                self._put_back(process)
        elif "error" in message:
            self._finish(task, "error", error=self._with_hint(message["error"]))
        else:
            status: Status = "skip" if message["score"] is None else "ok"
            if self._spec.source.is_ours and any(part.rpartition("/")[2] == UNSCORABLE for part in message["parts"]):
                status = "unscorable"  # said so by a function of hrl
            self._finish(
                task, status, score=message["score"], parts=message["parts"], turn_scores=message.get("turn_scores")
            )

    def _with_hint(self, error: str) -> str:
        """Add a hint to an error that names an environment variable withheld from the process."""
        name = withheld_variable(error, self._passed)
        if name is None:
            return error
        return (
            f"{error}\n(the variable {name} is set, but reward processes get only those that libraries need "
            f"and those that are named: reward.env=[{name}], or <argument>: env:{name} in reward_kwargs or in "
            "the entry of reward.functions)"
        )

    def _finish(self, task: _Task, status: Status, blames_response: bool = False, **outcome: Any) -> None:
        """Set a sample's outcome; a response that a built-in function failed on counts as a wrong answer."""
        duration_s = time.monotonic() - task.since
        if blames_response and self._spec.source.is_ours:
            reason = outcome["error"].rstrip().splitlines()[-1][:_LONGEST_REASON]
            logger.info("reward of %s: the response can't be scored: %s", task.name, reason)
            score, parts = read_reward(self._spec.source.wrong(task.data_source))
            status, outcome = "unscorable", {"score": score, "parts": parts | {UNSCORABLE: reason}}
        task.future.set_result(RewardOutcome(status, duration_s=duration_s, attempts=task.attempts, **outcome))

    def _too_late(self, process: _Process) -> None:
        """Kill a process past its deadline."""
        holder, *_ = process.state.read()
        state = state_of(process.pid)
        if state is not None and state.letter == STOPPED:  # its sample is not to blame
            self._end(process, f"its process {process.pid} had been stopped (SIGSTOP)")
        elif not process.concurrency:
            self._end(process, f"loading took longer than {_START_TIMEOUT_S:g} s", "timeout")
        elif holder in process.tasks:
            self._end(process, f"took longer than {self._timeout_s:g} s and was killed", "timeout")
        else:
            self._end(process, f"its process stood still for {self._timeout_s + _SILENCE_S:g} s")

    def _lost(self, process: _Process) -> None:
        """Clear up behind a process that ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(_LAST_WORDS_S)
        pid = process.pid
        code = process.popen.returncode
        how = f"its process {pid} {'closed its connection' if code is None else exit_in_words(code)}"
        if (reason := NEEDED.why_it_ended(pid) or why_memory_ended_it()) is not None:
            how = f"{how} ({reason})"
        self._end(process, how if process.concurrency else f"{how} while loading")

    def _end(self, process: _Process, error: str, status: Literal["timeout", "crash"] = "crash") -> None:
        """Kill a process and charge the sample that occupied it, or all of them if none did; queue the others again.

        Args:
            process: The process.
            error: What happened to it.
            status: Whether it passed its deadline or died. A sample is charged with a timeout at once, and with a crash
                after its second.
        """
        holder, _, blames_response = process.state.read()
        self._kill(process)
        if not process.concurrency:
            # The first process that takes too long is the last: the next would too, after another minute.
            self._start_failed(error, is_final=status == "timeout" and not self._started.is_set())
            return
        charged = [process.tasks[holder]] if holder in process.tasks else list(process.tasks.values())
        for task in charged:
            logger.warning("reward of %s: %s", task.name, error)
            if status == "timeout":
                self._finish(task, status, blames_response, error=error)
            elif task.attempts == _MAX_ATTEMPTS:
                self._finish(task, status, blames_response, error=f"{error}, twice")
            else:
                task.attempts += 1
        self._put_back(process)

    def _put_back(self, process: _Process) -> None:
        """Queue the samples of an ended process again, in front of all others."""
        self._queue.extendleft([task for task in reversed(process.tasks.values()) if not task.future.done()])

    def _start_failed(self, reason: str, *, is_final: bool) -> None:
        self._failed_starts += 1
        logger.warning("a reward process did not start: %s", reason)
        if is_final or self._failed_starts > _FAILED_STARTS_ALLOWED:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """End the thread because no process can be started; waiting samples fail with the reason."""
        self._broken = reason
        self._stopping = True
        self._started.set()

    def _kill(self, process: _Process) -> None:
        process.tending.cancel()
        stop_child(process.popen, f"reward process {process.pid}")
        NEEDED.remove(process.pid)
        process.state.close()
        self._processes.discard(process)
