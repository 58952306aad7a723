"""Phases that can run at once do, and give the numbers that they give one after another."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hrl.metrics import Metric, StepMetrics
from hrl.protocol import DataProto
from hrl.single_controller.turns import others_have_their_turn, run_apart
from hrl.single_controller.worker_errors import WorkerError
from hrl.trainer.phases import StepEnd, StepPhase, run_phases
from hrl.trainer.ppo.finite_columns import LeftOutError
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.trainer.ppo.driver import Driver
from tests.trainer.ppo.test_finite_columns import PPO, Broken
from tests.trainer.ppo.test_wiring import PerRow, one_step

COLUMNS = "abcdef"


def wait(until: Callable[[], bool], deadline_s: float = 20.0) -> None:
    """Wait as a call does for its ranks."""
    deadline = time.monotonic() + deadline_s
    with others_have_their_turn() as require_wanted:
        while not until():
            require_wanted()
            assert time.monotonic() < deadline, "nobody came"
            time.sleep(0.001)


def batch_of(**columns: float) -> DataProto:
    return DataProto.from_dict(tensors={name: torch.full((2,), value) for name, value in columns.items()})


class Clock:
    """Notes which phases began and ended, in order, and how many were running at most."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.pools: dict[str | None, set[str]] = {}

    @contextmanager
    def timed(self, name: str, pool: str | None) -> Iterator[None]:
        running = self.pools.setdefault(pool, set())
        assert not running, f"{name} began on {pool} while {running} ran there"
        running.add(name)
        self.events.append(f"+{name}")
        yield
        self.events.append(f"-{name}")
        running.remove(name)

    @property
    def most_at_once(self) -> int:
        running = most = 0
        for event in self.events:
            running += 1 if event[0] == "+" else -1
            most = max(most, running)
        return most


def run(phases: list[StepPhase], batch: DataProto, metrics: StepMetrics | None = None, **more: Any) -> DataProto:
    clock = more.pop("clock", Clock())
    metrics = StepMetrics() if metrics is None else metrics
    return run_phases(phases, batch, metrics, begin=lambda name: None, timed=clock.timed, **more)


# ---------------------------------------------------------------------------------------------- the same numbers


def drawn(rng: random.Random, place: int, *, one_pool: bool) -> StepPhase:
    """A phase that makes its columns from those that it needs, changes some of them, and waits in between."""
    needs, gives = (frozenset(rng.sample(COLUMNS, rng.randint(1, 2))) for _ in "12")
    is_open = rng.random() < 0.15
    naps = [rng.random() * 0.003 for _ in range(rng.randint(0, 2))]

    def work(batch: DataProto, metrics: StepMetrics) -> DataProto:
        total = sum(batch.batch[name].double().sum() * (1 + ord(name)) for name in sorted(needs))
        for nap in naps:
            until = time.monotonic() + nap
            wait(lambda until=until: time.monotonic() >= until)
        metrics.observe({"mean": Metric.mean(float(total), 1), "latest": Metric.last(place)})
        metrics["set"] = float(total)
        for name in sorted(gives):
            batch.batch[name] = torch.sin(total + torch.arange(2) + ord(name))
        batch.batch[f"own {place}"] = torch.zeros(2)
        return batch

    pool = None if one_pool else rng.choice([None, "x", "y", "z"])
    return StepPhase(f"p{place}", work, pool, None if is_open else needs, None if is_open else gives)


@pytest.mark.parametrize("seed", range(20))
def test_any_list_of_phases_gives_the_numbers_of_one_after_another(seed: int) -> None:
    found = []
    for one_pool in (True, False):
        rng = random.Random(seed)
        phases = [drawn(rng, place, one_pool=False) for place in range(7)]
        if one_pool:
            phases = [StepPhase(phase.name, phase.run, "x", phase.needs, phase.gives) for phase in phases]
        clock, metrics, looked = Clock(), StepMetrics(), []
        start = batch_of(**{name: float(ord(name)) for name in COLUMNS})
        batch = run(
            phases,
            start,
            metrics,
            clock=clock,
            over=lambda batch, name, looked=looked: looked.append((name, *batch.batch["a"].tolist())),
        )
        found.append((dict(metrics), looked, {name: batch.batch[name].tolist() for name in COLUMNS}))
        if one_pool:
            assert clock.most_at_once == 1
    assert found[0] == found[1]


