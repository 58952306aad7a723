"""The process in which environments live: `python -m hrl.episodes.environment_process <socket> <state>`.

It imports neither torch nor the parent's main module, loads the environment's class, and answers calls over a socket,
one line of JSON each. It can be killed at any moment. Async methods run on its event loop, each call with its own
deadline; plain ones on threads, one at a time for each episode, so that a slow one holds up no other episode.

`SharedState` tells the parent which episode holds the event loop, and for which episodes threads are busy. A thread
that works for nobody beats in it: where it does not, something holds Python's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

from hrl import user_file
from hrl.environments import beginning, loading, tools
from hrl.environments.beginning import NoColumnError, Row, arguments_of_reset, first_observation
from hrl.environments.interface import EnvironmentReplyError
from hrl.environments.loading import EnvironmentMaker, EnvironmentSpec
from hrl.environments.replies import action_from_plain, observation_to_plain, read_step, step_to_plain
from hrl.environments.tools import check_counts
from hrl.errors import RefusedError
from hrl.processes import attributing_loop
from hrl.processes.attributing_loop import CALLER, AttributingLoop
from hrl.processes.child import begin, describe, limit_memory, shortened
from hrl.processes.evidence import memory_is_left
from hrl.processes.messages import encode, open_stream, receive
from hrl.processes.plain_data import from_plain
from hrl.processes.sandbox import share_processors
from hrl.processes.shared_state import SharedState

_OURS = (
    __file__,
    *(str(module.__file__) for module in (user_file, attributing_loop, beginning, loading, tools)),
)
_CANCEL_GRACE_S = 1.0
"""How long a cancelled call may take to end."""
_BEAT_S = 0.25
_STACK_BYTES = 2 << 20
"""Of a thread: there may be as many as episodes, and all count as memory of the process."""
_FRAMES_SHOWN = 6


class CallerThreads(ThreadPoolExecutor):
    """As many threads as calls run at the same time, each known by the caller that it works for.

    Args:
        state: State that the parent reads.
    """

    def __init__(self, state: SharedState) -> None:
        super().__init__(max_workers=1)  # event loops take nothing else; it never starts its worker
        self._state = state
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], int]] = queue.SimpleQueue()
        self._idle = self._started = 0
        self._of_caller: dict[int, int] = {}
        self._own_pid = os.getpid()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call on an idle thread, or on a new one."""
        future: Future[Any] = Future()
        self._waiting.put((future, functools.partial(fn, *args, **kwargs), CALLER.get()))
        with self._lock:
            if self._idle:
                self._idle -= 1
                return future
            self._started += 1
        try:
            threading.Thread(target=self._run, daemon=True, name="environments").start()
        except RuntimeError:  # the system gives no further thread: those that there are take the call when they can
            with self._lock:
                self._started -= 1
                if not self._started:
                    raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: the threads end with the process."""

    def stack_of(self, caller: int) -> str:
        """Return where a caller's thread is now; empty if none works for it."""
        frame = sys._current_frames().get(self._of_caller.get(caller, 0))
        return "" if frame is None else _stack(_outwards(frame))

    def is_busy_for(self, caller: int) -> bool:
        """Return whether a thread works for a caller."""
        return caller in self._of_caller

    def _run(self) -> None:
        place = None
        with self._lock:
            place = self._state.add_thread(threading.get_native_id())
        while True:
            future, call, caller = self._waiting.get()
            if future.set_running_or_notify_cancel():
                self._work(place, future, call, caller)
            else:
                self._is_idle()
            del future, call

    def _is_idle(self) -> None:
        with self._lock:
            self._idle += 1

    def _work(self, place: int | None, future: Future[Any], call: Callable[[], Any], caller: int) -> None:
        CALLER.set(caller)
        self._of_caller[caller] = threading.get_ident()
        if place is not None:
            self._state.hold_thread(place, caller)
        value, error = None, None
        try:
            value = call()
        except BaseException as raised:  # noqa: BLE001  (whatever it is belongs to this call)
            error = raised
        if os.getpid() != self._own_pid:  # a fork that came back here: the rest is its parent's
            os._exit(0)
        if place is not None:
            self._state.hold_thread(place, 0)
        if self._of_caller.get(caller) == threading.get_ident():
            del self._of_caller[caller]
        if isinstance(error, StopIteration):  # which no future can hold
            error = RuntimeError(f"StopIteration: {error}")
        self._is_idle()  # before the answer: the next call may come at once, and must find this thread
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)


@dataclass(eq=False)
class _Episode:
    """An episode of this process."""

    number: int
    env: str | None
    environment: Any = None
    call: asyncio.Task[dict[str, Any]] | None = None
    thread_calls: set[Future[Any]] = field(default_factory=set)

    def title(self, method: str) -> str:
        """A method of it in messages."""
        if self.environment is None:
            return f"the constructor of {self.env or 'the environment'}"
        return f"{type(self.environment).__name__}.{method}"


