"""Online DPO on stand-ins: which samples become pairs, and what is done without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hrl.algos.preference import PairOptions
from hrl.config import ConfigError, compose_cli
from hrl.metrics import Metric
from hrl.protocol import DataProto
from hrl.report.run_folder import read_jsonl
from hrl.trainer.ppo.online_dpo import OnlineDPOTrainer
from tests.trainer.ppo.driver import Driver, Workers

ONLINE = ("recipe=online_dpo", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=3")


class Learner(Workers):
    """Notes the pairs; the reference finds token t of row i to have the log-prob -i - t."""

    def __init__(self) -> None:
        super().__init__()
        self.ref = self

    def compute_ref_log_prob(self, batch: DataProto, request: Any) -> DataProto:
        self.done.append("ref")
        rows = torch.arange(len(batch), dtype=torch.float32)
        return DataProto.from_dict(tensors={"ref_log_prob": -rows[:, None] - torch.arange(2.0)})

    def update_actor(self, batch: DataProto, request: Any) -> list[dict[str, Metric]]:
        self.done.append("update")
        self.asked.append(request)
        self.learnt.append(batch)
        return [{"train/loss": Metric.mean(0.5, 1)}]


def run(path: Path, *scores: float | None) -> Driver:
    driver = Driver(path, *ONLINE, "trainer.val_before_train=false", "trainer.test_freq=-1",
                    steps=1, scores=list(scores), workers=Learner())  # fmt: skip
    assert isinstance(driver.trainer, OnlineDPOTrainer)
    driver.fit()
    return driver


def test_the_best_and_the_worst_sample_of_each_prompt_are_a_pair(tmp_path: Path) -> None:
    # A tie; a clear pair; a sample that the reward function left out beside another pair.
    driver = run(tmp_path, 1.0, 1.0, 1.0, 0.0, 2.0, 1.0, None, 3.0, 4.0)
    (pairs,) = driver.workers.learnt
    assert pairs.batch["is_chosen"].tolist() == [True, False, True, False]
    assert pairs.batch["token_level_scores"].sum(-1).tolist() == [20.0, 0.0, 40.0, 30.0]  # rewards weigh 10
    uids = pairs.non_tensor_batch["uid"].tolist()
    assert uids[0] == uids[1] != uids[2] == uids[3]
    # The reference saw the four rows in the order of the batch: worst, best; worst, best.
    assert pairs.batch["ref_sequence_log_prob"].tolist() == [-3.0, -1.0, -7.0, -5.0]
    (asked,) = driver.workers.asked
    assert (asked.loss_type, asked.options) == ("sigmoid", PairOptions(0.1))
    assert asked.has_reference and asked.measures_mismatch and asked.columns <= {*pairs.batch.keys(), "uid"}
    assert driver.workers.plan.ranks[0].mini_batches[0].num_groups == 2
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert (record["rollout/pairs"], record["train/loss"]) == (2.0, 0.5)
    assert record["reward/mean"] == pytest.approx(13 / 8)  # of all samples with a score, not of the pairs alone


def test_without_a_pair_nothing_is_learnt_and_that_is_said(tmp_path: Path) -> None:
    driver = run(tmp_path, *[1.0] * 9)
    assert not {"ref", "update"} & set(driver.workers.done)
    assert "no two samples of a prompt differ" in driver.shown
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert record["rollout/pairs"] == 0.0
    # Sampler and trainer are compared all the same.
    assert (record["rollout/logprob_diff_mean"], record["rollout/logprob_diff_rows"]) == (0.0, 9.0)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("actor_rollout_ref.rollout.n=1", "a pair is made of two samples"),
        ("algorithm.kl_ctrl.kl_coef=0", "it is the beta of algorithm.preference_loss"),
        ("algorithm.kl_ctrl.type=adaptive", "the beta of algorithm.preference_loss is constant"),
        ("algorithm.use_kl_in_reward=true", "has no effect on algorithm.preference_loss"),
        ("actor_rollout_ref.actor.entropy_coeff=0.1", "has no effect on algorithm.preference_loss"),
        ("critic.enable=true", "has no effect on algorithm.preference_loss"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=127", "a prompt with both its answers may have 128"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "a pair is two sequences"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose_cli(["recipe=online_dpo", override])


def test_a_reference_is_built_for_losses_that_have_one() -> None:
    assert compose_cli(["recipe=online_dpo"]).needs_reference
    assert not compose_cli(["recipe=online_dpo", "algorithm.preference_loss=simpo"]).needs_reference
