"""Steps of an answer: where they end in its text, at which of its tokens, and how a model is shown them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StepMarks:
    """How a process reward model is shown the steps of an answer.

    Attributes:
        token: Stands behind each step, as text.
        token_id: Of it, or of what follows a space that it begins with.
        separator: Stands between two steps.
        reward_ids: Tokens that a language model says behind a step that is right, and behind one that is wrong; None of
            a classifier.
    """

    token: str
    token_id: int
    separator: str
    reward_ids: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, token: str, separator: str, reward_tokens: Sequence[str] | None
    ) -> StepMarks:
        """Return the marks of a model by the texts that its user names.

        Args:
            tokenizer: The model's.
            token: Read behind each step.
            separator: Stands between two steps.
            reward_tokens: What the model says behind a step that is right, and behind one that is wrong.

        Raises:
            ValueError: The tokenizer has none of them as one token.
        """
        ids = mark_id(tokenizer, token), *(word_id(tokenizer, word) for word in reward_tokens or ())
        if any(number is None for number in ids):
            raise ValueError(f"{[token, *(reward_tokens or ())]} are tokens {ids} of {tokenizer.name_or_path}")
        mark, *words = (number for number in ids if number is not None)
        return cls(token, mark, separator, (words[0], words[1]) if words else None)

    def hide(self, text: str) -> str:
        """Return a text without what only looks like the token: as many spaces leave every place where it was."""
        word = self.token.strip()
        return text.replace(word, " " * len(word))


def mark_id(tokenizer: PreTrainedTokenizerBase, mark: str) -> int | None:
    """Return the token that a mark is, but for spaces before it; None if it is none or several."""
    vocabulary = tokenizer.get_vocab()
    if mark in vocabulary:
        return int(vocabulary[mark])
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return ids[-1] if ids and mark.strip() == str(tokenizer.decode(ids[-1:])).strip() != "" else None


def word_id(tokenizer: PreTrainedTokenizerBase, word: str) -> int | None:
    """Return the token of a word as the tokenizer writes it, or else the one of that name; None if it is several."""
    ids = tokenizer.encode(word, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else tokenizer.get_vocab().get(word)


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
