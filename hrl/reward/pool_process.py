"""The process in which reward functions run: `python -m hrl.reward.pool_process <socket> <parent pid>`.

It imports neither torch nor the parent's main module, loads the function from its file, and answers one sample at a
time over a socket, in length-prefixed JSON. It can be killed at any moment.
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
from collections.abc import Callable
from typing import Any

from hrl.data.child import from_plain
from hrl.reward.function import RewardFunctionError, RewardSpec, load_reward_function, read_reward
from hrl.single_controller.processes import die_with_parent, guard_process_group

LENGTH = struct.Struct("!I")
_LONGEST_TRACEBACK = 4000
_LONGEST_TEXT = 4000


def encode(message: dict[str, Any]) -> bytes:
    """One frame: the length in four bytes, then JSON in ASCII."""
    payload = json.dumps(message).encode("ascii")
    return LENGTH.pack(len(payload)) + payload


def main(socket_number: int, parent_pid: int) -> None:
    """Loads the function, then answers samples until the parent hangs up."""
    die_with_parent(parent_pid)
    guard_process_group()  # the kernel ends this process with its parent, but not what the function starts in it
    os.dup2(2, 1)  # what a reward function prints must not end up in the parent's output
    connection = socket.socket(fileno=socket_number)
    with connection, connection.makefile("rb") as incoming:
        settings = _read(incoming)
        if settings is None:
            return
        if (limit := settings["memory_limit_bytes"]) is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        spec = RewardSpec(**settings["spec"] | {"data_sources": tuple(settings["spec"]["data_sources"])})
        function, error = _attempt(lambda: load_reward_function(spec))
        if error is not None:
            connection.sendall(encode({"load_error": error}))
            return
        connection.sendall(encode({"ready": True}))
        with asyncio.Runner() as runner:  # one event loop for all calls: clients that a function keeps stay usable
            while (sample := _read(incoming)) is not None:
                answer, error = _attempt(functools.partial(_score, function, spec, sample, runner))
                connection.sendall(encode({"error": error} if error is not None else answer))


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Runs the user's code, which may raise anything: its result, or the traceback for the parent to report."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001
        return None, _describe(error)


def _score(
    function: Callable[..., Any], spec: RewardSpec, sample: dict[str, Any], runner: asyncio.Runner
) -> dict[str, Any]:
    value = function(
        data_source=sample["data_source"],
        solution_str=sample["solution_str"],
        ground_truth=from_plain(sample["ground_truth"]),
        extra_info=from_plain(sample["extra_info"]),
        **spec.kwargs,
    )
    if inspect.iscoroutine(value):
        value = runner.run(value)
    score, parts = read_reward(value)
    short = {name: part[:_LONGEST_TEXT] if isinstance(part, str) else part for name, part in parts.items()}
    return {"score": score, "parts": short}


def _describe(error: Exception) -> str:
    """The traceback from the user's first frame on, cut in the middle if very long; our own errors in one line."""
    if isinstance(error, RewardFunctionError):
        return str(error)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    if len(text) <= _LONGEST_TRACEBACK:
        return text
    half = _LONGEST_TRACEBACK // 2
    return f"{text[:half]}\n…\n{text[-half:]}"


def _read(incoming: Any) -> dict[str, Any] | None:
    """The next frame, or `None` when the parent has hung up."""
    header = incoming.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    payload = incoming.read(length)
    return json.loads(payload) if len(payload) == length else None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
