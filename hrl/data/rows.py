"""Read rows from all kinds of sources and check them one by one.

A row of prompts is a dict with verl's keys: `data_source` (str), `prompt` (a chat, or a string), `reward_model`
(`{"style": …, "ground_truth": …}`) and `extra_info` (a dict); and, for a chat template that shows them, `tools` (JSON
schemas of functions). Rows with answers are described in `hrl.data.offline`. Reading never runs code: sources are
Parquet, JSON and objects of the caller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hrl.data.files import DEEPEST, BadRow, DatasetError, check_data_file, rows_of_file

BUNDLED_PREFIX = "bundled:"
REASONING_GYM_PREFIX = "reasoning_gym:"

Source = str | Iterable[Mapping[str, Any]]
"""A `.parquet` or `.jsonl` path, `bundled:<task>/<split>`, `reasoning_gym:<dataset>?…`, or the rows themselves."""
DataFiles = Source | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """The fields of every checked row.

    Attributes:
        data_source: Chooses the scorer and groups validation metrics.
        origin: File and row, for messages.
    """

    data_source: str = ""
    origin: str = ""


@dataclass(frozen=True, kw_only=True)
class PromptRow(DataRow):
    """One prompt with what its reward function needs.

    Attributes:
        messages: The prompt as a chat; a string prompt is one message of the user. Each has a role, a content, and
            other fields for the chat template, such as `tool_calls`.
        reward_model: `ground_truth` and other values for the reward function; empty if the row has none.
        extra_info: Further values for the reward function.
        tools: Schemas of the functions that the prompt offers; None for none.
    """

    messages: list[dict[str, Any]]
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]
    tools: list[dict[str, Any]] | None = None


R = TypeVar("R", bound=DataRow)


def read_rows(sources: Iterable[Source], check: Callable[[Mapping[str, Any]], R | str]) -> Iterator[R | BadRow]:
    """Yield every row of all sources in order, the unusable ones as `BadRow`.

    Args:
        sources: Sources from `sources_of`.
        check: Turns a raw row into a checked one, or into a sentence about what is wrong with it.

    Raises:
        DatasetError: A whole source can't be read.
    """
    for source in sources:
        for origin, raw in _raw_rows(source):
            if isinstance(raw, BadRow):
                yield raw
                continue
            row = check(raw) if isinstance(raw, Mapping) else f"is a {type(raw).__name__}, expected an object"
            if isinstance(row, str):
                yield BadRow(origin, row)
            else:
                yield replace(row, origin=origin, data_source=row.data_source or _source_name(source))


def sources_of(data_files: DataFiles) -> list[Source]:
    """Return the list of sources; a list of rows is a single source.

    Raises:
        DatasetError: A list mixes names and rows.
    """
    if isinstance(data_files, str):
        return [data_files]
    items: list[Any] = list(data_files)
    names: list[Source] = [item for item in items if isinstance(item, str)]
    if names and len(names) < len(items):
        raise DatasetError("a list of data holds either the names of sources or the rows themselves, not both")
    return names or [items]


def _source_name(source: Source) -> str:
    """Return the data source of rows that don't name one: `bundled/<task>`, the file's name, or `list`."""
    if not isinstance(source, str):
        return "list"
    if source.startswith(BUNDLED_PREFIX):
        return f"bundled/{source.removeprefix(BUNDLED_PREFIX).partition('/')[0]}"
    return Path(source).stem


def _raw_rows(source: Source) -> Iterator[tuple[str, object]]:
    """Yield every row of a source unchanged, with file and row for messages."""
    if not isinstance(source, str):
        return ((f"row {index} of the list", row) for index, row in enumerate(source))
    if source.startswith(BUNDLED_PREFIX):
        from hrl.data.tasks import bundled_rows

        made = bundled_rows(source.removeprefix(BUNDLED_PREFIX))
    elif source.startswith(REASONING_GYM_PREFIX):
        from hrl.data.tasks.reasoning_gym import reasoning_gym_rows

        made = reasoning_gym_rows(source.removeprefix(REASONING_GYM_PREFIX))
    else:
        path = Path(source).expanduser()
        check_data_file(path)
        return rows_of_file(path)
    return ((f"{source} row {index}", row) for index, row in enumerate(made))


def check_prompt(raw: Mapping[str, Any], prompt_key: str, source_key: str) -> PromptRow | str:
    """Check a raw row; return a prompt, or a sentence about what is wrong with the row.

    Args:
        raw: The row.
        prompt_key: Column of the prompt (`data.prompt_key`).
        source_key: Column of the data source (`data.reward_fn_key`).
    """
    messages = as_messages(raw.get(prompt_key), prompt_key)
    if isinstance(messages, str):
        return messages
    if not _is_shallow(messages):
        return f"{prompt_key!r} is nested more than {DEEPEST} levels deep"
    data_source = raw.get(source_key)
    if not isinstance(data_source, str) or not data_source:
        return f"{source_key!r} is {show_value(data_source)}, expected a non-empty string"
    for key, value in ((prompt_key, messages), (source_key, data_source)):
        if not _is_unicode(value):
            return f"{key!r} holds half a character (a lone surrogate, such as \\ud800)"
    plain: dict[str, dict[str, Any]] = {}
    for key in ("reward_model", "extra_info"):
        value = raw.get(key, {})
        if not isinstance(value, Mapping):
            return f"{key!r} is {show_value(value)}, expected an object (leave the key out for none)"
        if not _is_shallow(value):
            return f"{key!r} is nested more than {DEEPEST} levels deep"
        plain[key] = dict(value)
    tools = as_tools(raw.get("tools"))
    if isinstance(tools, str):
        return tools
    return PromptRow(
        data_source=data_source,
        messages=messages,
        reward_model=plain["reward_model"],
        extra_info=plain["extra_info"],
        tools=tools,
    )


def as_messages(prompt: object, key: str, role: str = "user") -> list[dict[str, Any]] | str:
    """Return a chat, or a sentence about what is wrong with it; a string is one message of `role`.

    A content is text, a list of text parts, or null in a message with other content (an assistant's `tool_calls`).
    Messages keep all other fields for the chat template, except nulls: Parquet gives every message every field, and
    templates test whether a field is present.
    """
    if isinstance(prompt, str):
        return [{"role": role, "content": prompt}] if prompt else f"{key!r} is an empty string"
    if not isinstance(prompt, Sequence) or not prompt:
        return f"{key!r} is {show_value(prompt)}, expected a string or a non-empty list of messages"
    messages = []
    for position, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            return f"message {position} of {key!r} is {show_value(message)}, expected an object with role and content"
        if not isinstance(message.get("role"), str):
            return f"'role' of message {position} of {key!r} is {show_value(message.get('role'))}, expected a string"
        fields = {name: value for name, value in message.items() if value is not None and name != "content"}
        content = message.get("content")
        wrong = _wrong_content(content, says_more=len(fields) > 1)
        if wrong is not None:
            return f"'content' of message {position} of {key!r} is {show_value(content)}, {wrong}"
        messages.append({"role": fields.pop("role"), "content": content, **fields})
    return messages


def _wrong_content(content: object, *, says_more: bool) -> str | None:
    """Return what was expected instead of a message's content; None if the content is right."""
    if isinstance(content, str) or (content is None and says_more):
        return None
    if not isinstance(content, Sequence) or not content:
        return "expected a string, a list of text parts, or null beside fields such as tool_calls"
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return 'expected parts {"type": "text", "text": …}: hrl trains on text'
    return None


def as_tools(tools: object) -> list[dict[str, Any]] | str | None:
    """Return tool schemas, given as a list or as JSON text of a list; or a sentence about what is wrong with them."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            return f"'tools' is a string, but not JSON ({error.msg} at column {error.colno})"
    if tools is None or tools == []:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        return f"'tools' is {show_value(tools)}, expected a list of JSON schemas"
    return [dict(tool) for tool in tools]


def _is_unicode(value: object) -> bool:
    """Return whether all text in a value can be encoded as UTF-8, i.e. has no lone surrogates."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in value)
    if isinstance(value, Mapping):
        return all(_is_unicode(item) for item in value.values())
    return not isinstance(value, Sequence) or all(map(_is_unicode, value))


def _is_shallow(value: object) -> bool:
    """Return whether a value is nested at most `DEEPEST` levels deep."""
    level: list[object] = [value]
    for _ in range(DEEPEST):
        inner = (item for item in level if isinstance(item, Mapping | list | tuple))
        level = [part for item in inner for part in (item.values() if isinstance(item, Mapping) else item)]
        if not level:
            return True
    return not any(isinstance(item, Mapping | list | tuple) for item in level)


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's content as readable text: its text, its joined text parts, or its other fields as JSON."""
    content = message["content"]
    if isinstance(content, str):
        return content
    if content is not None:
        return "".join(part["text"] for part in content)
    return json.dumps({name: value for name, value in message.items() if name not in ("role", "content")}, default=str)


def show_value(value: object) -> str:
    """Format a value for an error message, shortened and then with its type."""
    text = repr(value)
    return "missing or null" if value is None else f"{text[:60]}… ({type(value).__name__})" if len(text) > 60 else text
