"""Environments of the package verifiers, with their data sets and rubrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import verifiers

from hrl.environments.interface import Action, Environment, Observation, StepResult
from hrl.environments.tools import is_count
from hrl.errors import RefusedError

_CANCEL_S = 5.0
_Asked = tuple[list[dict[str, Any]], list[Any]]
"""Messages and tools."""


class VerifiersError(RefusedError, ValueError):
    """An environment of verifiers can't be loaded or played here; names it and the way out."""


@cache
def _loaded(name: str, arguments: str) -> Any:
    """Load an environment once for all episodes of a process: its data set may be large."""
    return verifiers.load_environment(name, **json.loads(arguments))


class _Policy(verifiers.Client):  # type: ignore[misc]
    """Stands where a rollout has the client of a model: what it is asked is the observation, the action its answer."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[_Asked] = asyncio.Queue()
        self.answers: asyncio.Queue[Action] = asyncio.Queue()

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any) -> Any:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(_plain, prompt)]
        await self.asked.put((messages, [*(tools or ())]))
        return _response(await self.answers.get(), model)

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError

    async def to_native_tool(self, tool: Any) -> Any:
        raise NotImplementedError

    async def to_native_prompt(self, messages: Any) -> Any:
        raise NotImplementedError

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def raise_from_native_response(self, response: Any) -> None:
        raise NotImplementedError

    async def from_native_response(self, response: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing is open."""


class VerifiersEnvironment(Environment):
    """An environment of verifiers: its own rollout runs, and where it asks a model, it gets what the policy writes.

    The row says which example of the environment's data set is played: that of its number, from the set for evaluation
    where the row is of a validation split (`bundled:games/val`). The reward is the rubric's, of the last turn; what its
    functions gave are metrics.

    Args:
        env: Its name, which is that of an installed package, as `verifiers.load_environment` takes it.
        arguments: Of its `load_environment`.

    Raises:
        VerifiersError: It can't be loaded, or rewards only groups.
    """

    def __init__(self, env: str, arguments: Mapping[str, Any] | None = None) -> None:
        try:
            self._env = _loaded(env, json.dumps(dict(arguments or {}), sort_keys=True))
        except (ImportError, AttributeError, ValueError, RuntimeError, TypeError) as error:
            raise VerifiersError(
                f"verifiers can't load the environment {env!r}: {error}. Install its package (`prime env install`), "
                "and give its arguments as environment.kwargs.arguments"
            ) from error
        if getattr(self._env, "requires_group_rollouts", False):
            raise VerifiersError(
                f"the rubric of {env!r} compares the samples of a group with each other, and an environment here sees "
                "its own episode alone: give the run a reward function that does it"
            )
        self._env_name = env
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:  # type: ignore[override]
        """Begin a rollout, and return what it asks first."""
        self._policy = _Policy()
        self._rollout = asyncio.create_task(self._play(self._example(row, seed)))
        asked = await self._next()
        if asked is None:
            raise VerifiersError("the rollout ended before it asked the policy anything")
        self._asked = messages, tools = asked
        schemas = [
            {
                "type": "function",
                "function": {"name": one.name, "description": one.description, "parameters": one.parameters},
            }
            for one in tools
        ]
        return Observation(messages=messages, tools=schemas or None)

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        """Answer the rollout, and return what it asks next, or the rubric's reward."""
        await self._policy.answers.put(action)
        asked = await self._next()
        if asked is not None:
            return StepResult(self._new_of(asked, action))
        assert self._rollout is not None
        state = self._rollout.result()
        metrics = {
            f"rubric/{name}" if is_count(name) else name: float(value)
            for name, value in (state.get("metrics") or {}).items()
        }
        return StepResult(
            reward=float(state.get("reward") or 0.0),
            done=True,
            truncated=bool(state.get("is_truncated")),
            metrics=metrics,
        )

    async def close(self) -> None:  # type: ignore[override]
        """End the rollout."""
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            await asyncio.wait({self._rollout}, timeout=_CANCEL_S)

    def _example(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        info = row.get("extra_info") or {}
        is_held_out = info.get("split") == "val"
        examples = self._env.get_eval_dataset() if is_held_out else self._env.get_dataset()
        return dict(examples[int(info.get("index", seed)) % len(examples)])

    async def _play(self, example: dict[str, Any]) -> Any:
        state = await self._env.rollout(example, self._policy, "policy", {})
        if state.get("error") is not None:
            raise VerifiersError(f"the rollout failed: {state['error']!r}")
        await self._env.rubric.score_rollout(state)
        return state

    def _new_of(self, asked: _Asked, action: Action) -> list[dict[str, Any]]:
        """Return what stands behind what was asked before and the policy's turn.

        Raises:
            VerifiersError: Something else was asked before: the episode has one context, and would be played in it.
        """
        (messages, tools), (before, tools_before) = asked, self._asked
        turn = len(before)
        expected = _said(_plain(_response(action, "").message))
        if messages[:turn] != before or tools != tools_before or [*map(_said, messages[turn : turn + 1])] != [expected]:
            raise VerifiersError(
                f"the rollout of {self._env_name!r} did not go on from the policy's turn {action.turn}: it rewrites "
                "its history or its tools, or asks several times at once. An episode here is one conversation; play "
                "it as a program (an hrl.AgentEnvironment whose `run` gives the rollout OpenAI's client), where each "
                "history is a branch"
            )
        self._asked = asked
        return messages[turn + 1 :]

    async def _next(self) -> _Asked | None:
        """Return what the rollout asks; None when it is over."""
        assert self._rollout is not None
        asking = asyncio.ensure_future(self._policy.asked.get())
        await asyncio.wait({asking, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return asking.result()
        asking.cancel()
        self._rollout.result()  # raises what it raised
        return None


def _plain(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    if isinstance(plain.get("content"), Sequence) and not isinstance(plain["content"], str):
        plain["content"] = "".join(str(part.get("text", "")) for part in plain["content"])
    if plain.get("tool_calls"):
        plain["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in plain["tool_calls"]
        ]
    return plain


def _said(message: Mapping[str, Any]) -> tuple[object, object, object]:
    """Return what tells a turn of the policy from others; a rollout may leave its reasoning out of the history."""
    return message.get("role"), message.get("content") or "", message.get("tool_calls") or None


def _response(action: Action, model: str) -> Any:
    from verifiers.types import Response, ResponseMessage, ToolCall

    calls = [ToolCall(id=call.id, name=call.name, arguments=call.text or "{}") for call in action.tool_calls]
    is_cut = action.finish_reason == "length"
    message = ResponseMessage(
        content=action.answer or (None if calls else ""),
        reasoning_content=action.reasoning,
        tool_calls=calls or None,
        finish_reason="length" if is_cut else "tool_calls" if calls else "stop",
        is_truncated=is_cut,
    )
    return Response(id=f"turn-{action.turn}", created=int(time.time()), model=model, message=message)