def main(socket_number: int, state_number: int) -> None:
    """Load the environment, then answer calls until the parent closes the connection."""
    state = begin(state_number)
    os.set_inheritable(socket_number, False)
    threading.stack_size(_STACK_BYTES)
    with socket.socket(fileno=socket_number) as connection:
        with connection.makefile("rb", buffering=0) as stream:
            settings = json.loads(_first_line(stream) or "null")
        if settings is None:
            return
        limit_memory(settings["memory_limit_gib"])
        share_processors(settings["processes"])
        try:
            maker = EnvironmentMaker(EnvironmentSpec.from_plain(settings["spec"]).resolve(os.environ))
        # The user's code may raise anything, also by `sys.exit`.
        except BaseException as error:  # noqa: BLE001
            said = {"load_error": _describe(error), "explains_itself": isinstance(error, RefusedError)}
            connection.sendall(encode(said))
            return
        refusals = [_refusal(maker, *choice) for choice in settings["choices"]]
        connection.sendall(encode({"ready": True, "traits": asdict(maker.traits), "refusals": refusals}))
        threading.Thread(target=_beat, args=(state,), daemon=True, name="beat").start()
        with asyncio.Runner(loop_factory=functools.partial(AttributingLoop, state)) as runner:
            runner.run(_Environments(maker, settings, state).serve(connection))
        # Threads that never return must not keep the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _refusal(maker: EnvironmentMaker, name: object, kwargs: object) -> str | None:
    """Return why a row must not choose this; None if it may."""
    try:
        maker.check_choice(name, from_plain(kwargs))
    except RefusedError as error:
        return str(error)
    return None


