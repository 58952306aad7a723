"""The phases of a step as a list, and the order in which they run: what can run at once on processes of its own does.

A phase names the processes that it runs on, the columns that it needs and those that it gives. It begins as soon as the
earlier phases that give what it needs have ended, and those on the same processes. So on one pool phases run one after
another, in the order of the list. The numbers are the same in any case: a phase sees what the phases that it waits for
have given, and what phases give, columns and metrics, comes together in the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hrl.metrics import StepMetrics
from hrl.protocol import DataProto
from hrl.single_controller.turns import Turns


@dataclass(frozen=True)
class StepPhase:
    """A phase of a step.

    Attributes:
        name: Of its timer.
        run: Takes the batch and the metrics of the step, and returns the batch; None for the one that it was given.
        on: The pool whose processes it calls; None for the driver alone.
        devices: Those of that pool, where other pools may have processes on them too.
        needs: The columns that it reads, of those that phases give; None where all that comes before has to be over.
        gives: The columns that it adds or changes for others; None where it may do anything to the batch, so that all
            that comes after has to wait. Further columns that it adds are for itself.
        is_timed: Whether it is a phase to whoever looks at the run.
    """

    name: str
    run: Callable[[DataProto, StepMetrics], DataProto | None]
    on: str | None = None
    needs: frozenset[str] | None = None
    gives: frozenset[str] | None = None
    devices: frozenset[Hashable] = frozenset()
    is_timed: bool = True

    def waits_for(self, earlier: StepPhase) -> bool:
        """Return whether it can't begin before an earlier phase of the list has ended."""
        if self.needs is None or earlier.gives is None or self.gives is None:
            return True
        if self.on == earlier.on or not self.devices.isdisjoint(earlier.devices):
            return True
        return not earlier.gives.isdisjoint(self.needs | self.gives)


class _Given(NamedTuple):
    """What a phase has given."""

    columns: dict[str, Tensor]
    others: dict[str, np.ndarray]
    meta: dict[str, Any]
    metrics: StepMetrics


class _Ended(NamedTuple):
    """How a phase has ended the step, and what it had given by then."""

    end: StepEnd
    given: _Given


class StepEnd(Exception):
    """Ends the phases of a step before the last one where nothing has failed; others that have begun are waited for.

    Attributes:
        batch: With the columns of the phases up to the one that raised it; None where that gave no batch.
    """

    batch: DataProto | None = None


def run_phases(
    phases: Sequence[StepPhase],
    batch: DataProto,
    metrics: StepMetrics,
    *,
    begin: Callable[[str], None],
    timed: Callable[[str, str | None], AbstractContextManager[None]],
    over: Callable[[DataProto, str], None] = lambda batch, name: None,
) -> DataProto:
    """Run the phases of a list, those at once that can, and return the batch with all that they gave.

    Args:
        phases: In the order in which they would run one after another.
        batch: What the first one gets.
        metrics: Receives those of the phases.
        begin: Is called before each with its name, and may refuse.
        timed: Makes the context of each, from its name and its pool.
        over: Is called with the batch and the name of each phase in the order of the list, as if they had run so.

    Raises:
        StepEnd: A phase or `over` raised it, the first one of the list; others that had begun have ended.
        Exception: The first error of a phase. Other phases are given up, see `Turns`; an error that one of them had by
            then is logged.
    """
    return _Run(list(phases), batch, metrics, begin, timed, over).to_the_end()


