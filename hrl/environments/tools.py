"""An environment of tools: Python functions that the policy calls until it answers without a call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hrl.environments.interface import (
    Action,
    Environment,
    EnvironmentReplyError,
    Observation,
    StepResult,
    ToolCall,
)
from hrl.environments.replies import MOST_CHARACTERS
from hrl.environments.tool_functions import (
    ArgumentsMisfitError,
    Tool,
    ToolSignatureError,
    mark_of,
    tool,
    tool_of,
)
from hrl.nearest import did_you_mean
from hrl.processes.evidence import memory_is_left
from hrl.processes.waiting import Clock
from hrl.text import clean_text, without_middle

__all__ = ["ToolEnvironment", "ToolLimits", "ToolSignatureError", "tool", "tool_of"]

_MOST_AT_ONCE = 16
"""Calls of one action that run at the same time; further ones wait for their turn."""
_LONGEST_RESULT = 1 << 20
_LONGEST_RESULTS = MOST_CHARACTERS // 2
"""Characters of all results of a turn, which share them: a reply may have no more than twice as many."""
_LONGEST_SHOWN = 200
_LONGEST_EXCEPTION = 1000

_COUNTED = ("tool_calls", "tool_errors")
"""What is counted here, of all tools and, behind a slash, of each. Metrics of these names are nobody else's."""


@dataclass(frozen=True)
class ToolLimits:
    """What calls of tools may take.

    Attributes:
        call_s: Seconds of one call, `environment.tool_timeout_s`.
        turn_s: Seconds of all calls of a turn, less than the step may take at whose deadline the episode fails.
        calls: Calls of a turn that are made, `environment.max_parallel_calls`.
    """

    call_s: float = 30.0
    turn_s: float = 54.0
    calls: int = 16