def test_phases_on_pools_of_their_own_run_at_once_and_what_needs_both_waits() -> None:
    begun: set[str] = set()

    def meets(name: str, other: str) -> StepPhase:
        def work(batch: DataProto, metrics: StepMetrics) -> DataProto:
            begun.add(name)
            wait(lambda: other in begun)
            batch.batch[name] = torch.ones(2)
            return batch

        return StepPhase(name, work, f"pool of {name}", frozenset("a"), frozenset({name}))

    def both(batch: DataProto, metrics: StepMetrics) -> DataProto:
        batch.batch["sum"] = batch.batch["ref"] + batch.batch["values"]
        return batch

    clock = Clock()
    batch = run([meets("ref", "values"), meets("values", "ref"), StepPhase("adv", both)], batch_of(a=1.0), clock=clock)
    assert batch.batch["sum"].tolist() == [2, 2]
    assert clock.events[:2] == ["+ref", "+values"] and clock.events[-2:] == ["+adv", "-adv"]


def test_a_phase_alone_gets_the_batch_and_the_metrics_themselves_in_the_drivers_own_thread() -> None:
    given, metrics, seen = batch_of(a=1.0), StepMetrics(), []

    def looks(batch: DataProto, metrics: StepMetrics) -> None:
        seen.append((batch, metrics, threading.current_thread()))

    phases = [StepPhase(name, looks, "x", frozenset("a"), frozenset()) for name in "pq"]
    assert run([*phases, StepPhase("adv", looks)], given, metrics) is given
    assert all(
        batch is given and own is metrics and thread is threading.current_thread() for batch, own, thread in seen
    )
    assert len(seen) == 3


def test_a_column_that_is_changed_in_secret_is_told() -> None:
    def secret(batch: DataProto, metrics: StepMetrics) -> DataProto:
        batch.batch["a"] = torch.zeros(2)
        return batch

    phases = [StepPhase(name, secret, name, frozenset(), frozenset()) for name in "pq"]
    with pytest.raises(RuntimeError, match=r"phase [pq] ran beside others and changed the column 'a', which its"):
        run(phases, batch_of(a=1.0))


# ---------------------------------------------------------------------------------------------- failures


def forever(batch: DataProto, metrics: StepMetrics) -> None:
    wait(lambda: False)


def left_over() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("values", "ref", "late")]


def test_a_failure_is_one_error_and_nobody_waits_for_the_phase_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    def fails(batch: DataProto, metrics: StepMetrics) -> None:
        wait(lambda: True)
        raise WorkerError(1, "critic.compute_values", "values", "no memory")

    began = time.monotonic()
    phases = [
        StepPhase("ref", forever, "x", frozenset(), frozenset()),
        StepPhase("values", fails, "y", frozenset(), frozenset()),
    ]
    with caplog.at_level(logging.ERROR), pytest.raises(WorkerError, match="rank 1: critic"):
        run(phases, batch_of(a=1.0))
    assert time.monotonic() - began < 30 and not left_over()
    assert not caplog.text, "one error, of the phase that failed"


def test_a_second_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    is_over = threading.Event()

    def fails(name: str, at_once: bool) -> StepPhase:
        def work(batch: DataProto, metrics: StepMetrics) -> None:
            with others_have_their_turn():
                is_over.set() if at_once else is_over.wait(10)
            raise WorkerError(0, name, name, "ended")

        return StepPhase(name, work, name, frozenset(), frozenset())

    with caplog.at_level(logging.ERROR), pytest.raises(WorkerError) as raised:
        run([fails("ref", True), fails("values", False)], batch_of(a=1.0))
    told = {"ref", "values"} - {raised.value.phase}
    assert f"{told.pop()} failed too" in caplog.text or not caplog.text  # if it noticed first that nobody waits


def test_a_step_that_ends_early_waits_for_what_it_has_begun_and_names_the_first_of_the_list() -> None:
    done = []

    def ends(name: str, after_s: float) -> StepPhase:
        def work(batch: DataProto, metrics: StepMetrics) -> None:
            until = time.monotonic() + after_s
            wait(lambda: time.monotonic() >= until)
            done.append(name)
            if name != "late":
                raise StepEnd(name)

        return StepPhase(name, work, name, frozenset(), frozenset())

    later = StepPhase("never", lambda *_: done.append("never"), "x", None, None)
    with pytest.raises(StepEnd, match="ref"):
        run([ends("ref", 0.1), ends("values", 0.0), ends("late", 0.2), later], batch_of(a=1.0))
    assert done == ["values", "ref", "late"] and not left_over()


def test_a_step_that_ends_early_keeps_what_was_given_before_as_one_after_another() -> None:
    def gives(name: str) -> StepPhase:
        def work(batch: DataProto, metrics: StepMetrics) -> DataProto:
            wait(lambda: True)
            batch.batch[name] = torch.ones(2)
            metrics[name] = 1.0
            if name == "values":
                end = StepEnd(name)
                end.batch = batch
                raise end
            return batch

        return StepPhase(name, work, name, frozenset("a"), frozenset({name}))

    for names in (["ref", "values", "late"], ["ref", "values"]):
        metrics = StepMetrics()
        with pytest.raises(StepEnd) as ended:
            run([gives(name) for name in names], batch_of(a=1.0), metrics)
        assert ended.value.batch is not None
        assert {*ended.value.batch.batch.keys()} == {"a", "ref", "values"}
        assert dict(metrics) == {"ref": 1.0, "values": 1.0}


