"""A validation goes on beside the next step where engines have devices of their own."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from hrl.metrics import Metric
from hrl.processes.signals import RunStoppedError, StopRequest
from hrl.protocol import DataProto
from hrl.report.run_folder import read_jsonl
from hrl.single_controller.turns import others_have_their_turn
from hrl.single_controller.worker_errors import WorkerDiedError
from hrl.trainer.callbacks import Callback, Callbacks
from tests.trainer.ppo.driver import Driver, Rewards, Workers

APART = (
    "placement=separate", "trainer.test_freq=1", "actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=grpo",
)  # fmt: skip
STEPS = 4
TIMES = ("timing_", "perf/", "memory", "time")


class ByWeights(Rewards):
    """A score that tells the weights which sampled a response, and the row."""

    def __init__(self) -> None:
        super().__init__([0.0])

    def scores_of(self, batch: DataProto) -> list[float | None]:
        version = batch.meta_info["policy_version"]
        return [version + 0.25 * (row % 2) for row in range(len(batch))]


class Meeting(Workers):
    """Engines that have sampled a validation only when the policy has begun to learn, and a policy that waits for them.

    Attributes:
        story: What was done, in order: by which weights what was sampled, updates, and syncs.
    """

    def __init__(self, patience_s: float = 10.0) -> None:
        super().__init__()
        self.story: list[str] = []
        self.patience_s = patience_s
        self.is_learning = self.is_validating = False

    def generate_sequences(self, rows: DataProto, request: Any) -> DataProto:
        what = "validation" if request.seed < 0 else "step"
        if what == "validation" and 0 < request.step < STEPS:
            self.is_validating = True
            self._wait(lambda: self.is_learning)
            self.is_learning = False
        self.story.append(f"{what} {request.step} by {self.version}")
        return super().generate_sequences(rows, request)

    def update_actor(self, batch: DataProto, request: Any) -> list[dict[str, Metric]]:
        if len(self.asked):  # a step that has a validation before it
            self.is_learning = True
            self._wait(lambda: self.is_validating)
            self.is_validating = False
        self.story.append("update")
        return super().update_actor(batch, request)

    def sync_weights(self, version: int, timeout_s: float) -> dict[str, float]:
        self.story.append(f"sync {version}")
        return super().sync_weights(version, timeout_s)

    def _wait(self, met: Any) -> None:
        end = monotonic() + self.patience_s
        with others_have_their_turn() as require_wanted:
            while not met():
                require_wanted()
                assert monotonic() < end, "neither waits for the other"
                sleep(0.005)


class InTurn(Meeting):
    def _wait(self, met: Any) -> None:
        pass


def run(folder: Path, workers: Meeting) -> Driver:
    driver = Driver(folder, *APART, workers=workers, rewards=ByWeights(), prompts=5, steps=STEPS)
    driver.fit()
    return driver


def untimed(folder: Path) -> list[dict[str, Any]]:
    records = read_jsonl(folder / "metrics.jsonl")
    return [{name: value for name, value in record.items() if not name.startswith(TIMES)} for record in records]


def test_a_validation_goes_on_while_the_next_step_learns_and_ends_before_the_engines_get_its_weights(
    tmp_path: Path,
) -> None:
    beside, in_turn = Meeting(), InTurn()
    driver = run(tmp_path / "beside", beside)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(driver.trainer), "validates_beside", False)
        run(tmp_path / "in_turn", in_turn)
    assert sorted(beside.story) == sorted(in_turn.story)
    assert beside.story[:3] == ["sync 0", "validation 0 by 0", "step 1 by 0"], "the first is waited for"
    for step in (1, 2, 3):
        begin, end = beside.story.index(f"sync {step}"), beside.story.index(f"sync {step + 1}")
        within = beside.story[begin + 1 : end]
        assert within[0] == f"step {step + 1} by {step}"
        assert set(within[1:]) == {"update", f"validation {step} by {step}"}, "one version for all of it"
    assert beside.story[-1] == "validation 4 by 4", "the last one has nothing beside it"
    assert [(request.step, request.seed < 0) for request in beside.begun[2:4]] == [(2, False), (1, True)]

    records = untimed(tmp_path / "beside")
    assert records == untimed(tmp_path / "in_turn"), "a record for each step, with the validation after it"
    assert [record["val/sums/mean@1"] for record in records] == [0.25 / 3 + step for step in range(5)]
    samples = [{file.name for file in (tmp_path / name / "rollouts").iterdir()} for name in ("beside", "in_turn")]
    assert samples[0] == samples[1] >= {f"val_step_{step}.jsonl" for step in range(5)}
    assert "validation after step 4" in driver.shown


class Watching(Callback):
    pass


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        (("placement=pairs", "trainer.save_freq=2"), "saved"),
        (("placement=colocated",), "shares devices"),
        (("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"), "refills"),
        ((), "callback"),
        ((), "subclass"),
    ],
)
def test_what_needs_the_result_of_a_validation_at_once_gets_it(
    tmp_path: Path, overrides: tuple[str, ...], change: str
) -> None:
    workers = InTurn()
    driver = Driver(tmp_path, *APART, *overrides, workers=workers, rewards=ByWeights(), prompts=5, steps=3)
    if change == "callback":
        driver.trainer.callbacks = Callbacks([Watching()])
    if change == "subclass":
        driver.trainer.__class__ = type("Own", (type(driver.trainer),), {"on_step_end": lambda *_: None})
    driver.fit()
    story = workers.story
    waited = [step for step in (1, 2) if story[story.index(f"sync {step}") + 1] == f"validation {step} by {step}"]
    assert waited == ([2] if change == "saved" else [1, 2])


def test_a_step_is_in_the_log_without_its_validation_if_the_next_one_fails(tmp_path: Path) -> None:
    class Dies(InTurn):
        def update_actor(self, batch: DataProto, request: Any) -> list[dict[str, Metric]]:
            if len(self.asked) == 1:
                raise WorkerDiedError(0, "actor.update_actor", "update_actor", 1, "killed")
            return super().update_actor(batch, request)

    with pytest.raises(WorkerDiedError):
        run(tmp_path, Dies())
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert (first["step"], second["step"]) == (0, 1)
    assert "actor/rows_run" in second and not any(name.startswith("val/") for name in second)


def test_a_signal_after_a_validation_was_begun_lets_it_end_before_the_run_is_saved(tmp_path: Path) -> None:
    workers = InTurn()
    driver = Driver(tmp_path, *APART, workers=workers, rewards=ByWeights(), prompts=5, steps=4)
    trainer = driver.trainer
    described = trainer.describe

    def signalled(batch: DataProto) -> dict[str, float]:
        if trainer.global_steps == 2:  # its validation goes on
            assert trainer._in_validation == 2
            trainer.stop = Asked()
        return described(batch)

    trainer.describe = signalled  # type: ignore[method-assign]
    with pytest.raises(RunStoppedError):
        driver.fit()
    assert trainer.checkpoints.steps() == [2]
    assert [record["val/sums/mean@1"] for record in untimed(tmp_path)] == [0.25 / 3 + step for step in range(3)]


class Asked(StopRequest):
    """A request that a signal has made."""

    is_asked = True  # type: ignore[assignment]


def test_a_step_that_learns_nothing_waits_for_the_validation_too(tmp_path: Path) -> None:
    class NotFinite(InTurn):
        def generate_sequences(self, rows: DataProto, request: Any) -> DataProto:
            sampled = super().generate_sequences(rows, request)
            if request.step == 2 and request.seed >= 0:
                sampled.batch["rollout_log_probs"] = torch.full_like(sampled.batch["rollout_log_probs"], torch.nan)
            return sampled

    workers = NotFinite()
    run(tmp_path, workers)
    story = workers.story
    begin = story.index("sync 1")
    assert story[begin + 1 : begin + 4] == ["step 2 by 1", "validation 1 by 1", "sync 2"]
