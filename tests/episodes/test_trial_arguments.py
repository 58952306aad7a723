"""Arguments of a trial fit their schemas, by what the tools themselves say of them."""

import datetime
import decimal
import enum
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from hrl.environments.tool_functions import tool_of
from hrl.episodes.trial_arguments import example


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: Annotated[float, Field(gt=0, lt=1)]


@dataclass
class Line:
    begin: Point
    end: Point
    colour: Colour
    name: str = "a line"


class Node(BaseModel):
    value: Annotated[int, Field(ge=7, multiple_of=5)]
    left: Optional["Node"]
    others: list["Node"]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(lt=-3)]


class Dog(BaseModel):
    kind: Literal["dog"]


def nested(line: Line, lines: list[Line], by_name: dict[str, Point]) -> str:
    return ""


def of_several(size: tuple[int, str], rest: tuple[float, ...], colour: Colour, kind: Literal["a", "b"]) -> str:
    return ""


def recursive(node: Node, pet: Annotated[Cat | Dog, Field(discriminator="kind")], either: Point | int) -> str:
    return ""


def bounded(
    least: Annotated[list[Point], Field(min_length=3, max_length=3)],
    unlike: Annotated[set[int], Field(min_length=2)],
    colours: Annotated[set[Colour], Field(min_length=2)],
    some: Annotated[dict[str, int], Field(min_length=2)],
    even: Annotated[int, Field(gt=10, lt=20, multiple_of=4)],
    small: Annotated[float, Field(ge=-0.5, lt=0)],
    large: Annotated[int, Field(gt=10**12)],
    long: Annotated[str, Field(min_length=9)],
    short: Annotated[str, Field(max_length=1)],
) -> str:
    return ""


def of_forms(
    code: Annotated[str, Field(pattern=r"^[A-Z]{3}-\d{4}$")],
    word: Annotated[str, Field(pattern=r"^\w+$", min_length=7)],
    choice: Annotated[str, Field(pattern=r"^(left|right)[^a-z]?$")],
    day: datetime.date,
    at: datetime.datetime,
    lasts: datetime.timedelta,
    number: uuid.UUID,
    file: Path,
    price: decimal.Decimal,
    free: Any,
) -> str:
    return ""


@pytest.mark.parametrize("function", [nested, of_several, recursive, bounded, of_forms])
def test_a_tool_reads_the_arguments_that_are_made_of_its_schema(function: Any) -> None:
    one = tool_of(function)
    arguments = example(one.schema["function"]["parameters"])
    read = one.read(arguments)
    assert read.keys() == arguments.keys() == set(one.schema["function"]["parameters"]["required"])


def test_what_names_itself_for_ever_ends() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}}
    assert isinstance(example(schema), dict)
    several = {"properties": {name: {"$ref": "#"} for name in "abcdefgh"}, "required": [*"abcdefgh"]}
    assert isinstance(example(several), dict)
    assert example({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}) == "text"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer"}, 2),
        ({"type": "integer", "minimum": 5}, 5),
        ({"type": "number", "maximum": 1}, 1),
        ({"type": "string", "enum": ["a", "b"]}, "a"),
        ({"type": "array", "items": {"type": "boolean"}}, [True]),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, None),
        ({"type": ["string", "null"]}, "text"),
        ({"properties": {"a": {"default": 3}, "b": {"type": "string"}}, "required": ["a"]}, {"a": 3}),
        ({}, "text"),
        ({"type": "integer", "exclusiveMinimum": 4}, 5),
        ({"type": "integer", "exclusiveMinimum": 2, "multipleOf": 5}, 5),
        ({"type": "integer", "exclusiveMaximum": 0}, -1),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
        ({"type": "number", "minimum": 3, "maximum": 4, "multipleOf": 0.25}, 3.0),
        ({"type": "string", "minLength": 6}, "texttt"),
        ({"type": "string", "maxLength": 2}, "te"),
        ({"type": "string", "pattern": "^[A-Z]{2}-\\d+(x|y)?$"}, "AA-0"),
        ({"type": "array", "items": {"const": 1}, "minItems": 3}, [1, 1, 1]),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [2, "text"]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "uniqueItems": True}, [2, 3]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"enum": ["x", "y"]}}}, "x"),
        ({"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}]}, {"a": 1, "b": 2}),
    ],
)
def test_arguments_fit_their_schema(schema: dict[str, Any], value: object) -> None:
    assert example(schema) == value
