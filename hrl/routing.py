"""Which experts a row's tokens went to, as a column of a batch: `routed_experts`, one array for each row.

The array of a row is `(tokens, L, K)`: of its first tokens, prompt and response without padding, in each of the model's
L layers with experts, the K experts by their numbers in the checkpoint. Where no choice is known stands `missing`, K
times. The last token of a response never passed through the sampler, so a row has one entry fewer than it has tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: The column's name.
ROUTED_EXPERTS = "routed_experts"


def routing_dtype(num_experts: int) -> np.dtype[Any]:
    """Return the smallest dtype for the numbers of so many experts and `missing`."""
    return np.dtype(np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.int16)


def missing(dtype: np.dtype[Any]) -> int:
    """Return the number that stands where no choice is known: the token then makes its own."""
    return int(np.iinfo(dtype).max)


def is_missing(routed: np.ndarray) -> np.ndarray:
    """Return `(tokens,)` bool, the tokens of a row whose choices are not known."""
    unknown: np.ndarray = (routed == missing(routed.dtype)).any((1, 2))
    return unknown


def known_by_beginning(rows: Sequence[np.ndarray], routed: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Give rows that begin alike the same choices there, and those that an engine had in its cache.

    An engine that finds the beginning of a prompt in its cache computes nothing for it and chooses no experts. The
    keys and values that it takes are those of a row that begins alike, and so are the choices that led to them. Where
    several engines have computed the same prompt, rounding may have led to different choices; a packed row computes it
    once.

    Args:
        rows: The tokens of each row, `(tokens,)`: prompts, of samples drawn by the same weights.
        routed: Their choices, which may begin with missing ones and may go on behind the prompt.

    Returns:
        The choices with as many beginnings filled in as other rows know; the arrays given are left as they are.
    """
    filled = list(routed)
    lacking = [is_missing(choices[: len(tokens)]) for tokens, choices in zip(rows, routed, strict=True)]
    first_of: dict[bytes, int] = {}  # of equal prompts, the row that knows most
    for row, tokens in enumerate(rows):
        best = first_of.setdefault(tokens.tobytes(), row)
        if (~lacking[row]).sum() > (~lacking[best]).sum():
            first_of[tokens.tobytes()] = row
    lengths = {row: int(lacking[row].sum()) for row in first_of.values()}
    for length in sorted({count for count in lengths.values() if count}):
        known = {
            rows[row][:length].tobytes(): filled[row][:length]
            for row in first_of.values()
            if lengths[row] < length <= len(filled[row])
        }
        for row in first_of.values():
            if lengths[row] == length and (found := known.get(rows[row][:length].tobytes())) is not None:
                (missed,) = lacking[row][:length].nonzero()
                filled[row] = filled[row].copy()
                filled[row][missed] = found[missed]
    for row, tokens in enumerate(rows):
        best = first_of[tokens.tobytes()]
        shared = min(len(tokens), len(filled[row]), len(filled[best]))
        # Mostly they are equal, and a response may have thousands of tokens.
        if shared and not np.array_equal(filled[row][:shared], filled[best][:shared]):
            filled[row] = np.concatenate([filled[best][:shared], filled[row][shared:]])
    return filled