@pytest.mark.parametrize("is_beside", [False, True])
def test_what_runs_apart_is_not_waited_for_where_nobody_wants_it(is_beside: bool) -> None:
    over = threading.Event()

    async def asks() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            over.set()

    def waits(batch: DataProto, metrics: StepMetrics) -> None:
        run_apart(asks(), "late")

    def fails(batch: DataProto, metrics: StepMetrics) -> None:
        wait(lambda: True)
        raise WorkerError(1, "critic.compute_values", "values", "no memory")

    began = time.monotonic()
    if is_beside:  # it leaves its turn to the other
        phases = [StepPhase("ref", waits, "x", frozenset(), frozenset())]
        phases += [StepPhase("values", fails, "y", frozenset(), frozenset())]
        with pytest.raises(WorkerError):
            run(phases, batch_of(a=1.0))
    else:
        alarm = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        alarm.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                run_apart(asks(), "late")
        finally:
            signal.signal(signal.SIGINT, before)
    assert over.wait(30) and time.monotonic() - began < 50
    until_gone = time.monotonic() + 30
    while left_over() and time.monotonic() < until_gone:
        time.sleep(0.01)
    assert not left_over()


def test_what_runs_apart_gives_its_result_or_its_error() -> None:
    async def asks(error: Exception | None) -> int:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return 3

    async def within_a_loop() -> int:
        return run_apart(asks(None), "late")

    assert run_apart(asks(None), "late") == asyncio.run(within_a_loop()) == 3
    with pytest.raises(WorkerError, match="no memory"):
        run_apart(asks(WorkerError(1, "ref", "ref", "no memory")), "late")


def test_an_interruption_of_the_driver_leaves_no_thread() -> None:
    def interrupted(batch: DataProto, name: str) -> None:
        raise KeyboardInterrupt

    quick = StepPhase("ref", lambda *_: None, "x", frozenset(), frozenset())
    with pytest.raises(KeyboardInterrupt):
        run([quick, StepPhase("values", forever, "y", frozenset(), frozenset())], batch_of(a=1.0), over=interrupted)
    assert not left_over()


# ---------------------------------------------------------------------------------------------- of PPO


class Meeting(Broken):
    """Roles each of whose calls lasts until all that can run beside it have begun."""

    def __init__(self, column: str = "", value: float = 0.0) -> None:
        super().__init__(column, value)
        self.met: dict[str, set[str]] = {}
        self.together = [{"log_prob", "ref", "values"}, {"critic", "actor"}]

    def meet(self, call: str) -> None:
        (group,) = (group for group in self.together if call in group)
        here = self.met.setdefault(min(group), set())
        here.add(call)
        wait(lambda: here == group)

    def compute_log_prob(self, batch: DataProto, request: Any) -> DataProto:
        self.meet("log_prob")
        return super().compute_log_prob(batch, request)

    def compute_ref_log_prob(self, batch: DataProto, request: Any) -> DataProto:
        self.meet("ref")
        return super().compute_ref_log_prob(batch, request)

    def compute_values(self, batch: DataProto, request: Any) -> DataProto:
        self.meet("values")
        return super().compute_values(batch, request)

    def update_critic(self, batch: DataProto, request: Any) -> list[Any]:
        self.meet("critic")
        super().update_critic(batch, request)
        return [{"critic/vf_loss": Metric.mean(0.5, 1)}]

    def update_actor(self, batch: DataProto, request: Any) -> list[Any]:
        self.meet("actor")
        return super().update_actor(batch, request)


def step_of(folder: Path, workers: Broken, *overrides: str) -> tuple[Driver, DataProto, StepMetrics]:
    driver = Driver(folder, *PPO, *overrides, workers=workers, rewards=PerRow([1.0, 0.0] * 3))
    return driver, *one_step(driver)


def test_a_ppo_step_on_pools_of_its_own_is_the_step_on_one_pool(tmp_path: Path) -> None:
    class OneByOne(Meeting):
        def meet(self, call: str) -> None:
            pass

    shared = step_of(tmp_path / "shared", OneByOne("", 0.0))
    apart = step_of(tmp_path / "apart", Meeting(), "placement=separate")
    assert apart[0].workers.met == {"log_prob": {"log_prob", "ref", "values"}, "actor": {"critic", "actor"}}
    for one, other in ((shared[1].batch, apart[1].batch),):
        assert set(one.keys()) == set(other.keys())
        assert all(torch.equal(one[name], other[name]) for name in one.keys())
    assert shared[2] == apart[2]
    assert [*shared[2]] == [*apart[2]], "in the same order, too"
    assert [type(one) for one in shared[0].workers.asked] == [type(one) for one in apart[0].workers.asked]


