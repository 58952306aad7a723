"""Functions that are tools, for tests; those of later annotations are texts."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, Optional

import pydantic


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Size(pydantic.BaseModel):
    width: float
    unit: Literal["cm", "m"] = "cm"


def paint(
    point: Point,
    colour: Colour,
    size: Size | None = None,
    mode: Literal["fast", "fine"] = "fast",
    copy: int = 1,
    title: Optional[str] = None,  # noqa: UP045  (as many still write it)
) -> str:
    """Paint a point.

    It stays painted.

    Args:
        point: Where to
            paint.
        colour (Colour): With which colour.
        copy: How often.

    Returns:
        What was painted.
    """
    return f"{type(point).__name__} {point.x},{point.y} {colour} {size} {mode} {copy} {title}"
