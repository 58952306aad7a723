"""The driver on its own: workers, rewards and data are stand-ins that give hand-made numbers."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Timer
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hrl.algos.registry import POLICY_LOSS_TRAITS, PolicyLossTraits
from hrl.cluster.checkpoints import CheckpointError
from hrl.cluster.manifest import Manifest
from hrl.errors import DatasetError
from hrl.metrics import Metric, StepMetrics
from hrl.protocol import DataProto
from hrl.report.run_folder import read_jsonl
from hrl.reward.combine import CombinedScores
from hrl.single_controller.worker_errors import WorkerDiedError, WorkerError
from hrl.trainer.callbacks import Callback, Callbacks, RunState
from hrl.workers.requests import SamplingParams
from tests.trainer.ppo.driver import Driver, Prompts, Rewards, Workers

MODEL_ONLY = (
    "reward.reward_model.enable=true",
    "reward.reward_model.model_path=some/model",
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The checkpoint of step 2, made with a KL coefficient of 0.5."""
    checkpoint = tmp_path / "checkpoints" / "step_2"
    checkpoint.mkdir(parents=True)
    state = {
        "step": 2,
        "data_position": {"epoch": 0, "offset": 3},
        "data": Prompts(3).fingerprint,
        "kl_coef": 0.5,
        "drift_gate_closed": False,
        "reward_shaping": {"scale": {"count": 3, "mean": 1.0, "deviation": 8.0}},
    }
    return write_state(checkpoint, state)


def write_state(checkpoint: Path, state: dict[str, Any]) -> Path:
    (checkpoint / "state.json").write_text(json.dumps(state))
    Manifest.of(checkpoint, 2).write(checkpoint)
    return checkpoint


