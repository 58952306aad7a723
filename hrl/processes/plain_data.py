"""The plain data that parent and child talk in: JSON, never pickles.

JSON has no tuples, and a scorer may care, so they are tagged; so are integers of more digits than Python reads back,
and dicts that look like a tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

_TUPLE = "__tuple__"
_INTEGER = "__int__"
_DICT = "__dict__"
_TAGS = ({_TUPLE}, {_INTEGER}, {_DICT})
_LARGEST_BITS = 10_000
_DEEPEST = 100


def is_huge(value: Any) -> bool:
    """Return whether a value is an integer that Python may not write in decimal: it does so for up to 4300 digits."""
    return isinstance(value, int) and value.bit_length() > _LARGEST_BITS


def first_misfit(error: ValidationError) -> tuple[str, str]:
    """Return which part of plain data is the first that is not of its kind, as a dotted name, and why."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"]


def first_problem(error: ValidationError) -> str:
    """Return `first_misfit` as a short line."""
    part, why = first_misfit(error)
    return f"{part!r:.80} is not what hrl writes there: {why.removeprefix('Value error, ')}"


def to_plain(value: Any, where: str = "value") -> Any:
    """Return `value` as JSON can hold it: tuples and huge integers tagged, the rest as it is.

    Args:
        value: Numbers, text, lists, tuples, dicts with text keys, numpy scalars and arrays.
        where: Name of the value in errors.

    Raises:
        ValueError: A part has another type or is nested too deep; names the part.
    """
    return _to_plain(value, where, 0)


def _to_plain(value: Any, where: str, depth: int) -> Any:
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return {_INTEGER: hex(value)} if is_huge(value) else value
    if depth >= _DEEPEST:
        raise ValueError(f"{where[:200]}… is nested more than {_DEEPEST} levels deep")
    if isinstance(value, tuple):
        return {_TUPLE: [_to_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_to_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; only text keys can be handed to another process")
        plain = {key: _to_plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
        return {_DICT: plain} if plain.keys() in _TAGS else plain
    if hasattr(value, "tolist") and type(listed := value.tolist()) is not type(value):  # numpy scalars and arrays
        return _to_plain(listed, where, depth + 1)
    raise ValueError(
        f"{where} is a {type(value).__name__}; only numbers, text, lists, tuples and dicts can go to another process"
    )


def from_plain(value: Any) -> Any:
    """Undo `to_plain`."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(from_plain(item) for item in value[_TUPLE])
        if value.keys() == {_INTEGER}:
            return int(value[_INTEGER], 16)
        if value.keys() == {_DICT}:
            value = value[_DICT]
        return {key: from_plain(item) for key, item in value.items()}
    return value
