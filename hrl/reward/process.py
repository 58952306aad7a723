"""The process in which reward functions run: `python -m hrl.reward.process <socket> <state>`.

It imports neither torch nor the parent's main module, loads the function, and answers samples over a socket, one line
of JSON each. It can be killed at any moment. A plain function gets one sample at a time; many calls of an async
function are awaited at once, each with its own deadline.

If the event loop is blocked, some call computes or waits without `await`. `SharedState` tells the parent which one.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import inspect
import json
import os
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

from hrl import user_file
from hrl.processes.attributing_loop import AttributingLoop
from hrl.processes.child import begin, describe, limit_memory
from hrl.processes.messages import encode, open_stream, receive
from hrl.processes.plain_data import from_plain
from hrl.processes.sandbox import share_processors
from hrl.processes.shared_state import SharedState
from hrl.reward import function as function_file
from hrl.reward.function import (
    PICTURES,
    RESPONSE,
    TURN_SCORES,
    RewardFunctionError,
    check_turn_scores,
    is_async,
    names_taken,
    read_reward,
    takes_pictures,
)
from hrl.reward.spec import RewardSpec
from hrl.reward.weighted import BLAME

_Turns = list[str] | None
"""What the policy wrote in each turn of an episode; None of a single response."""

_LONGEST_TEXT = 4000
_OURS = (__file__, function_file.__file__, user_file.__file__)
_ONE_AT_A_TIME = (
    "{name} returns a coroutine but is not `async def` itself, so its calls are awaited one at a time. "
    "With `async def` (also in a decorator's wrapper) many are awaited at once"
)
_CANCEL_GRACE_S = 1.0
"""How long a cancelled call may take to end."""


def main(socket_number: int, state_number: int) -> None:
    """Load the function, then answer samples until the parent closes the connection."""
    state = begin(state_number)
    with socket.socket(fileno=socket_number) as connection, connection.makefile("rb") as stream:
        settings = json.loads(stream.readline() or "null")
        if settings is None:
            return
        limit_memory(settings["memory_limit_gib"])
        share_processors(settings["processes"])
        spec = RewardSpec.from_plain(settings["spec"]).resolve(os.environ)
        function, error = _attempt(lambda: spec.source.load(spec.kwargs, spec.columns))
        if error is not None:
            connection.sendall(encode({"load_error": error}))
            return
        together, taken = is_async(function), names_taken(function)
        own = getattr(function, "max_concurrency", None)  # of a judge, say, whose endpoint allows so many
        most = min(settings["max_concurrency"], own or sys.maxsize)
        ready = {"ready": most if together else 1, "is_limited": together and own is not None}
        connection.sendall(encode(ready | {"takes_pictures": takes_pictures(function)}))
        # One event loop for all calls, so that clients that a function keeps stay usable.
        with asyncio.Runner(loop_factory=functools.partial(AttributingLoop, state)) as runner:
            if together:
                runner.run(_Judges(function, spec, settings["timeout_s"], state).serve(connection))
                return
            for line in stream:
                sample = json.loads(line)
                arguments = _arguments(spec, sample, taken, state)
                state.hold(sample["id"])
                answer, error = _attempt(functools.partial(_score, function, arguments, runner, sample["turns"]))
                state.hold(0)
                connection.sendall(encode({"id": sample["id"]} | (answer if error is None else {"error": error})))


def _score(
    function: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner, turns: _Turns = None
) -> dict[str, Any]:
    value = function(**arguments)
    if inspect.iscoroutine(value):
        warnings.warn(_ONE_AT_A_TIME.format(name=getattr(function, "__name__", "the reward function")), stacklevel=1)
        value = runner.run(value)
    return _reward(value, turns)


class _Judges:
    """Many concurrent calls of an async function.

    Each has a clock of its own; see `AttributingLoop.finishes_within`.
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
        call = self._loop.create_attributed(number, self._judge(arguments, sample["turns"]))
        if await self._loop.finishes_within(call, number, self._timeout_s):
            answer = _result_of(call)
        else:
            call.cancel()
            await asyncio.wait({call}, timeout=_CANCEL_GRACE_S)
            answer = {"timeout": True, "stuck": not call.done()}
        self._loop.forget(number)
        self._writer.write(encode({"id": number} | answer))

    async def _judge(self, arguments: dict[str, Any], turns: _Turns) -> dict[str, Any]:
        try:
            return _reward(await self._function(**arguments), turns)
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
    truth, turns = from_plain(sample["ground_truth"]), sample["turns"]
    offered = {
        "turns": [sample["solution_str"]] if turns is None else turns,
        "conversation": sample["conversation"],
        **{name: [base64.b64decode(file) for file in sample[name]] for name in (PICTURES,) if name in sample},
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


def _reward(value: object, turns: _Turns) -> dict[str, Any]:
    """Return what the parent is told of a reward; the one turn of a single response is all that it is worth."""
    score, parts = read_reward(value)
    short: dict[str, Any] = {
        name: part[:_LONGEST_TEXT] if isinstance(part, str) else part for name, part in parts.items()
    }
    if (steps := short.pop(TURN_SCORES, None)) is None:
        return {"score": score, "parts": short}
    check_turn_scores(steps, 1 if turns is None else len(turns))
    short[TURN_SCORES] = sum(steps)
    if turns is None or score is None:
        return {"score": None if score is None else score + sum(steps), "parts": short}
    return {"score": score, "parts": short, TURN_SCORES: steps}


def _describe(error: BaseException) -> str:
    """Return the traceback from the user's first frame on, shortened if very long; for hrl's own errors one line."""
    if isinstance(error, RewardFunctionError):
        return str(error)
    return describe(error, _OURS)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
