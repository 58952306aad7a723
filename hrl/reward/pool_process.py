"""The process in which reward functions run: `python -m hrl.reward.pool_process <socket> <state> <parent pid>`.

It imports neither torch nor the parent's main module, loads the function from its file, and answers samples over a
socket, in length-prefixed JSON. It can be killed at any moment. A plain function gets one sample at a time; of an
async function many calls are awaited at once, each under its own deadline.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import resource
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from hrl.data import user_file
from hrl.processes.child import from_plain
from hrl.processes.lifetime import die_with_parent, guard_process_group
from hrl.reward import function as function_file
from hrl.reward.event_loop import AttributingLoop, LoopState
from hrl.reward.function import RewardFunctionError, RewardSpec, is_async, load_reward_function, read_reward

LENGTH = struct.Struct("!I")
_LONGEST_TRACEBACK = 4000
_LONGEST_TEXT = 4000
_ONE_AT_A_TIME = (
    "{name} returns a coroutine and is not `async def` itself: its calls are awaited one at a time. "
    "Write `async def` (in a decorator's wrapper, too) and many are awaited at once"
)
_CANCEL_GRACE_S = 1.0
"""How long a cancelled call may take to end."""


def encode(message: dict[str, Any]) -> bytes:
    """One frame: the length in four bytes, then JSON in ASCII."""
    payload = json.dumps(message).encode("ascii")
    return LENGTH.pack(len(payload)) + payload


def main(socket_number: int, state_number: int, parent_pid: int) -> None:
    """Load the function, then answers samples until the parent hangs up."""
    die_with_parent(parent_pid)
    guard_process_group()  # the kernel ends this process with its parent, but not what the function starts in it
    os.dup2(2, 1)  # what a reward function prints must not end up in the parent's output
    connection = socket.socket(fileno=socket_number)
    with connection:
        settings = _read(connection)
        if settings is None:
            return
        if (limit := settings["memory_limit_bytes"]) is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        spec = RewardSpec.from_plain(settings["spec"]).resolve(os.environ)
        function, error = _attempt(lambda: load_reward_function(spec))
        if error is not None:
            connection.sendall(encode({"load_error": error}))
            return
        together = is_async(function)
        concurrency = settings["max_concurrency"] if together else 1
        connection.sendall(encode({"ready": True, "awaits": together, "concurrency": concurrency}))
        loop_factory = functools.partial(AttributingLoop, LoopState(state_number))
        with asyncio.Runner(loop_factory=loop_factory) as runner:  # one loop: clients that a function keeps stay usable
            if together:
                runner.run(_Judges(function, spec, settings["timeout_s"]).serve(connection))
            else:
                _serve_one_by_one(connection, function, spec, runner)


def _serve_one_by_one(
    connection: socket.socket, function: Callable[..., Any], spec: RewardSpec, runner: asyncio.Runner
) -> None:
    while (sample := _read(connection)) is not None:
        arguments = _arguments(spec, sample)
        if spec.is_built_in:
            arguments["blames_response"] = functools.partial(_blame, connection, sample["id"])
        answer, error = _attempt(functools.partial(_score, function, arguments, runner))
        connection.sendall(encode({"id": sample["id"]} | (answer if error is None else {"error": error})))


def _blame(connection: socket.socket, number: int, is_to_blame: bool) -> None:
    """Tell the parent, before it happens, whose fault it is if the sample goes wrong."""
    connection.sendall(encode({"id": number, "blames_response": is_to_blame}))


def _score(function: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    value = function(**arguments)
    if inspect.iscoroutine(value):
        warnings.warn(_ONE_AT_A_TIME.format(name=getattr(function, "__name__", "the reward function")), stacklevel=1)
        value = runner.run(value)
    return _reward(value)


class _Judges:
    """Many calls of an async function at once.

    A call's clock stands still while another one holds the loop, so that calls that compute between their awaits are
    not charged for each other.
    """

    def __init__(self, function: Callable[..., Any], spec: RewardSpec, timeout_s: float) -> None:
        self._function = function
        self._spec = spec
        self._timeout_s = timeout_s

    async def serve(self, connection: socket.socket) -> None:
        """Answers samples as they are done, until the parent hangs up."""
        self._loop: AttributingLoop = asyncio.get_running_loop()  # type: ignore[assignment]
        reader, self._writer = await asyncio.open_connection(sock=connection)
        answering: set[asyncio.Task[None]] = {self._loop.create_task(self._tick())}
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                sample = json.loads(await reader.readexactly(length))
                answering.add(task := self._loop.create_task(self._answer(sample)))
                task.add_done_callback(answering.discard)
        except asyncio.IncompleteReadError:
            return  # the parent has hung up

    async def _tick(self) -> None:
        """Show the parent that the loop turns."""
        while True:
            self._loop.touch()
            await asyncio.sleep(min(1.0, self._timeout_s / 4))

    async def _answer(self, sample: dict[str, Any]) -> None:
        number = sample["id"]
        call = self._loop.create_attributed(number, self._judge(_arguments(self._spec, sample)))
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
        return _reward(await self._function(**arguments))


def _result_of(call: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
    if call.cancelled():
        return {"error": "the function cancelled itself (asyncio.CancelledError)"}
    error = call.exception()
    if error is None:
        return call.result()
    return {"error": _describe(error)}


def _arguments(spec: RewardSpec, sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": sample["data_source"],
        "solution_str": sample["solution_str"],
        "ground_truth": from_plain(sample["ground_truth"]),
        "extra_info": from_plain(sample["extra_info"]),
        **spec.kwargs,
    }


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Run the user's code, which may raise anything: its result, or the traceback for the parent to report."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001
        return None, _describe(error)


def _reward(value: object) -> dict[str, Any]:
    score, parts = read_reward(value)
    short = {name: part[:_LONGEST_TEXT] if isinstance(part, str) else part for name, part in parts.items()}
    return {"score": score, "parts": short}


def _describe(error: BaseException) -> str:
    """Return the traceback from the user's first frame on, cut in the middle if very long.

    Our own errors in one line.
    """
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


def _read(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next frame, or `None` when the parent has hung up."""
    header = _read_bytes(connection, LENGTH.size)
    if header is None:
        return None
    payload = _read_bytes(connection, LENGTH.unpack(header)[0])
    return None if payload is None else json.loads(payload)


def _read_bytes(connection: socket.socket, count: int) -> bytes | None:
    parts = []
    while count > 0:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
