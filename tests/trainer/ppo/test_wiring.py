"""Columns that single algorithms need reach them; by a trainer on stand-ins whose numbers are chosen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hrl.columns import object_column
from hrl.metrics import StepMetrics
from hrl.protocol import DataProto
from hrl.routing import ROUTED_EXPERTS
from hrl.trainer.ppo.reward_parts import RewardPartError
from hrl.workers.requests import OldLogProbs
from tests.trainer.ppo.driver import Driver, Rewards, Workers

QUIET = ("trainer.val_before_train=false", "trainer.test_freq=-1")
GROUPS = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", *QUIET)
CORRECTION = "algorithm.rollout_correction"


class PerRow(Rewards):
    """Scores and parts row by row, in the order of the batch."""

    def __init__(self, scores: list[float | None], parts: list[dict[str, Any]] | None = None) -> None:
        super().__init__(scores)
        self.parts = parts

    def parts_of(self, batch: DataProto) -> list[dict[str, Any]]:
        return self.parts or super().parts_of(batch)


def one_step(driver: Driver) -> tuple[DataProto, StepMetrics]:
    """A step on the first batch of prompts: the batch as it is reported, and the metrics."""
    metrics, trainer = StepMetrics(), driver.trainer
    trainer.sync_weights()
    trainer.global_steps += 1
    return trainer.train_step(trainer.next_batch(), metrics), metrics


# ---------------------------------------------------------------------------------------------- ReMax


def test_remax_compares_each_sample_with_the_greedy_one_of_its_prompt(tmp_path: Path) -> None:
    # Two samples of each of three prompts, then the greedy ones; the third of these the reward function left out.
    rewards = PerRow([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.25, None])
    driver = Driver(tmp_path, "algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=2", *QUIET, rewards=rewards)
    batch, metrics = one_step(driver)
    sent = driver.workers.sampled[0].non_tensor_batch
    assert sent["greedy"].tolist() == [False] * 6 + [True] * 3
    assert sent["sample_index"].tolist() == [0, 1] * 3 + [2] * 3
    assert sent["uid"][6:].tolist() == sent["uid"][:6:2].tolist()

    assert len(batch) == 6 and "greedy" not in batch.non_tensor_batch
    assert batch.batch["reward_baselines"].tolist() == [5.0, 5.0, 2.5, 2.5, 0.0, 0.0]
    assert batch.batch["advantages"][:, -1].tolist() == [5.0, -5.0, 7.5, 7.5, 0.0, 0.0]
    assert batch.batch["response_mask"].sum(1).tolist() == [2, 2, 2, 2, 0, 0]  # no baseline, nothing to learn
    assert metrics["reward/baseline_mean"] == 3.75
    assert metrics["reward/baselines_left_out"] == 1
    assert metrics["response_length/greedy_mean"] == 2


def test_other_estimators_sample_nothing_greedily(tmp_path: Path) -> None:
    driver = Driver(tmp_path, *GROUPS, rewards=PerRow([1.0, 0.0] * 3))
    one_step(driver)
    assert "greedy" not in driver.workers.sampled[0].non_tensor_batch


# ---------------------------------------------------------------------------------------------- GDPO


GDPO = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[right,short]", *GROUPS[1:])


def test_gdpo_normalises_each_named_part_in_its_group(tmp_path: Path) -> None:
    # In the first group `short` alone differs, and a hundred times as much as `right` does in the second.
    parts = [{"right": r, "short": s} for r, s in ((0, 100), (0, 0), (1, 0), (0, 0), (1, 1), (1, 1))]
    rewards = PerRow([0.0] * 6, parts)
    batch, _ = one_step(Driver(tmp_path, *GDPO, rewards=rewards))
    advantages = batch.batch["advantages"][:, 0].tolist()
    assert advantages[0] == pytest.approx(advantages[2], rel=1e-4)
    assert advantages[0] == pytest.approx(-advantages[1], rel=1e-4)
    assert advantages[4:] == [0.0, 0.0]

    weighted = Driver(tmp_path / "w", *GDPO, "algorithm.gdpo_reward_weights=[1,3]", rewards=rewards)
    advantages = one_step(weighted)[0].batch["advantages"][:, 0].tolist()
    assert advantages[0] == pytest.approx(3 * advantages[2], rel=1e-4)


def test_a_part_that_a_reward_lacks_is_an_error_that_names_the_sample(tmp_path: Path) -> None:
    parts: list[dict[str, Any]] = [{"right": 1.0, "short": 0.0} for _ in range(6)]
    parts[3] = {"right": 1.0, "short": None}
    driver = Driver(tmp_path, *GDPO, rewards=PerRow([0.0] * 6, parts))
    with pytest.raises(
        RewardPartError, match=r"gdpo_reward_keys names 'short', which is None .* sample .*/1; its parts"
    ):
        one_step(driver)


# ---------------------------------------------------------------------------------------------- columns of the actor


def test_the_optimal_token_baseline_asks_the_actor_for_its_columns(tmp_path: Path) -> None:
    workers = Workers(trainer=math.log(0.5))
    rewards = PerRow([1.0, 0.0] * 3)
    estimator = "algorithm.adv_estimator=optimal_token_baseline"
    batch, _ = one_step(Driver(tmp_path, *GROUPS, estimator, workers=workers, rewards=rewards))
    assert workers.done == ["generate", "sleep", "log_prob", "update"]
    # Equal energies, 1 - 2 * 0.5 + 0.5, everywhere: the baseline is the group's mean return.
    assert batch.batch["advantages"][:2].tolist() == [[5.0, 5.0], [-5.0, -5.0]]
    assert workers.asked[0].old_log_probs is OldLogProbs.OWN  # one step on policy: the update's own are exact


def test_others_spare_that_forward_pass_on_policy(tmp_path: Path) -> None:
    driver = Driver(tmp_path, *GROUPS, rewards=PerRow([1.0, 0.0] * 3))
    one_step(driver)
    assert driver.workers.done == ["generate", "sleep", "update"]


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
def test_tokens_are_chosen_over_the_whole_batch_and_travel_as_a_column(tmp_path: Path, loss: str) -> None:
    overrides = [f"actor_rollout_ref.actor.policy_loss.{key}" for key in (f"loss_mode={loss}", f"{loss}_ratio=0.25")]
    wide = ["actor_rollout_ref.actor.policy_loss.clip_cov_lb=-1", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]

    def chosen(folder: str) -> torch.Tensor:
        driver = Driver(tmp_path / folder, *GROUPS, *overrides, *wide, rewards=PerRow([1.0, 0.0] * 3))
        _, metrics = one_step(driver)
        assert metrics["actor/selected_tokens"] == 3  # a quarter of twelve, not of each mini-batch of four
        return driver.workers.learnt[0].batch["selected_tokens"]

    selected = chosen("first")
    assert selected.dtype == torch.bool and int(selected.sum()) == 3
    assert torch.equal(selected, chosen("again"))


# ---------------------------------------------------------------------------------------------- policy filtration


def test_policy_filtration_learns_from_drawn_rows_and_reports_all(tmp_path: Path) -> None:
    pf_ppo = ("algorithm.use_pf_ppo=true", "algorithm.pf_ppo.reweight_method=max_min")
    rewards = PerRow([1.0, 0.5, 0.5, 0.5, 0.5, 0.0])
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=1"
    driver = Driver(tmp_path, *GROUPS, *pf_ppo, mini, rewards=rewards)
    batch, metrics = one_step(driver)
    assert len(set(batch.non_tensor_batch["uid"])) == 3 and len(batch) == 6
    (learnt,) = driver.workers.learnt
    assert len(learnt) == 6
    assert set(learnt.batch["token_level_scores"].sum(-1).tolist()) <= {10.0, 0.0}
    assert metrics["pf_ppo/distinct_rows"] == pytest.approx(2 / 6)
    # Drawn rows are no groups any more: three mini-batches of two rows, as configured.
    assert [m.num_sequences for m in driver.workers.plan.ranks[0].mini_batches] == [2, 2, 2]
    again = Driver(tmp_path / "again", *GROUPS, *pf_ppo, mini, rewards=rewards)
    one_step(again)
    assert torch.equal(again.workers.learnt[0].batch["advantages"], learnt.batch["advantages"])


# ---------------------------------------------------------------------------------------------- sampler and trainer


def test_importance_weights_are_made_once_from_the_trainers_log_probs(tmp_path: Path) -> None:
    workers = Workers(sampler=-1.0, trainer=-1.0 + math.log(4.0))
    tis = (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=2.0")
    _, metrics = one_step(Driver(tmp_path, *GROUPS, *tis, workers=workers, rewards=PerRow([1.0, 0.0] * 3)))
    assert workers.done == ["generate", "sleep", "log_prob", "update"]
    assert workers.learnt[0].batch["rollout_is_weights"].tolist() == [[2.0, 2.0]] * 6
    assert metrics["rollout_corr/rollout_is_mean"] == 2.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 1.0
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(4.0))
    assert metrics["rollout_corr/ppl_ratio"] == pytest.approx(0.25)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(math.log(4.0))
    assert not {name for name in metrics if name.endswith(("/ratio", "mean_square"))}


def test_a_rejected_sequence_has_no_part_in_its_group_and_a_rejected_token_hands_its_score_on(tmp_path: Path) -> None:
    class Disagreeing(Workers):
        def compute_log_prob(self, batch: DataProto, request: Any) -> DataProto:
            result = super().compute_log_prob(batch, request)
            result.batch["old_log_probs"][0] = -9.0  # a whole sequence
            result.batch["old_log_probs"][3, 1] = -2.0  # the last token of another, which carries its score
            return result

    rules = (
        f"{CORRECTION}.rollout_rs='seq_max_k2,token_k2'",
        f"{CORRECTION}.rollout_rs_threshold='20.0,0.1'",
        "algorithm.norm_adv_by_std_in_grpo=false",
    )
    rewards = PerRow([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    batch, metrics = one_step(Driver(tmp_path, *GROUPS, *rules, workers=Disagreeing(), rewards=rewards))
    assert batch.batch["response_mask"].tolist() == [[0, 0], [1, 1], [1, 1], [1, 0], [1, 1], [1, 1]]
    assert batch.batch["token_level_scores"][3].tolist() == [10.0, 0.0]
    # The first group is left with one sample: nothing to compare it with. The others differ by 10.
    assert batch.batch["advantages"].tolist() == [[0, 0], [0, 0], [-5, -5], [5, 0], [5, 5], [-5, -5]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(3 / 12)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 6)


BYPASS = (*GROUPS, f"{CORRECTION}.bypass_mode=true", "trainer.alarms={sampler_gap: 0.1}")


def test_bypass_mode_learns_against_the_sampler_without_a_forward_pass(tmp_path: Path) -> None:
    workers = Workers(sampler=-1.0, trainer=-1.05)
    driver = Driver(tmp_path, *BYPASS, workers=workers, rewards=PerRow([1.0, 0.0] * 3))
    batch, metrics = one_step(driver)
    assert workers.done == ["generate", "sleep", "update"]
    (asked,) = workers.asked
    assert asked.correction.loss_type == "ppo_clip"
    assert asked.old_log_probs is OldLogProbs.SAMPLER and "old_log_probs" not in asked.columns
    assert batch.batch["old_log_probs"].tolist() == [[-1.0, -1.0]] * 6
    assert metrics["rollout_corr/recomputed"] == 0.0


def test_the_drift_gate_brings_the_forward_pass_back_and_says_so(tmp_path: Path) -> None:
    workers = Workers(sampler=-1.0, trainer=-1.5)
    driver = Driver(tmp_path, *BYPASS, workers=workers, rewards=PerRow([1.0, 0.0] * 3))
    steps = [one_step(driver)[1]["rollout_corr/recomputed"]]
    assert "sampler and trainer differ by 0.500 per token, above 0.1 (alarm sampler_gap)" in driver.shown
    steps.append(one_step(driver)[1]["rollout_corr/recomputed"])
    assert workers.asked[1].old_log_probs is OldLogProbs.OWN
    assert driver.trainer.state()["drift_gate_closed"]

    workers.trainer = -1.05  # they agree again, which the forward pass finds out
    steps.append(one_step(driver)[1]["rollout_corr/recomputed"])
    steps.append(one_step(driver)[1]["rollout_corr/recomputed"])
    assert steps == [0.0, 1.0, 1.0, 0.0]
    assert workers.done.count("log_prob") == 2
    assert "the sampler's log-probs are taken again" in driver.shown


def test_a_resumed_run_finds_the_gate_as_it_was(tmp_path: Path) -> None:
    def run(steps: int) -> list[str]:
        workers = Workers(sampler=-1.0, trainer=-1.5)
        rewards = PerRow([1.0, 0.0] * 3)
        save = "trainer.save_freq=1"
        Driver(tmp_path, *BYPASS, save, workers=workers, rewards=rewards, steps=steps).fit()
        return workers.done

    assert "log_prob" not in run(1)
    assert run(2) == ["load", "generate", "sleep", "log_prob", "update"]


# ---------------------------------------------------------------------------------------------- experts


class WithExperts(Workers):
    """The engine's experts are 1 and 2, of which the second row of a batch lacks a prompt; a pass's are 3 and 4."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[Any] = []

    def generate_sequences(self, rows: DataProto, request: Any) -> DataProto:
        sampled = super().generate_sequences(rows, request)
        if not request.with_experts:
            return sampled
        routed = [np.full((3, 1, 2), (1, 2), np.uint8) for _ in range(len(rows))]
        routed[1][:2] = 255
        sampled.non_tensor_batch[ROUTED_EXPERTS] = object_column(routed)
        return sampled

    def compute_log_prob(self, batch: DataProto, request: Any) -> DataProto:
        self.passes.append(request)
        assert request.columns <= {*batch.batch.keys(), *batch.non_tensor_batch}
        found = super().compute_log_prob(batch, request)
        if request.records_experts:
            found.non_tensor_batch[ROUTED_EXPERTS] = object_column([np.full((3, 1, 2), (3, 4), np.uint8)] * len(batch))
        return found