def test_validation_reports_the_plain_score_and_drops_what_was_left_out(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.trainer.sync_weights()
    metrics = driver.trainer.validate()
    assert metrics["val/sums/mean@1"] == 0.5  # of 1, None and 0; to train on they weigh 10
    assert (metrics["val/sums/n"], metrics["val/sums/skipped"]) == (2.0, 1.0)
    assert "left out 1 of 3 samples" in driver.shown
    assert [r["score"] for r in read_jsonl(tmp_path / "rollouts" / "val_step_0.jsonl")] == [1.0, 0.0]


@pytest.mark.parametrize(("freq", "shown_at"), [(1, [1, 2]), (2, [2]), (10, []), (0, []), (-1, [])])
def test_samples_are_shown_every_so_many_steps(tmp_path: Path, freq: int, shown_at: list[int]) -> None:
    driver = Driver(tmp_path, f"trainer.log_rollouts_freq={freq}")
    driver.fit()
    assert [step for step in (1, 2) if f"samples of step {step}" in driver.shown] == shown_at


def test_the_first_samples_are_looked_at_before_anything_is_learnt_and_only_once(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    done: list[str] = []
    shown = driver.trainer.reporter.console.first_look
    driver.trainer.reporter.console.first_look = lambda look: (done.extend(driver.workers.done), shown(look))  # type: ignore[method-assign,assignment,func-returns-value]
    driver.fit()
    assert "generate" in done and "update actor" not in done
    assert driver.shown.count("first look: ") == 1
    assert json.loads((tmp_path / "first_look.json").read_text())["finding"]


def test_validation_by_a_reward_model_alone(tmp_path: Path) -> None:
    driver = Driver(tmp_path, *MODEL_ONLY, scores=None)
    driver.trainer.sync_weights()
    assert driver.trainer.validate()["val/sums/mean@1"] == 5.0
    assert driver.workers.done == ["generate", "reward model"]


def test_a_validation_of_which_everything_was_left_out_says_so(tmp_path: Path) -> None:
    driver = Driver(tmp_path, scores=[None, None, None])
    driver.trainer.sync_weights()
    assert driver.trainer.validate() == {"val/sums/skipped": 3.0, "val/rollout/truncated_responses": 1.0}


def test_what_went_wrong_in_a_validation_is_counted(tmp_path: Path) -> None:
    class Late(Rewards):
        def collect(self, batch: DataProto, metrics: StepMetrics, *, validate: bool = False) -> CombinedScores:
            metrics.observe({"reward/num_timeouts": Metric.total(2), "reward/num_retries": Metric.total(0)})
            return super().collect(batch, metrics)

    driver = Driver(tmp_path, rewards=Late([1.0] * 3))
    driver.trainer.sync_weights()
    metrics = driver.trainer.validate()
    assert (metrics["val/reward/num_timeouts"], metrics["val/rollout/truncated_responses"]) == (2.0, 1.0)
    assert "val/reward/num_retries" not in metrics, "nothing was retried"


def test_the_checkpoint_with_the_best_validation_stays_beside_the_newest(tmp_path: Path) -> None:
    scores = {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.3}
    driver = Driver(tmp_path, "trainer.save_freq=1", "trainer.test_freq=1", "trainer.val_before_train=false", steps=4)
    trainer = driver.trainer
    # A part's mean is no score, and another source's is not the run's.
    others = {"val/sums/format/mean@1": 5.0, "val/elsewhere/mean@1": 7.0}
    trainer.validate = lambda: {"val/sums/mean@1": scores[trainer.global_steps], "val/sums/n": 3.0, **others}
    driver.fit()
    assert trainer.checkpoints.steps() == [2, 3, 4]
    said = " ".join(driver.shown.split())
    assert "0.01 MB (model 0.02 GB); kept: step 2 (the best), 3, 4" in said
    assert [Manifest.read(trainer.checkpoints.path(step)).score for step in (2, 4)] == [0.9, 0.3]
    states = [json.loads((tmp_path / "checkpoints" / f"step_{step}" / "state.json").read_text()) for step in (2, 4)]
    assert [state["contents"] for state in states] == [["model"], ["model"]]

    again = Driver(tmp_path, "trainer.save_freq=1", "trainer.test_freq=-1", "trainer.val_before_train=false", steps=6)
    again.fit()  # goes on after step 4, without a validation
    assert again.trainer.checkpoints.steps() == [2, 5, 6]


class StopWhenSaved(Callback):
    def on_checkpoint(self, run: RunState, folder: Path) -> None:
        run.stop("saved")


def test_a_run_that_is_stopped_when_it_was_saved_is_validated_too(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "trainer.save_freq=2", "trainer.test_freq=5", "trainer.val_before_train=false", steps=9)
    driver.trainer.validate = lambda: {"val/sums/mean@1": 0.75, "val/sums/n": 3.0}
    driver.trainer.callbacks = Callbacks([StopWhenSaved()])
    driver.fit()
    assert driver.trainer.global_steps == 2
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["val/sums/mean@1"] == 0.75
    assert driver.trainer.checkpoints.best() == 2  # whose score came after it


def test_the_spread_of_the_runs_rewards_goes_on_after_a_resume(tmp_path: Path, saved: Path) -> None:
    driver = Driver(tmp_path)
    assert driver.trainer.state()["reward_shaping"]["scale"]["count"] == 0
    driver.trainer.restore()
    assert driver.trainer.state()["reward_shaping"] == {"scale": {"count": 3, "mean": 1.0, "deviation": 8.0}}


def test_a_checkpoint_without_a_part_of_the_state_is_named(tmp_path: Path, saved: Path) -> None:
    state = json.loads((saved / "state.json").read_text())
    del state["drift_gate_closed"]
    write_state(saved, state)
    driver = Driver(tmp_path)
    with pytest.raises(CheckpointError, match=f"{saved}/state.json has no drift_gate_closed"):
        driver.trainer.restore()
    assert driver.workers.done == [], "no weights are loaded before"


def test_a_part_of_the_state_that_the_run_has_no_place_for_is_refused_in_its_own_folder(
    tmp_path: Path, saved: Path
) -> None:
    state = json.loads((saved / "state.json").read_text())
    write_state(saved, state | {"curriculum": [1]})
    driver = Driver(tmp_path)
    with pytest.raises(CheckpointError, match=r"state.json has the state of curriculum, .*resume_mode=resume_path"):
        driver.trainer.restore()
    assert driver.workers.done == [], "no weights are loaded before"
    Driver(tmp_path / "branch", *branch_of(saved)).trainer.restore()  # begins another run


def branch_of(saved: Path) -> list[str]:
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"]


def test_a_run_is_not_continued_in_other_data(tmp_path: Path, saved: Path) -> None:
    driver = Driver(tmp_path, prompts=4)
    with pytest.raises(CheckpointError, match=r"4 rows, were 3(?s:.*)trainer\.resume_mode=disable"):
        driver.trainer.restore()
    assert driver.workers.done == [], "no weights are loaded before"


@pytest.mark.parametrize(("prompts", "offset"), [(3, 3), (4, 0)])
def test_a_branch_goes_on_in_the_same_data_and_begins_other_data_anew(
    tmp_path: Path, saved: Path, prompts: int, offset: int
) -> None:
    driver = Driver(tmp_path / "branch", *branch_of(saved), prompts=prompts)
    driver.trainer.restore()
    assert driver.trainer.data_position.to_dict() == {"epoch": 0, "offset": offset}
    assert driver.trainer.global_steps == 2
    assert ("4 rows, were 3" in driver.shown) == (prompts == 4)


def test_a_saved_checkpoint_says_which_data_its_position_is_in(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "trainer.save_freq=2")
    driver.fit()
    state = json.loads((tmp_path / "checkpoints/step_2/state.json").read_text())
    assert state["data"] == Prompts(3).fingerprint
    Driver(tmp_path, steps=3).trainer.restore()


def test_what_the_first_validation_left_out_stands_in_its_record(tmp_path: Path) -> None:
    driver = Driver(tmp_path, steps=1)
    driver.fit()
    before, after = read_jsonl(tmp_path / "metrics.jsonl")
    assert (before["step"], before["val/sums/mean@1"], before["val/sums/skipped"]) == (0, 0.5, 1.0)
    assert (after["step"], after["val/sums/mean@1"], after["val/sums/skipped"]) == (1, 0.5, 1.0)


def test_without_steps_a_run_validates_once(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "trainer.val_before_train=false", steps=0)
    driver.fit()
    assert driver.workers.done == ["generate"]
    assert "no step left: at step 0" in driver.shown and "validation after step 0" in driver.shown
    assert [record["val/sums/mean@1"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [0.5]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_resumed_run_without_steps_left_validates_once(tmp_path: Path, saved: Path, steps: int) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "reward/mean": 0.25}\n')
    driver = Driver(tmp_path, steps=steps)
    driver.fit()
    assert driver.workers.done == ["load", "generate"]
    assert f"resumed from {saved}: continuing after step 2" in driver.shown
    assert driver.shown.count("validation after step 2") == 1
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert first == {"step": 1}
    assert (second["step"], second["reward/mean"], second["val/sums/mean@1"]) == (2, 0.25, 0.5)


def test_a_fixed_kl_coefficient_is_the_configured_one_and_a_change_is_told(tmp_path: Path, saved: Path) -> None:
    driver = Driver(tmp_path, "algorithm.kl_ctrl.kl_coef=0.125")
    driver.trainer.restore()
    assert driver.trainer.kl_ctrl.value == 0.125
    assert "kl_coef is 0.125 from here on; it was 0.5" in driver.shown


def test_an_adaptive_kl_coefficient_goes_on_from_the_checkpoint(tmp_path: Path, saved: Path) -> None:
    driver = Driver(tmp_path, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.125")
    driver.trainer.restore()
    assert driver.trainer.kl_ctrl.value == 0.5
    assert "algorithm.kl_ctrl" not in driver.shown


def test_how_a_batch_is_sampled_is_decided_here(tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    sampling = [f"{rollout}.temperature=0.9", "trainer.seed=5"]
    val = f"{rollout}.val_kwargs"
    sampled = [f"{val}.do_sample=true", f"{val}.temperature=0.6", f"{val}.top_p=0.5", f"{val}.top_k=3"]
    greedy = [f"{val}.do_sample=false", *sampled[1:]]
    cases = ((greedy, SamplingParams(0.0, max_tokens=32)), (sampled, SamplingParams(0.6, 0.5, 3, 32)))
    for number, (overrides, expected) in enumerate(cases):
        driver = Driver(tmp_path / str(number), *sampling, *overrides)
        trainer, trainer_step = driver.trainer, 4
        trainer.sync_weights()
        trainer.global_steps = trainer_step
        trainer.generate(trainer.next_batch(), StepMetrics())
        trainer.validate()
        training, validation = driver.workers.draws
        assert training.sampling == SamplingParams(0.9, 1.0, -1, 32)
        assert validation.sampling == expected
        assert (training.seed, validation.seed) == (5, -6), "a validation may sample the prompts of its own step"
        assert training.step == validation.step == trainer_step
        assert (training.reward_round, validation.reward_round) == (40, 41)
        assert not training.with_greedy and not validation.with_greedy


@pytest.mark.parametrize("declared", [True, False])
def test_rows_without_advantage_are_spared_only_where_the_loss_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: bool
) -> None:
    monkeypatch.setitem(POLICY_LOSS_TRAITS, "vanilla", PolicyLossTraits(zero_at_zero_advantage=declared))
    driver = Driver(tmp_path)
    batch = driver.workers.generate_sequences(Prompts().batch([0, 1, 2]), None)
    batch.non_tensor_batch["uid"] = np.array(["a", "b", "c"], dtype=object)
    batch.batch["advantages"] = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, -1.0]])
    driver.trainer.update_actor(batch, StepMetrics())
    rows, (mini_batch,) = driver.workers.plan.rows[0], driver.workers.plan.ranks[0].mini_batches
    run = {rows[i] for micro_batch in mini_batch.micro_batches for i in micro_batch}
    assert run == ({0, 2} if declared else {0, 1, 2})


def test_how_long_the_run_stood_still_for_a_checkpoint_is_in_the_next_record(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "trainer.save_freq=2", "trainer.test_freq=-1", steps=4)
    driver.fit()
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert [record["step"] for record in records if "timing_s/save_checkpoint" in record] == [3]
    for step in (2, 4):
        assert f"saved {tmp_path}/checkpoints/step_{step} in " in driver.shown


class SlowDisk(Workers):
    """Ranks that have written their part when `update_actor` is called for the `after`-th time, or never.

    Attributes:
        error: What a rank has to say of its writing.
    """

    def __init__(self, after: int = 0, error: str | None = None) -> None:
        super().__init__()
        self.after, self.error = after, error
        self.open: list[Path] = []
        self.refuses: list[int] = []

    def save(self, folder: Path, contents: list[str]) -> list[Path]:
        self.open.append(folder)
        return [folder / "written.json"]

    def update_actor(self, batch: DataProto, request: Any) -> list[dict[str, Metric]]:
        metrics = super().update_actor(batch, request)
        if self.done.count("update") == self.after:
            self.write()
        return metrics

    def write(self) -> None:
        while self.open:
            super().save(self.open.pop(), [])

    def finish_save(self, *, wait: bool = True) -> None:
        if self.error is not None:
            raise WorkerError(0, "actor.finish_save", "save_checkpoint", self.error)
        if self.open and int(self.open[-1].name.rpartition("_")[2]) in self.refuses:
            file = str(self.open.pop() / "shard")
            refused = WorkerError(1, "actor.finish_save", "save_checkpoint", "OSError: …", "Traceback …")
            raise refused from OSError(28, "No space left on device", file)
        if wait:
            self.write()


def test_a_run_goes_on_while_a_checkpoint_is_written_and_it_counts_when_it_is_whole(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "trainer.save_freq=2", "trainer.test_freq=-1", steps=4, workers=SlowDisk(after=4))
    there: list[list[int]] = []
    driver.trainer.on_step_end = lambda *_: there.append(driver.trainer.checkpoints.steps())
    driver.fit()
    assert there[:3] == [[], [], []]
    assert driver.trainer.checkpoints.steps() == [2, 4], "the end of the run waits for the last"


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "trainer.save_freq=1", "trainer.test_freq=-1", steps=3, workers=SlowDisk())
    begun: list[list[int]] = []
    save = driver.workers.save
    driver.workers.save = lambda *given: begun.append(driver.trainer.checkpoints.steps()) or save(*given)
    driver.fit()
    assert begun == [[], [1], [1, 2]]


