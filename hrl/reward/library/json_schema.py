"""Structured output: a response that is JSON of a given form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from hrl.files import expanded
from hrl.reward.library.base import ArgumentError, readable
from hrl.reward.scorers.final_answer import after_thinking

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
_LONGEST_TEXT = 100_000


class JsonSchema:
    """Pays 1 for a response that is one JSON value which a JSON Schema accepts.

    The value is the whole response after any `<think>…</think>`, or the content of its only code fence. Two values, or
    a value among words, pay nothing, and neither does a name that is given twice. A schema that accepts `{}` pays for
    it: name what is `required`.

    Args:
        schema: The schema (any draft; 2020-12 unless `$schema` says otherwise), or the path of its file. References
            to other files and addresses are not followed.
        fenced: Whether a code fence with words around it is accepted.
    """

    def __init__(self, schema: Mapping[str, Any] | str, fenced: bool = True) -> None:
        import jsonschema
        from referencing import Registry

        if isinstance(schema, str):
            file = expanded(schema)
            try:
                schema = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ArgumentError(f"schema file {file} can't be read: {error}") from error
        if not isinstance(schema, Mapping):
            raise ArgumentError(
                f"schema is a {type(schema).__name__}, must be a mapping or the path of a file with one"
            )
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        try:
            validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ArgumentError(f"schema is not a JSON Schema: {error.message} (at {error.json_path})") from error
        self._validator = validator(schema, registry=Registry())  # an empty one fetches nothing
        self._fenced = fenced

    def __call__(self, response: str, blames_response: Callable[[bool], None] = lambda is_to_blame: None) -> float:
        """Return 1 or 0.

        Raises:
            ArgumentError: The schema refers to something outside of itself.
        """
        from referencing.exceptions import Unresolvable

        text = readable(after_thinking(response)).strip()
        fences = _FENCED.findall(text) if self._fenced else []
        if len(fences) > 1 or len(text) > _LONGEST_TEXT:
            return 0.0
        blames_response(True)  # a `pattern` of the schema may take for ever on some texts
        try:
            value = json.loads(
                fences[0] if fences else text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_once
            )
            return float(self._validator.is_valid(value))
        except (ValueError, RecursionError):  # no JSON, a number of too many digits, or nested too deep
            return 0.0
        except Unresolvable as error:
            raise ArgumentError(f"schema refers to {error}, which is not in it") from error
        finally:
            blames_response(False)


def _finite(text: str) -> float:
    """Refuse numbers that are too large for Python, which reads `1e999` as infinity."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that is given twice: readers of JSON differ in which of the values they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _no_constant(name: str) -> None:
    """Refuse `NaN` and `Infinity`, which Python reads and JSON doesn't have."""
    raise ValueError(f"{name} is not JSON")
