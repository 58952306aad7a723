"""`bench.harness`: results are compared before anything is timed, and a ratio below its floor is seen."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from bench import harness
from bench.harness import Case, Comparison, measure


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of one call each."""
    monkeypatch.setattr(harness, "LEAST_S", 0.0)


class Side:
    """One side of a case, which notes its calls."""

    def __init__(self, name: str, calls: list[str], result: int = 1) -> None:
        self.name, self.calls, self.result = name, calls, result

    def __call__(self) -> int:
        self.calls.append(self.name)
        return self.result


def equal(ours: object, theirs: object) -> None:
    assert ours == theirs, f"{ours} and {theirs}"


def test_the_results_are_compared_before_the_first_round() -> None:
    calls: list[str] = []

    def check(ours: int, theirs: int) -> None:
        calls.append("check")

    measure(Case("a", "peer", Side("ours", calls), Side("theirs", calls), check, rounds=2))

    assert calls == ["ours", "theirs", "check", "ours", "theirs", "ours", "theirs"]


def test_results_that_differ_end_it_before_anything_is_timed() -> None:
    calls: list[str] = []
    with pytest.raises(AssertionError, match="1 and 2"):
        measure(Case("a", "peer", Side("ours", calls), Side("theirs", calls, 2), equal))
    assert calls == ["ours", "theirs"]


def test_without_a_call_before_every_round_is_compared() -> None:
    calls: list[str] = []
    with pytest.raises(AssertionError, match="1 and 2"):
        measure(Case("a", "peer", Side("ours", calls), Side("theirs", calls, 2), equal, rounds=3, warms_up=False))
    assert calls == ["ours", "theirs"]


def test_objects_are_thawed_after_results_that_differ() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(AssertionError):
        measure(Case("a", "peer", lambda: 1, lambda: 2, equal, warms_up=False))
    assert gc.get_freeze_count() <= before


def test_a_comparison_has_the_medians_of_its_rounds_and_the_floor() -> None:
    def seconds(result: list[float]) -> list[float]:
        return result

    case = Case("a", "peer", lambda: [1.0, 2.0, 9.0], lambda: [8.0], lambda *_: None, 5.0, rounds=1, seconds=seconds)

    (row,) = measure(case)

    assert (row.ours, row.theirs, row.ratio, row.rounds) == (2.0, 8.0, 4.0, (3, 1))
    assert row.spread == (3.5, 0.0)
    assert row.floor == 5.0 and not row.holds


class Clock:
    """Time that passes only in calls."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def passes(self, seconds: float) -> Callable[[], int]:
        def call() -> int:
            self.now_s += seconds
            return 1

        return call


def test_a_short_call_is_made_again_within_its_turn_and_the_mean_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(), list[str]()
    monkeypatch.setattr(harness, "LEAST_S", 0.02)
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: clock.now_s, process_time=lambda: 0.0))
    short, long = clock.passes(0.0078125), clock.passes(0.5)

    def ours() -> int:
        calls.append("ours")
        return short()

    wall, cpu = measure(Case("a", "peer", ours, long, equal, rounds=2))

    assert wall.rounds == cpu.rounds == (2, 2)
    assert (wall.ours, wall.theirs) == (0.0078125, 0.5)
    assert len(calls) == 1 + 2 * 3


def test_what_is_settled_is_one_call_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "LEAST_S", 1.0)
    calls: list[str] = []
    case = Case("a", "peer", Side("ours", calls), Side("theirs", calls), equal, rounds=1, settle=Side("settle", calls))

    measure(case)

    assert calls[-4:] == ["ours", "settle", "theirs", "settle"]


def test_only_the_time_has_the_floor_of_a_case_and_other_pairs_come_behind() -> None:
    def others() -> Iterator[Comparison]:
        yield Comparison("a", "peer", "MiB", 1.0, 3.0, 2.0)

    wall, cpu, mib = measure(Case("a", "peer", lambda: 1, lambda: 1, equal, 1e9, rounds=1, others=others))

    assert not wall.holds
    assert cpu.floor is None and cpu.holds
    assert mib.holds and mib.ratio == 3.0


@pytest.mark.parametrize(("theirs", "holds"), [(1.99, False), (2.0, True), (2.01, True)])
def test_a_ratio_holds_from_its_floor_on(theirs: float, holds: bool) -> None:
    assert Comparison("a", "peer", "seconds", 1.0, theirs, 2.0).holds is holds
