"""What an environment says, made fit to be tokenised: whole characters, and not too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USUAL_TOKEN = 4
"""Characters of each end, per token that may stay, that are tokenised first; of few texts tokens are longer."""
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
    longest = max_tokens * _LONGEST_TOKEN // 2
    looked_at = min(max_tokens * _USUAL_TOKEN, longest)
    while len(text) > 2 * looked_at:
        heads, tails = _borders(tokenizer, text[:looked_at]), _borders(tokenizer, text[-looked_at:])
        # Where both ends have more tokens than can stay of them, nobody needs to look at what is between.
        if looked_at == longest or min(len(heads), len(tails)) > max_tokens // 2 + 2:
            end = len(text) - looked_at
            break
        looked_at = min(2 * looked_at, longest)
    else:
        if _length(tokenizer, text) <= max_tokens:
            return text
        heads = tails = _borders(tokenizer, text)
        end = 0
    room = max_tokens
    while room > 0:
        kept = max(room - _length(tokenizer, _mark(len(text))), 0)
        if not kept:
            break
        last = heads[min((kept + 1) // 2, len(heads) - 1)]
        first = end + tails[max(len(tails) - 1 - kept // 2, 0)]
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
