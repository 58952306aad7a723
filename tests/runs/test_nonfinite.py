"""Runs with numbers that are not finite: wherever they begin, the weights are those of the run without that step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hrl.report.run_folder import read_jsonl
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from hrl.workers import policy, value_model
from hrl.workers.engine.nonfinite import NonFiniteStepError, NonFiniteWeightsError
from hrl.workers.policy import Policy
from hrl.workers.value_model import ValueModel
from tests.runs.in_process import in_process, run_in_process
from tests.runs.runner import TWO_ROWS, Runner

pytestmark = [pytest.mark.engine]

NAN, INF = math.nan, math.inf


def overrides(runner: Runner, folder: Path, steps: int) -> list[str]:
    return runner.arguments(folder, *TWO_ROWS, f"trainer.total_training_steps={steps}")


class Poison:
    """Puts a number that is not finite where a step's plan says; other steps stay as they are.

    Attributes:
        plan: Place and number of the steps that are poisoned.
        step: The present one.
    """

    def __init__(self, plan: dict[int, tuple[str, float]], patch: pytest.MonkeyPatch) -> None:
        self.plan, self.step, self.patch = plan, 0, patch
        train_step = RayPPOTrainer.train_step

        def counted(trainer: Any, *args: Any) -> Any:
            self.step = trainer.global_steps
            return train_step(trainer, *args)

        patch.setattr(RayPPOTrainer, "train_step", counted)

    def now(self, place: str) -> float | None:
        """The number to put there, if any."""
        there, value = self.plan.get(self.step, ("", 0.0))
        return value if there == place else None

    def column(self, owner: Any, method: str, column: str) -> None:
        """Poison a column of what a method returns."""
        made = getattr(owner, method)

        def poisoned(*args: Any, **named: Any) -> Any:
            batch = made(*args, **named)
            if (value := self.now(column)) is not None and column in batch.batch:
                batch.batch[column][0, 0] = value
            return batch

        self.patch.setattr(owner, method, poisoned)

    def loss(self, module: Any, name: str, poison: Callable[[torch.Tensor, float], torch.Tensor], place: str) -> None:
        """Poison the losses that a function of the ranks returns."""
        made = getattr(module, name)

        def poisoned(*args: Any, **named: Any) -> Any:
            loss = made(*args, **named)
            value = self.now(place)
            return loss if value is None else poison(loss, value)

        self.patch.setattr(module, name, poisoned)


def in_gradient(loss: torch.Tensor, value: float) -> torch.Tensor:
    loss.register_hook(lambda gradient: gradient * value)
    return loss


def test_wherever_it_begins_nothing_is_applied_and_the_run_goes_on(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "advantages", "returns")
    places = [*columns, "actor loss", "actor gradient", "critic loss", "critic gradient"]
    # A NaN at one place, infinity at the next, then a step that is as it should be: three in a row would end the run.
    plan = {1 + at + at // 2: (place, (NAN, INF)[at % 2]) for at, place in enumerate(places)}
    steps = 3 * len(places) // 2
    poison = Poison(plan, monkeypatch)
    poison.column(RayPPOTrainer, "generate", "rollout_log_probs")
    poison.column(Policy, "compute_log_prob", "old_log_probs")
    poison.column(RayPPOTrainer, "compute_ref_log_prob", "ref_log_prob")
    poison.column(ValueModel, "compute_values", "values")
    poison.column(RayPPOTrainer, "compute_advantage", "advantages")
    poison.column(RayPPOTrainer, "compute_advantage", "returns")
    losses = dict(policy._LOSSES)
    monkeypatch.setattr(policy, "_LOSSES", losses)
    for kind, (made, names) in policy._LOSSES.items():

        def poisoned(*args: Any, made: Any = made) -> torch.Tensor:
            loss = made(*args)
            value, slope = poison.now("actor loss"), poison.now("actor gradient")
            loss = loss if value is None else loss * value
            return loss if slope is None else in_gradient(loss, slope)

        losses[kind] = (poisoned, names)
    poison.loss(value_model, "_value_loss", lambda loss, value: loss * value, "critic loss")
    poison.loss(value_model, "_value_loss", in_gradient, "critic gradient")

    models: dict[str, Any] = {}
    init = RayPPOTrainer.init_workers

    def remembered(trainer: RayPPOTrainer) -> None:
        init(trainer)
        objects = trainer.workers.actor._objects
        models["actor"], models["critic"] = objects["actor_rollout"].engine, objects["critic"].engine

    monkeypatch.setattr(RayPPOTrainer, "init_workers", remembered)
    sums: list[dict[str, int]] = []
    sync = RayPPOTrainer.sync_weights

    def summed(trainer: RayPPOTrainer) -> dict[str, float]:
        sums.append({name: engine.weights_checksum() for name, engine in models.items()})
        return sync(trainer)

    monkeypatch.setattr(RayPPOTrainer, "sync_weights", summed)
    with in_process():
        run_in_process(
            *overrides(runner, tmp_path, steps),
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=true",
            f"critic.model.path={runner.model}",
        )
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(records) == steps
    kept = {file.name for file in (tmp_path / "nonfinite").glob("*.json")}
    for record, before, after in zip(records, sums[:-1], sums[1:], strict=True):
        step = record["step"]
        place, _ = plan.get(step, ("", 0.0))
        moved = {name for name in models if before[name] != after[name]}
        counted = {name: record.get(f"{name}/skipped_steps", 0) for name in models}
        model = place.partition(" ")[0]
        if place in columns:
            assert not moved and record["nonfinite/batches"] == 1, (step, place)
            assert any(name.startswith(f"step_{step}.") for name in kept), (step, place)
        elif place:
            assert moved == models.keys() - {model}, (step, place)
            assert counted == {name: float(name == model) for name in models} and record["nonfinite/batches"] == 0
            assert f"step_{step}_rank_0.{model}-0.json" in kept
        else:
            assert moved == models.keys() and not any(counted.values()), step
            assert all(record[f"{name}/weights_checksum"] == after[name] for name in models)


def test_three_poisoned_steps_end_a_run_that_has_kept_their_batches(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = policy.policy_loss

    def poisoned(*args: Any) -> Any:
        result = good(*args)
        return replace(result, loss_mat=result.loss_mat * NAN)

    monkeypatch.setattr(policy, "policy_loss", poisoned)
    with in_process(), pytest.raises(NonFiniteStepError, match="3 optimizer steps in a row"):
        run_in_process(*overrides(runner, tmp_path, 9))
    kept = {file.name for file in (tmp_path / "nonfinite").glob("*.json")}
    assert kept == {f"step_{step}_rank_0.actor-0.json" for step in (1, 2, 3)}
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [record["actor/skipped_steps"] for record in records] == [1, 1]
    assert [record["nonfinite/metrics"] for record in records] == [1, 1], "the loss itself"
    assert all(record["perf/max_memory_gib"] > 0.1 for record in records)
    said = "".join(capsys.readouterr().out.split())  # the terminal breaks lines anywhere
    assert f"Therowsarein{tmp_path}/nonfinite/step_2_rank_*" in said
    assert "metricsthatarenotfinite:actor/pg_loss" in said


def test_a_moment_that_is_lost_ends_the_run_before_its_weights_are_used(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Policy.update

    def poisoned(self: Policy, batch: Any, request: Any) -> Any:
        if request.step == 2:
            parameter, state = next(iter(self.engine.optimizer.rule.state.items()))
            state["exp_avg"].to_local().view(-1)[0] = NAN
            assert self.engine.optimizer.names[parameter]
        return update(self, batch, request)

    monkeypatch.setattr(Policy, "update", poisoned)
    with in_process(), pytest.raises(NonFiniteWeightsError, match="update actor of step 2.*rank 0: weight model"):
        run_in_process(*overrides(runner, tmp_path, 9), "trainer.save_freq=1")
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_1"]