@pytest.mark.parametrize(("mode", "taken"), [("R3", [1, 2]), ("R2", [3, 4])])
def test_experts_reach_the_update_from_the_sampler_or_from_the_pass_before(
    mode: str, taken: list[int], tmp_path: Path
) -> None:
    workers = WithExperts()
    off_policy = ("actor_rollout_ref.actor.ppo_epochs=2", f"actor_rollout_ref.actor.router_replay.mode={mode}")
    balance = "actor_rollout_ref.actor.router_aux_loss_coef=0.01"
    one_step(Driver(tmp_path, *GROUPS, *off_policy, balance, workers=workers, rewards=PerRow([1.0, 0.0] * 3)))
    assert [(one.replays_experts, one.records_experts) for one in workers.passes] == [(mode == "R3", mode == "R2")]
    (learnt,), (asked,) = workers.learnt, workers.asked
    assert asked.replays_experts and ROUTED_EXPERTS in asked.columns and asked.router_aux_loss_coef == 0.01
    for row in learnt.non_tensor_batch[ROUTED_EXPERTS]:
        assert row[:, 0].tolist() == [taken] * 3


def test_where_a_batch_is_one_step_r2_has_nothing_to_take_and_r3_is_compared_as_it_replays(tmp_path: Path) -> None:
    for mode in ("R2", "R3"):
        workers = WithExperts()
        key = f"actor_rollout_ref.actor.router_replay.mode={mode}"
        one_step(Driver(tmp_path / mode, *GROUPS, key, workers=workers, rewards=PerRow([0.0] * 6)))
        assert workers.asked[0].replays_experts is (mode == "R3")
        # No row has an advantage, so none runs in the update, and all are compared in a pass of their own.
        assert [one.replays_experts for one in workers.passes] == [mode == "R3"]
        assert (ROUTED_EXPERTS in workers.learnt[0].non_tensor_batch) is (mode == "R3")
