"""Whichever column of a step is not finite: nothing is learnt from the batch, it is kept, counted and named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hrl.metrics import StepMetrics
from hrl.protocol import DataProto
from hrl.trainer.ppo import ray_trainer
from hrl.trainer.ppo.finite_columns import FiniteColumns, LeftOutError, NonFiniteBatchError
from tests.trainer.ppo.driver import Driver, Workers
from tests.trainer.ppo.test_wiring import GROUPS, PerRow

NAN, INF = math.nan, math.inf
#: Everything that a PPO step has: a critic, a reference, KL in the reward, two optimizer steps.
PPO = (
    *GROUPS[1:],
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
)


class Broken(Workers):
    """Roles of which one gives a number that is not finite, in row 3, at response token 1."""

    def __init__(self, column: str, value: float) -> None:
        super().__init__()
        self.ref = self
        self.column, self.value = column, value

    def broken(self, batch: DataProto) -> DataProto:
        if self.column in batch.batch and self.value is not None:
            batch.batch[self.column][3, 1] = self.value
        return batch

    def generate_sequences(self, rows: DataProto, request: Any) -> DataProto:
        return self.broken(super().generate_sequences(rows, request))

    def compute_log_prob(self, batch: DataProto, request: Any) -> DataProto:
        return self.broken(super().compute_log_prob(batch, request))

    def compute_ref_log_prob(self, batch: DataProto, request: Any) -> DataProto:
        found = Workers.compute_log_prob(self, batch, request).rename("old_log_probs", "ref_log_prob")
        return self.broken(found)

    def compute_values(self, batch: DataProto, request: Any) -> DataProto:
        return self.broken(DataProto.from_dict(tensors={"values": torch.zeros(len(batch), 2)}))

    def update_critic(self, batch: DataProto, request: Any) -> list[Any]:
        self.done.append("critic")
        return []


#: The phase after which each column of a PPO step is seen.
COLUMNS = {
    "rollout_log_probs": "gen",
    "token_level_scores": "reward",
    "old_log_probs": "old_log_prob",
    "ref_log_prob": "ref",
    "values": "values",
    "token_level_rewards": "adv",
    "advantages": "adv",
    "returns": "adv",
}


def driver_with(column: str, value: float, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Driver:
    """A driver in whose steps this column is broken, whoever makes it."""
    workers = Broken(column, value)
    driver = Driver(folder, *PPO, *overrides, workers=workers, rewards=PerRow([1.0, 0.0] * 3))
    if column == "token_level_scores":
        place = ray_trainer.place_scores
        monkeypatch.setattr(
            ray_trainer,
            "place_scores",
            lambda *args: workers.broken(DataProto.from_dict(tensors={column: place(*args)})).batch[column],
        )
    for name in ("apply_kl_penalty", "compute_advantage"):
        made = getattr(ray_trainer, name)

        def poisoned(batch: DataProto, *args: Any, name: str = name, made: Any = made, **named: Any) -> Any:
            result = made(batch, *args, **named)
            if (name == "apply_kl_penalty") == (column == "token_level_rewards"):
                workers.broken(batch)
            return result

        monkeypatch.setattr(ray_trainer, name, poisoned)
    return driver


def step(driver: Driver) -> StepMetrics:
    metrics, trainer = StepMetrics(), driver.trainer
    trainer.global_steps += 1
    batch = trainer.train_step(trainer.next_batch(), metrics)
    metrics |= trainer.describe(batch)
    return metrics


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("column", COLUMNS)
def test_nothing_is_learnt_from_a_batch_with_a_broken_column(
    column: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_with(column, value, tmp_path, monkeypatch)
    driver.trainer.sync_weights()
    beta = driver.trainer.kl_ctrl.value
    metrics = step(driver)
    assert not {"update", "critic"} & set(driver.workers.done)
    assert (metrics["nonfinite/batches"], metrics["nonfinite/numbers"]) == (1, 1)
    assert driver.workers.version == 1, "the weights stay, and their version is the step"
    assert driver.trainer.kl_ctrl.value == beta

    kept = tmp_path / "nonfinite" / f"step_1.{COLUMNS[column]}.json"
    record = json.loads(kept.read_text())
    assert record["column"] == column
    said = {"NaN": NAN, "Infinity": INF, "-Infinity": -INF}[record["first"].pop("value")]
    assert str(said) == str(value) and record["first"] == {"row": 3, "position": 1}
    assert record["rows"] == [3, 2], "the row, and the others of its prompt"
    columns = load_file(kept.with_suffix(".safetensors"))
    assert columns[column].isfinite().tolist() == [True, False, True, True]

    monkeypatch.undo()
    driver.workers.value = None
    metrics = step(driver)
    assert metrics["nonfinite/batches"] == 0 and {"update", "critic"} <= set(driver.workers.done)


def test_three_in_a_row_end_the_run_and_name_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_with("values", NAN, tmp_path, monkeypatch)
    driver.trainer.sync_weights()
    step(driver)
    step(driver)
    kept = tmp_path / "nonfinite" / "step_3.values.json"
    named = (
        rf"3 steps in a row.*after phase values, values is nan in row 3 \(uid .*, sample 1, response token 1\).*{kept}"
    )
    with pytest.raises(NonFiniteBatchError, match=named):
        step(driver)


def test_a_run_that_was_killed_between_them_ends_at_the_same_step_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def driver(name: str) -> Driver:
        made = driver_with("values", NAN, tmp_path / name, monkeypatch, "trainer.save_freq=1")
        made.trainer.total_training_steps = 9
        return made

    straight = driver("straight")
    with pytest.raises(NonFiniteBatchError):
        straight.fit()
    for steps in (1, 2):
        killed = driver("killed")
        killed.trainer.total_training_steps = steps
        killed.fit()
    resumed = driver("killed")
    with pytest.raises(NonFiniteBatchError, match="3 steps in a row"):
        resumed.fit()
    assert resumed.trainer.global_steps == straight.trainer.global_steps == 3


def test_a_broken_token_is_seen_before_a_correction_rejects_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = (
        "algorithm.rollout_correction.rollout_rs=token_k2",
        "algorithm.rollout_correction.rollout_rs_threshold=0.1",
    )
    driver = driver_with("old_log_probs", NAN, tmp_path, monkeypatch, *rule)
    driver.trainer.sync_weights()
    assert step(driver)["nonfinite/batches"] == 1


def batch_of(**columns: torch.Tensor) -> DataProto:
    mask = torch.tensor([[1, 0], [0, 0]])
    return DataProto.from_dict(tensors={"response_mask": mask, **columns})


def test_numbers_that_nothing_is_learnt_from_may_be_anything(tmp_path: Path) -> None:
    columns = FiniteColumns(tmp_path, print)
    columns.look(batch_of(a=torch.tensor([[0.0, NAN], [INF, 0.0]]), b=torch.tensor([0.0, NAN])), "gen")
    with pytest.raises(LeftOutError) as found:
        columns.look(batch_of(b=torch.tensor([NAN, 0.0])), "gen")
    assert (found.value.broken.rows, found.value.broken.position) == ([0], None)


def test_finite_numbers_whose_sum_is_not_are_finite(tmp_path: Path) -> None:
    FiniteColumns(tmp_path, print).look(batch_of(a=torch.full((2, 2), 3e38)), "gen")
