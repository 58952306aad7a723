"""Counting shapes: a picture, drawn here, with one to five shapes of each of two kinds; how many are of one kind?

The smallest task that can't be solved without the picture: a prompt's text says which kind is asked for, and nothing
of their number. Pictures of `val` are drawn with another seed than those of `train`.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hrl.data.tasks.answer_format import options_in
from hrl.errors import DatasetError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

DATA_SOURCE = "bundled/shapes"
OPTIONS = ("size", "seed", "side")
"""What an address takes behind its question mark: the number of rows, the seed, and a picture's width in pixels."""
KINDS = ("circle", "square", "triangle")
MOST = 5
"""Shapes of one kind in a picture."""
_SIZES = {"train": 512, "val": 64}
_CELLS = 4
"""Shapes stand in a grid of so many rows and columns, so that none hides another."""
_COLOURS = ("#d1242f", "#0969da", "#1a7f37", "#8250df", "#bc4c00")
_LEAST_SIDE, _SIDE = 32, 112


def rows(split: str, query: str = "") -> Iterator[dict[str, Any]]:
    """Return the rows of a split, `train` (512) or `val` (64), each drawn when it is asked for.

    Args:
        split: The split.
        query: `size=…&seed=…&side=…`, as behind the question mark of an address.

    Raises:
        DatasetError: No such split, or an option that is none.
    """
    address = f"bundled:shapes/{split}"
    if split not in _SIZES:
        raise DatasetError(f"bundled:shapes has no split {split!r}; it has {' and '.join(_SIZES)}")
    options = options_in(query, address) if query else {}
    size = _number(options.pop("size", _SIZES[split]), "size", address, least=1)
    seed = _number(options.pop("seed", 1), "seed", address, least=0)
    side = _number(options.pop("side", _SIDE), "side", address, least=_LEAST_SIDE)
    if options:
        raise DatasetError(f"{address} has no option {next(iter(options))!r}; it has {', '.join(OPTIONS)}")
    drawn = random.Random(f"hrl shapes {split} {seed}")
    return (_row(index, split, drawn, side) for index in range(size))


def _row(index: int, split: str, drawn: random.Random, side: int) -> dict[str, Any]:
    asked, other = drawn.sample(KINDS, 2)
    number = drawn.randint(1, MOST)
    kinds = [asked] * number + [other] * drawn.randint(1, MOST)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {
                "role": "user",
                "content": f"<image>How many {asked}s are in the picture? Answer with the final number only.",
            }
        ],
        "images": [{"bytes": _picture(kinds, drawn, side), "path": None}],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": index, "split": split, "asked": asked},
    }


def _picture(kinds: list[str], drawn: random.Random, side: int) -> bytes:
    """Return a PNG with these shapes, each in a cell of its own."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)
    width = side / _CELLS
    cells = drawn.sample(range(_CELLS**2), len(kinds))
    for kind, cell in zip(kinds, cells, strict=True):
        row, column = divmod(cell, _CELLS)
        _draw(draw, kind, column * width, row * width, width, drawn.choice(_COLOURS))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _draw(draw: ImageDraw, kind: str, left: float, top: float, width: float, colour: str) -> None:
    margin = width / 6
    low, high, right, bottom = left + margin, top + margin, left + width - margin, top + width - margin
    if kind == "circle":
        draw.ellipse((low, high, right, bottom), fill=colour)
    elif kind == "square":
        draw.rectangle((low, high, right, bottom), fill=colour)
    else:
        draw.polygon([(low, bottom), (right, bottom), (left + width / 2, high)], fill=colour)


def _number(value: Any, name: str, address: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DatasetError(f"{name} of {address} is {value!r}, must be a whole number from {least}")
    return value
