"""Seconds of a phase as a sum of terms, each with what it is spent on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A phase of a step.

    Attributes:
        name: As in `timing_s/<name>`.
        terms: What the time is spent on → seconds.
    """

    name: str
    terms: dict[str, float]

    @property
    def seconds(self) -> float:
        """The sum."""
        return sum(self.terms.values())

    @property
    def largest(self) -> str:
        """What most of the time is spent on."""
        return max(self.terms, key=self.terms.__getitem__)


def added(terms: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return label → sum, in the order of appearance, without those that are 0."""
    sums: dict[str, float] = {}
    for label, seconds in terms:
        if seconds > 0.0:
            sums[label] = sums.get(label, 0.0) + seconds
    return sums
