"""Processes for reward functions: each sample under a deadline, each process killable.

One thread of the parent owns all processes. It starts them, hands every idle one a sample, and kills the one whose
deadline has passed, whatever it is doing, a loop in C included. The kernel kills them when that thread ends, so they
outlive no parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from hrl.data.child import child_environment, to_plain
from hrl.reward.function import RewardFunctionError, RewardSpec
from hrl.reward.pool_process import LENGTH, encode

logger = logging.getLogger(__name__)

_BURST = 4
"""At most so many times `num_workers` processes run while others sit on samples that take long."""
_SLOW_AFTER_S = 1.0
"""A sample counts as taking long after this time, or a quarter of its deadline if that is shorter."""
_LAST_WORDS_S = 0.5
"""How long a process whose socket has closed may take to end on its own, which tells its exit code."""
_SEND_TIMEOUT_S = 10.0
_FAILED_STARTS_ALLOWED = 3
_MAX_ATTEMPTS = 2

Status = Literal["ok", "skip", "error", "timeout", "crash"]


@dataclass(frozen=True)
class RewardSample:
    """One response to score.

    Attributes:
        name: how messages call the sample.
        data_source, ground_truth, extra_info: of the prompt's row; plain data.
        solution_str: the response's text.
    """

    name: str
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardOutcome:
    """What became of a sample.

    Attributes:
        status: `ok`; `skip`, the function returned None; `error`, it raised or returned no reward; `timeout`, it was
            killed at its deadline; `crash`, its process died, twice.
        score: the reward, if `ok`.
        parts: what the function returned beside it.
        error: a message or traceback for the last three.
        duration_s: of the last attempt.
        attempts: 2 after a crash.
    """

    status: Status
    score: float | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    duration_s: float = 0.0
    attempts: int = 1


@dataclass
class _Task:
    name: str
    frame: bytes
    future: Future[RewardOutcome]
    attempts: int = 0


@dataclass(eq=False)
class _Slot:
    process: subprocess.Popen[bytes]
    connection: socket.socket
    since: float
    deadline: float
    ready: bool = False
    task: _Task | None = None
    buffer: bytearray = field(default_factory=bytearray)


class RewardPool:
    """Runs one reward function in several processes.

    Args:
        spec: the function.
        num_workers: processes.
        timeout_s: for one call of the function; then its process is killed and replaced.
        start_timeout_s: for starting a process and loading the function.
        memory_limit_bytes: address space of a process, beyond which the function gets a `MemoryError`; None for no
            limit.
    """

    def __init__(
        self,
        spec: RewardSpec,
        *,
        num_workers: int,
        timeout_s: float,
        start_timeout_s: float = 60.0,
        memory_limit_bytes: int | None = None,
    ) -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(f"a reward pool needs a worker and a deadline, got {num_workers=}, {timeout_s=}")
        self._spec = spec
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._slow_after_s = min(_SLOW_AFTER_S, timeout_s / 4)
        self._start_timeout_s = start_timeout_s
        plain = {"path": spec.path, "name": spec.name, "kwargs": to_plain(spec.kwargs, "reward_kwargs")}
        plain["data_sources"] = list(spec.data_sources)
        self._settings = encode({"memory_limit_bytes": memory_limit_bytes, "spec": plain})
        self._lock = threading.Lock()
        self._queue: deque[_Task] = deque()
        self._slots: set[_Slot] = set()
        self._stopping = False
        self._failed_starts = 0
        self._broken: str | None = None
        self._started = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)

    def start(self) -> None:
        """Starts the processes and waits until one of them has loaded the function.

        Raises:
            RewardFunctionError: the function can't be loaded; with the traceback of the process.
        """
        self._thread.start()
        limit_s = self._start_timeout_s * (_FAILED_STARTS_ALLOWED + 1) + _SEND_TIMEOUT_S
        if not self._started.wait(limit_s):
            self._broken = f"no reward process was ready within {limit_s:.0f} s"
        if self._broken is not None:
            self.shutdown()
            raise RewardFunctionError(f"{self._spec.title} can't be loaded: {self._broken}")

    def submit(self, sample: RewardSample) -> Future[RewardOutcome]:
        """Queues a sample; the future always gets an outcome, also when the process dies or the pool is shut down.

        Raises:
            ValueError: ground truth or extra info hold something that is no plain data.
            RuntimeError: the pool isn't running.
        """
        frame = encode(
            {
                "data_source": sample.data_source,
                "solution_str": sample.solution_str,
                "ground_truth": to_plain(sample.ground_truth, f"ground truth of {sample.name}"),
                "extra_info": to_plain(sample.extra_info, f"extra_info of {sample.name}"),
            }
        )
        task = _Task(sample.name, frame, Future())
        with self._lock:
            if self._stopping or not self._thread.is_alive():
                raise RuntimeError(f"the reward pool is not running: {self._broken or 'start it first'}")
            self._queue.append(task)
        self._wake()
        return task.future

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the processes that run now."""
        return tuple(sorted(slot.process.pid for slot in list(self._slots)))

    def shutdown(self) -> None:
        """Kills all processes; samples not yet scored end as crashed. Calling it again does nothing."""
        with self._lock:
            self._stopping = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join()

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ the thread that owns the processes

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._keep_enough_processes()
                self._hand_out()
                for key, _ in self._selector.select(self._next_deadline_s()):
                    if key.data is None:
                        self._drain_wakeups()
                    else:
                        self._receive(key.data)
                self._enforce_deadlines()
        finally:
            with self._lock:
                self._stopping = True
                abandoned = list(self._queue)
                self._queue.clear()
            for slot in list(self._slots):
                self._kill(slot)
                abandoned += [slot.task] if slot.task is not None else []
            for task in abandoned:
                self._abandon(task)
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()

    def _abandon(self, task: _Task) -> None:
        """Ends a task without a reward. A future that its owner has cancelled takes no result."""
        if task.attempts > 0 or task.future.set_running_or_notify_cancel():
            reason = self._broken or "the reward pool was shut down"
            task.future.set_result(RewardOutcome("crash", error=reason, attempts=task.attempts))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # closed: the thread is gone and has cleaned up
            self._wake_out.send(b"\0", socket.MSG_DONTWAIT)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _keep_enough_processes(self) -> None:
        """Replaces what was killed; adds processes while some sit on slow samples and others wait behind them."""
        if self._broken is not None:
            return
        now = time.monotonic()
        slow = sum(slot.task is not None and now - slot.since > self._slow_after_s for slot in self._slots)
        wanted = self._num_workers
        if self._queue:
            wanted = min(self._num_workers + slow, self._num_workers * _BURST)
        while len(self._slots) < wanted and self._broken is None:
            self._launch()
        spare = [slot for slot in self._slots if slot.ready and slot.task is None]
        for slot in spare[: max(0, len(self._slots) - wanted)]:
            self._kill(slot)

    def _launch(self) -> None:
        try:
            process, ours = _start_process()
        except OSError as error:
            self._give_up(
                f"the system gives no further process: {error}. Lower reward.num_workers, or raise the limits of "
                "processes, open files or memory (ulimit -a, the container's)"
            )
            return
        ours.settimeout(_SEND_TIMEOUT_S)
        now = time.monotonic()
        slot = _Slot(process, ours, since=now, deadline=now + self._start_timeout_s)
        self._slots.add(slot)
        self._selector.register(ours, selectors.EVENT_READ, slot)
        with contextlib.suppress(OSError):  # dead already: its closed socket says so in the next round
            ours.sendall(self._settings)

    def _hand_out(self) -> None:
        idle = [slot for slot in self._slots if slot.ready and slot.task is None]
        for slot in idle:
            task = self._next_task()
            if task is None:
                return
            task.attempts += 1
            slot.task = task
            slot.since = time.monotonic()
            slot.deadline = slot.since + self._timeout_s
            with contextlib.suppress(OSError):  # dead already: its closed socket says so in the next round
                slot.connection.sendall(task.frame)

    def _next_task(self) -> _Task | None:
        """The next sample that nobody has cancelled."""
        with self._lock:
            while self._queue:
                task = self._queue.popleft()
                if task.attempts > 0 or task.future.set_running_or_notify_cancel():
                    return task
        return None

    def _next_deadline_s(self) -> float | None:
        now = time.monotonic()
        moments = [slot.deadline for slot in self._slots if slot.task is not None or not slot.ready]
        if self._queue:  # somebody waits: look again when a running sample starts to count as slow
            counts_as_slow = (slot.since + self._slow_after_s + 0.01 for slot in self._slots)
            moments += [moment for moment in counts_as_slow if moment > now]
        return max(0.0, min(moments) - now) if moments else None

    def _receive(self, slot: _Slot) -> None:
        try:
            data = slot.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lost(slot)
            return
        slot.buffer += data
        if len(slot.buffer) < LENGTH.size:
            return
        (length,) = LENGTH.unpack_from(slot.buffer)
        if len(slot.buffer) < LENGTH.size + length:
            return
        payload = bytes(slot.buffer[LENGTH.size :])
        slot.buffer.clear()
        self._answered(slot, json.loads(payload))

    def _answered(self, slot: _Slot, message: dict[str, Any]) -> None:
        if "load_error" in message:
            self._kill(slot)
            self._give_up(str(message["load_error"]))
        elif slot.task is None:
            slot.ready = True
            self._failed_starts = 0
            self._started.set()
        elif "error" in message:
            self._finish(slot, "error", error=message["error"])
        else:
            status: Status = "skip" if message["score"] is None else "ok"
            self._finish(slot, status, score=message["score"], parts=message["parts"])

    def _finish(self, slot: _Slot, status: Status, **outcome: Any) -> None:
        task = slot.task
        assert task is not None  # only busy slots are finished
        slot.task = None
        duration_s = time.monotonic() - slot.since
        task.future.set_result(RewardOutcome(status, duration_s=duration_s, attempts=task.attempts, **outcome))

    def _lost(self, slot: _Slot) -> None:
        """A process ended on its own: the sample it had is tried once more, elsewhere."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            slot.process.wait(_LAST_WORDS_S)
        self._kill(slot)
        how = f"its process {slot.process.pid} {_describe_exit(slot.process.returncode)}"
        if slot.task is None:
            if not slot.ready:
                self._start_failed(f"{how} while loading")
        elif slot.task.attempts < _MAX_ATTEMPTS:
            logger.warning("reward of %s: %s; trying once more", slot.task.name, how)
            with self._lock:
                self._queue.appendleft(slot.task)
        else:
            self._finish(slot, "crash", error=f"{how}, twice")

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for slot in [s for s in self._slots if now >= s.deadline and (s.task is not None or not s.ready)]:
            self._kill(slot)
            if slot.task is None:
                self._start_failed(f"loading took longer than {self._start_timeout_s:g} s")
            else:
                logger.warning("reward of %s: killed after %.1f s", slot.task.name, self._timeout_s)
                self._finish(slot, "timeout", error=f"took longer than {self._timeout_s:g} s and was killed")

    def _start_failed(self, reason: str) -> None:
        self._failed_starts += 1
        logger.warning("a reward process did not start: %s", reason)
        if self._failed_starts > _FAILED_STARTS_ALLOWED:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """No process can be had: the thread ends, and whatever waits ends with the reason."""
        self._broken = reason
        self._stopping = True
        self._started.set()
        self._wake()  # the thread itself, should it be about to wait

    def _kill(self, slot: _Slot) -> None:
        self._selector.unregister(slot.connection)
        slot.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(slot.process.pid, signal.SIGKILL)
        slot.process.wait()
        self._slots.discard(slot)


def _start_process() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that waits for its settings, and this end of its socket.

    Raises:
        OSError: the system refuses one.
    """
    ours, theirs = socket.socketpair()
    with ExitStack() as on_failure, theirs:
        on_failure.enter_context(ours)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hrl.reward.pool_process", str(theirs.fileno()), str(os.getpid())],
            env=child_environment(OMP_NUM_THREADS="1", PYTHONHASHSEED="0"),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that its own children can be killed with it, and Ctrl-C is the parent's
        )
        on_failure.pop_all()
    return process, ours


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
