"""Phases of a run with what is resident in each, and how that stands to the memory that is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hrl.config.arithmetic import Fact

GIB = 1 << 30


class Entry(NamedTuple):
    """One item of a phase.

    Attributes:
        label: What it is.
        num_bytes: How large.
        certain: It follows from the configuration; others are upper estimates, such as activations of the largest
            micro-batch that the configuration allows.
    """

    label: str
    num_bytes: float
    certain: bool = True


@dataclass(frozen=True)
class Phase:
    """What is resident at the worst moment of a phase."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> float:
        """The sum."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def certain_bytes(self) -> float:
        """The sum of what is no estimate."""
        return sum(entry.num_bytes for entry in self.entries if entry.certain)

    def in_words(self) -> str:
        """Return the sum and its parts, the largest first."""
        parts = sorted(self.entries, key=lambda entry: entry.num_bytes, reverse=True)
        listed = ", ".join(f"{entry.label} {gib(entry.num_bytes)}" for entry in parts if entry.num_bytes >= GIB / 20)
        return f"{gib(self.num_bytes)} GiB: {listed}"


@dataclass(frozen=True)
class Ledger:
    """The phases of what shares one memory.

    Attributes:
        where: A GPU of a pool, or the machine.
        phases: In the order of a step.
    """

    where: str
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.num_bytes)


def too_large(ledger: Ledger, capacity_bytes: float) -> str | None:
    """Return what to say of an account of which already what is certain does not fit; None where that does."""
    worst = max(ledger.phases, key=lambda phase: phase.certain_bytes)
    if worst.certain_bytes <= capacity_bytes:
        return None
    certain = Phase(worst.name, tuple(entry for entry in worst.entries if entry.certain))
    needs = f"the phase {worst.name!r} takes at least {certain.in_words()}"
    return f"{ledger.where} has {gib(capacity_bytes)} GiB, and {needs}"


def perhaps_too_large(ledger: Ledger, capacity_bytes: float) -> str | None:
    """Return what to say of an account that fits only if its micro-batches stay below what the configuration allows."""
    peak = ledger.peak
    if peak.num_bytes <= capacity_bytes or too_large(ledger, capacity_bytes) is not None:
        return None
    return f"{ledger.where} has {gib(capacity_bytes)} GiB, and the phase {peak.name!r} may take {peak.in_words()}"


def gib(num_bytes: float) -> str:
    """Return a number of GiB, with one digit behind the point below 100."""
    return f"{num_bytes / GIB:.1f}" if num_bytes < 100 * GIB else f"{num_bytes / GIB:,.0f}"


def in_words(ledgers: Iterable[Ledger]) -> list[Fact]:
    """Return a line for each phase."""
    return [Fact(f"{phase.name}, {ledger.where}", phase.in_words()) for ledger in ledgers for phase in ledger.phases]
