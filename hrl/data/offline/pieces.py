"""Tokens of texts that stand one behind another, such that each border is one that a sampler would leave.

Tokens of a whole need not be those of its beginning and others behind: a token may span the border, and how a run of
spaces is cut depends on what follows it. The tokens before a border are those of the text before it, encoded alone.

Taken literally that encodes a conversation once per border. A tokenizer that says where its tokens stand does it in one
go: special tokens are cut out of a text before anything else is looked at, so what is left and right of one is encoded
as if it stood alone. Only what lies between the last of them and a border is encoded again to compare, and that is
mostly the header of a message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hrl.data.chat_template import encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pieces = list[list[int]]


def encode_pieces(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[str]]) -> list[Pieces]:
    """Token ids of every text of every row.

    Texts 0 … k of a row as one text have the tokens of its pieces 0 … k. Where a token would span the border behind a
    text, the one that follows is encoded by itself.
    """
    if not rows:
        return []
    # Without a chat template the tokenizer may add tokens of its own, which stand nowhere.
    once = tokenizer.is_fast and tokenizer.chat_template is not None
    found = _cut_wholes(tokenizer, rows) if once else [None] * len(rows)
    left = iter(_cut_beginnings(tokenizer, [texts for texts, pieces in zip(rows, found, strict=True) if not pieces]))
    return [pieces or next(left) for pieces in found]


# ---------------------------------------------------------------------------------------------- every row once


def _cut_wholes(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[str]]) -> list[Pieces | None]:
    """Pieces of each row's tokens; None where a border is not between two of them."""
    wholes = ["".join(texts) for texts in rows]
    encoded = tokenizer(wholes, add_special_tokens=False, return_offsets_mapping=True)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    ids, spans = encoded["input_ids"], encoded["offset_mapping"]
    anchors = [[*_anchors(*row, special)] for row in zip(rows, wholes, ids, spans, strict=True)]
    windows = [*dict.fromkeys(window for row in anchors for _, window in row)]
    alone = dict(zip(windows, encode_texts(tokenizer, windows), strict=True))
    return [_cut(tokens, [(at, alone[window]) for at, window in row]) for tokens, row in zip(ids, anchors, strict=True)]


def _anchors(
    texts: Sequence[str], whole: str, ids: Sequence[int], spans: Sequence[tuple[int, int]], special: Collection[int]
) -> Iterator[tuple[int, str]]:
    """For each border a token that begins there or before it, whatever follows the border, and the text in between."""
    places = [i for i, token in enumerate(ids) if token in special]
    starts = [spans[i][0] for i in places]
    for border in accumulate(map(len, texts[:-1])):
        found = bisect_left(starts, border)
        if found < len(starts) and starts[found] == border:
            yield places[found], ""
        else:
            at, start = (places[found - 1], starts[found - 1]) if found else (0, 0)
            yield at, whole[start:border]


def _cut(ids: list[int], borders: Sequence[tuple[int, list[int]]]) -> Pieces | None:
    """Tokens cut where those that are expected from a token on, up to a border, end; None if others stand there."""
    if any(ids[at : at + len(expected)] != expected for at, expected in borders):
        return None
    ends = [0, *(at + len(expected) for at, expected in borders), len(ids)]
    return [ids[start:end] for start, end in pairwise(ends)]


# ---------------------------------------------------------------------------------------------- a text per border


def _cut_beginnings(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[str]]) -> list[Pieces]:
    """Pieces by encoding each text with all that stands before it."""
    beginnings = [text for texts in rows for text in accumulate(texts)]
    encoded = iter(encode_texts(tokenizer, beginnings))
    return [_differences(tokenizer, texts, [next(encoded) for _ in texts]) for texts in rows]


def _differences(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], encoded: Sequence[list[int]]) -> Pieces:
    """`encoded[k]` are the tokens of texts 0 … k as one text."""
    pieces = []
    before: list[int] = []
    for text, until_here in zip(texts, encoded, strict=True):
        if until_here[: len(before)] == before:
            pieces.append(until_here[len(before) :])
        else:
            pieces.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        before = until_here
    return pieces
