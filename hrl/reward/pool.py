"""Processes for reward functions: each sample under a deadline, each process killable.

One thread of the parent owns all processes. It starts them, hands each as many samples as it takes at once (one, or
many calls of an async function), and kills the one whose deadline has passed, whatever it is doing, a loop in C
included. The kernel kills them when that thread ends, so they outlive no parent.

A built-in function never fails because of a response: what breaks it scores as a wrong answer does, and is marked.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from hrl.processes.child import to_plain, withheld_names
from hrl.reward.function import RewardFunctionError, RewardSpec, read_reward
from hrl.reward.pool_process import LENGTH, encode
from hrl.reward.pool_slot import Slot, Task, describe_exit, start_process
from hrl.reward.sample import RewardOutcome, RewardSample, Status
from hrl.reward.score import wrong_score

logger = logging.getLogger(__name__)

_BURST = 4
"""At most so many times `num_workers` processes run while others sit on samples that take long."""
_SLOW_AFTER_S = 1.0
"""A sample counts as taking long after this time, or a quarter of its deadline if that is shorter."""
_LAST_WORDS_S = 0.5
"""How long a process whose socket has closed may take to end on its own, which tells its exit code."""
_SILENCE_S = 5.0
"""How much longer than a deadline an event loop may stand still with nobody in it, before its process is killed."""
_FAILED_STARTS_ALLOWED = 3
_MAX_ATTEMPTS = 2
_LONGEST_REASON = 300


class RewardPool:
    """Runs one reward function in several processes.

    Args:
        spec: The function.
        num_workers: Processes.
        timeout_s: For one call of the function; then an await is cancelled, and anything else ends with its process,
            which is replaced.
        max_concurrency: Calls of an async function that one process awaits at once.
        start_timeout_s: For starting a process and loading the function.
        memory_limit_gib: Address space of a process, beyond which the function gets a `MemoryError`; None for no
            limit.
    """

    def __init__(
        self,
        spec: RewardSpec,
        *,
        num_workers: int,
        timeout_s: float,
        max_concurrency: int = 64,
        start_timeout_s: float = 60.0,
        memory_limit_gib: float | None = None,
    ) -> None:
        if num_workers < 1 or timeout_s <= 0 or max_concurrency < 1:
            raise ValueError(
                f"a reward pool needs a worker, a deadline and a call at a time, got {num_workers=}, {timeout_s=}, "
                f"{max_concurrency=}"
            )
        self._spec = spec
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._slow_after_s = min(_SLOW_AFTER_S, timeout_s / 4)
        self._start_timeout_s = start_timeout_s
        self._withheld = withheld_names(keep=spec.env.values())
        self._settings = encode(
            {
                "memory_limit_bytes": None if memory_limit_gib is None else int(memory_limit_gib * 2**30),
                "spec": spec.to_plain(),
                "timeout_s": timeout_s,
                "max_concurrency": max_concurrency,
            }
        )
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._queue: deque[Task] = deque()
        self._slots: set[Slot] = set()
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
        """Start the processes and waits until one of them has loaded the function.

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
        self._thread.start()
        limit_s = self._start_timeout_s * (_FAILED_STARTS_ALLOWED + 1) + _LAST_WORDS_S
        if not self._started.wait(limit_s):
            self._broken = f"no reward process was ready within {limit_s:.0f} s"
        if self._broken is not None:
            self.shutdown()
            raise RewardFunctionError(f"{self._spec.title} can't be loaded: {self._broken}")

    def submit(self, sample: RewardSample) -> Future[RewardOutcome]:
        """Queues a sample; the future always gets an outcome, also when the process dies or the pool is shut down.

        Raises:
            ValueError: Ground truth or extra info hold something that is no plain data.
            RuntimeError: The pool isn't running.
        """
        number = next(self._numbers)
        frame = encode(
            {
                "id": number,
                "data_source": sample.data_source,
                "solution_str": sample.solution_str,
                "ground_truth": to_plain(sample.ground_truth, f"ground truth of {sample.name}"),
                "extra_info": to_plain(sample.extra_info, f"extra_info of {sample.name}"),
            }
        )
        task = Task(number, sample.name, sample.data_source, frame, Future())
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
        """Kill all processes; samples not yet scored end as crashed. Calling it again does nothing."""
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
                for key, events in self._selector.select(self._next_deadline_s()):
                    if key.data is None:
                        self._drain_wakeups()
                        continue
                    if events & selectors.EVENT_WRITE and key.data in self._slots:
                        self._send(key.data)
                    if events & selectors.EVENT_READ:
                        self._receive(key.data)
                self._enforce_deadlines()
        finally:
            with self._lock:
                self._stopping = True
                abandoned = list(self._queue)
                self._queue.clear()
            for slot in list(self._slots):
                self._kill(slot)
                abandoned += slot.tasks.values()
            for task in abandoned:
                self._abandon(task)
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()

    def _abandon(self, task: Task) -> None:
        """End a task without a reward. A future that its owner has cancelled takes no result."""
        if task.future.running() or task.future.set_running_or_notify_cancel():
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
        """Replace what was killed; adds processes while some sit on slow samples and others wait behind them."""
        if self._broken is not None:
            return
        slow_since = time.monotonic() - self._slow_after_s
        slow = sum(slot.is_ready and slot.is_full and slot.oldest_s < slow_since for slot in self._slots)
        wanted = self._num_workers
        if self._queue:
            wanted = min(self._num_workers + slow, self._num_workers * _BURST)
        while len(self._slots) < wanted and self._broken is None:
            self._launch()
        spare = [slot for slot in self._slots if slot.is_ready and not slot.tasks]
        for slot in spare[: max(0, len(self._slots) - wanted)]:
            self._kill(slot)

    def _launch(self) -> None:
        try:
            process, ours, state = start_process(self._spec.env.values())
        except OSError as error:
            self._give_up(
                f"the system gives no further process: {error}. Lower reward.num_workers, or raise the limits of "
                "processes, open files or memory (ulimit -a, the container's)"
            )
            return
        ours.setblocking(False)
        slot = Slot(process, ours, state, since=time.monotonic())
        self._slots.add(slot)
        self._selector.register(ours, selectors.EVENT_READ, slot)
        slot.outgoing += self._settings
        self._send(slot)

    def _hand_out(self) -> None:
        """Give waiting samples to the processes that have the fewest."""
        open_slots = [slot for slot in self._slots if slot.is_ready and not slot.is_full]
        while open_slots:
            task = self._next_task()
            if task is None:
                return
            slot = min(open_slots, key=lambda candidate: len(candidate.tasks))
            task.attempts += 1
            task.since = time.monotonic()
            task.blames_response = False
            slot.tasks[task.number] = task
            slot.outgoing += task.frame
            self._send(slot)
            if slot.is_full:
                open_slots.remove(slot)

    def _send(self, slot: Slot) -> None:
        """Send what fits; the rest when the process has read it."""
        with contextlib.suppress(OSError):  # full; or dead already: its closed socket says so in the next round
            while slot.outgoing:
                del slot.outgoing[: slot.connection.send(slot.outgoing)]
        writing = selectors.EVENT_WRITE if slot.outgoing else 0
        self._selector.modify(slot.connection, selectors.EVENT_READ | writing, slot)

    def _next_task(self) -> Task | None:
        """Return the next sample that nobody has cancelled."""
        with self._lock:
            while self._queue:
                task = self._queue.popleft()
                if task.future.running() or task.future.set_running_or_notify_cancel():
                    return task
        return None

    def _deadline_s(self, slot: Slot) -> float:
        """Return the moment at which a process is killed if nothing changes; infinite for an idle one."""
        if not slot.is_ready:
            return slot.since + self._start_timeout_s
        if not slot.tasks:
            return float("inf")
        if not slot.awaits:
            return slot.oldest_s + self._timeout_s
        # Awaits have their deadlines inside the process. From here only a loop that stands still is seen.
        holder, since_s = slot.state.read()
        return max(since_s, slot.oldest_s) + self._timeout_s + (0.0 if holder else _SILENCE_S)

    def _next_deadline_s(self) -> float | None:
        now = time.monotonic()
        moments = [moment for slot in self._slots if (moment := self._deadline_s(slot)) != float("inf")]
        # A loop that turns now may stand still by then: look again when it could have done so for too long.
        moments += [now + self._timeout_s for slot in self._slots if slot.awaits and slot.tasks]
        if self._queue:  # somebody waits: look again when a running sample starts to count as slow
            counts_as_slow = (slot.oldest_s + self._slow_after_s + 0.01 for slot in self._slots)
            moments += [moment for moment in counts_as_slow if moment > now]
        return max(0.0, min(moments) - now) if moments else None

    def _receive(self, slot: Slot) -> None:
        if slot not in self._slots:  # killed since the selector saw it
            return
        try:
            data = slot.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(slot)
            return
        slot.incoming += data
        while len(slot.incoming) >= LENGTH.size and slot in self._slots:
            (length,) = LENGTH.unpack_from(slot.incoming)
            if len(slot.incoming) < LENGTH.size + length:
                return
            payload = bytes(slot.incoming[LENGTH.size : LENGTH.size + length])
            del slot.incoming[: LENGTH.size + length]
            self._answered(slot, json.loads(payload))

    def _answered(self, slot: Slot, message: dict[str, Any]) -> None:
        if "load_error" in message:
            self._kill(slot)
            self._give_up(self._with_hint(str(message["load_error"])))
        elif "ready" in message:
            slot.concurrency, slot.awaits = message["concurrency"], message["awaits"]
            self._failed_starts = 0
            self._started.set()
        elif "blames_response" in message:
            slot.tasks[message["id"]].blames_response = message["blames_response"]
        else:
            self._take_answer(slot, slot.tasks.pop(message["id"]), message)

    def _take_answer(self, slot: Slot, task: Task, message: dict[str, Any]) -> None:
        if "timeout" in message:
            self._finish(task, "timeout", error=f"took longer than {self._timeout_s:g} s and was cancelled")
            if message["stuck"]:  # a call that ignores its cancellation ends with its process
                self._kill(slot)
                self._put_back(list(slot.tasks.values()), charge=False)
        elif "error" in message:
            self._finish(task, "error", error=self._with_hint(message["error"]))
        else:
            status: Status = "skip" if message["score"] is None else "ok"
            self._finish(task, status, score=message["score"], parts=message["parts"])

    def _with_hint(self, error: str) -> str:
        """Add to a function's error that a variable was kept from it, if it names one."""
        for name in self._withheld:
            if f"'{name}'" in error or f'"{name}"' in error:
                return (
                    f"{error}\n(the variable {name} looks like a secret, which reward processes get only if it is "
                    f"named: reward.custom_reward_function.reward_kwargs.<argument>=env:{name})"
                )
        return error

    def _finish(self, task: Task, status: Status, **outcome: Any) -> None:
        """End a sample; what a response did to a built-in function counts as a wrong answer."""
        duration_s = time.monotonic() - task.since
        if self._spec.is_built_in and task.blames_response and status in ("error", "timeout", "crash"):
            reason = outcome["error"].rstrip().splitlines()[-1][:_LONGEST_REASON]
            logger.info("reward of %s: the response can't be scored: %s", task.name, reason)
            score, parts = read_reward(wrong_score(task.data_source))
            status, outcome = "ok", {"score": score, "parts": parts | {"unscorable": reason}, "unscorable": reason}
        task.future.set_result(RewardOutcome(status, duration_s=duration_s, attempts=task.attempts, **outcome))

    def _put_back(self, tasks: list[Task], *, charge: bool) -> None:
        """Samples of a process that is gone, to be tried elsewhere; not charged where another one ended it."""
        for task in tasks:
            task.attempts -= 0 if charge else 1
        with self._lock:
            self._queue.extendleft(reversed(tasks))

    def _lost(self, slot: Slot) -> None:
        """A process ended on its own: the sample that it was busy with is tried once more, elsewhere."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            slot.process.wait(_LAST_WORDS_S)
        holder, _ = slot.state.read()
        self._kill(slot)
        how = f"its process {slot.process.pid} {describe_exit(slot.process.returncode)}"
        if not slot.is_ready:
            self._start_failed(f"{how} while loading")
        guilty = [slot.tasks.pop(holder)] if holder in slot.tasks else list(slot.tasks.values())
        self._put_back([task for task in slot.tasks.values() if task not in guilty], charge=False)
        for task in guilty:
            if task.attempts < _MAX_ATTEMPTS:
                logger.warning("reward of %s: %s; trying once more", task.name, how)
            else:
                self._finish(task, "crash", error=f"{how}, twice")
        self._put_back([task for task in guilty if task.attempts < _MAX_ATTEMPTS], charge=True)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for slot in [slot for slot in self._slots if now >= self._deadline_s(slot)]:
            self._stop(slot)

    def _stop(self, slot: Slot) -> None:
        """Kill a process that is over its deadline; the sample that held it is charged, others are tried again."""
        holder, _ = slot.state.read()
        self._kill(slot)
        if not slot.is_ready:
            self._start_failed(f"loading took longer than {self._start_timeout_s:g} s")
            return
        guilty = slot.tasks.pop(holder, None) if slot.awaits else slot.tasks.popitem()[1]
        if guilty is not None:
            logger.warning("reward of %s: killed after %.1f s", guilty.name, self._timeout_s)
            self._finish(guilty, "timeout", error=f"took longer than {self._timeout_s:g} s and was killed")
            self._put_back(list(slot.tasks.values()), charge=False)
            return
        error = f"its process stood still for {self._timeout_s + _SILENCE_S:g} s, twice"
        for task in slot.tasks.values():
            if task.attempts >= _MAX_ATTEMPTS:
                self._finish(task, "crash", error=error)
        self._put_back([task for task in slot.tasks.values() if task.attempts < _MAX_ATTEMPTS], charge=True)

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

    def _kill(self, slot: Slot) -> None:
        self._selector.unregister(slot.connection)
        slot.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(slot.process.pid, signal.SIGKILL)
        slot.process.wait()
        slot.state.close()
        self._slots.discard(slot)
