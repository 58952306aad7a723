"""Rows for environments that bring their own tasks: each is a number, from which an environment makes a game.

All samples of a row play the same game, as `extra_info.game_seed` says, and those of `val` are no games of `train`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from hrl.data.tasks.answer_format import options_in
from hrl.errors import DatasetError

DATA_SOURCE = "bundled/games"
_SPLITS = {"train": 0, "val": 1}
_SIZES = {"train": 1000, "val": 50}
OPTIONS = ("size", "seed")
PROMPT = "Begin."
"""What an environment whose `reset` is not its own shows; others replace it."""


def rows(split: str, query: str = "") -> Iterator[dict[str, Any]]:
    """Return the rows of a split, `train` or `val`.

    Args:
        split: The split.
        query: `size=…&seed=…`, as behind the question mark of an address.

    Raises:
        DatasetError: No such split, or an option that is none.
    """
    address = f"bundled:games/{split}"
    if split not in _SPLITS:
        raise DatasetError(f"bundled:games has no split {split!r}; it has train and val")
    options = options_in(query, address) if query else {}
    size = _number(options.pop("size", _SIZES[split]), "size", address, least=1)
    seed = _number(options.pop("seed", 1), "seed", address, least=0)
    if options:
        raise DatasetError(f"{address} has no option {next(iter(options))!r}; it has {' and '.join(OPTIONS)}")
    drawn = random.Random(f"hrl games {split} {seed}")
    return (
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": PROMPT}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            # The lowest bit tells the splits apart, so that no game is in both.
            "extra_info": {"index": index, "split": split, "game_seed": drawn.getrandbits(30) << 1 | _SPLITS[split]},
        }
        for index in range(size)
    )


def _number(value: Any, name: str, address: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DatasetError(f"{name} of {address} is {value!r}, must be a whole number from {least}")
    return value
