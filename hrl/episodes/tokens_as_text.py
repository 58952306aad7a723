"""Sampled tokens as the pieces of text that they are, and where a stop text ends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HALF_A_CHARACTER = "\ufffd"


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of tokens, without special ones."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Pieces:
    """What each token adds to a text that grows.

    Args:
        tokenizer: The policy's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._open: list[int] = []

    def add(self, token: int) -> str:
        """Return what one more token adds: nothing where it ends within a character."""
        self._open.append(token)
        new = self.rest()
        if not new or new.endswith(_HALF_A_CHARACTER):
            return ""
        self._shown, self._open = self._open, []
        return new

    def rest(self) -> str:
        """Return what those tokens are that have added nothing, if no more come."""
        before, now = decode(self._tokenizer, self._shown), decode(self._tokenizer, [*self._shown, *self._open])
        return now[len(before) :]


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text; all pieces together are the text.

    A token that ends within a character adds nothing, and the one that completes the character adds it.
    """
    text, growing = decode(tokenizer, ids), Pieces(tokenizer)
    found = [growing.add(token) for token in ids]
    joined = "".join(found)
    if not found or joined == text:
        return found
    if text.startswith(joined):  # it was cut off within a character
        return [*found[:-1], found[-1] + text[len(joined) :]]
    return [*[""] * (len(found) - 1), text]


def beginnings(pieces: Sequence[str]) -> list[int]:
    """Return where each piece begins in the text that they are."""
    return [0, *accumulate(map(len, pieces))][: len(pieces)]


@dataclass(frozen=True)
class Stopped:
    """A response that a stop text ended.

    Attributes:
        num_tokens: Those up to the one that completes the stop text.
        text: What stands before the stop text.
        num_text_tokens: The tokens that are exactly `text`; None where the stop text begins within one.
    """

    num_tokens: int
    text: str
    num_text_tokens: int | None


def stopped_at(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stops: Sequence[str]) -> Stopped | None:
    """Return where the first stop text ends a response; None where there is none.

    The tokens before that point are those that would have been sampled if nothing had been sampled after it.
    """
    text = decode(tokenizer, ids)
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    if not found:
        return None
    ends = list(accumulate(map(len, pieces(tokenizer, ids))))
    end, begin = min(found)
    count = next(number for number, reached in enumerate(ends, start=1) if reached >= end)
    return Stopped(count, text[:begin], [0, *ends].index(begin) if begin in (0, *ends) else None)


def shown_token(tokenizer: PreTrainedTokenizerBase, token: int) -> tuple[str, list[int] | None]:
    """Return a token as text, special ones too, and as bytes; None for a part of a character."""
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    return text, None if _HALF_A_CHARACTER in text else list(text.encode())
