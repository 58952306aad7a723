"""What a tool or an environment may do to its process, beside 200 ordinary episodes in four of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hrl.config.environment import EnvironmentConfig
from hrl.environments.interface import Action, ToolCall
from hrl.environments.loading import EnvironmentSpec
from hrl.environments.tools import ToolLimits
from hrl.episodes.pool import (
    EnvironmentFailedError,
    EnvironmentFaultError,
    EnvironmentLostError,
    EnvironmentPool,
)
from tests.chaos.faults import Fault, Outcome

_EPISODES, _QUICK_EPISODES = 200, 40
_PROCESSES = 4
_FAULTY = 3
_TURNS = 4
_MAX_ATTEMPTS = 2
_MOST_REPLAYS = 20

WORLDS = Path(__file__).with_name("worlds.py")

Judge = Callable[[object], str | None]
"""Takes what came of the faulty call, the tool's answer or an error; returns why that is wrong, or None."""


def answered(*parts: str) -> Judge:
    """Return the judge of a fault that the policy is told of."""
    return lambda told: None if isinstance(told, str) and all(part in told for part in parts) else f"got {told!r:.200}"


def failed(kind: type[EnvironmentFaultError], *parts: str) -> Judge:
    """Return the judge of a fault that ends its episode, to blame for it, with a message that has these parts."""

    def judge(told: object) -> str | None:
        if not isinstance(told, kind) or not all(part in str(told) for part in parts):
            return f"got {type(told).__name__}: {told!s:.200}"
        if isinstance(told, EnvironmentLostError) and not told.is_to_blame:
            return f"it is not said to be to blame: {told!s:.200}"
        return None

    return judge


def either(*judges: Judge) -> Judge:
    """Return the judge of a fault of which several outcomes are right."""
    return lambda told: None if any(judge(told) is None for judge in judges) else judges[0](told)


async def _play(pool: EnvironmentPool, number: int) -> list[str]:
    """Play an ordinary episode, again if its process was lost; return what its tools answered."""
    row = {"prompt": [{"role": "user", "content": "Count."}]}
    blamed = 0
    for _ in range(_MOST_REPLAYS):
        environment = pool.open(number, row, number)
        found = []
        try:
            await environment.reset()
            for turn in range(_TURNS):
                calls = (ToolCall("add", {"number": turn}, "a"), ToolCall("look", {}, "b"))
                result = await environment.step(Action("", tool_calls=calls, turn=turn))
                found += [message["content"] for message in result.observation.messages]
                await asyncio.sleep(0.02)
            assert (await environment.step(Action("the end"))).done
            return found
        except EnvironmentLostError as error:
            blamed += error.is_to_blame
            if blamed == _MAX_ATTEMPTS:
                return [str(error)]
        finally:
            await environment.close()
    return ["it was begun too often"]


async def _faulty(pool: EnvironmentPool, number: int, tool: str, what: str) -> object:
    """Play an episode whose tool does something; return the answer of that call, or the error."""
    await asyncio.sleep(0.05)
    environment = pool.open(f"faulty {number}", {"prompt": [{"role": "user", "content": "Break."}]}, number)
    try:
        await environment.reset()
        action = Action("", tool_calls=(ToolCall(tool, {"what": what}, "a"),))
        result = await environment.step(action)
        return result.observation.messages[0]["content"]
    except EnvironmentFaultError as error:
        return error
    finally:
        await environment.close()


async def _together(pool: EnvironmentPool, episodes: int, tool: str, what: str) -> tuple[list[list[str]], list[object]]:
    ordinary = asyncio.gather(*(_play(pool, number) for number in range(episodes)))
    faulty = asyncio.gather(*(_faulty(pool, number, tool, what) for number in range(_FAULTY)))
    return await ordinary, await faulty


def beside(tool: str, what: str, judge: Judge, folder: Path, *, episodes: int = _EPISODES) -> Outcome:
    """Play episodes of which three are faulty, and judge these and all the others."""
    settings = EnvironmentConfig(
        num_workers=_PROCESSES, step_timeout_s=3.0, memory_limit_gib=1.0, max_observation_tokens=256
    )
    spec = EnvironmentSpec.of(f"{WORLDS}:World", tool_limits=ToolLimits(call_s=1.0))

    async def run() -> tuple[list[list[str]], list[object], str]:
        with (folder / "output").open("wb") as output:
            async with asyncio.timeout(90), EnvironmentPool(spec, settings, output) as pool:
                ordinary, faulty = await _together(pool, episodes, tool, what)
                return ordinary, faulty, str(pool.counts)

    began = time.monotonic()
    try:
        ordinary, faulty, counts = asyncio.run(run())
    except TimeoutError:
        return Outcome(0, time.monotonic() - began, "it hung")
    seconds = time.monotonic() - began
    wrong = [number for number, found in enumerate(ordinary) if found != _right(number)]
    if wrong:
        return Outcome(0, seconds, f"{len(wrong)} of {episodes} others went wrong: {ordinary[wrong[0]]}; {counts}")
    if left := _left():
        return Outcome(0, seconds, f"{left} processes are left")
    for told in faulty:
        if (why := judge(told)) is not None:
            return Outcome(1 if isinstance(told, EnvironmentFaultError) else 0, seconds, why)
    return Outcome(2, seconds, " ".join(str(faulty[0]).split())[:200])


