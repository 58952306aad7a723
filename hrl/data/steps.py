"""Steps of an answer: where they end in its text, and at which of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def step_ends(text: str, separator: str) -> list[int]:
    """Return where each step ends, as a number of characters of the text, behind the last one that is no space.

    A step is what stands between two separators and is more than space.

    Args:
        text: The answer.
        separator: Not empty, such as an empty line.
    """
    ends, start = [], 0
    for piece in text.split(separator):
        if piece.strip():
            ends.append(start + len(piece.rstrip()))
        start += len(piece) + len(separator)
    return ends


def with_step_tokens(text: str, ends: Sequence[int], step_token: str) -> str:
    """Return the text with a token behind each step, and what stood between two steps behind the token."""
    starts = [0, *ends]
    return "".join(text[start:end] + step_token for start, end in zip(starts, ends, strict=False)) + text[starts[-1] :]


def tokens_at(ends: Sequence[int], ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the token of an answer with which its text reaches each number of characters.

    A token may hold the end of a step and more; the step then ends at this token.

    Args:
        ends: Not more than the text has.
        ids: The answer's tokens.
        decode: Returns the text of tokens, the answer's if they are all of them.
    """
    places = []
    for end in ends:
        low, high = 0, len(ids) - 1
        while low < high:
            middle = (low + high) // 2
            if len(decode(ids[: middle + 1])) >= end:
                high = middle
            else:
                low = middle + 1
        places.append(low)
    return places
