"""The parts of a rehearsal: what was tried, what came of it, what was reduced and what was left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hrl.errors import HrlError, RefusedError

_REFUSED_STATUS = 2


class RehearsalError(HrlError):
    """A part of a rehearsal failed; the table says which."""


class Change(NamedTuple):
    """What was reduced.

    Attributes:
        what: Key or name.
        was: What the line has.
        now: What the rehearsal has.
    """

    what: str
    was: str
    now: str


def told(value: Any) -> str:
    """Return a value as the table shows it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Part:
    """A part of a rehearsal.

    Attributes:
        name: What was rehearsed.
        passed: Whether it did.
        seconds: How long it took.
        detail: What was seen, or the error.
    """

    name: str
    passed: bool
    seconds: float
    detail: str = ""


@dataclass
class Rehearsal:
    """What a rehearsal has shown so far.

    Attributes:
        show: Is called with every part as it ends, and with what begins.
        parts: Those that have ended.
        changes: What was reduced.
        lost: What of the layout's shape could not be kept.
        absent: What was not rehearsed, and why.
        status: The exit status.
        has_run: Whether the run was started.
    """

    show: Callable[[Part | str], None]
    parts: list[Part] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    absent: list[tuple[str, str]] = field(default_factory=list)
    status: int = 0
    has_run: bool = False

    def add(self, name: str, seconds: float, detail: str = "", *, passed: bool = True) -> None:
        """Note a part that has ended."""
        self.parts.append(Part(name, passed, seconds, detail))
        self.show(self.parts[-1])

    @contextmanager
    def part(self, name: str) -> Iterator[list[str]]:
        """Time a part; what the block puts into the list is its detail. An error in it is the part's, and goes on."""
        self.show(name)
        began, said = time.monotonic(), list[str]()
        try:
            yield said
        except HrlError as error:
            self.add(name, time.monotonic() - began, str(error), passed=False)
            self.status = _REFUSED_STATUS if isinstance(error, RefusedError) else 1
            raise RehearsalError(name) from error
        self.add(name, time.monotonic() - began, "; ".join(said))