def test_what_goes_wrong_while_a_checkpoint_is_written_ends_the_run_after_the_next_step(tmp_path: Path) -> None:
    broken = SlowDisk(error="KeyError: 'what'")
    driver = Driver(tmp_path, "trainer.save_freq=2", "trainer.test_freq=-1", steps=9, workers=broken)
    with pytest.raises(WorkerError, match=r"save_checkpoint\) raised KeyError: 'what'"):
        driver.fit()
    assert driver.trainer.global_steps == 3
    assert driver.trainer.checkpoints.steps() == []


def full_at(*steps: int) -> SlowDisk:
    disk = SlowDisk()
    disk.refuses.extend(steps)
    return disk


def test_a_disk_that_is_full_ends_the_run_with_one_line_and_the_part_is_removed(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "trainer.save_freq=2", "trainer.test_freq=-1", steps=9, workers=full_at(4))
    with pytest.raises(CheckpointError) as stopped:
        driver.fit()
    store = driver.trainer.checkpoints
    assert str(stopped.value) == (
        f"step 4 is not saved: rank 1 of actor can't write {store.temporary(4)}/shard: No space left on device; make "
        "room there, or name a folder in another place with trainer.default_local_dir; kept: step 2"
    )
    assert "abandon save" in driver.workers.done, "nobody writes there while it is removed"
    assert (driver.trainer.global_steps, store.steps(), store.interrupted()) == (5, [2], [])


