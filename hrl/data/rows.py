"""Rows of a data set, from wherever they come, checked one by one.

A row is a dict with verl's keys: `data_source` (str), `prompt` (a chat, or a string), `reward_model`
(`{"style": …, "ground_truth": …}`) and `extra_info` (a dict); and, for a chat template that shows them, `tools` (JSON
schemas of functions). Reading executes nothing: Parquet and JSON only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrl.data.files import PARQUET, DatasetError, check_data_file

BUNDLED_PREFIX = "bundled:"
REASONING_GYM_PREFIX = "reasoning_gym:"
_PARQUET_ROWS_AT_ONCE = 1024
_DEEPEST = 100
"""Levels that rows may be nested: deeper ones cannot be sent to another process (`hrl.processes.plain_data`)."""


@dataclass(frozen=True)
class RowKeys:
    """What the two columns with configurable names are called (`data.prompt_key`, `data.reward_fn_key`)."""

    prompt: str = "prompt"
    data_source: str = "data_source"


@dataclass(frozen=True)
class Row:
    """One checked row.

    Attributes:
        messages: The prompt as a chat; a string prompt is one message of the user. Each has a role, a content, and
            whatever else of it the chat template may read, such as `tool_calls`.
        data_source: Names the scorer and groups validation metrics.
        reward_model: `ground_truth` and whatever else the reward function wants; empty if the row has none.
        extra_info: Free for the reward function.
        origin: File and row, for messages.
        tools: Schemas of the functions that the prompt offers; None for none.
    """

    messages: list[dict[str, Any]]
    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]
    origin: str
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used, and why."""

    origin: str
    reason: str


def read_rows(source: str | Sequence[Mapping[str, Any]], keys: RowKeys) -> Iterator[Row | BadRow]:
    """Yield every row of `source` in its order, the unusable ones as `BadRow`.

    Args:
        source: A `.parquet` or `.jsonl` path, `bundled:<task>/<split>`, `reasoning_gym:<dataset>?…`, or the rows
            themselves.
        keys: The names of the configurable columns.

    Raises:
        DatasetError: The source as a whole can't be read.
    """
    for origin, raw in raw_rows(source):
        yield raw if isinstance(raw, BadRow) else check_row(raw, keys, origin)


def check_row(raw: object, keys: RowKeys, origin: str) -> Row | BadRow:
    """Turn a raw row into a `Row`, or says what is wrong with it."""
    if not isinstance(raw, Mapping):
        return BadRow(origin, f"is a {type(raw).__name__}, expected an object with the key {keys.prompt!r}")
    messages = as_messages(raw.get(keys.prompt), keys.prompt)
    if isinstance(messages, str):
        return BadRow(origin, messages)
    if not _is_shallow(messages):
        return BadRow(origin, f"{keys.prompt!r} is nested more than {_DEEPEST} levels deep")
    if not _is_unicode(messages):
        return BadRow(origin, f"{keys.prompt!r} holds half a character (a lone surrogate, such as \\ud800)")
    data_source = raw.get(keys.data_source)
    if not isinstance(data_source, str) or not data_source:
        return BadRow(origin, f"{keys.data_source!r} is {show_value(data_source)}, expected a non-empty string")
    if not _is_unicode(data_source):
        return BadRow(origin, f"{keys.data_source!r} holds half a character (a lone surrogate, such as \\ud800)")
    plain: dict[str, dict[str, Any]] = {}
    for key in ("reward_model", "extra_info"):
        value = raw.get(key, {})
        if not isinstance(value, Mapping):
            return BadRow(origin, f"{key!r} is {show_value(value)}, expected an object (leave the key out for none)")
        if not _is_shallow(value):
            return BadRow(origin, f"{key!r} is nested more than {_DEEPEST} levels deep")
        plain[key] = dict(value)
    tools = as_tools(raw.get("tools"))
    if isinstance(tools, str):
        return BadRow(origin, tools)
    return Row(messages, data_source, plain["reward_model"], plain["extra_info"], origin, tools)


def as_messages(prompt: object, key: str, role: str = "user") -> list[dict[str, Any]] | str:
    """Return a chat, or a sentence about what is wrong with it; a string is one message of `role`.

    Messages keep every field, since only the chat template knows which of them it shows. A content is text, a list of
    parts of text, or null where the message says something else (an assistant's `tool_calls`). Other fields that are
    null are left out: Parquet gives every message every field, and templates ask whether a field is there.
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
    """Return what a message's content should have been; None if it is right."""
    if isinstance(content, str) or (content is None and says_more):
        return None
    if not isinstance(content, Sequence) or not content:
        return "expected a string, a list of text parts, or null beside fields such as tool_calls"
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return 'expected parts {"type": "text", "text": …}: hrl trains on text'
    return None