def _first_line(stream: Any) -> bytes:
    """Read up to the end of a line and no further: what comes after it is the event loop's to read."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (read := stream.read(1)):
            return b""
        line += read
    return bytes(line)


def _beat(state: SharedState) -> None:
    while True:
        state.beat()
        time.sleep(_BEAT_S)


class _Environments:
    """The environments of this process, and the calls of them."""

    def __init__(self, maker: EnvironmentMaker, settings: dict[str, Any], state: SharedState) -> None:
        self._maker = maker
        self._timeout_s: float = settings["timeout_s"]
        self._longest_text: int | None = settings["longest_text"]
        self._state = state
        self._threads = CallerThreads(state)
        self._episodes: dict[int, _Episode] = {}
        self._imported: set[str] = set()

    async def serve(self, connection: socket.socket) -> None:
        """Answer calls as they are done, until the parent closes the connection."""
        self._loop: AttributingLoop = asyncio.get_running_loop()  # type: ignore[assignment]
        self._loop.set_default_executor(self._threads)
        reader, self._writer = await open_stream(connection)
        answering: set[asyncio.Task[None]] = {self._loop.create_task(self._tick())}
        while (message := await receive(reader)) is not None:
            answering.add(task := self._loop.create_task(self._answer(message)))
            task.add_done_callback(answering.discard)

    async def _tick(self) -> None:
        """Show the parent that the loop turns."""
        while True:
            self._loop.note(0)
            await asyncio.sleep(min(1.0, self._timeout_s / 4))

    async def _answer(self, message: dict[str, Any]) -> None:
        """Make a call of an environment; its answer is the result, its error, or where it was at its deadline."""
        number, method = message["episode"], message["do"]
        if method == "reset":
            self._episodes[number] = _Episode(number, message["env"])
        episode = self._episodes[number]
        if method == "close":
            await self._interrupt(episode)
        call = self._loop.create_attributed(number, self._attempt(episode, method, message))
        episode.call = call
        self._loop.clock_of(call).tell = lambda waits: self._say({"id": message["id"], "waits": waits})
        if await self._loop.finishes_within(call, number, self._timeout_s):
            answer = {"error": "the call was given up"} if call.cancelled() else call.result()
        else:
            where = self._threads.stack_of(number) or _stack(_awaited(call.get_coro()))
            call.cancel()
            await asyncio.wait({call}, timeout=_CANCEL_GRACE_S)
            answer = {"timeout": where, "stuck": not call.done() or self._threads.is_busy_for(number)}
        if method == "close":
            del self._episodes[number]
            self._loop.forget(number)
        self._say({"id": message["id"]} | answer)

    def _say(self, what: dict[str, Any]) -> None:
        self._writer.write(encode(what))

    async def _interrupt(self, episode: _Episode) -> None:
        """End the call that still runs where its caller has given it up."""
        if episode.call is not None and not episode.call.done():
            episode.call.cancel()
            await asyncio.wait({episode.call}, timeout=_CANCEL_GRACE_S)

    async def _attempt(self, episode: _Episode, method: str, message: dict[str, Any]) -> dict[str, Any]:
        """Make a call, and return what is to be answered."""
        try:
            if method == "reset":
                return {"result": await self._reset(episode, message)}
            if method == "step":
                action = action_from_plain(message["action"])
                read = functools.partial(_plain_step, episode.environment, self._longest_text, len(action.token_ids))
                return {"result": await self._call(episode, episode.environment.step, (action,), {}, read)}
            await self._thread_calls_of(episode)
            if episode.environment is not None:
                await self._call(episode, episode.environment.close, (), {}, lambda _: None)
            return {"result": None}
        except EnvironmentReplyError as error:
            return {"error": f"{episode.title(method)} {error}"}
        except RefusedError as error:
            return {"error": str(error)}
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return {"error": f"{episode.title(method)} cancelled itself (asyncio.CancelledError)"}
        # The user's code may raise anything, also by `sys.exit`, and whatever it is belongs to this episode alone. No
        # Ctrl-C reaches this process, so that a `KeyboardInterrupt` is the code's own.
        except BaseException as error:  # noqa: BLE001
            if isinstance(error, MemoryError) and not memory_is_left():
                return {"exhausted": f"{episode.title(method)} failed:\n{_describe(error)}"}
            return {"error": f"{episode.title(method)} failed:\n{_describe(error)}"}

    async def _thread_calls_of(self, episode: _Episode) -> None:
        """Wait until no thread works for an episode: its plain methods run one at a time."""
        if running := {asyncio.wrap_future(one) for one in episode.thread_calls}:
            await asyncio.wait(running)

    async def _reset(self, episode: _Episode, message: dict[str, Any]) -> dict[str, Any]:
        row, name, given = Row(from_plain(message["row"])), message["env"], from_plain(message["env_kwargs"])

        def made() -> Any:
            episode.environment = self._maker.make(name, given)
            return episode.environment

        check = functools.partial(self._maker.check_choice, name, given)
        if isinstance(name, str) and name not in self._imported:
            await self._on_thread(episode, check)  # imports take their time
            self._imported.add(name)
        else:
            check()
        environment = made() if self._maker.is_async(name) else await self._on_thread(episode, made)
        arguments = arguments_of_reset(environment.reset, message["seeds"])

        def read(value: object) -> dict[str, Any]:
            return observation_to_plain(first_observation(environment, value))

        result: dict[str, Any] = await self._call(episode, environment.reset, (row,), arguments, read)
        return result

    async def _call(
        self,
        episode: _Episode,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        read: Callable[[Any], Any],
    ) -> Any:
        """Call a method where its kind runs, and read what it returned there, too."""
        if inspect.iscoroutinefunction(method):
            return read(await method(*args, **kwargs))

        def call() -> tuple[Any, bool]:
            value = method(*args, **kwargs)
            is_awaited = inspect.isawaitable(value)
            return (value if is_awaited else read(value)), is_awaited

        value, is_awaited = await self._on_thread(episode, call)
        return read(await value) if is_awaited else value

    async def _on_thread(self, episode: _Episode, call: Callable[[], Any]) -> Any:
        running = self._threads.submit(call)
        episode.thread_calls.add(running)
        running.add_done_callback(episode.thread_calls.discard)
        return await asyncio.wrap_future(running)


def _plain_step(environment: object, longest_text: int | None, num_tokens: int, value: object) -> dict[str, Any]:
    return step_to_plain(check_counts(environment, read_step(value, longest_text, num_tokens)))


def _describe(error: BaseException) -> str:
    """Return the traceback from the user's first frame on; for hrl's own errors one line."""
    if isinstance(error, RefusedError):
        return str(error)
    if isinstance(error, NoColumnError):
        _drop_last_frame(error)  # the row's own
    return describe(error, _OURS)


def _drop_last_frame(error: BaseException) -> None:
    """Take the innermost frame out of a traceback of several."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        if frame.tb_next.tb_next is None:
            frame.tb_next = None
        else:
            frame = frame.tb_next


def _outwards(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _awaited(coroutine: Any) -> list[FrameType]:
    """Return the frames of a coroutine and of what it awaits."""
    found = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        found.append(frame)
        coroutine = coroutine.cr_await
    return found


def _stack(frames: list[FrameType]) -> str:
    """Return where the user's code is, innermost last; empty if none of it is there."""
    own = [frame for frame in frames if frame.f_code.co_filename not in _OURS]
    while own and own[0].f_code.co_filename == threading.__file__:
        own = own[1:]
    lines = traceback.format_list(
        traceback.StackSummary.extract((frame, frame.f_lineno) for frame in own[-_FRAMES_SHOWN:])
    )
    return shortened("".join(lines).rstrip())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