def test_a_run_goes_on_without_a_checkpoint_where_it_is_told_to_and_counts_it(tmp_path: Path) -> None:
    goes_on = ("trainer.save_freq=1", "trainer.test_freq=-1", "trainer.on_save_error=continue")
    driver = Driver(tmp_path, *goes_on, steps=5, workers=full_at(2, 3))
    driver.fit()
    store = driver.trainer.checkpoints
    assert (store.steps(), store.interrupted()) == ([4, 5], [])
    said = " ".join(driver.shown.split())
    assert said.count("The run goes on (trainer.on_save_error=continue)") == 2 and "step 3 is not saved" in said
    steps = [record for record in read_jsonl(tmp_path / "metrics.jsonl") if record["step"] > 0]
    counted = [record["checkpoint/failed_saves"] for record in steps]
    assert counted == sorted(counted) and (counted[0], counted[-1]) == (0.0, 2.0)


def test_a_run_that_goes_on_and_can_not_save_its_end_does_not_end_well(tmp_path: Path) -> None:
    goes_on = ("trainer.save_freq=2", "trainer.test_freq=-1", "trainer.on_save_error=continue")
    driver = Driver(tmp_path, *goes_on, steps=4, workers=full_at(4))
    with pytest.raises(CheckpointError, match="the run ends without a checkpoint of its last step, 4; kept: step 2"):
        driver.fit()


