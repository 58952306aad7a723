"""Two implementations of one thing, on the same input, in turns, in one process.

A benchmark is a module of this folder with a function `cases`, which makes the inputs, outside of what is timed. The
first line of its docstring is its title in the results, the rest says what is compared and why; `AXIS` names the axis
of its growth curve, and `THREADS` is the number of its threads. A case has two callables, ours and the peer's. Their
results are compared first; then they run in turns of at least 20 ms, A/B/A/B, so that whatever else the machine does
meets both, and medians are compared. What a number means on another machine is the ratio, not the seconds. What is
there before the rounds is frozen for Python's garbage collector, as it is in vLLM's server and in hrl's processes: a
collection walks through what the two have made, and not through the libraries.

A callable may start processes; their CPU time counts once they have ended. It may also start a whole program, from
whose result is read what each of its steps took.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

ROUNDS = 7
#: The shortest turn. A shorter call is made again until this has passed, and the mean counts: the first would mostly
#: pay for code and data that the other side's turn has put out of the caches.
LEAST_S = 0.02


@dataclass(frozen=True)
class Case:
    """One point of a benchmark.

    Attributes:
        label: What distinguishes it from the benchmark's other cases, such as `512 ranks`.
        peer: Whose code `theirs` calls, with its version.
        ours: Runs hrl's code once and returns its result.
        theirs: Runs the peer's code once, on the same input.
        check: Raises an `AssertionError` where the two results differ by more than they may.
        floor: The least acceptable ratio of the peer's seconds to ours; None if the case only shows growth.
        x: Place on the axis of the growth curve.
        series: Which curve it belongs to, where a benchmark has several.
        rounds: How often each runs.
        others: Further pairs that are compared besides time, made after the rounds.
        seconds: Reads from a result what it took, several values where a program took several steps. The time of the
            call without it.
        warms_up: Whether the first call of each is not counted.
        settle: Called after each run, outside of what is timed: waits for what it has left to other processes.
    """

    label: str
    peer: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    check: Callable[[Any, Any], None]
    floor: float | None = None
    x: float | None = None
    series: str = ""
    rounds: int = ROUNDS
    others: Callable[[], Iterator[Comparison]] | None = None
    seconds: Callable[[Any], Sequence[float]] | None = None
    warms_up: bool = True
    settle: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Comparison:
    """A quantity of both, of which less is better.

    Attributes:
        label: Of the case it belongs to.
        peer: Whose the other value is.
        quantity: What is counted, with its unit: `seconds`, `CPU seconds`, `MiB`.
        ours: hrl's value.
        theirs: The peer's.
        floor: The least acceptable `theirs / ours`.
        x: Place on the axis of the growth curve.
        series: Which curve it belongs to.
        spread: Of hrl's and the peer's rounds, the largest distance from the median, as a share of it.
        rounds: Of how many values hrl's and the peer's are the medians.
    """

    label: str
    peer: str
    quantity: str
    ours: float
    theirs: float
    floor: float | None = None
    x: float | None = None
    series: str = ""
    spread: tuple[float, float] = (0.0, 0.0)
    rounds: tuple[int, int] = (1, 1)

    @property
    def ratio(self) -> float:
        """How many times less hrl takes than the peer."""
        return self.theirs / self.ours

    @property
    def holds(self) -> bool:
        """Whether the ratio is at or above its floor."""
        return self.floor is None or self.ratio >= self.floor


@dataclass
class _Rounds:
    seconds: Callable[[Any], Sequence[float]] | None
    settle: Callable[[], Any] | None
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def run(self, function: Callable[[], Any]) -> Any:
        gc.collect()
        is_one_call = self.seconds is not None or self.settle is not None
        wall, cpu, calls = time.perf_counter(), _cpu_seconds(), 0
        while calls == 0 or (not is_one_call and time.perf_counter() - wall < LEAST_S):
            result = function()
            calls += 1
        self.cpu_s.append((_cpu_seconds() - cpu) / calls)
        taken = (time.perf_counter() - wall) / calls
        self.wall_s.extend([taken] if self.seconds is None else self.seconds(result))
        if self.settle is not None:
            self.settle()
        return result

    @property
    def spread(self) -> float:
        middle = statistics.median(self.wall_s)
        return max(abs(seconds - middle) for seconds in self.wall_s) / middle


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of all children that have ended, with theirs."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(case: Case) -> list[Comparison]:
    """Compare the two results, then the two times.

    Raises:
        AssertionError: The results differ.
    """
    ours, theirs = (_Rounds(case.seconds, case.settle) for _ in range(2))
    if case.warms_up:
        # What is made once (compiled loops, arenas, files in memory) is there afterwards, for both.
        case.check(case.ours(), case.theirs())
        if case.settle is not None:
            case.settle()
    gc.collect()
    gc.freeze()
    try:
        for _ in range(case.rounds):
            results = ours.run(case.ours), theirs.run(case.theirs)
            if not case.warms_up:
                case.check(*results)
    finally:
        gc.unfreeze()
    found = [
        Comparison(
            case.label,
            case.peer,
            quantity,
            statistics.median(a),
            statistics.median(b),
            case.floor if quantity == "seconds" else None,
            case.x,
            case.series,
            (ours.spread, theirs.spread) if quantity == "seconds" else (0.0, 0.0),
            (len(a), len(b)),
        )
        for quantity, a, b in (("seconds", ours.wall_s, theirs.wall_s), ("CPU seconds", ours.cpu_s, theirs.cpu_s))
        # Of a program only processes count that its own ones waited for, which Ray's aren't.
        if quantity == "seconds" or case.seconds is None
    ]
    return found + list(case.others() if case.others is not None else ())
