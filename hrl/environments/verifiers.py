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
from hrl.errors import RefusedError

_CANCEL_S = 5.0


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
        self.asked: asyncio.Queue[tuple[list[dict[str, Any]], list[Any]]] = asyncio.Queue()
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
        self._seen = 0
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:  # type: ignore[override]
        """Begin a rollout, and return what it asks first."""
        self._policy = _Policy()
        self._rollout = asyncio.create_task(self._play(self._example(row, seed)))
        asked = await self._next()
        if asked is None:
            raise VerifiersError("the rollout ended before it asked the policy anything")
        messages, tools = asked
        self._seen = len(messages)
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
            # What it was asked before, the policy's turn, and what is new.
            new = asked[0][self._seen + 1 :]
            self._seen = len(asked[0])
            return StepResult(new)
        assert self._rollout is not None
        state = self._rollout.result()
        metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
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

    async def _next(self) -> tuple[list[dict[str, Any]], list[Any]] | None:
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


def _response(action: Action, model: str) -> Any:
    from verifiers.types import Response, ResponseMessage, ToolCall

    calls = [ToolCall(id=call.id, name=call.name, arguments=call.text or "{}") for call in action.tool_calls]
    is_cut = action.finish_reason == "length"
    message = ResponseMessage(
        content=action.content or (None if calls else action.text),
        reasoning_content=action.reasoning,
        tool_calls=calls or None,
        finish_reason="length" if is_cut else "tool_calls" if calls else "stop",
        is_truncated=is_cut,
    )
    return Response(id=f"turn-{action.turn}", created=int(time.time()), model=model, message=message)