def test_a_save_that_there_is_no_room_for_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tmp_path, "trainer.save_freq=2", "trainer.test_freq=-1", steps=4)
    monkeypatch.setattr("hrl.cluster.disk.room_in", lambda folder: 80_000_000)
    saved = driver.workers.save
    driver.workers.save = lambda *given: pytest.fail("ranks began to write") or saved(*given)
    with pytest.raises(CheckpointError, match=r"takes 0\.09 GB \(model 0\.02 GB\), and .* there are 0\.08 GB left"):
        driver.fit()
    assert driver.trainer.checkpoints.interrupted() == []
    assert driver.trainer.global_steps == 0, "no step is made whose checkpoint has no room"


def test_a_disk_that_fills_up_during_the_run_is_seen_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path, "trainer.save_freq=2", "trainer.test_freq=-1", steps=4)
    monkeypatch.setattr("hrl.cluster.disk.room_in", lambda _: 80e6 if driver.trainer.global_steps > 3 else 90e6)
    with pytest.raises(CheckpointError, match=r"step 4 is not saved: a checkpoint takes 0\.09 GB .*left.*kept: step 2"):
        driver.fit()
    assert driver.trainer.checkpoints.steps() == [2]


@pytest.mark.parametrize("ended_by", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_ends_early_still_saves_what_it_had_begun_to(tmp_path: Path, ended_by: type[BaseException]) -> None:
    class EndsInStep3(SlowDisk):
        def update_actor(self, batch: DataProto, request: Any) -> list[dict[str, Metric]]:
            if self.done.count("update") == 2:
                Timer(0.2, self.write).start()
                raise ended_by
            return super().update_actor(batch, request)

    driver = Driver(tmp_path, "trainer.save_freq=2", "trainer.test_freq=-1", steps=9, workers=EndsInStep3())
    with pytest.raises(ended_by):
        driver.fit()
    assert driver.trainer.checkpoints.steps() == [2]


def test_a_rank_that_died_is_not_waited_for(tmp_path: Path) -> None:
    class Dies(SlowDisk):
        def update_actor(self, batch: DataProto, request: Any) -> list[dict[str, Metric]]:
            if self.done.count("update") == 2:
                raise WorkerDiedError(0, "actor.update_actor", "update_actor", 1, "killed")
            return super().update_actor(batch, request)

    driver = Driver(tmp_path, "trainer.save_freq=2", "trainer.test_freq=-1", steps=9, workers=Dies())
    started = monotonic()
    with pytest.raises(WorkerDiedError):
        driver.fit()
    assert monotonic() - started < 20, "less than the patience with ranks that live"
    assert driver.trainer.checkpoints.steps() == []
    assert "step 2 is not saved" in " ".join(driver.shown.split())


def test_prompts_are_answered_only_if_each_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(Prompts):
        def require_all(self) -> None:
            raise DatasetError("row 1 is too long")

    driver = Driver(tmp_path)
    monkeypatch.setattr(Prompts, "of_prompts", lambda self, rows: Short(2), raising=False)
    with pytest.raises(DatasetError, match="row 1 is too long"):
        driver.trainer.answer([{"prompt": "a"}] * 3, SamplingParams(1.0, 1.0, max_tokens=4))


# ---------------------------------------------------------------------------------------------- looking ahead

EVERY_STEP = ("trainer.test_freq=1", "actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=grpo")


class Mixed(Rewards):
    """Every second response is right."""

    def scores_of(self, batch: DataProto) -> list[float | None]:
        return [float(row % 2) for row in range(len(batch))]


def asked_ahead(driver: Driver) -> list[tuple[int, int]]:
    """Step and seed of what the engines were asked for before its turn; a validation's seed is negative."""
    return [(request.step, request.seed) for request in driver.workers.begun]


def test_a_validation_and_the_samples_of_the_next_step_are_asked_for_together(tmp_path: Path) -> None:
    driver = Driver(tmp_path, *EVERY_STEP, "trainer.save_freq=1", rewards=Mixed(None), steps=3)
    driver.fit()
    assert asked_ahead(driver) == [(0, -2), (1, 1), (1, -2), (2, 1), (2, -2), (3, 1)], "not behind the last step"
    assert [request in driver.workers.begun for request in driver.workers.draws] == [True] * 6 + [False]
    assert [len(rows) for rows in driver.workers.sampled] == [3, 6] * 3 + [3]


class Alone(Driver):
    """A driver whose trainer looks at one thing after the other."""

    def fit(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.trainer), "looks_ahead", False)
            super().fit()


