"""What an environment says, made fit to be tokenised: whole characters, and not too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_TOKEN = 64
"""Characters per token beyond which a text is cut before it is tokenised."""


def with_whole_characters(value: Any) -> Any:
    """Return a value whose texts have no lone surrogates, at any depth; each becomes the replacement character.

    What isn't Unicode can't be tokenised, and is nobody's fault in an episode: a tool printed half a character, or the
    policy wrote the escape of one into its JSON.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if isinstance(value, Mapping):
        return {with_whole_characters(key): with_whole_characters(item) for key, item in value.items()}
    return [with_whole_characters(item) for item in value] if isinstance(value, list | tuple) else value


def without_middle(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> str:
    """Return a text of at most `max_tokens` tokens: itself, or its beginning and its end around a mark.

    The mark says how many characters are missing. Where it alone would be too long, the beginning is left.
    """
    if len(text.encode("utf-8")) < max_tokens:  # no token is shorter than a byte
        return text
    half = max_tokens * _LONGEST_TOKEN // 2
    beginning, end = (text, text) if len(text) <= 2 * half else (text[:half], text[-half:])
    if beginning is text and _length(tokenizer, text) <= max_tokens:
        return text
    heads, tails = _borders(tokenizer, beginning), _borders(tokenizer, end)
    room = max_tokens
    while room > 0:
        kept = max(room - _length(tokenizer, _mark(len(text))), 0)
        if not kept:
            break
        last = heads[min((kept + 1) // 2, len(heads) - 1)]
        first = len(text) - len(end) + tails[max(len(tails) - 1 - kept // 2, 0)]
        cut = text[:last] + _mark(first - last) + text[first:]
        # Tokens at the borders may join, or not join, with the mark.
        excess = _length(tokenizer, cut) - max_tokens
        if excess <= 0 and first > last:
            return cut
        room -= max(excess, 1)
    return _beginning(tokenizer, text, heads, max_tokens)


def _beginning(tokenizer: PreTrainedTokenizerBase, text: str, heads: Sequence[int], max_tokens: int) -> str:
    for kept in range(min(max_tokens, len(heads) - 1), 0, -1):
        if _length(tokenizer, text[: heads[kept]]) <= max_tokens:
            return text[: heads[kept]]
    return ""


def _mark(characters: int) -> str:
    return f"\n[… {characters:,} characters left out …]\n"


def _length(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _borders(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return where in a text its tokens 0, 1, … begin, and its length; never within a character."""
    if not tokenizer.is_fast:  # it doesn't tell; of most texts a token has at least one character
        return list(range(len(text) + 1))
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [*(start for start, _ in spans), len(text)]
