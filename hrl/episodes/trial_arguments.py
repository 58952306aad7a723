"""Arguments that fit the schema of a tool, for a script that calls it in a trial."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined]  # what a pattern asks for, as `re` itself reads it
from typing import Any

_DEEPEST = 4
"""Parts in parts from which on what may be left out is."""
_MOST_PARTS, _MOST_DEPTH, _MOST_NAMES = 10_000, 40, 20
_KINDS = {
    "object": {"properties", "additionalProperties", "required"},
    "array": {"items", "prefixItems", "minItems"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
"""Kind → keys that tell it where no type does."""
_FORMS = {
    "date": "2024-01-31",
    "time": "12:00:00Z",
    "date-time": "2024-01-31T12:00:00Z",
    "duration": "P1D",
    "uuid": "12345678-1234-4234-8234-123456789012",
    "email": "a@example.org",
    "uri": "https://example.org/",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
}
_LONGEST = 100_000
"""Of texts and lists, which a stranger's schema may ask to be as long as it likes."""


def example(schema: Mapping[str, Any]) -> Any:
    """Return a value that fits a JSON schema, as far as its types, choices and bounds tell.

    Parts that are named (`$ref`) are looked up, and of several forms the first is taken. A text is made for simple
    patterns alone, and conditions between fields are not looked at.
    """
    return _example(schema, _Root(schema), 0)


@dataclass
class _Root:
    """A whole schema, in which parts are looked up, and of how many parts a value may still be made."""

    schema: Mapping[str, Any]
    left: int = _MOST_PARTS


def _example(schema: Any, root: _Root, depth: int) -> Any:
    """Return a value for a part of a schema.

    Args:
        schema: The part.
        root: The whole.
        depth: How many parts it is in; what names itself ends at some depth.
    """
    root.left -= 1
    if root.left < 0 or depth > _MOST_DEPTH:  # it names itself for ever
        return {}
    schema = _looked_up(schema, root)
    for name in ("default", "const"):
        if name in schema:
            return schema[name]
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("allOf"):
        parts = [_looked_up(part, root) for part in schema["allOf"]]
        return _example(_joined([{key: schema[key] for key in schema if key != "allOf"}, *parts]), root, depth + 1)
    for several in ("anyOf", "oneOf"):
        if schema.get(several):
            forms = schema[several]
            # What names itself ends at the form without parts.
            plain = [form for form in forms if _looked_up(form, root).get("type") in ("null", "string", "integer")]
            return _example((plain if depth > _DEEPEST and plain else forms)[0], root, depth + 1)
    kind = schema.get("type", next((kind for kind, keys in _KINDS.items() if keys & schema.keys()), "string"))
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return _object(schema, root, depth)
    if kind == "array":
        return _array(schema, root, depth)
    if kind in ("integer", "number"):
        return _number(schema, is_whole=kind == "integer")
    return {"boolean": True, "null": None}.get(kind) if kind != "string" else _string(schema)