def _right(number: int) -> list[str]:
    total, found = number, []
    for turn in range(_TURNS):
        total += turn
        found += [str(total)] * 2
    return found


def _left() -> int:
    """Return how many of the processes are left that only what is above starts."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_bytes() == b"sleep\x001000.5\x00"
    return found


_LATE = answered("Error: ", "took longer than 1 s")
_FULL = failed(EnvironmentLostError, "has no memory left")
_HELD = failed(EnvironmentLostError, "was killed: something held it for longer than 3 s")


def _fault(tool: str, what: str, judge: Judge, variant: str = "", is_quick: bool = False) -> Fault:
    inject = partial(beside, tool, what, judge, episodes=_QUICK_EPISODES if is_quick else _EPISODES)
    how = "plain" if tool == "plainly" else "async"
    return Fault("a tool that " + (variant or what), f"{how}: {what}", inject, is_quick)


_HANGS, _ENDS, _ANSWERS = "hangs", "ends its process", "answers anything"
FAULTS = [
    _fault("plainly", "sleep", _LATE, _HANGS),
    _fault("asynchronously", "sleep", _LATE, _HANGS, is_quick=True),
    _fault("plainly", "spin", _LATE, _HANGS),
    _fault("asynchronously", "spin", _HELD, _HANGS),
    _fault("plainly", "spin in C", _HELD, _HANGS),
    _fault("asynchronously", "spin in C", _HELD, _HANGS),
    _fault("plainly", "sleep with Python's lock", _HELD, _HANGS),
    _fault("plainly", "raise", answered("Error: plainly failed: ZeroDivisionError: by the tool"), "raises or exits"),
    _fault("asynchronously", "raise", answered("ZeroDivisionError: by the tool"), "raises or exits"),
    _fault("plainly", "exit", answered("Error: plainly failed", "SystemExit: 3"), "raises or exits"),
    _fault("asynchronously", "exit", answered("SystemExit: 3"), "raises or exits"),
    _fault("plainly", "end", failed(EnvironmentLostError, "ended with exit code 3"), _ENDS),
    _fault("asynchronously", "die", failed(EnvironmentLostError, "was killed by SIGKILL"), _ENDS, is_quick=True),
    _fault("plainly", "crash", failed(EnvironmentLostError, "was killed by SIGSEGV"), _ENDS),
    _fault("plainly", "stop", failed(EnvironmentLostError, "had been stopped (SIGSTOP)"), "stops its process"),
    _fault("plainly", "megabyte", answered("xxx", "characters left out"), _ANSWERS),
    _fault("plainly", "hundred megabytes", answered("xxx", "characters left out"), _ANSWERS),
    _fault("plainly", "recursive", answered("[[...]]"), _ANSWERS),
    _fault("plainly", "surrogate", answered("\ufffd" * 10), _ANSWERS),
    _fault("plainly", "leak", either(_FULL, _LATE), "leaks memory to its limit"),
    _fault("asynchronously", "leak", _FULL, "leaks memory to its limit"),
    _fault("plainly", "fork", answered("forked"), "forks"),
    _fault("plainly", "fork and return", answered("returned"), "forks"),
    _fault("asynchronously", "fork and return", answered("returned"), "forks"),
    _fault("plainly", "print", answered("done"), "writes where it should not"),
    _fault(
        "plainly",
        "write to the connection",
        either(failed(EnvironmentLostError, "wrote"), failed(EnvironmentFailedError), answered("done")),
        "writes where it should not",
    ),
    _fault("plainly", "close all files", failed(EnvironmentFaultError), "breaks its process"),
    _fault("asynchronously", "stop the loop", failed(EnvironmentLostError), "breaks its process"),
    _fault("asynchronously", "cancel all tasks", failed(EnvironmentFaultError), "breaks its process"),
    _fault("plainly", "kill all", either(answered("done"), answered("Error")), "kills others"),
    _fault("plainly", "kill the parent", either(answered("Error"), failed(EnvironmentLostError)), "kills others"),
]
