"""The process in which reward functions run: `python -m hrl.reward.process <socket> <state>`.

It imports neither torch nor the parent's main module, loads the function, and answers samples over a socket, one line
of JSON each. It can be killed at any moment. A plain function gets one sample at a time; many calls of an async
function are awaited at once, each with its own deadline.

If the event loop is blocked, some call computes or waits without `await`. `SharedState` tells the parent which one.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import mmap
import os
import resource
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

from hrl import user_file
from hrl.processes.isolation import isolate
from hrl.processes.plain_data import from_plain
from hrl.processes.signals import stay_alone
from hrl.reward import function as function_file
from hrl.reward.function import RESPONSE, RewardFunctionError, is_async, names_taken, read_reward
from hrl.reward.spec import RewardSpec
from hrl.reward.weighted import BLAME

_SINCE_NS, _HOLDER, _BLAME, _PID = range(4)
_STATE_BYTES = 4 * 8
_LONGEST_TRACEBACK = 4000
_LONGEST_TEXT = 4000
_LONGEST_GARBLE = 80
_ONE_AT_A_TIME = (
    "{name} returns a coroutine but is not `async def` itself, so its calls are awaited one at a time. "
    "With `async def` (also in a decorator's wrapper) many are awaited at once"
)
_CANCEL_GRACE_S = 1.0
"""How long a cancelled call may take to end."""
_CALLER: contextvars.ContextVar[int] = contextvars.ContextVar("caller", default=0)


# ---------------------------------------------------------------------- what goes between parent and child


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as one line of JSON in ASCII."""
    return (json.dumps(message) + "\n").encode("ascii")