class _Run:
    def __init__(
        self,
        phases: list[StepPhase],
        batch: DataProto,
        metrics: StepMetrics,
        begin: Callable[[str], None],
        timed: Callable[[str, str | None], AbstractContextManager[None]],
        over: Callable[[DataProto, str], None],
    ) -> None:
        self.phases, self.batch, self.metrics = phases, batch, metrics
        self.begin, self.timed, self.over = begin, timed, over
        self.waits = [{j for j in range(k) if phase.waits_for(phases[j])} for k, phase in enumerate(phases)]
        self.next = 0  # the first whose gift is not in the batch
        self.begun: set[int] = set()
        self.given: dict[Any, _Given | _Ended] = {}

    def to_the_end(self) -> DataProto:
        with Turns() as turns:
            try:
                while self.next < len(self.phases):
                    self._begin_what_can(turns)
                    if turns.running:
                        self._take(turns)
                    self._join()
            except StepEnd:
                while turns.running:
                    self._take(turns)
                raise
        return self.batch

    def _begin_what_can(self, turns: Turns) -> None:
        """Begin every phase that can; one that would run alone runs here, on the batch itself."""
        for place in self._ready():
            if self.phases[place].is_timed:
                self.begin(self.phases[place].name)
            self.begun.add(place)
            if place == self.next and not turns.running and not self._ready():
                self._run_alone(place)
                return
            view, metrics = self._view(place), StepMetrics()
            turns.begin(place, self.phases[place].name, partial(self._run_beside, place, view, metrics))

    def _ready(self) -> list[int]:
        """Return the places of phases that can begin; none behind one that ends the step."""
        is_over = {*range(self.next), *self.given}
        end = min((place for place, given in self.given.items() if isinstance(given, _Ended)), default=len(self.waits))
        return [place for place in range(end) if place not in self.begun | is_over and self.waits[place] <= is_over]

    def _run_alone(self, place: int) -> None:
        phase = self.phases[place]
        with self.timed(phase.name, phase.on) if phase.is_timed else nullcontext():
            found = phase.run(self.batch, self.metrics)
        self.batch = self.batch if found is None else found
        self.next += 1
        self.over(self.batch, phase.name)

    def _run_beside(self, place: int, view: DataProto, metrics: StepMetrics) -> _Given | _Ended:
        phase, before = self.phases[place], copy_of(view)
        try:
            with self.timed(phase.name, phase.on) if phase.is_timed else nullcontext():
                found = phase.run(view, metrics)
        except StepEnd as end:
            return _Ended(end, _gift(phase, before, before if end.batch is None else end.batch, metrics))
        return _gift(phase, before, view if found is None else found, metrics)

    def _view(self, place: int) -> DataProto:
        """Return the batch as a phase sees it, with what those gave that it waits for."""
        view = copy_of(self.batch)
        for earlier in sorted(self.waits[place] & self.given.keys()):
            given = self.given[earlier]
            assert isinstance(given, _Given), "no phase begins behind one that ends the step"
            _put(given, view)
        return view

    def _take(self, turns: Turns) -> None:
        ended = turns.next_ended()
        if ended.error is not None:
            raise ended.error
        self.given[ended.key] = ended.result

    def _join(self) -> None:
        """Put into the batch what has been given, up to the first phase that has not ended."""
        while (given := self.given.pop(self.next, None)) is not None:
            if isinstance(given, _Ended):
                _put(given.given, self.batch)
                self.metrics.absorb(given.given.metrics)
                if given.end.batch is not None:  # that of a phase which did not see what ran beside it
                    given.end.batch = self.batch
                raise given.end
            _put(given, self.batch)
            self.metrics.absorb(given.metrics)
            self.next += 1
            self.over(self.batch, self.phases[self.next - 1].name)


def copy_of(batch: DataProto) -> DataProto:
    """Return a batch of the same columns, to which others can be added."""
    return DataProto(
        None if batch.batch is None else batch.batch.copy(), dict(batch.non_tensor_batch), dict(batch.meta_info)
    )


def _gift(phase: StepPhase, before: DataProto, after: DataProto, metrics: StepMetrics) -> _Given:
    gives = phase.gives or frozenset()
    columns = _changes(dict(before.batch.items()), dict(after.batch.items()))
    others = _changes(before.non_tensor_batch, after.non_tensor_batch)
    had = {*before.batch.keys(), *before.non_tensor_batch}
    secret = sorted((columns.keys() | others.keys()) & had - gives)
    if secret or len(after) != len(before):
        what = f"the column {secret[0]!r}" if secret else "the rows"
        raise RuntimeError(f"phase {phase.name} ran beside others and changed {what}, which its `gives` does not name")
    return _Given(
        {name: column for name, column in columns.items() if name in gives},
        {name: column for name, column in others.items() if name in gives},
        _changes(before.meta_info, after.meta_info),
        metrics,
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {name: column for name, column in after.items() if name not in before or before[name] is not column}


def _put(given: _Given, batch: DataProto) -> None:
    for name, column in given.columns.items():
        batch.batch[name] = column
    batch.non_tensor_batch.update(given.others)
    batch.meta_info.update(given.meta)
