"""Sampler and trainer are compared in every step, whatever the rewards are; by a trainer on stand-ins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.metrics import Metric, StepMetrics
from hrl.protocol import DataProto
from hrl.report.run_folder import read_jsonl
from hrl.trainer.ppo.sampler_mismatch import SPOT_CHECK_ROWS, DriftGate, spot_check
from hrl.workers.requests import OldLogProbs
from tests.trainer.ppo.driver import Driver, Workers

QUIET = ("trainer.val_before_train=false", "trainer.test_freq=-1")
GROUPS = ("algorithm.adv_estimator=grpo", *QUIET)
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=true"


def samples(number: int) -> str:
    return f"actor_rollout_ref.rollout.n={number}"


class Apart(Workers):
    """Sampler and trainer differ by 0.5 per token, or by 0.1 in the update, which runs other rows than the check."""

    def __init__(self, in_update: float = 0.5) -> None:
        super().__init__(sampler=-1.0, trainer=-1.5)
        self.in_update = in_update

    def update_actor(self, batch: DataProto, request: object) -> list[dict[str, Metric]]:
        self.trainer = self.sampler - self.in_update
        return super().update_actor(batch, request)


def one_step(driver: Driver) -> StepMetrics:
    metrics, trainer = StepMetrics(), driver.trainer
    trainer.sync_weights()
    trainer.global_steps += 1
    trainer.train_step(trainer.next_batch(), metrics)
    return metrics


# ---------------------------------------------------------------------------------------------- which rows


def batch_of(has_tokens: list[bool]) -> DataProto:
    return DataProto.from_dict(tensors={"response_mask": torch.tensor(has_tokens)[:, None].expand(-1, 2).long()})


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_as_many_rows_are_compared_as_there_are_up_to_the_bound(rows: list[tuple[bool, bool]]) -> None:
    has_tokens, runs = map(list, zip(*rows, strict=True))
    compared = [row for row, run in enumerate(runs) if run]
    checked = spot_check(batch_of(has_tokens), compared).tolist()
    trained = {row for row, has in enumerate(has_tokens) if has}
    assert set(checked) <= trained - set(compared) and len(set(checked)) == len(checked)
    both = len(checked) + len(trained & set(compared))
    assert both >= min(SPOT_CHECK_ROWS, len(trained))
    assert both == min(SPOT_CHECK_ROWS, len(trained)) or not checked, "no more than needed"
    assert spot_check(batch_of(has_tokens), compared).tolist() == checked


def test_the_rows_stand_evenly_over_the_batch() -> None:
    assert spot_check(batch_of([True] * 64), ()).tolist() == list(range(0, 64, 4))


# ---------------------------------------------------------------------------------------------- all rewards equal


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_the_alarm_sounds_when_every_reward_is_equal(tmp_path: Path, reward: float) -> None:
    driver = Driver(tmp_path, *GROUPS, samples(2), workers=Apart(), scores=[reward] * 6, steps=1)
    driver.fit()
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert record["rollout/logprob_diff_mean"] == record["rollout/logprob_diff_max"] == 0.5
    assert (record["rollout/logprob_diff_rows"], record["actor/rows_run"]) == (6, 0)
    assert record["actor/entropy"] == 0.25
    assert record["rollout_corr/kl"] == pytest.approx(0.5)
    assert "alarm sampler_gap in step 1: sampler and trainer differ by more than 0.1" in driver.shown
    assert record["health/sampler_gap"] == 1.0


def test_the_gate_closes_when_every_reward_is_equal(tmp_path: Path) -> None:
    driver = Driver(tmp_path, *GROUPS, samples(2), BYPASS, workers=Apart(), scores=[0.0] * 6)
    assert one_step(driver)["rollout_corr/recomputed"] == 0
    assert driver.trainer.drift_gate.is_closed
    assert one_step(driver)["rollout_corr/recomputed"] == 1


def test_while_only_the_critic_learns_both_are_compared_as_well(tmp_path: Path) -> None:
    class WithCritic(Apart):
        def compute_values(self, batch: DataProto, request: object) -> DataProto:
            return DataProto.from_dict(tensors={"values": torch.zeros(len(batch), 2)})

        def update_critic(self, batch: DataProto, request: object) -> list[dict[str, Metric]]:
            return {}

    options = ("algorithm.adv_estimator=gae", "trainer.critic_warmup=1", *QUIET)
    driver = Driver(tmp_path, *options, workers=WithCritic(), scores=[1.0, 0.0, 0.0])
    metrics = one_step(driver)
    assert driver.workers.done == ["generate", "sleep", "log_prob"]
    assert (metrics["rollout/logprob_diff_mean"], metrics["rollout/logprob_diff_rows"]) == (0.5, 3)


# ---------------------------------------------------------------------------------------------- some rewards equal


def test_the_figures_are_means_over_the_tokens_of_the_rows_that_run_and_of_those_that_are_checked(
    tmp_path: Path,
) -> None:
    scores = [1.0, 0.0] + [0.0] * 6 + [1.0] * 8 + [0.0] * 8  # one prompt of three differs: 8 rows run
    driver = Driver(tmp_path, *GROUPS, samples(8), workers=Apart(in_update=0.1), scores=scores)
    metrics = one_step(driver)
    (checked,) = driver.workers.scored
    assert checked.batch["token_level_scores"].sum(-1).tolist() == [10.0] * 4 + [0.0] * 4
    assert (metrics["actor/rows_run"], metrics["rollout/logprob_diff_rows"]) == (8, 16)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx((8 * 0.5 + 8 * 0.1) / 16)


def test_where_enough_rows_run_no_others_are_looked_at(tmp_path: Path) -> None:
    scores = [1.0] + [0.0] * 15 + [1.0] * 32
    driver = Driver(tmp_path, *GROUPS, samples(16), workers=Workers(), scores=scores)
    metrics = one_step(driver)
    assert "log_prob" not in driver.workers.done
    assert (metrics["actor/rows_run"], metrics["rollout/logprob_diff_rows"]) == (16, 16)


def test_an_update_compares_only_what_its_first_step_runs(tmp_path: Path) -> None:
    scores = [1.0, 0.0] * 12
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=1"
    driver = Driver(tmp_path, *GROUPS, samples(8), BYPASS, mini, workers=Workers(), scores=scores)
    metrics = one_step(driver)
    assert metrics["rollout/logprob_diff_rows"] == 16  # 8 of the first of three steps
    assert metrics["actor/rows_run"] == 24
    assert set(driver.workers.scored[0].non_tensor_batch["uid"]) == set(
        driver.workers.learnt[0].non_tensor_batch["uid"][8:]
    )


def test_nothing_is_compared_twice(tmp_path: Path) -> None:
    tis = f"{CORRECTION}.rollout_is=token"
    driver = Driver(tmp_path, *GROUPS, samples(2), tis, workers=Workers(), scores=[0.0] * 6)
    metrics = one_step(driver)
    assert driver.workers.done.count("log_prob") == 1
    assert metrics["rollout/logprob_diff_rows"] == 6


# ---------------------------------------------------------------------------------------------- the gate


def test_the_gate_stays_where_it_is_without_a_measurement_and_takes_nan_for_a_difference() -> None:
    gate = DriftGate(0.1)
    assert gate.judge(None) is None and not gate.is_closed
    assert "differ by nan" in (gate.judge(float("nan")) or "") and gate.is_closed
    assert gate.judge(None) is None and gate.is_closed
    assert "taken again" in (gate.judge(0.1) or "") and not gate.is_closed


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_a_closed_gate_changes_the_old_log_probs_and_nothing_else(tmp_path: Path, loss_type: str) -> None:
    rejection = (f"{CORRECTION}.rollout_rs=token_k2", f"{CORRECTION}.rollout_rs_threshold=0.01")
    options = (BYPASS, f"{CORRECTION}.loss_type={loss_type}", *rejection)
    driver = Driver(tmp_path, *GROUPS, samples(2), *options, workers=Apart(), scores=[1.0, 0.0] * 3)
    one_step(driver)
    metrics = one_step(driver)
    opened, closed = driver.workers.learnt
    assert metrics["rollout_corr/recomputed"] == 1 and driver.workers.done.count("log_prob") == 1
    before, after = driver.workers.asked
    assert before.correction == after.correction and after.correction.loss_type == loss_type
    assert (before.old_log_probs, after.old_log_probs) == (OldLogProbs.SAMPLER, OldLogProbs.OWN)
    assert (before.measures_mismatch, after.measures_mismatch) == (True, False)
    # Every token is to be rejected; that is the update's to do, so the divisor and the groups are those of the batch.
    for column in ("response_mask", "advantages", "rollout_log_probs"):
        assert torch.equal(closed.batch[column], opened.batch[column]), column
    assert np.all(closed.batch["response_mask"].numpy() == 1)
    assert metrics["rollout/logprob_diff_rows"] == 6
