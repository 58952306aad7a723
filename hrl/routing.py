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


def continued(kept: np.ndarray | None, told: np.ndarray, start: int = 0) -> np.ndarray:
    """Return the choices of a row in which was sampled once more.

    A token keeps the choice that was told first: the keys and values that later turns read are those of that pass, as
    long as they are in the engine's cache, and it is with that choice that a sampled token's log-prob was computed.
    Later ones stand where none was known, such as for the last token of a turn, which passes through the engine with
    the next one.

    Args:
        kept: `(n, L, K)` of the row's first tokens, from earlier turns; None before the first.
        told: `(tokens, L, K)`, what the engine says of the row's tokens from `start` on.
        start: At most n.

    Returns:
        `(start + tokens, L, K)`, or `kept` where the engine says of no further tokens.
    """
    if kept is None:
        return told
    known = len(kept) - start
    joined = np.concatenate([kept, told[known:]])
    again = told[:known]
    lacking = is_missing(kept[start : start + len(again)])
    joined[start : start + len(again)][lacking] = again[lacking]
    return joined


def known_by_beginning(rows: Sequence[np.ndarray], routed: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Give rows that begin alike the same choices there, and those that an engine had in its cache.

    An engine that finds the beginning of a prompt in its cache computes nothing for it and chooses no experts. The
    keys and values that it takes are those of a row that begins alike, and so are the choices that led to them. Where
    several engines have computed the same prompt, rounding may have led to different choices; a packed row computes it
    once.

    Args:
        rows: The tokens of each row, `(tokens,)`, of samples drawn by the same weights: prompts, or all.
        routed: Their choices, some of which may be missing, and which may go on behind these tokens.

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
    # Up to the last that a row lacks; behind that it knows all.
    lengths = {row: int(np.flatnonzero(lacking[row])[-1]) + 1 if lacking[row].any() else 0 for row in first_of.values()}
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