def test_rows_that_the_correction_rejects_are_not_given_to_the_reference(tmp_path: Path) -> None:
    """It changes the mask of the response, which models read: they wait for it."""
    driver = Driver(
        tmp_path, *PPO, "placement=separate", "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0", workers=Broken("", 0.0),
    )  # fmt: skip
    phases = {phase.name: phase for phase in driver.trainer.preparation()}
    assert phases["ref"].waits_for(phases["old_log_prob"]) and phases["values"].waits_for(phases["old_log_prob"])
    assert not phases["values"].waits_for(phases["ref"])


MODEL = ("reward.reward_model.enable=true", "reward.reward_model.model_path=x")


class WithModel(Meeting):
    """Whose reward model scores beside the others, once a function has said which rows are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.together = [{"log_prob", "ref", "values", "rm"}, {"critic", "actor"}]
        self.seen: dict[str, list[int]] = {}

    def compute_rm_score(self, batch: DataProto, request: Any) -> DataProto:
        self.seen["rm"] = batch.batch["response_mask"].sum(1).tolist()
        self.meet("rm")
        scores = torch.arange(float(len(batch)))
        return DataProto.from_dict(tensors={"rm_scores": scores})

    def compute_values(self, batch: DataProto, request: Any) -> DataProto:
        self.seen["values"] = batch.batch["response_mask"].sum(1).tolist()
        return super().compute_values(batch, request)


class WithModelOneByOne(WithModel):
    def meet(self, call: str) -> None:
        pass


@pytest.mark.parametrize("function", [None, [1.0, None, 0.5, 0.0, 1.0, 0.25]], ids=["alone", "with a function"])
def test_a_reward_model_scores_beside_the_others_and_they_do_not_see_rows_that_a_function_left_out(
    function: list[float | None] | None, tmp_path: Path
) -> None:
    found = []
    for name, workers, placement in (
        ("shared", WithModelOneByOne(), "colocated"),
        ("apart", WithModel(), "separate"),
    ):
        overrides = (*PPO, *MODEL, f"placement={placement}")
        driver = Driver(tmp_path / name, *overrides, workers=workers, rewards=PerRow(function))
        batch, metrics = one_step(driver)
        found.append(({key: column.tolist() for key, column in batch.batch.items()}, dict(metrics), workers.seen))
    assert found[0] == found[1]
    left_out = [2, 0, 2, 2, 2, 2] if function else [2] * 6
    assert found[1][2] == {"rm": [2] * 6, "values": left_out}


@pytest.mark.parametrize("estimator", ["remax", "grpo"])
def test_what_the_scores_may_change_waits_for_them(estimator: str, tmp_path: Path) -> None:
    filters = ["algorithm.filter_groups.enable=true"] if estimator == "grpo" else []
    named = (*PPO, *MODEL, "placement=separate", *filters, f"algorithm.adv_estimator={estimator}")
    driver = Driver(tmp_path, *named, workers=Broken("", 0.0))
    phases = {phase.name: phase for phase in driver.trainer.preparation()}
    assert "rm" not in phases and phases["ref"].waits_for(phases["reward"])


def test_what_a_subclass_has_replaced_runs_beside_nothing(tmp_path: Path) -> None:
    class Own(RayPPOTrainer):
        compute_values = lambda self, batch: batch  # noqa: E731  a name of its own, as a decorator may leave

    driver = Driver(tmp_path, *PPO, "placement=separate", workers=Broken("", 0.0))
    driver.trainer.__class__ = Own
    phases = {phase.name: phase for phase in driver.trainer.preparation()}
    assert phases["values"].waits_for(phases["ref"])


def test_a_number_that_is_not_finite_is_that_of_the_first_phase_whichever_ends_first(tmp_path: Path) -> None:
    class Late(Broken):
        """Whose reference is broken too, and there first."""

        def compute_values(self, batch: DataProto, request: Any) -> DataProto:
            found = super().compute_values(batch, request)
            found.batch["values"][3, 1] = float("nan")
            return found

        def compute_ref_log_prob(self, batch: DataProto, request: Any) -> DataProto:
            until = time.monotonic() + 0.1
            wait(lambda: time.monotonic() >= until)
            return super().compute_ref_log_prob(batch, request)

    _, batch, metrics = step_of(tmp_path, Late("ref_log_prob", float("nan")), "placement=separate")
    assert metrics["nonfinite/batches"] == 1
    assert (tmp_path / "nonfinite" / "step_1.ref.json").exists()
    assert issubclass(LeftOutError, StepEnd) and "values" not in batch.batch
