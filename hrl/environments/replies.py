"""What environments give, checked and made plain; the same checks hold in their processes and in those that ask them.

All that comes from here is what JSON can hold, without lone surrogates, and of bounded size and depth.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from hrl.environments.interface import Action, EnvironmentReplyError, Observation, StepResult, ToolCall
from hrl.text import clean_text, without_middle

MOST_CHARACTERS = 4 << 20
"""Of all texts of a reply together, with one for each other value."""
_DEEPEST = 50
_MOST_METRICS, _LONGEST_NAME = 200, 200
GYMNASIUM = (
    "that is gymnasium's interface, and its environments are played with environment.path=gymnasium "
    "(hrl.environments.gymnasium)"
)
"""What is said of a class that was written for gymnasium."""
_LARGEST_BITS = 10_000
_LARGEST_TOKEN = 2**31
_LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
_SHOWN = 80


def read_observation(value: object, longest_text: int | None = None) -> Observation:
    """Read what `reset` returned, or the observation of a step.

    Args:
        value: An `Observation`, messages, or a text, which becomes the user's message.
        longest_text: Characters of a message's text beyond which it loses its middle; None keeps all.

    Raises:
        EnvironmentReplyError: It is nothing of the kind; the text begins with a verb.
    """
    if isinstance(value, str):
        value = Observation(messages=[{"role": "user", "content": value}])
    elif not isinstance(value, Observation):
        if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
            raise EnvironmentReplyError(
                f"returned {_short(value)}, where an observation is expected: messages, a text, or "
                f"hrl.Observation(…){_meant(value)}"
            )
        if _is_of_gymnasium(value):
            raise EnvironmentReplyError(
                f"returned a tuple of an observation and a dict, where the observation alone is expected; {GYMNASIUM}"
            )
        value = Observation(messages=value)
    if (value.messages is None) == (value.token_ids is None):
        which = "neither messages nor" if value.messages is None else "both messages and"
        raise EnvironmentReplyError(f"returned an observation with {which} token_ids: give one of the two")
    left = _Budget()
    tools = None if value.tools is None else [_tool(tool, left) for tool in _sequence(value.tools, "tools")]
    if value.messages is None:
        return Observation(token_ids=_token_ids(value.token_ids, left), tools=tools)
    messages = [
        _message(message, number, left, longest_text)
        for number, message in enumerate(_sequence(value.messages, "messages"))
    ]
    return Observation(messages=messages, tools=tools, is_agent=_flag(value.is_agent, "is_agent"))


def read_step(value: object, longest_text: int | None = None, num_tokens: int | None = None) -> StepResult:
    """Read what `step` returned.

    Args:
        value: A `StepResult`.
        longest_text: As in `read_observation`.
        num_tokens: How many tokens the turn has, each of which may have a reward; None looks at no number.

    Returns:
        The result; its observation is an `Observation`, or None where the episode is over, and rewards of tokens are a
        tuple.

    Raises:
        EnvironmentReplyError: It is nothing of the kind; the text begins with a verb.
    """
    if not isinstance(value, StepResult):
        raise EnvironmentReplyError(
            f"returned {_short(value)}, where hrl.StepResult(observation=…, reward=…, done=…) is "
            f"expected{_meant(value)}"
        )
    truncated = _flag(value.truncated, "truncated")
    done = _flag(value.done, "done") or truncated
    if value.observation is None and not done:
        raise EnvironmentReplyError("returned no observation although the episode is not done")
    observation = None if value.observation is None else read_observation(value.observation, longest_text)
    if observation is not None and not done and not (observation.messages or observation.token_ids):
        raise EnvironmentReplyError("returned an empty observation although the episode is not done")
    reward = None if value.reward is None else _reward(value.reward, num_tokens)
    return StepResult(observation, reward, done, truncated, _metrics(value.metrics))


class _Budget:
    """How much a reply may still hold."""

    def __init__(self) -> None:
        self._left = MOST_CHARACTERS

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise EnvironmentReplyError(f"returned more than {MOST_CHARACTERS:,} characters: cut what is longer")


def _sequence(value: object, what: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise EnvironmentReplyError(f"returned {_short(value)} as {what}, where a list is expected")
    return value


def _message(value: object, number: int, left: _Budget, longest_text: int | None) -> dict[str, Any]:
    where = f"message {number}"
    if not isinstance(value, Mapping):
        raise EnvironmentReplyError(
            f"returned {_short(value)} as {where}, where a dict with role and content is expected"
        )
    role = value.get("role")
    if not isinstance(role, str) or not role:
        raise EnvironmentReplyError(f"returned {where} without a role: {_short(value)}")
    content = value.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        raise EnvironmentReplyError(
            f"returned {where} with {_short(content)} as its content, where a text is expected: str(…) makes one"
        )
    if longest_text is not None:
        if isinstance(content, str):
            content = without_middle(content, longest_text)
        elif content is not None:
            content = [_without_middle_of_part(part, longest_text) for part in content]
        value = {**value, "content": content} if "content" in value else value
    plain: dict[str, Any] = _plain(value, where, left, 0)
    return plain


def _without_middle_of_part(part: object, longest: int) -> object:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": without_middle(part["text"], longest)}
    return part


def _tool(value: object, left: _Budget) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("function"), Mapping):
        raise EnvironmentReplyError(
            f'returned {_short(value)} as a tool, where {{"type": "function", "function": {{…}}}} is expected'
        )
    plain: dict[str, Any] = _plain(value, "a tool", left, 0)
    return plain


def _token_ids(value: object, left: _Budget) -> tuple[int, ...]:
    listed = value.tolist() if hasattr(value, "tolist") else value
    found = _sequence(listed, "token_ids")
    left.take(len(found))
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < _LARGEST_TOKEN:
            raise EnvironmentReplyError(f"returned {_short(one)} in token_ids, where numbers of tokens are expected")
    return tuple(found)


def _plain(value: object, where: str, left: _Budget, depth: int) -> Any:
    if isinstance(value, str):
        left.take(len(value) + 1)
        return clean_text(str(value))
    left.take(1)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > _LARGEST_BITS:
            raise EnvironmentReplyError(f"returned a number of {value.bit_length():,} bits in {where}")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth >= _DEEPEST:
        raise EnvironmentReplyError(f"returned {where} nested more than {_DEEPEST} levels deep, or in itself")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise EnvironmentReplyError(f"returned {_short(key)} as a key in {where}, where a text is expected")
            left.take(len(key))
        return {clean_text(key): _plain(item, where, left, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, left, depth + 1) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        left.take(getattr(value, "size", 1))
        listed = value.tolist()
        if type(listed) is not type(value):
            return _plain(listed, where, left, depth + 1)
    raise EnvironmentReplyError(
        f"returned {_short(value)} in {where}, which is no plain data: texts, numbers, lists and dicts are"
    )


def _reward(value: object, num_tokens: int | None) -> float | tuple[float, ...]:
    """Return the reward of a turn, or those of its tokens."""
    listed = value.tolist() if getattr(value, "shape", ()) else value  # type: ignore[attr-defined]
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes | bytearray):
        return _finite(listed, "the reward")
    if num_tokens is not None and len(listed) != num_tokens:
        raise EnvironmentReplyError(
            f"returned {len(listed):,} rewards for a turn of {num_tokens:,} tokens, where a number for the turn is "
            "expected, or one for each of action.token_ids"
        )
    rewards = tuple(_finite(reward, f"the reward of token {place}") for place, reward in enumerate(listed))
    _finite(math.fsum(rewards), "the sum of the tokens' rewards")
    return rewards


def _metrics(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise EnvironmentReplyError(f"returned {_short(value)} as metrics, where a dict of numbers is expected")
    if len(value) > _MOST_METRICS:
        raise EnvironmentReplyError(f"returned {len(value):,} metrics; at most {_MOST_METRICS} are kept track of")
    found = {}
    for name, number in value.items():
        if not isinstance(name, str) or len(name) > _LONGEST_NAME or not name.isprintable() or not name.strip():
            raise EnvironmentReplyError(
                f"returned {_short(name)} as the name of a metric, which is printable and has at most "
                f"{_LONGEST_NAME} characters"
            )
        found[str(name)] = _finite(number, f"metric {name}")
    return found


def _is_of_gymnasium(value: object) -> bool:
    """Return whether a value is an observation with a dict of further facts, and not two messages."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    observation, facts = value
    return not isinstance(observation, Mapping) and isinstance(facts, Mapping) and "role" not in facts


