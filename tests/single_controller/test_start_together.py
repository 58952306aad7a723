"""Calls and groups side by side: nobody waits for another, and the first failure ends the waiting."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from hrl.single_controller.dispatch import Dispatch, register
from hrl.single_controller.resource_pool import RayResourcePool
from hrl.single_controller.worker import RayClassWithInitArgs, Worker
from hrl.single_controller.worker_errors import WorkerError
from hrl.single_controller.worker_group import GroupFuture, RayWorkerGroup, wait_for_all


class Pending:
    """A call that ends after so many looks at it."""

    def __init__(self, looks: int, outcome: Any) -> None:
        self.looks, self.outcome = looks, outcome

    def done(self) -> bool:
        self.looks -= 1
        if self.looks <= 0 and isinstance(self.outcome, Exception):
            raise self.outcome
        return self.looks <= 0

    def get(self, timeout_s: float | None = None) -> Any:
        return self.outcome


def failure(rank: int) -> WorkerError:
    return WorkerError(rank, "ref.init_model", "init", "no weights")


def future(looks: int, outcome: Any) -> GroupFuture:
    return GroupFuture(Pending(looks, outcome), lambda results: results)


def test_results_come_in_the_order_of_the_calls() -> None:
    assert wait_for_all([future(5, "a"), future(1, "b"), future(3, "c")]) == ["a", "b", "c"]


def test_a_failure_ends_the_wait_for_calls_that_would_never_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(WorkerError, match="rank 1"):
        wait_for_all([future(10**9, "never"), future(3, failure(1)), future(3, failure(2))])
    assert "failed too: rank 2: ref.init_model (phase init) raised no weights" in caplog.text


class Slow(Worker):
    def __init__(self, begun: str, other: str, fails: bool = False) -> None:
        """Waits until another group's worker is under construction."""
        if fails:
            raise FileNotFoundError("no weights here")
        with open(begun, "w"):
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    open(other).close()
                    return
                except FileNotFoundError:
                    time.sleep(0.02)
        raise TimeoutError("nobody else was constructed meanwhile")

    @register(Dispatch.ONE_TO_ALL)
    def here(self) -> bool:
        return True


def begin(pool: RayResourcePool, *args: Any, **kwargs: Any) -> RayWorkerGroup:
    return RayWorkerGroup(pool, RayClassWithInitArgs(Slow, *args, **kwargs), wait=False)


@pytest.mark.usefixtures("ray_session")
def test_groups_that_start_together_construct_at_the_same_time(tmp_path) -> None:
    pools = [RayResourcePool([1], use_gpu=False) for _ in range(2)]
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    groups = [begin(pools[0], a, b), begin(pools[1], b, a)]
    try:
        RayWorkerGroup.start_together(groups)
        assert [group.here() for group in groups] == [[True], [True]]
    finally:
        for group, pool in zip(groups, pools, strict=True):
            group.shutdown()
            pool.release()


@pytest.mark.usefixtures("ray_session")
def test_if_one_group_fails_all_are_ended_and_their_places_are_free(tmp_path) -> None:
    pools = [RayResourcePool([1], use_gpu=False) for _ in range(2)]
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    waits_for_the_other, fails = begin(pools[0], a, b), begin(pools[1], b, a, fails=True)
    started = time.monotonic()
    with pytest.raises(WorkerError, match="no weights here"):
        RayWorkerGroup.start_together([waits_for_the_other, fails])
    assert time.monotonic() - started < 50
    for pool in pools:
        pool.take_place()
        pool.release()