class ToolEnvironment(Environment):
    """The policy calls tools, whose results it is shown, until it answers without a call.

    Tools are the functions of `environment.tools`, and methods of a subclass with the mark `@hrl.tool`. Each episode
    has an object of its own, so what methods keep in `self` is the episode's. The calls of an action are answered in
    order. Functions run at the same time; methods one after the other, so that what becomes of `self` does not depend
    on which is faster. Whatever goes wrong with a call is told to the policy.
    """

    _functions: Sequence[Callable[..., Any]] = ()
    _limits = ToolLimits()
    _outlives: asyncio.Future[Any] | None = None
    """The call of a method that went on behind its deadline; no other method begins before it has ended."""

    def answered(self, action: Action) -> StepResult | float | None:
        """Say what the policy's answer is worth; by default the run's reward functions say so.

        May be `async def`, and is called with the first action that has no call, and none that can't be read.

        Returns:
            The reward of this turn; None for none; or a `StepResult`, with which the episode may also go on.
        """
        return None

    def set_up(self, functions: Sequence[Callable[..., Any]], limits: ToolLimits) -> None:
        """Take the functions of `environment.tools`, and what calls may take; called before `reset`."""
        self._functions, self._limits = functions, limits

    @classmethod
    def check_tools(cls) -> None:
        """Refuse a class with methods that can't be tools.

        Raises:
            ToolSignatureError: One of them can't be one.
        """
        from pydantic_core import to_json  # noqa: F401  (imported once, and not by the first thread of many)

        _tools_of(cls)

    @classmethod
    def brings_tools(cls) -> bool:
        """Whether the class has tools of its own, beside the functions of `environment.tools`."""
        return cls.tools is not ToolEnvironment.tools or bool(_tools_of(cls))

    @property
    def tools(self) -> Mapping[str, Tool]:
        """Name → tool: those of the class, then the functions.

        Raises:
            ToolSignatureError: Two have the same name, or one can't be a tool.
        """
        return self.tools_with(self._functions)

    @classmethod
    def tools_with(cls, functions: Sequence[Callable[..., Any]]) -> Mapping[str, Tool]:
        """Return what `tools` is where these are the functions."""
        found = dict(_tools_of(cls))
        for function in functions:
            one = tool_of(function)
            if one.name in found:
                raise ToolSignatureError(
                    f"two tools are named {one.name}: give one another name with @hrl.tool(name=…)"
                )
            found[one.name] = one
        return found

    def with_tools(self, observation: Observation) -> Observation:
        """Return what `reset` observed, with the schemas of the tools unless it has tools of its own."""
        if observation.tools is not None:
            return observation
        return replace(observation, tools=[one.schema for one in self.tools.values()])

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]  # the base allows both
        """Run the calls of an action, or end with its answer."""
        if not action.tool_calls and action.error is not None:
            what = clean_text(without_middle(action.error, _LONGEST_SHOWN))
            return StepResult(f"Error: the call of a tool can't be read: {what}", metrics=self._counted())
        if not action.tool_calls:
            is_own = type(self).answered is not ToolEnvironment.answered
            result: Any = None
            if inspect.iscoroutinefunction(self.answered):
                result = await self.answered(action)
            elif is_own:
                result = await _on_thread(functools.partial(self.answered, action))
            if not isinstance(result, StepResult):
                # What was cut off may have been on the way to a call.
                result = StepResult(reward=result, done=True, truncated=action.finish_reason == "length")
            return replace(result, metrics={**self._counted(), **result.metrics})
        with _Turn(self._limits.turn_s) as turn:
            made, others = action.tool_calls[: self._limits.calls], action.tool_calls[self._limits.calls :]
            answers = await asyncio.gather(*(self._answer(call, turn) for call in made))
        for call in others:
            self._count("tool_calls", call)
            self._count("tool_errors", call)
            answers.append(
                f"Error: {call.name[:_LONGEST_SHOWN]} was not called: at most {len(made)} calls are made in a turn"
            )
        longest = _LONGEST_RESULTS // len(answers)
        messages = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": without_middle(answer, longest)}
            for call, answer in zip(action.tool_calls, answers, strict=True)
        ]
        return StepResult(messages, metrics=self._counted())

    def _counted(self) -> dict[str, float]:
        """Return the counts of the episode so far. A tool that was not called has counts too: means are over all."""
        tools = ("", *(f"/{name}" for name in self.tools))
        return {f"{kind}{tool}": float(self._counts[f"{kind}{tool}"]) for kind in _COUNTED for tool in tools}

    @functools.cached_property
    def _counts(self) -> Counter[str]:
        return Counter()

    def _count(self, kind: str, call: ToolCall) -> None:
        self._counts[kind] += 1
        if call.name in self.tools:
            self._counts[f"{kind}/{call.name}"] += 1

    async def _answer(self, call: ToolCall, turn: _Turn) -> str:
        """Return the result of a call as a text, or what was wrong with it."""
        self._count("tool_calls", call)
        async with turn.at_once:
            text, is_error = await self._attempt(call, self.tools, turn)
        if is_error:
            self._count("tool_errors", call)
        return text

    async def _attempt(self, call: ToolCall, known: Mapping[str, Tool], turn: _Turn) -> tuple[str, bool]:
        if call.name not in known:
            names = ", ".join(known) or "none"
            hint = did_you_mean(call.name[:_LONGEST_SHOWN], known)
            return (
                f"Error: there is no tool {call.name[:_LONGEST_SHOWN]!r}. The tools are: {names}. {hint}".rstrip(),
                True,
            )
        chosen = known[call.name]
        if call.arguments is None:
            written = without_middle(call.text, _LONGEST_SHOWN)
            return clean_text(f"Error: the arguments of {call.name} are no JSON object: {written}"), True
        try:
            arguments = chosen.read(call.arguments)
        except ArgumentsMisfitError as error:
            return clean_text(f"Error: wrong arguments of {call.name}: {error}"), True
        is_method = chosen.name in _tools_of(type(self))
        async with turn.one_by_one if is_method else contextlib.nullcontext():
            left_s = turn.left_s
            if left_s <= 0:
                why = f"those before it took all of the {self._limits.turn_s:g} s that a turn's calls may take"
                return f"Error: {call.name} was not called: {why}", True
            timeout_s = min(self._limits.call_s if chosen.timeout_s is None else chosen.timeout_s, left_s)
            if is_method and self._outlives is not None:
                if not await Clock().finishes_within(self._outlives, timeout_s):
                    return f"Error: {call.name} was not called: a call before it has not ended", True
                self._outlives = None
            with Clock() as clock:
                running = asyncio.ensure_future(self._run(chosen, arguments, is_method))
            try:
                await clock.finishes_within(running, timeout_s)
            finally:
                if not running.done():
                    self._give_up(running, chosen, is_method)
        if not running.done():
            return f"Error: {call.name} took longer than {timeout_s:.3g} s", True
        try:
            return text_of(running.result()), False
        # A tool may raise anything, also by `sys.exit`; the policy is told.
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            if isinstance(error, MemoryError) and not memory_is_left():
                raise  # the process can't go on
            said = without_middle(f"{type(error).__name__}: {error}", _LONGEST_EXCEPTION)
            return f"Error: {call.name} failed: {clean_text(said)}", True

    def _give_up(self, running: asyncio.Future[Any], chosen: Tool, is_method: bool) -> None:
        """Let go of a call that is past its deadline. A thread can't be ended: a plain method goes on."""
        if chosen.is_async or not is_method:
            running.cancel()
        if is_method:
            self._outlives = running
            running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody asks for it

    async def _run(self, chosen: Tool, arguments: Mapping[str, Any], is_method: bool) -> Any:
        """Call a tool, on a thread if it is plain."""
        call = functools.partial(chosen.function, *([self] if is_method else []), **arguments)
        return await (_guarded(call()) if chosen.is_async else _on_thread(call))


