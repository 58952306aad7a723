"""What the driver makes of episodes: neither their number of rows nor what an environment's tokens have shows in it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.algos.advantages import ADVANTAGE_ESTIMATORS
from hrl.algos.kl import KL_ESTIMATORS, AdaptiveKLController
from hrl.algos.registry import estimator_traits
from hrl.algos.token_selection import TOKEN_SELECTORS
from hrl.batching.planner import MicroBatchLimits, Planner
from hrl.config.algorithm import AlgorithmConfig, FilterGroupsConfig, PfPpoConfig, RolloutCorrectionConfig
from hrl.protocol import DataProto
from hrl.trainer.ppo.advantage import apply_kl_penalty, compute_advantage, needed_columns
from hrl.trainer.ppo.dynamic_sampling import DynamicSamplingError, GroupFilter
from hrl.trainer.ppo.metrics import compute_data_metrics
from hrl.trainer.ppo.sampler_mismatch import correct_for_sampler, sampler_drift
from hrl.trainer.ppo.samples import count_episode_tokens, counted_samples, sample_sums
from hrl.trainer.ppo.selection import draw_by_score, mark_tokens
from tests.algos.batches import ACTOR
from tests.trainer.ppo.episode_rows import by_episode, in_branches, whole_episodes, with_noise

SEEDS = st.integers(0, 1 << 16)
LIMITS = MicroBatchLimits(200, None, "a.key")


def batch_of(mask: list[list[int]], samples: list[int], branches: list[int]) -> DataProto:
    non_tensors = {"uid": ["a"] * len(mask), "sample_index": samples, "branch": branches}
    return DataProto.from_dict(
        tensors={"response_mask": torch.tensor(mask)},
        non_tensors={name: np.array(column, dtype=object) for name, column in non_tensors.items()},
    )


def test_the_first_row_with_a_token_stands_for_an_episode() -> None:
    batch = batch_of([[0, 0], [1, 0], [0, 1], [1, 1], [0, 0]], [0, 0, 0, 1, 2], [0, 1, 2, 0, 0])
    assert counted_samples(batch).tolist() == [False, True, False, True, False]
    assert sample_sums(batch, torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])).tolist() == [7, 7, 7, 8, 16]
    assert count_episode_tokens(batch)
    assert batch.batch["episode_tokens"].tolist() == [2, 2, 2, 2, 0]


def test_without_branches_nothing_is_added_up_or_counted() -> None:
    batch = batch_of([[1, 1], [0, 0]], [0, 1], [0, 0])
    values = torch.ones(2)
    assert sample_sums(batch, values) is values
    assert counted_samples(batch).tolist() == [True, False]
    assert not count_episode_tokens(batch)
    assert "episode_tokens" not in batch.batch.keys()


# ------------------------------------------------------------------ the same episodes in one row, in several, noisy


def three_forms(seed: int) -> tuple[DataProto, DataProto, DataProto]:
    whole = whole_episodes(seed)
    return whole.select(deepcopy=True), with_noise(whole, seed), in_branches(whole, seed)


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
@settings(max_examples=8, deadline=None)
@given(seed=SEEDS)
def test_advantages_and_their_metrics_are_those_of_episodes(name: str, seed: int) -> None:
    config = AlgorithmConfig(
        adv_estimator=name, gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=True, gdpo_reward_keys=["acc", "form"]
    )
    wholes, *others = three_forms(seed)
    for batch in (wholes, *others):
        compute_advantage(batch, name, config=config, columns=needed_columns(estimator_traits(name)))
        batch.batch["returns"] *= batch.batch["response_mask"]
    for other in others:
        for column in ("advantages", "returns"):
            torch.testing.assert_close(by_episode(other, column), by_episode(wholes, column), rtol=1e-4, atol=1e-5)
        expected, found = compute_data_metrics(wholes), compute_data_metrics(other)
        of_rows = "response_length", "prompt_length", "response/"
        assert expected.keys() == found.keys()
        for metric in (metric for metric in expected if not metric.startswith(of_rows)):
            assert found[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-5), metric


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, kind=st.sampled_from(sorted(KL_ESTIMATORS)))
def test_kl_in_the_reward_and_its_controller(seed: int, kind: str) -> None:
    found = []
    for batch in three_forms(seed):
        controller = AdaptiveKLController(0.2, target_kl=0.1, horizon=100)
        _, metrics = apply_kl_penalty(batch, controller, kind)
        found.append((by_episode(batch, "token_level_rewards"), metrics, controller.value))
    for rewards, metrics, value in found[1:]:
        torch.testing.assert_close(rewards, found[0][0])
        assert metrics == pytest.approx(found[0][1])
        assert value == pytest.approx(found[0][2])


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, metric=st.sampled_from(["reward", "score", "acc"]))
def test_groups_are_kept_by_scores_of_episodes(seed: int, metric: str) -> None:
    kept = []
    for batch in three_forms(seed):
        groups = GroupFilter(FilterGroupsConfig(enable=True, metric=metric, max_num_gen_batches=1), 1, step=1)
        try:
            groups.add(batch)
        except DynamicSamplingError as error:
            kept.append(str(error))
        else:
            kept.append(groups.full_batch()[1] | {"uid": groups.full_batch()[0].non_tensor_batch["uid"][0]})
    assert kept[0] == kept[1] == kept[2]


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_a_score_on_a_rejected_token_stays_in_its_episode(seed: int) -> None:
    """Rejection and weights are per token; the rewards of turns whose tokens are left stay where they are."""
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold="0.5")
    wholes, *others = three_forms(seed)
    expected, _ = correct_for_sampler(wholes, correction)
    for batch in others:
        found, _ = correct_for_sampler(batch, correction)
        for name in ("response_mask", "token_level_scores", "rollout_is_weights"):
            assert torch.equal(by_episode(found, name), by_episode(expected, name)), name


SEQUENCE_CORRECTIONS = {
    "weights": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_threshold="0.2_5.0", rollout_is_batch_normalize=True
    ),
    "sum": RolloutCorrectionConfig(rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"),
    "mean": RolloutCorrectionConfig(rollout_rs="seq_mean_k2,token_k2", rollout_rs_threshold="0.5"),
    "max": RolloutCorrectionConfig(rollout_is="token", rollout_rs="seq_max_k3", rollout_rs_threshold="0.8"),
}


@pytest.mark.parametrize("correction", SEQUENCE_CORRECTIONS.values(), ids=SEQUENCE_CORRECTIONS)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_an_episode_is_one_sequence_to_the_rollout_correction(correction: RolloutCorrectionConfig, seed: int) -> None:
    found = [correct_for_sampler(batch, correction) for batch in three_forms(seed)]
    (expected, metrics), *others = found
    for batch, other_metrics in others:
        for name in ("response_mask", "token_level_scores", "rollout_is_weights"):
            if name in expected.batch.keys():
                torch.testing.assert_close(by_episode(batch, name), by_episode(expected, name))
        results = {name: metric.result() for name, metric in other_metrics.items()}
        assert results == pytest.approx({name: metric.result() for name, metric in metrics.items()}, rel=1e-5)


def test_the_weight_of_an_episode_of_two_rows_is_that_of_its_four_tokens() -> None:
    """Log-ratios 0.1 + 0.1 in one row and -0.2 - 0.4 in the other; alone they had weights 1.22 and 0.55."""
    batch = batch_of([[1, 1, 0, 0], [0, 0, 1, 1]], samples=[0, 0], branches=[0, 1])
    batch.batch["old_log_probs"] = torch.tensor([[0.1, 0.1, 9.0, 9.0], [9.0, 9.0, -0.2, -0.4]])
    batch.batch["rollout_log_probs"] = batch.batch["token_level_scores"] = torch.zeros(2, 4)
    correction = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_sum_k1", rollout_rs_threshold="0.6_1.6")
    _, metrics = correct_for_sampler(batch, correction)
    weight = math.exp(-0.4)
    torch.testing.assert_close(
        batch.batch["rollout_is_weights"], torch.tensor([[weight, weight, 0.0, 0.0], [0.0, 0.0, weight, weight]])
    )
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]  # exp(0.6) alone is above 1.6
    assert metrics["rollout_corr/rollout_is_mean"].result() == pytest.approx(weight)


def test_episodes_of_several_rows_that_all_failed_have_nothing_to_correct() -> None:
    batch = batch_of([[0, 0], [0, 0]], samples=[0, 0], branches=[0, 1])
    for name in ("old_log_probs", "rollout_log_probs", "token_level_scores"):
        batch.batch[name] = torch.zeros(2, 2)
    correction = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_max_k3", rollout_rs_threshold="0.8")
    correct_for_sampler(batch, correction)
    assert batch.batch["rollout_is_weights"].tolist() == batch.batch["response_mask"].tolist() == [[0, 0], [0, 0]]


def test_rejected_tokens_leave_the_rewards_of_other_turns_alone() -> None:
    """The last token of turn 0 is rejected, and all of turn 2; rewards stood on the last tokens of turns."""
    batch = DataProto.from_dict(
        tensors={
            "old_log_probs": torch.zeros(1, 6),
            "rollout_log_probs": torch.tensor([[0.0, 2.0, 9.0, 0.0, 0.0, 2.0]]),
            "response_mask": torch.tensor([[1, 1, 0, 1, 1, 1]]),
            "token_level_scores": torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0, 4.0]]),
        }
    )
    correct_for_sampler(batch, RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold="0.5"))
    assert batch.batch["response_mask"].tolist() == [[1, 0, 0, 1, 1, 0]]
    assert batch.batch["token_level_scores"].tolist() == [[1, 0, 0, 0, 6, 0]]


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_policy_filtration_draws_episodes_with_all_their_rows(seed: int) -> None:
    drawn = []
    for batch in three_forms(seed):
        of_batch, metrics = draw_by_score(batch, PfPpoConfig(), torch.Generator().manual_seed(seed))
        drawn.append((of_batch, metrics))
    (expected, metrics), *others = drawn
    for found, other_metrics in others:
        assert other_metrics == metrics
        for name in ("response_mask", "token_level_scores"):
            assert torch.equal(by_episode(found, name), by_episode(expected, name))


@pytest.mark.parametrize("name", sorted(TOKEN_SELECTORS))
def test_tokens_are_selected_among_the_policys(name: str) -> None:
    actor = type("Settings", (), vars(ACTOR) | {"policy_loss": ACTOR.policy_loss})()
    actor.policy_loss.loss_mode = name
    selected = []
    for batch in three_forms(1)[:2]:
        compute_advantage(batch, "grpo")
        mark_tokens(batch, actor, torch.Generator().manual_seed(0))
        selected.append(batch.batch["selected_tokens"])
        assert not (selected[-1] & ~batch.batch["response_mask"].bool()).any()
    assert torch.equal(*selected)


def test_drift_from_the_sampler_is_measured_at_the_policys_tokens() -> None:
    found: list[dict[str, float]] = []
    for batch in three_forms(2):
        columns = batch.batch
        metrics = sampler_drift(columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"])
        found.append({name: metric.result() for name, metric in metrics.items() if not name.endswith("rows")})
    assert found[1] == pytest.approx(found[0])
    per_token = {name: value for name, value in found[0].items() if "seq" not in name and "ppl" not in name}
    assert {name: found[2][name] for name in per_token} == pytest.approx(per_token, rel=1e-5)


# ------------------------------------------------------------------ mini-batches


def _steps(batch: DataProto, mini_batch_rows: int, **cuts: int) -> list[tuple[int, int, int, set[object]]]:
    """Tokens, sequences, groups and episodes of each optimizer step."""
    plan = Planner(share_prefix=True).update(batch, 2, LIMITS, mini_batch_rows=mini_batch_rows, epochs=1, **cuts)
    others = batch.non_tensor_batch
    steps = []
    for index, step in enumerate(plan.ranks[0].mini_batches):
        held = [
            rows[place]
            for rows, rank in zip(plan.rows, plan.ranks, strict=True)
            for micro_batch in rank.mini_batches[index].micro_batches
            for place in micro_batch
        ]
        episodes = {(others["uid"][row], others["sample_index"][row]) for row in held}
        assert len(held) == sum(
            (others["uid"][row], others["sample_index"][row]) in episodes for row in range(len(batch))
        )
        steps.append((step.num_tokens, step.num_sequences, step.num_groups, episodes))
    return steps


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, size=st.integers(1, 12), shuffle=st.none() | st.integers(0, 9))
def test_mini_batches_are_those_of_episodes_in_one_row_each(seed: int, size: int, shuffle: int | None) -> None:
    """As many optimizer steps, of the same episodes with all their rows, and with the same divisors."""
    wholes, _, branched = three_forms(seed)
    assert _steps(branched, size, shuffle_seed=shuffle) == _steps(wholes, size, shuffle_seed=shuffle)