def _looked_up(schema: Any, root: _Root) -> Mapping[str, Any]:
    """Return a part of a schema, or what it names, with what stands beside the name."""
    for _ in range(_MOST_NAMES):
        if not isinstance(schema, Mapping):
            return {}  # `true`: anything
        if "$ref" not in schema:
            return schema
        found: Any = root.schema
        for part in str(schema["$ref"]).lstrip("#/").split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name, {}) if isinstance(found, Mapping) else {}
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**found, **beside} if isinstance(found, Mapping) else beside
    return {}


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a schema that asks for all that several do."""
    joined: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key == "properties":
                joined[key] = {**joined.get(key, {}), **value}
            elif key == "required":
                joined[key] = [*joined.get(key, []), *value]
            else:
                joined[key] = value
    return joined


def _object(schema: Mapping[str, Any], root: _Root, depth: int) -> dict[str, Any]:
    fields = schema.get("properties") or {}
    needed = [name for name in schema.get("required", fields) if name in fields]
    if depth > _DEEPEST:
        needed = [name for name in needed if name in schema.get("required", ())]
    found = {name: _example(fields[name], root, depth + 1) for name in needed}
    others = schema.get("additionalProperties", {})
    for number in range(len(found), min(schema.get("minProperties", 0), _LONGEST)):
        found[f"key{number}"] = _example(others, root, depth + 1)
    return found


def _array(schema: Mapping[str, Any], root: _Root, depth: int) -> list[Any]:
    least, most = min(schema.get("minItems", 0), _LONGEST), schema.get("maxItems", math.inf)
    first = [_example(item, root, depth + 1) for item in schema.get("prefixItems", ())]
    if "items" in schema or least > len(first):
        wanted = max(least, 1 if not first and depth <= _DEEPEST else 0)
        others = [_example(schema.get("items", {}), root, depth + 1) for _ in range(wanted - len(first))]
        if schema.get("uniqueItems"):
            others = _unlike(others, _looked_up(schema.get("items", {}), root))
        first += others
    return first[: int(most)] if most < len(first) else first


def _unlike(values: list[Any], schema: Mapping[str, Any]) -> list[Any]:
    """Return values that differ, where numbers, texts and choices can."""
    if schema.get("enum"):
        return list(schema["enum"][: len(values)])
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        step = schema.get("multipleOf", 1)
        return [value + number * step for number, value in enumerate(values)]
    return [f"{value}{number}" if isinstance(value, str) and number else value for number, value in enumerate(values)]


def _number(schema: Mapping[str, Any], *, is_whole: bool) -> float:
    """Return a number within its bounds, 2 where they allow it."""
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    step = schema.get("multipleOf", 1 if is_whole else None)
    if is_whole and step is not None and step % 1:
        step = 1

    def fits(value: float) -> bool:
        return low <= value <= high and above < value < below

    least = max(low, above) if max(low, above) > -math.inf else None
    most = min(high, below) if min(high, below) < math.inf else None
    near: list[float] = [2, *(bound for bound in (least, most) if bound is not None)]
    if step is not None:  # the multiples around each
        near = [math.floor(value / step) * step + more * step for value in near for more in (0, 1, -1)]
    elif least is not None and most is not None:
        near.append((least + most) / 2)
    else:
        near += [value + more for value in near for more in (1, -1)]
    found = next(filter(fits, near), 2)
    return int(found) if is_whole else found


def _string(schema: Mapping[str, Any]) -> str:
    """Return a text of its form and length; of its pattern where that is simple."""
    least, most = min(schema.get("minLength", 0), _LONGEST), schema.get("maxLength")
    found = _FORMS.get(str(schema.get("format")), "text")
    found = found + "t" * (least - len(found))
    found = found if most is None else found[:most]
    if not isinstance(pattern := schema.get("pattern"), str):
        return found
    with contextlib.suppress(re.error, RecursionError, OverflowError):  # its dialect is that of JavaScript
        if re.search(pattern, found) is None:
            made = _text_of(_parser.parse(pattern), max(0, least))
            return made if most is None else made[:most]
    return found


def _text_of(pattern: Any, least: int) -> str:
    """Return a text for a pattern; what repeats does so as often as it must, the first of it `least` times."""
    made = ""
    for operator, argument in pattern:
        kind = str(operator)
        if kind == "LITERAL":
            made += chr(argument)
        elif kind == "IN":
            made += _letter_of(argument)
        elif kind in ("ANY", "NOT_LITERAL"):
            made += "t" if argument != ord("t") else "a"
        elif kind == "SUBPATTERN":
            made += _text_of(argument[-1], least)
        elif kind == "BRANCH":
            made += _text_of(argument[1][0], least)
        elif kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            low, high, part = argument
            times = min(max(low, least), int(high), _LONGEST)
            made += _text_of(part, 0) * times
            least = max(0, least - times)
    return made


def _letter_of(choices: Any) -> str:
    """Return a letter of a class such as `[a-z0-9]`."""
    kind, argument = str(choices[0][0]), choices[0][1]
    if kind == "NEGATE":
        inside = "".join(_letter_of([choice]) for choice in choices[1:])
        return next(letter for letter in "ta0 -" if letter not in inside)
    if kind == "RANGE":
        return chr(argument[0])
    if kind == "CATEGORY":
        return {"CATEGORY_DIGIT": "0", "CATEGORY_SPACE": " "}.get(str(argument), "a")
    return chr(argument)
