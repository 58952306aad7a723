"""The driver's steps between a score and an update, with numbers worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hrl.algos.kl import AdaptiveKLController, FixedKLController
from hrl.batching.planner import plan_generation
from hrl.config import compose_cli
from hrl.metrics import StepMetrics
from hrl.protocol import DataProto
from hrl.trainer.ppo.advantage import advantage_columns, apply_kl_penalty, compute_advantage, rows_without_advantage
from hrl.trainer.ppo.generation import PolicyVersionError, check_policy_version, prompt_batch
from hrl.trainer.ppo.sampler_mismatch import correct_for_sampler, sampler_drift, with_sample_sizes


def batch(**tensors: torch.Tensor) -> DataProto:
    rows = len(next(iter(tensors.values())))
    return DataProto.from_dict(
        tensors=tensors, non_tensors={"uid": np.array([str(row // 2) for row in range(rows)], dtype=object)}
    )


def test_kl_penalty_is_taken_off_every_trained_token() -> None:
    data = batch(
        token_level_scores=torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]]),
        old_log_probs=torch.tensor([[-1.0, -2.0, 0.0], [-3.0, 0.0, 0.0]]),
        ref_log_prob=torch.tensor([[-1.5, -1.0, 9.0], [-3.5, 0.0, 0.0]]),
        response_mask=torch.tensor([[1, 1, 0], [1, 0, 0]]),
    )
    data, metrics = apply_kl_penalty(data, FixedKLController(0.1), "kl")
    # k1 per token: [0.5, -1.0], [0.5]; reward = score - 0.1 * k1
    torch.testing.assert_close(data.batch["token_level_rewards"], torch.tensor([[-0.05, 1.1, 0.0], [1.95, 0.0, 0.0]]))
    # mean over sequences of the mean per token: ((0.5 - 1.0) / 2 + 0.5) / 2
    assert metrics == {"actor/reward_kl_penalty": pytest.approx(0.125), "actor/reward_kl_penalty_coeff": 0.1}


def test_the_adaptive_controller_moves_after_the_step_it_was_measured_on() -> None:
    ones = torch.ones(2, 1)
    data = batch(token_level_scores=ones, old_log_probs=ones, ref_log_prob=ones - 0.5, response_mask=ones.long())
    controller = AdaptiveKLController(0.2, target_kl=0.1, horizon=100)
    _, metrics = apply_kl_penalty(data, controller, "kl")
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.2
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 2 / 100))  # error clipped to +0.2, two sequences


def test_grpo_advantages_by_uid_and_rows_without_advantage() -> None:
    data = batch(
        token_level_rewards=torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]),
        response_mask=torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]]),
    )
    data = compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False)
    # group 0 scores 1 and 0, mean 0.5; group 1 scores 1 and 1: no spread
    assert data.batch["advantages"].tolist() == [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0], [0.0, 0.0]]
    assert rows_without_advantage(data).tolist() == [False, False, True, True]


def test_gae_takes_its_values_gamma_and_lambda() -> None:
    data = batch(
        token_level_rewards=torch.tensor([[0.0, 1.0]]),
        values=torch.tensor([[0.5, 0.2]]),
        response_mask=torch.tensor([[1, 1]]),
    )
    data = compute_advantage(data, "gae", gamma=0.5, lam=0.8)
    # backwards: 1 - 0.2 = 0.8, then 0.5 * 0.2 - 0.5 + 0.5 * 0.8 * 0.8 = -0.08; returns are these plus the values
    torch.testing.assert_close(data.batch["returns"], torch.tensor([[0.42, 1.0]]))


def test_what_was_cut_off_ends_in_the_value_of_the_batch() -> None:
    data = batch(
        token_level_rewards=torch.tensor([[0.0, 1.0]]),
        values=torch.tensor([[0.5, 0.2]]),
        response_mask=torch.tensor([[1, 1]]),
        bootstrap_values=torch.tensor([3.0]),
    )
    data = compute_advantage(data, "gae", gamma=0.5, lam=0.8)
    # backwards: 1 + 0.5 * 3 - 0.2 = 2.3, then 0.5 * 0.2 - 0.5 + 0.5 * 0.8 * 2.3 = 0.52; plus the values
    torch.testing.assert_close(data.batch["returns"], torch.tensor([[1.02, 2.5]]))


def test_turns_of_a_batch_are_the_steps_of_an_estimator_of_turns() -> None:
    data = batch(
        token_level_rewards=torch.tensor([[1.0, 3.0], [0.0, 0.0]]),
        turn_index=torch.tensor([[0, 1], [0, 0]]),
        response_mask=torch.tensor([[1, 1], [1, 1]]),
    )
    data = compute_advantage(data, "grpo_turns", norm_adv_by_std_in_grpo=False)
    # rewards of three turns, 1, 3 and 0, with the mean 4 / 3
    torch.testing.assert_close(data.batch["advantages"], torch.tensor([[4.0, 5.0], [-4.0, -4.0]]) / 3)


def test_an_estimator_gets_what_it_needs_and_a_column_that_is_missing_is_named() -> None:
    data = batch(token_level_rewards=torch.tensor([[0.0, 1.0]]), response_mask=torch.tensor([[1, 1]]))
    with pytest.raises(ValueError, match=r"'gae' reads \['values'\], and the batch has no such columns"):
        compute_advantage(data, "gae")
    with pytest.raises(ValueError, match="needs 'reward_parts'"):
        compute_advantage(data, "gdpo")


@pytest.mark.parametrize(
    ("overrides", "columns"),
    [
        (["algorithm.adv_estimator=grpo"], []),
        (["algorithm.adv_estimator=gae"], ["values"]),
        (["algorithm.adv_estimator=grpo", "critic.enable=true"], ["values"]),
        (["algorithm.adv_estimator=remax"], ["reward_baselines"]),
        (["algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=true"], ["old_log_probs"]),
        (["algorithm.adv_estimator=optimal_token_baseline"], ["old_log_probs", "sum_pi_squared"]),
        (
            ["algorithm.adv_estimator=grpo", "algorithm.rollout_correction.rollout_is=token"],
            ["old_log_probs", "rollout_is_weights"],
        ),
    ],
)
def test_an_estimator_is_given_what_the_run_has_also_for_another_reason(
    overrides: list[str], columns: list[str]
) -> None:
    assert advantage_columns(compose_cli(overrides)) == columns


def test_an_advantage_outside_the_mask_moves_nothing() -> None:
    data = batch(advantages=torch.tensor([[0.0, 3.0], [1.0, 0.0]]), response_mask=torch.tensor([[1, 0], [1, 0]]))
    assert rows_without_advantage(data).tolist() == [True, False]


def test_prompts_of_different_batches_are_different_groups_and_samples_of_one_prompt_are_one() -> None:
    settings = SimpleNamespace(n=2, temperature=1.0, val_kwargs=SimpleNamespace(n=2, do_sample=False, temperature=0.0))

    def uids(indices: list[int], step: int, validate: bool) -> list[str]:
        prompts = DataProto.from_dict(
            tensors={"prompts": torch.zeros(len(indices), 3)},
            non_tensors={"index": np.array(indices, dtype=object)},
        )
        rows = prompt_batch(prompts, settings.n, step=step, validate=validate)
        assert rows.non_tensor_batch["sample_index"].tolist() == [0, 1] * len(indices)
        return rows.non_tensor_batch["uid"].tolist()

    first, second = uids([0, 1], 3, True), uids([2, 3], 3, True)
    assert first[0] == first[1] != first[2]
    assert len({*first, *second}) == 4
    assert uids([0, 1], 3, True) == first
    assert not {*uids([0, 1], 4, True), *uids([0, 1], 3, False)} & set(first)


def test_sampler_drift_counts_trained_tokens_only() -> None:
    data = batch(
        old_log_probs=torch.tensor([[-1.0, -2.0], [-1.0, 5.0]]),
        rollout_log_probs=torch.tensor([[-1.1, -1.7], [-1.0, 0.0]]),
        response_mask=torch.tensor([[1, 1], [1, 0]]),
    )
    columns = data.batch
    drift = StepMetrics()
    drift.observe(sampler_drift(columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]))
    assert drift["rollout/logprob_diff_mean"] == pytest.approx((0.1 + 0.3 + 0.0) / 3, abs=1e-6)
    assert drift["rollout/logprob_diff_max"] == pytest.approx(0.3, abs=1e-6)
    assert drift["rollout/logprob_diff_p99"] == pytest.approx(0.1 + 0.98 * 0.2, abs=1e-6)  # of 0, 0.1 and 0.3
    assert drift["rollout_corr/kl"] == pytest.approx(-(0.1 - 0.3 + 0.0) / 3, abs=1e-6)  # sampler less trainer


def test_a_token_that_the_trainer_finds_unlikely_is_rejected_and_its_score_moves() -> None:
    data = batch(
        old_log_probs=torch.tensor([[-1.0, -1.0, -4.0], [-1.0, -1.0, 0.0]]),
        rollout_log_probs=torch.tensor([[-1.0, -2.0, -1.0], [-1.5, -1.0, 0.0]]),
        token_level_scores=torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.0]]),
        response_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
    )
    settings = SimpleNamespace(
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_is_batch_normalize=False,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.1_9.0",
    )
    corrected, _ = correct_for_sampler(data, settings)
    # ratios 1, e, e^-3 (below 0.1: rejected) and e^0.5, 1; weights are cut at 2
    assert corrected.batch["response_mask"].tolist() == [[1, 1, 0], [1, 1, 0]]
    assert corrected.batch["token_level_scores"].tolist() == [[0.0, 1.0, 0.0], [0.0, 0.5, 0.0]]
    weights = corrected.batch["rollout_is_weights"]
    torch.testing.assert_close(weights[:, :2], torch.tensor([[1.0, 2.0], [math.exp(0.5), 1.0]]))
    unscored = batch(**{name: data.batch[name] for name in ("old_log_probs", "rollout_log_probs")},
                     response_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))  # fmt: skip
    corrected, _ = correct_for_sampler(unscored, settings)
    assert corrected.batch["response_mask"].tolist() == [[1, 1, 0], [1, 1, 0]]


def test_effective_sample_sizes_are_squared_means_over_second_moments() -> None:
    metrics = {"rollout_corr/ratio": 0.9, "rollout_corr/chi2_token": 0.35}
    metrics |= {"rollout_corr/rollout_is_mean": 0.5, "rollout_corr/rollout_is_mean_square": 0.4}
    with_sample_sizes(metrics)
    assert metrics["rollout_corr/eff_sample_size"] == pytest.approx(0.9**2 / 1.35)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.5**2 / 0.4)


def test_a_batch_of_another_policy_version_is_refused_naming_both() -> None:
    data = DataProto(meta_info={"policy_version": 3})
    check_policy_version(data, 3)
    with pytest.raises(PolicyVersionError, match=r"version 3.*version 4"):
        check_policy_version(data, 4)
    with pytest.raises(PolicyVersionError, match="version None"):
        check_policy_version(DataProto(), 0)


@pytest.mark.parametrize(("world_size", "tensor_parallel"), [(1, 1), (2, 1), (4, 2), (3, 1)])
def test_generation_plan_keeps_groups_whole_and_drives_engines_by_their_first_rank(
    world_size: int, tensor_parallel: int
) -> None:
    uids = np.array([f"g{row // 3}" for row in range(21)], dtype=object)  # 7 groups of 3
    plan = plan_generation(uids, world_size, tensor_parallel)
    assert sorted(row for rows in plan.rows for row in rows) == list(range(21))
    owner = {uid: {rank for rank, rows in enumerate(plan.rows) if uid in uids[list(rows)]} for uid in set(uids)}
    assert all(len(ranks) == 1 for ranks in owner.values())
    sizes = [len(rows) for rank, rows in enumerate(plan.rows) if rank % tensor_parallel == 0]
    assert max(sizes) - min(sizes) <= 3
    assert all(not rows for rank, rows in enumerate(plan.rows) if rank % tensor_parallel)