def _meant(value: object) -> str:
    """Return what was probably meant by a reply that is none, after its message."""
    if value is None:
        return "; is a `return` missing?"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "; write `return` in place of `yield`"
    if isinstance(value, bytes):
        return "; .decode() makes a text of it"
    if isinstance(value, Real):
        return "; str(…) makes a text of it"
    if isinstance(value, tuple) and len(value) in (4, 5):
        return f"; {GYMNASIUM}"
    return ""


def _flag(value: object, name: str) -> bool:
    if getattr(value, "shape", None) == ():
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, bool):
        raise EnvironmentReplyError(f"returned {_short(value)} as {name}, where True or False is expected")
    return value


def _finite(value: object, what: str) -> float:
    if getattr(value, "shape", None) == ():  # a scalar of numpy or torch
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real):
        raise EnvironmentReplyError(f"returned {_short(value)} as {what}, where a number is expected")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST_FLOAT32:  # also true for NaN
        raise EnvironmentReplyError(f"returned {number} as {what}, which is not finite in float32")
    return number


def _short(value: object) -> str:
    """Return what a value is, for a message; never its whole text, which may be long, and may fail."""
    if isinstance(value, str | bytes):
        return ascii(value[:_SHOWN]) + ("…" if len(value) > _SHOWN else "")
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int) and value.bit_length() < 64:
        return repr(value)
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


