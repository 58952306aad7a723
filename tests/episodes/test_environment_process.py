"""The process in which environments live has as many threads as calls run in it at the same time, and no more."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from hrl.episodes.environment_process import CallerThreads
from hrl.processes.shared_state import SharedState

PATIENCE_S = 20


def threads_of_ten() -> CallerThreads:
    return CallerThreads(SharedState(SharedState.create(num_threads=10)))


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_a_call_that_comes_as_soon_as_another_is_answered_takes_its_thread(raises: bool) -> None:
    """A thread more for each call that comes so early is one more for every ten batches or so, all the time."""
    threads = threads_of_ten()
    used: list[int] = []
    may_begin, is_over = threading.Event(), threading.Event()

    def call() -> None:
        may_begin.wait(PATIENCE_S)
        used.append(threading.get_ident())
        if raises:
            raise ZeroDivisionError

    def go_on(_: Future[None]) -> None:  # on the thread that answers, and before it is through with that
        if len(used) < 10:
            threads.submit(call).add_done_callback(go_on)
        else:
            is_over.set()

    threads.submit(call).add_done_callback(go_on)
    may_begin.set()
    assert is_over.wait(PATIENCE_S)
    assert len(set(used)) == 1


def test_calls_at_the_same_time_have_a_thread_each_and_the_next_ones_have_the_same() -> None:
    threads = threads_of_ten()
    all_are_there = threading.Barrier(4, timeout=PATIENCE_S)

    def call() -> int:
        all_are_there.wait()
        return threading.get_ident()

    used = [[one.result(PATIENCE_S) for one in [threads.submit(call) for _ in range(4)]] for _ in range(20)]
    assert [len(set(of_round)) for of_round in used] == [4] * 20
    assert len(set().union(*used)) == 4
