"""Tokens of texts that stand one behind another, such that each border is one that a sampler would leave.

Tokens of a whole need not be those of its beginning and others behind: a token may span the border, and how a run of
spaces is cut depends on what follows it. The tokens before a border are those of the text before it, encoded alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from hrl.data.chat_template import encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_pieces(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """Token ids of every text of every row.

    Texts 0 … k of a row as one text have the tokens of its pieces 0 … k. Where a token would span the border behind a
    text, the one that follows is encoded by itself.
    """
    beginnings = [[*accumulate(texts)] for texts in rows]
    encoded = iter(encode_texts(tokenizer, [text for row in beginnings for text in row]))
    return [_pieces(tokenizer, texts, [next(encoded) for _ in texts]) for texts in rows]


def _pieces(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], encoded: Sequence[list[int]]) -> list[list[int]]:
    """``encoded[k]`` are the tokens of texts 0 … k as one text."""
    pieces = []
    before: list[int] = []
    for text, until_here in zip(texts, encoded, strict=True):
        if until_here[: len(before)] == before:
            pieces.append(until_here[len(before) :])
        else:
            pieces.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        before = until_here
    return pieces
