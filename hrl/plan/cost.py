"""Seconds of a phase as a sum of terms, each with what it is spent on."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A phase of a step.

    Attributes:
        name: As in `timing_s/<name>`.
        terms: What the time is spent on → seconds.
        devices: Those that it runs on, where its neighbours run at once if they have others; None where it runs alone.
    """

    name: str
    terms: dict[str, float]
    devices: frozenset[Hashable] | None = None

    @property
    def seconds(self) -> float:
        """The sum."""
        return sum(self.terms.values())

    @property
    def largest(self) -> str:
        """What most of the time is spent on."""
        return max(self.terms, key=self.terms.__getitem__)


def together_s(phases: Iterable[Phase]) -> float:
    """Return the seconds from the beginning of the first to the end of the last phase, as the trainer runs them.

    Neighbours that may run at once begin together, and wait for those on the same devices.
    """
    over_at, busy_until = 0.0, dict[Hashable, float]()
    for phase in phases:
        if phase.devices is None:
            over_at = max([over_at, *busy_until.values()]) + phase.seconds
            busy_until = {}
        else:
            end = max([over_at, *(busy_until.get(device, over_at) for device in phase.devices)]) + phase.seconds
            busy_until |= dict.fromkeys(phase.devices, end)
    return max([over_at, *busy_until.values()])


def added(terms: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return label → sum, in the order of appearance, without those that are 0."""
    sums: dict[str, float] = {}
    for label, seconds in terms:
        if seconds > 0.0:
            sums[label] = sums.get(label, 0.0) + seconds
    return sums
