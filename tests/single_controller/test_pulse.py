"""A rank without a pulse is the one that holds the others up; those in a collective only wait for it."""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import RpcError

from hrl.single_controller import pulse
from hrl.single_controller.pulse import Beat, Pulses, place_of, whereabouts


class Store:
    """Beats as ranks have left them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.beats: dict[int, Beat | None] = {}
        self.fails = False
        monkeypatch.setattr(Pulses, "_read", lambda _, rank: self.read(rank))
        monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: self.now))

    def read(self, rank: int) -> Beat | None:
        if self.fails:
            raise RpcError("deadline exceeded")
        return self.beats.get(rank)

    def beat(self, rank: int) -> None:
        last = self.beats.get(rank)
        self.beats[rank] = Beat(1 if last is None else last.number + 1, "f (x.py:1)", False, 1.5)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


def look_for(pulses: Pulses, store: Store, seconds: float, beating: tuple[int, ...]) -> None:
    for _ in range(int(seconds / 15)):
        store.now += 15
        for rank in beating:
            store.beat(rank)
        pulses.look([0, 1], 30.0)


def test_only_the_rank_without_a_pulse_is_silent_and_only_after_its_time(store: Store) -> None:
    pulses = Pulses(["a", "b"])
    look_for(pulses, store, 60, beating=(0, 1))
    look_for(pulses, store, 165, beating=(0,))
    assert pulses.silent([0, 1]) == []
    look_for(pulses, store, 15, beating=(0,))
    assert pulses.silent([0, 1]) == [1]
    assert pulses.silent([0]) == [], "nobody waits for the other"
    look_for(pulses, store, 15, beating=(0, 1))
    assert pulses.silent([0, 1]) == []


def test_time_in_which_the_driver_itself_stood_still_is_not_silence(store: Store) -> None:
    pulses = Pulses(["a", "b"])
    look_for(pulses, store, 30, beating=(0, 1))
    store.now += 100_000
    pulses.look([0, 1], 30.0)
    assert pulses.silent([0, 1]) == []


def test_a_rank_that_never_had_a_pulse_is_not_silent(store: Store) -> None:
    pulses = Pulses(["a", "b"])
    look_for(pulses, store, 600, beating=())
    assert pulses.silent([0, 1]) == []


def test_beats_that_cannot_be_read_are_not_silence(store: Store) -> None:
    pulses = Pulses(["a", "b"])
    look_for(pulses, store, 30, beating=(0, 1))
    store.fails = True
    look_for(pulses, store, 600, beating=())
    assert pulses.silent([0, 1]) == []


def test_a_beat_that_could_not_be_left_is_followed_by_the_next_until_the_cluster_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left: list[int] = []
    tried = iter(range(1, 100))

    def put(_: str, beat: str, *, namespace: bytes) -> None:
        number = next(tried)
        if number in (1, 3):
            raise RpcError("deadline exceeded")
        if number > 5:
            monkeypatch.setattr(pulse.ray, "is_initialized", lambda: False)
            raise RuntimeError("the cluster has ended")
        left.append(json.loads(beat)[0])

    monkeypatch.setattr(pulse.internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(pulse.ray, "is_initialized", lambda: True)
    pulse._beat("a", threading.main_thread().ident, 0.0)
    assert left == [2, 4, 5] and next(tried) == 7
    assert [record.message for record in caplog.records] == [
        f"beat {number} of this rank could not be left, the next is tried: deadline exceeded" for number in (1, 3)
    ]


def test_those_that_the_others_wait_for_come_first() -> None:
    waiting = Beat(9, "all_reduce (distributed/x.py:7), called by step (engine/engine.py:3)", True, 1.0)
    beats = {rank: waiting for rank in range(16) if rank != 5} | {5: Beat(4, "read (lib/nfs.py:2)", False, 1.0)}
    assert whereabouts(beats) == (
        "rank 5 in read (lib/nfs.py:2); ranks 0, 1, 2, 3, 4, 6, 7, 8 and 7 more waiting for other ranks in "
        "all_reduce (distributed/x.py:7), called by step (engine/engine.py:3)"
    )
    assert whereabouts({}) == ""


def test_the_place_is_the_innermost_function_and_the_one_of_hrl_that_led_there() -> None:
    held, let_go = threading.Event(), threading.Event()

    class Place:
        def __str__(self) -> str:
            held.set()
            let_go.wait(10)
            return "x"

    beats = {0: Beat(1, Place(), False, 0.0)}  # type: ignore[arg-type]
    thread = threading.Thread(target=whereabouts, args=(beats,))
    thread.start()
    assert held.wait(10)
    place, in_collective = place_of(sys._current_frames()[thread.ident or 0])
    let_go.set()
    thread.join(10)
    assert place.startswith("wait (") and "called by whereabouts (single_controller/pulse.py:" in place
    assert not in_collective and place_of(None) == ("nowhere", False)
