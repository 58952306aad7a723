"""What a fault is, and how its outcome is scored.

2 is what hrl promises: the run goes on, or ends in time with one message that names what happened and the way out. 1 is
an end in time whose message is poor, or a fault that this system does not let anybody inject. 0 is a hang, a wrong
result with exit status 0, or a traceback that says nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: Files of this folder that have a list `FAULTS`, in the order of the table.
ROOMS: tuple[str, ...] = (
    "checkpoints",
    "kills",
    "network_faults",
    "store_faults",
    "numbers",
    "soak",
    "data_faults",
    "fuzz",
    "security",
    "stopping",
    "process_faults",
    "sync_faults",
    "refusals",
    "environments",
    "episodes",
)


@dataclass(frozen=True)
class Outcome:
    """What a fault led to.

    Attributes:
        score: 0, 1 or 2.
        seconds: From the fault, or from the start of a run that it keeps from starting, to the end.
        message: What the user was told, in one line; or why the score is not 2.
    """

    score: int
    seconds: float
    message: str


def not_tried(why: str) -> Outcome:
    """Return the outcome of a fault that can't be injected here."""
    return Outcome(1, 0.0, f"not tried: {why}")


class Fault(NamedTuple):
    """A fault that can be injected.

    Attributes:
        kind: The kind of fault; several variants may share one, and it counts by the worst.
        variant: What tells it from the others of its kind.
        inject: Injects it into a run of its own, in an empty folder that it is given.
        is_quick: Whether it takes a few seconds and belongs to the short half, which is part of `make test`.
    """

    kind: str
    variant: str
    inject: Callable[[Path], Outcome]
    is_quick: bool = False


def faults(rooms: Iterable[str] = ROOMS) -> Sequence[Fault]:
    """Return the faults of some files of this folder."""
    return [fault for room in rooms for fault in importlib.import_module(f"tests.chaos.{room}").FAULTS]