# ---------------------------------------------------------------------- between processes


def observation_to_plain(observation: Observation) -> dict[str, Any]:
    """Return a checked observation as JSON can hold it."""
    parts = {"messages": observation.messages, "token_ids": observation.token_ids, "tools": observation.tools}
    plain = {name: part for name, part in parts.items() if part is not None}
    return plain | ({"is_agent": True} if observation.is_agent else {})


def observation_from_plain(plain: object) -> Observation:
    """Undo `observation_to_plain`.

    Raises:
        EnvironmentReplyError: It is no observation.
    """
    return read_observation(Observation(**_fields(plain, ("messages", "token_ids", "tools", "is_agent"))))


def step_to_plain(result: StepResult) -> dict[str, Any]:
    """Return a checked result as JSON can hold it."""
    observation = result.observation
    return {
        "observation": observation_to_plain(observation) if isinstance(observation, Observation) else None,
        "reward": result.reward,
        "done": result.done,
        "truncated": result.truncated,
        "metrics": dict(result.metrics),
    }


def step_from_plain(plain: object, num_tokens: int | None = None) -> StepResult:
    """Undo `step_to_plain`.

    Args:
        plain: What it returned.
        num_tokens: As in `read_step`.

    Raises:
        EnvironmentReplyError: It is no result.
    """
    fields = _fields(plain, ("observation", "reward", "done", "truncated", "metrics"))
    if fields.get("observation") is not None:
        fields["observation"] = observation_from_plain(fields["observation"])
    return read_step(StepResult(**fields), num_tokens=num_tokens)


def action_to_plain(action: Action) -> dict[str, Any]:
    """Return an action as JSON can hold it."""
    return {**vars(action), "tool_calls": [vars(call) for call in action.tool_calls]}


def action_from_plain(plain: Mapping[str, Any]) -> Action:
    """Undo `action_to_plain`."""
    calls = tuple(ToolCall(**call) for call in plain["tool_calls"])
    return Action(**{**plain, "token_ids": tuple(plain["token_ids"]), "tool_calls": calls})


def _fields(plain: object, names: Iterable[str]) -> dict[str, Any]:
    if not isinstance(plain, dict) or not plain.keys() <= set(names):
        raise EnvironmentReplyError(f"returned {_short(plain)}, which is no reply of an environment's process")
    return dict(plain)
