"""Items of a data set, joined into the columns of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def collate_fn(items: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Stacks tensors along a new first axis; everything else becomes an object array `(B,)`.

    Raises:
        ValueError: No items, or items with different keys.
    """
    if not items:
        raise ValueError("nothing to collate")
    keys = items[0].keys()
    for position, item in enumerate(items):
        if item.keys() != keys:
            raise ValueError(f"item {position} has other keys than item 0: {sorted(item.keys() ^ keys)}")
    return {key: _column([item[key] for item in items]) for key in keys}


def _column(values: list[Any]) -> torch.Tensor | np.ndarray:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    column = np.empty(len(values), dtype=object)  # filled, not converted: numpy would make lists into a second axis
    for position, value in enumerate(values):
        column[position] = value
    return column
