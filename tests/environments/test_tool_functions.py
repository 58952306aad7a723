"""A function's types and docstring become the schema that the policy sees, and its arguments the function's types."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import jsonschema
import pytest
from pydantic import Field

from hrl.environments.tool_functions import (
    ArgumentsMisfitError,
    ToolSignatureError,
    mark_of,
    read_docstring,
    tool,
    tool_of,
)
from tests.environments.tool_files import Colour, Point, Size, paint


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def test_a_schema_has_names_types_descriptions_and_defaults():
    assert tool_of(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second.", "default": 1},
                },
                "required": ["a"],
            },
        },
    }


def test_a_function_without_parameters_has_an_empty_object():
    def now() -> str:
        return "now"

    assert tool_of(now).schema["function"]["parameters"] == {"type": "object", "properties": {}}
    assert tool_of(now).schema["function"]["description"] == ""


def test_enums_literals_dataclasses_models_and_optionals_are_in_the_schema_and_come_as_themselves():
    made = tool_of(paint)
    parameters = made.schema["function"]["parameters"]
    jsonschema.Draft202012Validator.check_schema(parameters)
    properties = parameters["properties"]
    assert parameters["required"] == ["point", "colour"]
    assert made.schema["function"]["description"] == "Paint a point.\n\nIt stays painted."
    assert properties["point"]["description"] == "Where to paint."
    assert properties["colour"]["description"] == "With which colour."
    assert properties["mode"] == {"enum": ["fast", "fine"], "type": "string", "default": "fast"}
    assert properties["title"] == {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    assert parameters["$defs"]["Colour"] == {"enum": ["red", "blue"], "type": "string"}
    given = {"point": {"x": "3"}, "colour": "blue", "size": {"width": 2, "unit": "m"}, "copy": 2}
    jsonschema.validate({**given, "point": {"x": 3}}, parameters)
    read = made.read(given)
    assert read == {"point": Point(3, 0), "colour": Colour.BLUE, "size": Size(width=2, unit="m"), "copy": 2}
    assert made.function(**read).startswith("Point 3,0 Colour.BLUE width=2.0 unit='m' fast 2 None")


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({}, "a: Field required"),
        ({"a": "x"}, "a: Input should be a valid integer"),
        ({"a": 1, "c": 2}, "c: Extra inputs are not permitted"),
        ({"a": None, "b": []}, "a: Input should be a valid integer.*; b: Input should be a valid integer"),
        ({"a": 1, "argument_1": 2}, "argument_1: Extra inputs are not permitted"),
    ],
)
def test_arguments_that_do_not_fit_are_told_by_their_names(arguments, told):
    with pytest.raises(ArgumentsMisfitError, match=told):
        tool_of(add).read(arguments)


def test_a_mark_gives_another_name_and_deadline():
    @tool(name="plus", timeout_s=3)
    def other(a: int) -> int:
        return a

    @tool
    def plain(a: int) -> int:
        return a

    assert (tool_of(other).name, tool_of(other).timeout_s, tool_of(plain).name) == ("plus", 3, "plain")
    assert mark_of(add) is None


def test_what_wraps_a_function_has_its_types():
    @functools.wraps(add)
    def wrapper(*args: Any, **kwargs: Any) -> int:
        return add(*args, **kwargs)

    assert tool_of(wrapper).schema == tool_of(add).schema


def test_a_part_of_a_function_has_its_name_its_docstring_and_its_types():
    part = tool_of(functools.partial(add, b=2))
    assert part.name == "add"
    described, whole = part.schema["function"], tool_of(add).schema["function"]
    assert described["description"] == whole["description"]
    assert described["parameters"]["required"] == ["a"] and described["parameters"]["properties"]["b"]["default"] == 2
    assert part.function(**part.read({"a": "3"})) == 5


def test_the_type_of_a_result_need_not_be_known():
    assert tool_of(of_an_unknown_result).read({"a": 1}) == {"a": 1}


def test_constraints_of_a_type_are_in_the_schema_and_hold():
    def pick(number: Annotated[int, Field(ge=1, le=6)]) -> int:
        return number

    assert tool_of(pick).schema["function"]["parameters"]["properties"]["number"]["maximum"] == 6
    with pytest.raises(ArgumentsMisfitError, match="number: Input should be less than or equal to 6"):
        tool_of(pick).read({"number": 7})


def many(*numbers: int) -> int: ...
def any_named(**numbers: int) -> int: ...
def by_position(a: int, /) -> int: ...
def untyped(a, b: int) -> int: ...
def odd(a: threading.Lock) -> int: ...  # noqa: F821  (that is the point)
def opaque(a: object_without_schema) -> int: ...  # noqa: F821


class OtherKind:
    """Nothing that has a schema."""


def other_kind(a: int, b: OtherKind) -> int: ...
def of_an_unknown_result(a: int) -> NotImported: ...  # noqa: F821  (nobody reads it)


@pytest.mark.parametrize(
    "function, told",
    [
        (many, r"the tool many takes \*numbers.*give each parameter a name"),
        (any_named, r"the tool any_named takes \*\*numbers"),
        (by_position, "takes a by position only"),
        (untyped, "has no type for a: write a: int"),
        (odd, r"^the tool odd has a: the type threading.Lock is not known in test_tool_functions.py \(name 'thr"),
        (other_kind, r"has b: [\w.]*OtherKind, whose type has no JSON schema: [^`]*OtherKind'>\. Numbers"),
        (lambda a: a, "has a name that no policy can call"),
        (int, "is a class, where a function is expected"),
    ],
)
def test_what_can_be_no_tool_is_refused_with_its_reason(function, told):
    with pytest.raises(ToolSignatureError, match=told):
        tool_of(function)


def test_a_docstring_without_sections_is_all_description():
    assert read_docstring("One.\n\nTwo: three.") == ("One.\n\nTwo: three.", {})
    assert read_docstring("") == ("", {})
    text = "Do.\n\nArgs:\n  a: One: two.\n    More.\n\n  b:\n    Later.\nRaises:\n  c: No.\n"
    assert read_docstring(text) == ("Do.", {"a": "One: two. More.", "b": "Later."})