def as_tools(tools: object) -> list[dict[str, Any]] | str | None:
    """Schemas of functions, given as a list or as a list in JSON; or a sentence about what is wrong with them."""
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
    """Return whether all text in messages can be written as UTF-8, without half of a character (a lone surrogate)."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in value)
    if isinstance(value, Mapping):
        return all(_is_unicode(item) for item in value.values())
    return not isinstance(value, Sequence) or all(map(_is_unicode, value))


def _is_shallow(value: object) -> bool:
    """Return whether lists and objects in it go no deeper than `_DEEPEST`."""
    level: list[object] = [value]
    for _ in range(_DEEPEST):
        inner = (item for item in level if isinstance(item, Mapping | list | tuple))
        level = [part for item in inner for part in (item.values() if isinstance(item, Mapping) else item)]
        if not level:
            return True
    return not any(isinstance(item, Mapping | list | tuple) for item in level)


def text_of(message: Mapping[str, Any]) -> str:
    """Return what a message says, for people: its text, its text parts joined, or its other fields as JSON."""
    content = message["content"]
    if isinstance(content, str):
        return content
    if content is not None:
        return "".join(part["text"] for part in content)
    return json.dumps({name: value for name, value in message.items() if name not in ("role", "content")}, default=str)


def show_value(value: object) -> str:
    """Return a value in a message: short, and with its type where it was cut."""
    text = repr(value)
    return "missing or null" if value is None else f"{text[:60]}… ({type(value).__name__})" if len(text) > 60 else text


def source_name(source: str | Sequence[Mapping[str, Any]]) -> str:
    """Return what rows of a source are called that do not say themselves.

    `bundled/<task>`, the file's name, or `list`.
    """
    if not isinstance(source, str):
        return "list"
    if source.startswith(BUNDLED_PREFIX):
        return f"bundled/{source.removeprefix(BUNDLED_PREFIX).partition('/')[0]}"
    return Path(source).stem


def raw_rows(source: str | Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, object]]:
    """Every row of a source as it stands there, with file and row for messages; see `read_rows`.

    Raises:
        DatasetError: The source as a whole can't be read.
    """
    if not isinstance(source, str):
        return ((f"row {index} of the list", row) for index, row in enumerate(source))
    if source.startswith(BUNDLED_PREFIX):
        from hrl.data.tasks import bundled_rows

        return _named(source, bundled_rows(source.removeprefix(BUNDLED_PREFIX)))
    if source.startswith(REASONING_GYM_PREFIX):
        from hrl.data.tasks.reasoning_gym import reasoning_gym_rows

        return _named(source, reasoning_gym_rows(source.removeprefix(REASONING_GYM_PREFIX)))
    path = Path(source).expanduser()
    check_data_file(path)
    return _parquet_rows(path) if path.suffix in PARQUET else _jsonl_rows(path)


def _named(source: str, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[str, object]]:
    return ((f"{source} row {index}", row) for index, row in enumerate(rows))


def _jsonl_rows(path: Path) -> Iterator[tuple[str, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            origin = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                # Programs on Windows often begin a file with a byte order mark.
                yield origin, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                yield origin, BadRow(origin, f"is not UTF-8 (byte {error.start} of the line)")
            except json.JSONDecodeError as error:
                yield origin, BadRow(origin, f"is not JSON ({error.msg} at column {error.colno})")
            except ValueError:
                yield origin, BadRow(origin, "holds an integer of thousands of digits; write it as a string")
            except RecursionError:
                yield origin, BadRow(origin, f"is nested more than {_DEEPEST} levels deep")


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"data file {path} is not a readable Parquet file: {error}") from error
    number = 0
    with file:
        batches = file.iter_batches(batch_size=_PARQUET_ROWS_AT_ONCE)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise DatasetError(f"data file {path} is damaged behind row {number}: {error}") from error
            if batch is None:
                return
            for offset in range(batch.num_rows):
                origin = f"{path} row {number}"
                number += 1
                try:
                    row = batch.slice(offset, 1).to_pylist()[0]
                    yield origin, {name: _without_missing(v) if isinstance(v, list) else v for name, v in row.items()}
                except UnicodeDecodeError as error:
                    yield origin, BadRow(origin, f"holds text that is not UTF-8 ({error.reason})")


def _without_missing(value: Any) -> Any:
    """Return what was written.

    Parquet gives every struct in a list the fields of all of them, null where one has none.
    """
    if isinstance(value, list):
        return [_without_missing(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_missing(item) for name, item in value.items() if item is not None}
    return value
