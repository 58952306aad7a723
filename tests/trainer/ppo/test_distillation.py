"""Distillation on stand-ins: what the teacher is asked for, and what the update and the advantages get of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hrl.columns import object_column
from hrl.protocol import DataProto
from hrl.report.run_folder import read_jsonl
from hrl.workers.requests import TEACHER_IDS, TEACHER_LOG_PROBS
from tests.trainer.ppo.driver import Driver, Rewards, Workers

LOSS = "distillation.distillation_loss"


class Taught(Workers):
    """The teacher finds every token half as likely as a policy that gives it the log-prob -1."""

    def __init__(self) -> None:
        super().__init__()
        self.ref = self
        self.asked_of_teacher: list[Any] = []

    def compute_ref_log_prob(self, batch: DataProto, request: Any) -> DataProto:
        self.done.append("ref")
        self.asked_of_teacher.append(request)
        likeliest = [torch.zeros(2, request.num_top).numpy() for _ in range(len(batch))]
        others = {TEACHER_IDS: object_column(likeliest), TEACHER_LOG_PROBS: object_column(likeliest)}
        scores = torch.full((len(batch), 2), -1.5)
        return DataProto.from_dict(tensors={"ref_log_prob": scores}, non_tensors=others if request.num_top else {})


class Unscored(Rewards):
    """Nobody scores: whoever asks fails."""

    scores_steps = scores_validations = False

    def __init__(self) -> None:
        super().__init__(None)

    def collect(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is scored")


def run(path: Path, *changes: str, rewards: Rewards | None = None) -> Driver:
    driver = Driver(path, "recipe=distillation", "trainer.val_before_train=false", "trainer.test_freq=-1", *changes,
                    steps=1, scores=[1.0, 1.0, 1.0], workers=Taught(), rewards=rewards)  # fmt: skip
    driver.fit()
    return driver


def test_the_likeliest_tokens_travel_and_rows_without_advantage_are_learnt_from(tmp_path: Path) -> None:
    driver = run(tmp_path, f"{LOSS}.topk=4")
    assert driver.workers.asked_of_teacher[0].num_top == 4
    (request,), (learnt,) = driver.workers.asked, driver.workers.learnt
    assert {TEACHER_IDS, TEACHER_LOG_PROBS} <= request.columns and "advantages" not in request.columns
    assert sum(map(len, request.plan.rows)) == len(learnt) == 3  # equal rewards: no advantage differs from 0
    assert "old_log_probs" not in learnt.batch.keys()


@pytest.mark.parametrize(("with_rewards", "weight"), [("false", 1.0), ("true", 0.1)])
def test_as_a_reward_the_divergence_is_subtracted_from_advantages(
    tmp_path: Path, with_rewards: str, weight: float
) -> None:
    driver = run(
        tmp_path, f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=true", f"{LOSS}.use_task_rewards={with_rewards}",
        f"{LOSS}.distillation_loss_coef=0.1",
    )  # fmt: skip
    (request,), (learnt,) = driver.workers.asked, driver.workers.learnt
    assert request.distillation is None and driver.workers.asked_of_teacher[0].num_top == 0
    # log s - log t = -1 + 1.5 at every token; equal rewards whiten to 0.
    torch.testing.assert_close(learnt.batch["advantages"], torch.full((3, 2), -0.5 * weight))
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert record["distillation/loss"] == 0.5


@pytest.mark.parametrize("as_reward", [False, True])
def test_samples_without_a_score_are_learnt_from_and_nothing_is_said_of_scores(tmp_path: Path, as_reward: bool) -> None:
    mode = (f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=true") if as_reward else (f"{LOSS}.topk=4",)
    mode += ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",)  # which selects tokens by their advantages
    driver = run(tmp_path, *mode, "trainer.test_freq=1", rewards=Unscored())
    (learnt,) = driver.workers.learnt
    assert ("advantages" in learnt.batch.keys()) == as_reward and "token_level_scores" not in learnt.batch.keys()
    if as_reward:
        torch.testing.assert_close(learnt.batch["advantages"], torch.full((3, 2), -0.5))
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert not [name for name in record if name.startswith(("reward/", "critic/score", "critic/rewards", "val/sums"))]
    assert record["response_length/mean"] == 2
    (sample, *_) = read_jsonl(tmp_path / "rollouts" / "step_1.jsonl")
    assert "score" not in sample and sample["response"] == "one"
