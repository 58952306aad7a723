"""A regular expression as a reward."""

from __future__ import annotations

import regex

from hrl.reward.library.base import ArgumentError, require
from hrl.reward.scorers.final_answer import after_thinking

_LONGEST_S = 1.0


class Pattern:
    """Pays 1 if a regular expression matches, and 0 otherwise.

    What stands in `<think>…</think>` is not looked at. A text that matches in several places is as good as none: a
    response that lists all it can think of earns nothing. A pattern that takes longer than a second on a response
    (`(a+)+$` may need years) does not match it.

    Args:
        pattern: The regular expression, as of the package `regex`, which knows all that Python's `re` does.
        whole: Whether the response as a whole must match, apart from spaces around it.
        most: How many matches may occur; none of them counts beyond that.
        ignore_case: Whether capitals and small letters are alike.
    """

    def __init__(self, pattern: str, whole: bool = False, most: int = 1, ignore_case: bool = False) -> None:
        require(most >= 1, f"most is {most}, must be at least 1")
        flags = regex.MULTILINE | (regex.IGNORECASE if ignore_case else 0)
        try:
            self._pattern = regex.compile(pattern, flags)
        except regex.error as error:
            raise ArgumentError(f"pattern {pattern!r} is not a regular expression: {error}") from error
        require(
            self._pattern.fullmatch("") is None if whole else self._pattern.search("") is None,
            f"pattern {pattern!r} matches an empty text, so that an empty response would be paid",
        )
        self._whole, self._most = whole, most

    def __call__(self, response: str) -> float:
        """Return 1 or 0."""
        text = after_thinking(response).strip()
        try:
            if self._whole:
                return float(self._pattern.fullmatch(text, timeout=_LONGEST_S) is not None)
            found = 0
            for _ in self._pattern.finditer(text, timeout=_LONGEST_S):
                found += 1
                if found > self._most:
                    return 0.0
            return float(found > 0)
        except TimeoutError:
            return 0.0
