"""The record of an episode as a conversation: who said what, which tools were called, and what a turn was worth.

Screen, page, trackers and tables of answers show the same lines. What is shown is masked: what an environment says may
hold what it was given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from hrl.masking import masked_text

Record = Mapping[str, Any]


class Line(NamedTuple):
    """What one side said at once.

    Attributes:
        role: `system`, `user`, `assistant`, `tool`, …
        text: What was said, without tool calls where these could be read.
        calls: The tool calls in it, as `name(argument=value)`.
        reasoning: What was thought before, where a parser told it apart.
        turn: Of the policy, counted from 0; None for what is not the policy's.
        reward: Of the turn; None without one.
        tokens: How many tokens of the policy's it has; None for what is not the policy's.
    """

    role: str
    text: str
    calls: tuple[str, ...] = ()
    reasoning: str = ""
    turn: int | None = None
    reward: float | None = None
    tokens: int | None = None


class Run(NamedTuple):
    """Neighbouring tokens of a row that have the same origin.

    Attributes:
        origin: `prompt`, `policy` or `environment`.
        text: Their text, with special tokens.
        tokens: How many there are.
        turn: The policy's turn that they belong to; None in the prompt.
        trained: Whether the policy learns from them.
        version: Of the policy that sampled them; None for others.
    """

    origin: str
    text: str
    tokens: int
    turn: int | None = None
    trained: bool = False
    version: int | None = None


def is_episode(record: Record) -> bool:
    """Return whether a record is that of an episode, and not of one response to a prompt."""
    return "turns" in record


def first_turn(record: Record) -> int:
    """Return where in the conversation of an episode the policy's first turn is; its end where none is in it."""
    places = [turn["message"] for turn in record["turns"] if turn.get("message") is not None]
    return min(places, default=len(record.get("messages") or ()))


def conversation(record: Record, *, with_prompt: bool = True) -> list[Line]:
    """Return the lines of an episode, in order, with secrets masked.

    Args:
        record: Of an episode, see `hrl.report.episode_records`.
        with_prompt: Whether it begins with the messages of the prompt.
    """
    turns, messages, begin = record["turns"], record.get("messages") or [], first_turn(record)
    lines = []
    if with_prompt:
        lines += [_of_message(message) for message in messages[:begin]] or [Line("prompt", str(record["prompt"]))]
    for number, turn in enumerate(turns):
        lines.append(_of_turn(number, turn))
        lines += [_of_message(message) for message in turn.get("observation") or ()]
    return [_masked(line) for line in lines]


def transcript(record: Record) -> str:
    """Return what came after the prompt as plain text, with the role before each line and a turn's reward behind it."""
    return "\n".join(_plain(line) for line in conversation(record, with_prompt=False))


def runs_of(record: Record) -> list[list[Run]]:
    """Return the tokens of every branch of an episode; of a single response, its prompt and its response.

    Texts are masked.
    """
    branches = record.get("branches")
    if branches is None:
        trained = record.get("score") is not None
        tokens = int(record.get("response_length") or 0)
        answer = Run("policy", str(record["response"]), tokens, turn=0, trained=trained)
        branches = [[Run("prompt", str(record["prompt"]), 0)._asdict(), answer._asdict()]]
    return [[_run(fields) for fields in branch] for branch in branches]


def _run(fields: Mapping[str, Any]) -> Run:
    known = {name: fields[name] for name in Run._fields if name in fields}
    return Run(**known)._replace(text=masked_text(str(fields.get("text", ""))))


def _of_turn(number: int, turn: Mapping[str, Any]) -> Line:
    calls = turn.get("tool_calls") or ()
    content = turn.get("content")
    if content is None and not calls:
        said = str(turn["text"])  # nothing of it reached the conversation
    else:
        said = content_text(turn)
    return Line(
        "assistant",
        said,
        tuple(map(call_text, calls)),
        str(turn.get("reasoning") or ""),
        number,
        turn.get("reward"),
        turn.get("tokens"),
    )


def _of_message(message: Mapping[str, Any]) -> Line:
    calls = message.get("tool_calls")
    return Line(
        str(message.get("role", "?")),
        content_text(message),
        tuple(map(call_text, calls)) if isinstance(calls, list | tuple) else (),
    )


def content_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message as text; of parts that are no text, their type, as in `<image>`."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list | tuple):
        return "".join(_part_text(part) for part in content)
    return _as_json(content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        return part["text"] if isinstance(part.get("text"), str) else f"<{part.get('type', '?')}>"
    return _as_json(part)


def call_text(call: Any) -> str:
    """Return a tool call as `name(argument=value)`, whichever of the usual forms it has; else as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return _as_json(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return f"{function.get('name')}({arguments})"
    if isinstance(arguments, Mapping):
        written = ", ".join(f"{name}={_as_json(value)}" for name, value in arguments.items())
    else:
        written = _as_json(function.get("text", "") if arguments is None else arguments)
    return f"{function.get('name')}({written})"


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _masked(line: Line) -> Line:
    text, reasoning = masked_text(line.text), masked_text(line.reasoning)
    return line._replace(text=text, reasoning=reasoning, calls=tuple(map(masked_text, line.calls)))


def _plain(line: Line) -> str:
    thought = [f"(thinks) {line.reasoning}"] if line.reasoning else []
    said = [line.text] if line.text.strip() or not line.calls else []
    reward = "" if line.reward is None else f"  [reward {line.reward:g}]"
    return f"{line.role}: " + "\n".join([*thought, *said, *(f"→ {call}" for call in line.calls)]) + reward