def test_looking_ahead_changes_nothing_but_the_times_of_a_run_nor_of_its_checkpoints(tmp_path: Path) -> None:
    found = []
    for kind, folder in ((Driver, tmp_path / "ahead"), (Alone, tmp_path / "alone")):
        driver = kind(folder, *EVERY_STEP, "trainer.save_freq=1", rewards=Mixed(None), prompts=5, steps=3)
        driver.fit()
        records = read_jsonl(folder / "metrics.jsonl")
        states = [json.loads((folder / "checkpoints" / f"step_{step}" / "state.json").read_text()) for step in (2, 3)]
        assert [state["config"]["trainer"].pop("default_local_dir") for state in states] == [str(folder)] * 2
        prompts = [rows.non_tensor_batch["uid"].tolist() for rows in driver.workers.sampled]
        noisy = ("timing", "perf/", "memory", "time")
        found.append(([{k: v for k, v in r.items() if not k.startswith(noisy)} for r in records], states, prompts))
    ahead, alone = found
    assert ahead == alone
    assert driver.workers.begun == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("trainer.profile=[1,2]",), [(2, -2), (3, 1)]),  # its profile is to show all of a step
        ((*MODEL_ONLY,), []),  # it would score beside engines that sample
        (("trainer.test_freq=2", "trainer.val_before_train=false"), [(2, -2), (3, 1)]),
    ],
)
def test_a_step_is_not_begun_ahead_where_that_would_harm_or_share_nothing(
    tmp_path: Path, overrides: tuple[str, ...], expected: list[tuple[int, int]]
) -> None:
    rewards = Rewards(None) if overrides == MODEL_ONLY else Mixed(None)
    driver = Driver(tmp_path, *EVERY_STEP, *overrides, rewards=rewards, steps=3)
    driver.workers.start_profile = lambda: None  # type: ignore[attr-defined]
    driver.workers.stop_profile = lambda step: {}  # type: ignore[attr-defined]
    driver.trainer.reporter.profile = lambda *_: None  # type: ignore[method-assign,assignment]
    driver.fit()
    assert asked_ahead(driver) == expected


