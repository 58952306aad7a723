"""What an environment is, and what goes between it and the policy.

An environment is a class of the user's; each episode has an instance of its own, which lives in a process for
environments. Nothing here imports torch, transformers or Ray.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hrl.errors import HrlError

Message = Mapping[str, Any]
"""A message as chat templates know it: `role`, `content`, and what else the template reads."""


class EnvironmentReplyError(HrlError, ValueError):
    """An environment gave something that is no observation or result; says what, and what was expected."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as the engine's parser read it from what the policy wrote.

    Attributes:
        name: Of the tool.
        arguments: By name; None if the policy wrote something else than a JSON object, which `text` has.
        id: Of the call, as the answer's `tool_call_id` repeats it.
        text: The arguments as they were written.
    """

    name: str
    arguments: Mapping[str, Any] | None
    id: str = ""
    text: str = ""


@dataclass(frozen=True)
class Action:
    """What the policy did in one turn.

    Attributes:
        text: All that it wrote, without special tokens.
        token_ids: All that it sampled, with the token that ended the turn.
        content: The text without tool calls and without reasoning.
        reasoning: Its reasoning, where a reasoning parser is configured; None without one.
        tool_calls: The calls in it, in order.
        finish_reason: `stop`, or `length` if the turn was cut off at its token limit.
        turn: Counted from 0.
        error: What of a tool call could not be read, where one was begun; the turn then has no calls.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: Literal["stop", "length"] = "stop"
    turn: int = 0
    error: str | None = None

    @property
    def answer(self) -> str:
        """What the policy said to whoever it talks to: `content`, and of an action that was not parsed, its `text`.

        Empty where the turn is reasoning alone, as one is that was cut off within it.
        """
        is_parsed = bool(self.content or self.tool_calls) or self.reasoning is not None
        return self.content if is_parsed else self.text


@dataclass(frozen=True)
class Observation:
    """What the policy is shown next. Exactly one of `messages` and `token_ids` is given.

    Attributes:
        messages: What the chat template renders: in `reset` the whole prompt, later what comes after the policy's turn.
        token_ids: Tokens in place of messages, taken as they are.
        tools: Schemas of the tools that the policy may call (`{"type": "function", "function": {…}}`). Only in `reset`.
        is_agent: The environment asks the policy itself; see `hrl.environments.agent`. Only in `reset`.
    """

    messages: Sequence[Message] | None = None
    token_ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    is_agent: bool = False


@dataclass(frozen=True)
class StepResult:
    """What became of an action.

    Attributes:
        observation: What the policy is shown next: an `Observation`, a list of messages, or a text, which becomes the
            user's message. None where the episode is over.
        reward: Of this turn, or of each of its tokens: a number for each of `action.token_ids`. None in all turns
            leaves the reward to the run's reward functions.
        done: Whether the episode is over.
        truncated: Whether it is over because a limit of the environment's own was reached, and not by its nature.
        metrics: Numbers to report; the last value of an episode counts.
    """

    observation: Observation | Sequence[Message] | str | None = None
    reward: float | Sequence[float] | None = None
    done: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(ABC):
    """The world of one episode.

    `reset`, `step` and `close` may also be `async def`. A class that has the three methods need not inherit from this
    one. Plain methods run on threads: what episodes of a process share, such as the state of the module `random`, is
    not repeatable. An environment that draws takes its own generator from `seed`. All samples of a prompt have the same
    one, since their rewards are compared; a `reset` with an argument `sample_seed` is given that of the sample, too.

    Args of the constructor are `environment.kwargs`.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation | Sequence[Message] | str:
        """Begin the episode; by default with the row's prompt.

        Args:
            row: The row of the data set, as it was read, with `prompt` as messages.
            seed: The same for the same run, step and prompt; in a validation for the same run and row, at any step. A
                method that does not name it is not given it.
        """
        prompt: Sequence[Message] = row["prompt"]
        return prompt

    @abstractmethod
    def step(self, action: Action) -> StepResult:
        """Take the policy's turn."""

    def close(self) -> None:
        """Let go of what the episode held; called once, however it ended."""
