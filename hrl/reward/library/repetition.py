"""A penalty for saying the same again."""

from __future__ import annotations

import re

from hrl.reward.library.base import require

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w{1,12}|[^\w\s]")
"""A character of a script without spaces, up to twelve letters of a word, or a sign: so `aaaa…` repeats itself too."""


class Repetition:
    """Takes away up to 1 for word sequences that occur more than once.

    The score is −(1 − u / t), with t the number of sequences of `size` words and u how many of them are different, as
    in the repetition penalty of arXiv:2502.03373 (section 4). It never pays: an empty response gets 0, which is the
    most that any response can get.

    Args:
        size: Number of words of a sequence.
    """

    def __init__(self, size: int = 3) -> None:
        require(size >= 1, f"size is {size}, must be at least 1")
        self._size = size

    def __call__(self, response: str) -> float:
        """Return −1 to 0."""
        words = [word.lower() for word in _WORD.findall(response)]
        sequences = list(zip(*(words[start:] for start in range(self._size)), strict=False))
        return len(set(sequences)) / len(sequences) - 1.0 if sequences else 0.0