def test_a_trainer_that_samples_in_its_own_way_is_asked_when_its_turn_comes(tmp_path: Path) -> None:
    driver = Driver(tmp_path, *EVERY_STEP, rewards=Mixed(None))

    class Own(type(driver.trainer)):  # type: ignore[misc]
        def generate(self, batch: DataProto, metrics: StepMetrics, wave: int = 0) -> DataProto:
            return super().generate(batch, metrics, wave)

    driver.trainer.__class__ = Own
    driver.fit()
    assert asked_ahead(driver) == []
    driver.trainer.__class__ = Own.__base__
    for name, value in (("sampler", object()), ("train_dataset", SimpleNamespace(is_streamed=True))):
        with pytest.MonkeyPatch.context() as patch:
            assert driver.trainer.looks_ahead
            patch.setattr(driver.trainer, name, value)
            assert not driver.trainer.looks_ahead


def test_a_run_that_is_stopped_by_its_validation_has_lost_nothing_and_goes_on_with_the_same_prompts(
    tmp_path: Path,
) -> None:
    class Stop(Callback):
        def on_validation(self, run: RunState, metrics: Any) -> None:
            if run.step == 2:
                run.stop("good enough")

    def sampled(driver: Driver) -> list[list[str]]:
        return [rows.non_tensor_batch["uid"].tolist() for rows in driver.workers.sampled]

    every = (*EVERY_STEP, "trainer.save_freq=1")
    driver = Driver(tmp_path / "straight", *every, rewards=Mixed(None), prompts=5, steps=4)
    driver.fit()
    straight = sampled(driver)
    driver = Driver(tmp_path / "stopped", *every, rewards=Mixed(None), prompts=5, steps=4)
    driver.trainer.callbacks = Callbacks([Stop()])
    driver.fit()
    assert sampled(driver) == straight[:5] and asked_ahead(driver)[-1] == (3, 1)
    driver = Driver(tmp_path / "stopped", *every, rewards=Mixed(None), prompts=5, steps=4)
    driver.fit()
    assert sampled(driver) == straight[5:]


def test_what_was_begun_is_forgotten_if_something_else_is_asked_for(tmp_path: Path) -> None:
    driver = Driver(tmp_path, *EVERY_STEP, rewards=Mixed(None))
    trainer = driver.trainer
    trainer.sync_weights()
    trainer.run_state._advance(0)
    trainer._look_ahead()
    trainer.global_steps = 1
    begun, mine = trainer._begun[1], trainer.next_batch()
    trainer.generate(mine, StepMetrics())
    assert trainer._begun[0].request.seed < 0 and len(trainer._begun) == 1, "in whatever order"
    other = trainer.next_batch()
    other.batch["prompts"] = other.batch["prompts"] + 1
    trainer.generate(other, StepMetrics())
    assert trainer._begun == [] and driver.workers.draws[-1] is not begun.request
