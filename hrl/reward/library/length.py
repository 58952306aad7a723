"""How long a response is, as a reward."""

from __future__ import annotations

from typing import Literal

from hrl.reward.library.base import require, visible


class Length:
    """Pays 1 for a length between two bounds, and linearly less outside of them.

    The score of a response of n words is max(0, 1 − d / `width`), where d is how far n lies outside. An empty response
    gets 0. Any text of the right length is paid, so give it a small weight beside a function that looks at the content.
    A penalty over the last tokens before the limit is `reward.overlong_buffer`.

    Args:
        least: The shortest length that is paid in full.
        most: The longest; None for no bound.
        target: The only one, in place of `least` and `most`.
        width: How far outside of the bounds the score reaches 0; by default half of `target` or `most`, and half of
            `least` where there is no other bound.
        unit: Whether `words` or `characters` are counted.
        penalty: Whether 1 is subtracted, so that the score is a penalty between −1 and 0.
    """

    def __init__(
        self,
        least: int = 1,
        most: int | None = None,
        target: int | None = None,
        width: int | None = None,
        unit: Literal["words", "characters"] = "words",
        penalty: bool = False,
    ) -> None:
        require(unit in ("words", "characters"), f"unit is {unit!r}, must be words or characters")
        if target is not None:
            require(most is None and least == 1, "target takes the place of least and most; leave them out")
            least = most = target
        require(least >= 1, f"least is {least}, must be at least 1: an empty response is never paid")
        require(most is None or most >= least, f"most is {most}, less than least={least}")
        self._least, self._most, self._unit, self._penalty = least, most, unit, penalty
        self._width = width if width is not None else max(1, (most or least) // 2)
        require(self._width >= 1, f"width is {width}, must be at least 1")

    def __call__(self, response: str) -> float:
        """Return 0 to 1, or −1 to 0."""
        text = visible(response)
        number = len(text.split()) if self._unit == "words" else len(text)
        beyond = max(self._least - number, 0 if self._most is None else number - self._most, 0)
        score = max(0.0, 1.0 - beyond / self._width) if number else 0.0
        return score - 1.0 if self._penalty else score