class _Turn(Clock):
    """The calls of one action, and the seconds that they may take together; waiting in line is none of them."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._begun_s = seconds, time.monotonic()
        self.at_once = asyncio.Semaphore(_MOST_AT_ONCE)
        self.one_by_one = asyncio.Lock()

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._seconds - self.counted_s(self._begun_s, self._seconds)


def is_count(metric: str) -> bool:
    """Return whether a metric has the name of one that is counted here."""
    return metric.partition("/")[0] in _COUNTED


def check_counts(environment: object, result: StepResult) -> StepResult:
    """Return what a step returned.

    Raises:
        EnvironmentReplyError: A metric stands where a count of tool calls does, which it would replace.
    """
    named = {name: value for name, value in result.metrics.items() if is_count(name)}
    counted = environment._counted() if named and isinstance(environment, ToolEnvironment) else {}
    for name, value in named.items():
        if counted.get(name) != value:
            raise EnvironmentReplyError(
                f"returned {value:g} as the metric {name!r}, which is a count of hrl's own: give it another name"
            )
    return result


@functools.lru_cache(maxsize=256)
def _tools_of(made: type[ToolEnvironment]) -> Mapping[str, Tool]:
    """Return the marked methods of a class as tools, those of its bases first."""
    found: dict[str, Tool] = {}
    for name in dict.fromkeys(name for base in reversed(made.__mro__) for name in vars(base)):
        function = inspect.getattr_static(made, name)
        if isinstance(function, staticmethod | classmethod) and mark_of(function.__func__) is not None:
            kind = type(function).__name__
            raise ToolSignatureError(f"the tool {name} of {made.__name__} is a {kind}: make it a plain method")
        if mark_of(function) is not None:
            one = tool_of(function, is_method=True)
            if one.name in found:
                raise ToolSignatureError(f"two tools of {made.__name__} are named {one.name}")
            found[one.name] = one
    return found


async def _guarded(call: Any) -> Any:
    """Await a call; an exit is an exception like others, and must not end the event loop."""
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:
        raise _ended_by(error) from error


async def _on_thread(call: Callable[[], Any]) -> Any:
    """Make a call on a thread of the running loop's."""
    value, error = await asyncio.get_running_loop().run_in_executor(None, _attempted, call)
    if error is not None:
        raise error
    return await _guarded(value) if inspect.isawaitable(value) else value


def _attempted(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except (SystemExit, KeyboardInterrupt, StopIteration) as error:  # which no future can hold
        return None, _ended_by(error)
    except Exception as error:  # noqa: BLE001  (told to the policy)
        return None, error


def _ended_by(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}: {error}")


def text_of(value: object) -> str:
    """Return the result of a tool as a text: a text as it is, anything else as JSON, else as Python shows it."""
    if isinstance(value, str):
        text = value
    else:
        from pydantic_core import PydanticSerializationError, to_json

        try:
            text = json.dumps(value, ensure_ascii=False) if _is_simple(value) else to_json(value, fallback=str).decode()
        except (PydanticSerializationError, ValueError, RecursionError):
            text = repr(value)
    return clean_text(without_middle(text, _LONGEST_RESULT))


def _is_simple(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float)
