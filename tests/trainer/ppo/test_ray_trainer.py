"""The driver on its own: workers, rewards and data are stand-ins that give hand-made numbers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from hrl.data.sampler import EpochOrder
from hrl.protocol import DataProto
from hrl.reward.combine import CombinedScores, Weighting, combine_scores
from hrl.trainer.config import compose_cli
from hrl.trainer.console import RunConsole
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from hrl.trainer.reporting import RunReporter
from hrl.trainer.run_folder import RunFolder, read_jsonl

MODEL_ONLY = (
    "reward.function_weight=0",
    "reward.reward_model.enable=true",
    "reward.reward_model.model_path=some/model",
)
FUNCTION_SCORES = [1.0, None, 0.0]


class Prompts:
    """Three prompts of two tokens."""

    order = EpochOrder(3, seed=0)

    def __len__(self) -> int:
        return 3

    def batch(self, indices: Any) -> DataProto:
        rows = list(indices)
        return DataProto.from_dict(
            tensors={"prompts": torch.ones(len(rows), 2, dtype=torch.int64)},
            non_tensors={
                "index": np.array(rows, dtype=object),
                "data_source": np.array(["sums"] * len(rows), dtype=object),
            },
        )


class Workers:
    """Every role at once: a response is two tokens, the reward model says 5, and what is done is noted."""

    world_size = 1

    def __init__(self) -> None:
        self.done: list[str] = []
        self.actor = self.rollout = self.rm = self
        self.version = 0
        self.plan: Any = None

    def sync_weights(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def sleep_rollout(self) -> None:
        self.done.append("sleep")

    def generate_sequences(self, rows: DataProto, plan: Any) -> DataProto:
        self.done.append("generate")
        ones = torch.ones(len(rows), 2, dtype=torch.int64)
        return DataProto.from_dict(
            tensors={
                "prompts": ones,
                "responses": ones,
                "attention_mask": torch.ones(len(rows), 4, dtype=torch.int64),
                "response_mask": ones.clone(),
            },
            non_tensors={"finish_reason": np.array(["stop"] * len(rows), dtype=object)},
            meta_info={"policy_version": self.version, "metrics": {}},
        )

    def compute_rm_score(self, batch: DataProto, plan: Any) -> DataProto:
        self.done.append("reward model")
        return DataProto.from_dict(tensors={"rm_scores": torch.full((len(batch),), 5.0)})

    def update_actor(self, batch: DataProto, plan: Any) -> DataProto:
        self.done.append("update")
        self.plan = plan
        return DataProto(meta_info={"metrics": {}})

    def save(self, folder: Path, contents: list[str]) -> None:
        (folder / "weights").write_text("w")

    def load(self, folder: Path) -> None:
        self.done.append("load")


class Rewards:
    """A reward function that leaves every second sample out; weighed with 10."""

    def __init__(self, function_scores: list[float | None] | None) -> None:
        self.function_scores = function_scores

    def begin(self, rows: DataProto) -> None:
        pass

    def collect(self, batch: DataProto, metrics: dict[str, float]) -> CombinedScores:
        model = batch.batch["rm_scores"] if "rm_scores" in batch.batch.keys() else None
        combined = combine_scores(
            self.function_scores, model, torch.full((len(batch),), 2), 2, Weighting(function=10.0)
        )
        batch.batch["response_mask"] = batch.batch["response_mask"] * combined.kept[:, None]
        return combined


class Words:
    """A tokenizer."""

    def batch_decode(self, rows: list[list[int]]) -> list[str]:
        return ["one" for _ in rows]


class Driver:
    """A trainer on stand-ins."""

    def __init__(
        self, path: Path, *overrides: str, steps: int = 2, scores: list[float | None] | None = FUNCTION_SCORES
    ) -> None:
        config = compose_cli(
            [
                f"trainer.default_local_dir={path}",
                "data.train_batch_size=3",
                "actor_rollout_ref.actor.ppo_mini_batch_size=3",
                "actor_rollout_ref.rollout.n=1",
                "algorithm.adv_estimator=reinforce_plus_plus",
                "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
                *overrides,
            ]
        )
        self.shown_file = io.StringIO()
        console = RunConsole(steps, [], Console(file=self.shown_file, width=200, color_system=None))
        self.folder = RunFolder(path, resume=True)
        self.workers = Workers()
        self.trainer = RayPPOTrainer(
            config,
            Words(),
            {},
            SimpleNamespace(),
            train_dataset=Prompts(),
            val_dataset=Prompts(),
            rewards=Rewards(scores),
            reporter=RunReporter(config, self.folder, console, Words(), num_devices=1),
            total_training_steps=steps,
        )
        self.trainer._workers = self.workers

    @property
    def shown(self) -> str:
        return self.shown_file.getvalue()

    def fit(self) -> None:
        self.trainer.fit()
        self.folder.close()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The checkpoint of step 2, made with a KL coefficient of 0.5."""
    checkpoint = tmp_path / "checkpoints" / "step_2"
    checkpoint.mkdir(parents=True)
    state = {"step": 2, "data_position": {"epoch": 0, "offset": 0}, "kl_coef": 0.5}
    (checkpoint / "state.json").write_text(json.dumps(state))
    return checkpoint


def test_validation_reports_the_plain_score_and_drops_what_was_left_out(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.trainer.sync_weights()
    metrics = driver.trainer.validate()
    assert metrics["val/sums/mean@1"] == 0.5  # of 1, None and 0; to train on they weigh 10
    assert (metrics["val/sums/n"], metrics["val/sums/skipped"]) == (2.0, 1.0)
    assert "left out 1 of 3 samples" in driver.shown
    assert [r["score"] for r in read_jsonl(tmp_path / "rollouts" / "val_step_0.jsonl")] == [1.0, 0.0]


def test_validation_by_a_reward_model_alone(tmp_path: Path) -> None:
    driver = Driver(tmp_path, *MODEL_ONLY, scores=None)
    driver.trainer.sync_weights()
    assert driver.trainer.validate()["val/sums/mean@1"] == 5.0
    assert driver.workers.done == ["generate", "reward model"]


def test_a_validation_of_which_everything_was_left_out_says_so(tmp_path: Path) -> None:
    driver = Driver(tmp_path, scores=[None, None, None])
    driver.trainer.sync_weights()
    assert driver.trainer.validate() == {"val/sums/skipped": 3.0}


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


@pytest.mark.parametrize("declared", [True, False])
def test_rows_without_advantage_are_spared_only_where_the_loss_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: bool
) -> None:
    names = {"vanilla"} if declared else set()
    monkeypatch.setattr("hrl.trainer.ppo.ray_trainer.ZERO_AT_ZERO_ADVANTAGE", names)
    driver = Driver(tmp_path)
    batch = driver.workers.generate_sequences(Prompts().batch([0, 1, 2]), None)
    batch.non_tensor_batch["uid"] = np.array(["a", "b", "c"], dtype=object)
    batch.batch["advantages"] = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, -1.0]])
    driver.trainer.update_actor(batch, {})
    rows, (mini_batch,) = driver.workers.plan.rows[0], driver.workers.plan.ranks[0].mini_batches
    run = {rows[i] for micro_batch in mini_batch.micro_batches for i in micro_batch}
    assert run == ({0, 2} if declared else {0, 1, 2})


def test_saving_is_told_and_is_no_part_of_a_steps_record(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "trainer.save_freq=1", "trainer.test_freq=-1")
    driver.fit()
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert not any("timing_s/save_checkpoint" in record for record in records)
    for step in (1, 2):
        assert f"saved {tmp_path}/checkpoints/step_{step} in " in driver.shown