async def open_stream(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return reader and writer of a connection, for lines of any length."""
    return await asyncio.open_connection(sock=connection, limit=sys.maxsize)


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message, or `None` if the other side has closed the connection.

    Raises:
        GarbledError: What came is no message.
    """
    try:
        line = await reader.readline()
    except ConnectionError:
        return None
    if not line.endswith(b"\n"):
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise GarbledError(line[:_LONGEST_GARBLE]) from error
    if not isinstance(message, dict):
        raise GarbledError(line[:_LONGEST_GARBLE])
    return message


class GarbledError(ValueError):
    """A line between parent and child that is no message: a reward function wrote to its process's connection."""


class SharedState:
    """Which sample occupies the process and since when, in memory that the parent can read at any time.

    Args:
        descriptor: Descriptor of a memory file from `create`; it is closed.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _STATE_BYTES)
        self._cells = memoryview(self._memory).cast("q")
        os.close(descriptor)

    @staticmethod
    def create() -> int:
        """Return the descriptor of a new memory file, occupied by no sample."""
        descriptor = os.memfd_create("reward-process")
        os.ftruncate(descriptor, _STATE_BYTES)
        return descriptor

    def hold(self, sample: int) -> None:
        """Record that a sample occupies the process from now on; 0 is none."""
        if sample:
            self.blame_response(False)
        # The time is written first: a reader between the two writes sees a process that has just moved on.
        self._cells[_SINCE_NS] = time.monotonic_ns()
        self._cells[_HOLDER] = sample

    def blame_response(self, is_to_blame: bool) -> None:
        """Record whether the response is to blame if the current sample fails from now on."""
        self._cells[_BLAME] = is_to_blame

    def read(self) -> tuple[int, float, bool]:
        """Return the sample, since when (on the clock of `time.monotonic`), and whether its response is to blame."""
        return self._cells[_HOLDER], self._cells[_SINCE_NS] / 1e9, bool(self._cells[_BLAME])

    def enter(self) -> None:
        """Record that this process is the one whose state it is."""
        self._cells[_PID] = os.getpid()

    @property
    def pid(self) -> int:
        """Id of the process; 0 before it has begun."""
        return self._cells[_PID]

    def close(self) -> None:
        """Release the memory."""
        self._cells.release()
        self._memory.close()


# ---------------------------------------------------------------------- the child


def main(socket_number: int, state_number: int) -> None:
    """Load the function, then answer samples until the parent closes the connection."""
    stay_alone()
    isolate()  # before the user's code; the guard that started this process is thus out of its reach
    os.dup2(2, 1)  # what a reward function prints must not end up in the parent's output
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # killed at its end, it writes out no buffer
    state = SharedState(state_number)
    state.enter()
    with socket.socket(fileno=socket_number) as connection, connection.makefile("rb") as stream:
        settings = json.loads(stream.readline() or "null")
        if settings is None:
            return
        if (limit_gib := settings["memory_limit_gib"]) is not None:
            resource.setrlimit(resource.RLIMIT_AS, (int(limit_gib * 2**30),) * 2)
        spec = RewardSpec.from_plain(settings["spec"]).resolve(os.environ)
        function, error = _attempt(lambda: spec.source.load(spec.kwargs, spec.columns))
        if error is not None:
            connection.sendall(encode({"load_error": error}))
            return
        together, taken = is_async(function), names_taken(function)
        own = getattr(function, "max_concurrency", None)  # of a judge, say, whose endpoint allows so many
        most = min(settings["max_concurrency"], own or sys.maxsize)
        connection.sendall(encode({"ready": most if together else 1, "is_limited": together and own is not None}))
        # One event loop for all calls, so that clients that a function keeps stay usable.
        with asyncio.Runner(loop_factory=functools.partial(AttributingLoop, state)) as runner:
            if together:
                runner.run(_Judges(function, spec, settings["timeout_s"], state).serve(connection))
                return
            for line in stream:
                sample = json.loads(line)
                arguments = _arguments(spec, sample, taken, state)
                state.hold(sample["id"])
                answer, error = _attempt(functools.partial(_score, function, arguments, runner))
                state.hold(0)
                connection.sendall(encode({"id": sample["id"]} | (answer if error is None else {"error": error})))


def _score(function: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    value = function(**arguments)
    if inspect.iscoroutine(value):
        warnings.warn(_ONE_AT_A_TIME.format(name=getattr(function, "__name__", "the reward function")), stacklevel=1)
        value = runner.run(value)
    return _reward(value)


class AttributingLoop(asyncio.SelectorEventLoop):
    """Records which caller each callback runs for: the one that scheduled it, also through tasks of tasks.

    Args:
        state: State that the parent reads.
    """

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._held_s: dict[int, float] = {}
        self._all_held_s = 0.0
        self._is_ending = False
        super().__init__()

    def create_attributed(self, caller: int, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Create a task that runs for `caller`, which must not be 0."""
        context = contextvars.copy_context()
        context.run(_CALLER.set, caller)
        self._held_s[caller] = 0.0
        return self.create_task(coroutine, context=context)

    def held_by_others_s(self, caller: int) -> float:
        """Return the seconds spent so far in callbacks of all other callers."""
        return self._all_held_s - self._held_s.get(caller, 0.0)

    def forget(self, caller: int) -> None:
        """Delete the record of a caller."""
        self._held_s.pop(caller, None)

    def note(self, caller: int) -> None:
        """Record that a caller, or none if 0, occupies the loop from now on."""
        if not self._is_ending:
            self._state.hold(caller)

    def call_soon(  # type: ignore[override]  # the base has type variables for the arguments
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback as asyncio does, to be noted while it runs."""
        return super().call_soon(self._run_noted, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback as asyncio does, to be noted while it runs."""
        return super().call_at(when, self._run_noted, callback, *args, context=context)

    def _run_noted(self, callback: Callable[..., object], *args: Any) -> None:
        caller = _CALLER.get()
        if caller == 0:
            callback(*args)
            return
        self.note(caller)
        begun_s = time.monotonic()
        try:
            callback(*args)
        except (SystemExit, KeyboardInterrupt):
            self._is_ending = True  # callbacks during the exit must not hide which caller ends the process
            raise
        finally:
            held_s = time.monotonic() - begun_s
            self._all_held_s += held_s
            self._held_s[caller] = self._held_s.get(caller, 0.0) + held_s
            self.note(0)


class _Judges:
    """Many concurrent calls of an async function.

    A call's clock is paused while another one occupies the loop, so calls aren't charged for each other's computation.
    """

    def __init__(self, function: Callable[..., Any], spec: RewardSpec, timeout_s: float, state: SharedState) -> None:
        self._function = function
        self._taken = names_taken(function)
        self._spec = spec
        self._timeout_s = timeout_s
        self._state = state

    async def serve(self, connection: socket.socket) -> None:
        """Answer samples as they are done, until the parent closes the connection."""
        self._loop: AttributingLoop = asyncio.get_running_loop()  # type: ignore[assignment]
        reader, self._writer = await open_stream(connection)
        answering: set[asyncio.Task[None]] = {self._loop.create_task(self._tick())}
        while (sample := await receive(reader)) is not None:
            answering.add(task := self._loop.create_task(self._answer(sample)))
            task.add_done_callback(answering.discard)

    async def _tick(self) -> None:
        """Show the parent that the loop turns."""
        while True:
            self._loop.note(0)
            await asyncio.sleep(min(1.0, self._timeout_s / 4))

    async def _answer(self, sample: dict[str, Any]) -> None:
        number = sample["id"]
        arguments = _arguments(self._spec, sample, self._taken, self._state)
        call = self._loop.create_attributed(number, self._judge(arguments))
        left_s = self._timeout_s
        begun_s, others_s = self._loop.time(), self._loop.held_by_others_s(number)
        while not call.done() and left_s > 0:
            await asyncio.wait({call}, timeout=left_s)
            waited_s = self._loop.held_by_others_s(number) - others_s
            left_s = self._timeout_s - (self._loop.time() - begun_s - waited_s)
        if call.done():
            answer = _result_of(call)
        else:
            call.cancel()
            await asyncio.wait({call}, timeout=_CANCEL_GRACE_S)
            answer = {"timeout": True, "stuck": not call.done()}
        self._loop.forget(number)
        self._writer.write(encode({"id": number} | answer))

    async def _judge(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return _reward(await self._function(**arguments))
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop, and every other call with it
            return {"error": _describe(error)}


def _result_of(call: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
    if call.cancelled():
        return {"error": "the function cancelled itself (asyncio.CancelledError)"}
    error = call.exception()
    return call.result() if error is None else {"error": _describe(error)}


def _arguments(
    spec: RewardSpec, sample: dict[str, Any], taken: frozenset[str] | None, state: SharedState
) -> dict[str, Any]:
    """Return what the function takes of a sample; a column that other rows have and this one lacks is None."""
    truth = from_plain(sample["ground_truth"])
    offered = {
        **dict.fromkeys(spec.columns),
        "answer": truth,
        **{name: from_plain(value) for name, value in sample["columns"].items()},
        "data_source": sample["data_source"],
        **dict.fromkeys(RESPONSE, sample["solution_str"]),
        "ground_truth": truth,
        "extra_info": from_plain(sample["extra_info"]),
        **spec.kwargs,
    }
    if isinstance(offered.get("reward_model"), dict):  # a column that travels without what travels beside it
        offered["reward_model"] = {"ground_truth": truth, **offered["reward_model"]}
    if spec.source.is_ours:
        offered[BLAME] = state.blame_response
    return offered if taken is None else {name: value for name, value in offered.items() if name in taken}


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Run the user's code; return its result, or a traceback for the parent to report."""
    try:
        return call(), None
    # The user's code may raise anything, also by `sys.exit`, and whatever it is belongs to this sample alone. No Ctrl-C
    # reaches this process, so that a `KeyboardInterrupt` is the code's own.
    except BaseException as error:  # noqa: BLE001
        return None, _describe(error)


def _reward(value: object) -> dict[str, Any]:
    score, parts = read_reward(value)
    short = {name: part[:_LONGEST_TEXT] if isinstance(part, str) else part for name, part in parts.items()}
    return {"score": score, "parts": short}


def _describe(error: BaseException) -> str:
    """Return the traceback from the user's first frame on, shortened if very long; for hrl's own errors one line."""
    if isinstance(error, RewardFunctionError):
        return str(error)
    frames = error.__traceback__
    while frames is not None and _leads_to_the_user(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    if len(text) <= _LONGEST_TRACEBACK:
        return text
    half = _LONGEST_TRACEBACK // 2
    return f"{text[:half]}\n…\n{text[-half:]}"


def _leads_to_the_user(file: str) -> bool:
    """Return whether a frame of this file only calls or imports the user's code."""
    return file in (__file__, function_file.__file__, user_file.__file__) or file.startswith("<frozen importlib")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
