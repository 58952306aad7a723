"""The two driver-side steps between a score and a gradient: the KL penalty and the advantage.

Both run over the whole batch on the driver, so neither can depend on how the batch was cut over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import torch

from hrl.algos.advantages import AdvantageConfig, AdvantageInput, compute_advantages
from hrl.algos.distillation import with_teacher_advantages
from hrl.algos.groups import group_codes
from hrl.algos.kl import KLController, penalise_rewards
from hrl.algos.registry import EstimatorTraits, estimator_traits
from hrl.batching.episodes import episode_numbers
from hrl.config.algorithm import AlgorithmConfig
from hrl.config.distillation import DistillationLossConfig
from hrl.config.ppo import PPOTrainerConfig
from hrl.protocol import DataProto
from hrl.trainer.ppo.old_log_probs import needs_old_log_prob
from hrl.trainer.ppo.reward_parts import reward_columns


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Subtract the scaled KL to the reference from the scores, token by token.

    `r_t = score_t - beta * kl_t` (Ziegler et al., 2019, arXiv:1909.08593, eq. 2). The controller then moves beta.

    Args:
        data: `token_level_scores`, `old_log_probs`, `ref_log_prob` and `response_mask`, each (B, R).
        kl_ctrl: Holds beta.
        kl_penalty: Name of the estimator, see `hrl.algos.kl`.

    Returns:
        `data` with `token_level_rewards (B, R)`, and the metrics `actor/reward_kl_penalty` (mean over sequences
        of their mean KL per token, an episode of several rows being one) and `actor/reward_kl_penalty_coeff` (the
        beta that was applied).
    """
    columns, beta, episodes = data.batch, kl_ctrl.value, episode_numbers(data)
    columns["token_level_rewards"], current_kl = penalise_rewards(
        columns["token_level_scores"],
        columns["old_log_probs"],
        columns["ref_log_prob"],
        columns["response_mask"],
        beta,
        kl_penalty,
        None if episodes is None else torch.from_numpy(episodes),
    )
    if math.isfinite(current_kl):  # if not, neither are the rewards, and beta stays
        kl_ctrl.update(current_kl=current_kl, n_steps=len(data) if episodes is None else int(episodes.max()) + 1)
    return data, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmConfig | None = None,
    *,
    columns: Collection[str] | None = None,
) -> DataProto:
    """Add `advantages` and `returns`, both (B, R), by the named estimator.

    Args:
        data: `token_level_rewards`, `response_mask` (B, R), the columns that the estimator gets, and the non-tensor
            `uid` that says which rows are samples of one prompt. Of episodes also `turn_index (B, R)`, the non-tensors
            `sample_index` and `branch`, and `bootstrap_values (B,)` where those that were cut off end in a value.
        adv_estimator: A name in `hrl.algos.advantages.ADVANTAGE_ESTIMATORS`.
        gamma: Discount per token.
        lam: Lambda of GAE.
        num_repeat: Accepted as in verl and not needed: groups are told by `uid`.
        norm_adv_by_std_in_grpo: Divide by the group's standard deviation (GRPO) or not (Dr.GRPO).
        config: The `algorithm` part of the configuration, for estimators with settings of their own; replaces the
            three numbers above. Its `gdpo_reward_keys` name the parts of the reward that gdpo reads.
        columns: Names of the other columns that the estimator gets, see `advantage_columns`; by default those that it
            is registered to need.

    Raises:
        ValueError: There is no such estimator, the batch lacks a column of it, or a reward is not finite.
    """
    traits, batch = estimator_traits(adv_estimator), data.batch
    given = needed_columns(traits) if columns is None else columns
    missing = sorted(set(given) - set(batch.keys()))
    if missing:
        raise ValueError(
            f"the advantage estimator {adv_estimator!r} reads {missing}, and the batch has no such columns"
        )
    episodes = episode_numbers(data)
    settings = AdvantageConfig(gamma, lam, norm_adv_by_std_in_grpo) if config is None else config
    part_names = settings.gdpo_reward_keys if traits.needs_parts else ()
    inputs = AdvantageInput(
        token_level_rewards=batch["token_level_rewards"],
        response_mask=batch["response_mask"],
        group_ids=group_codes(data.non_tensor_batch["uid"]),
        reward_parts=reward_columns(data, part_names, "algorithm.gdpo_reward_keys") if part_names else None,
        turn_index=batch.get("turn_index", None),
        episode_ids=None if episodes is None else torch.from_numpy(episodes),
        bootstrap_values=batch.get("bootstrap_values", None),
        **{name: batch[name] for name in given},
    )
    batch["advantages"], batch["returns"] = compute_advantages(adv_estimator, inputs, settings)
    return data


def add_teacher_advantages(data: DataProto, settings: DistillationLossConfig) -> dict[str, float]:
    """Subtract the divergence from a teacher from every token's advantage, see `with_teacher_advantages`.

    Args:
        data: `advantages`, `old_log_probs`, `ref_log_prob` (the teacher's) and `response_mask`, each (B, R); its
            `advantages` are replaced.
        settings: Which divergence, its weight, and whether there are advantages of rewards too.

    Returns:
        The metric `distillation/loss`, the mean divergence of a trained token.
    """
    columns, mask = data.batch, data.batch["response_mask"]
    columns["advantages"], divergence = with_teacher_advantages(
        columns["advantages"] if settings.use_task_rewards else None,
        student=columns["old_log_probs"],
        teacher=columns["ref_log_prob"],
        mask=mask,
        name=settings.loss_mode,
        weight=settings.weight,
        limit=settings.loss_max_clamp,
    )
    return {"distillation/loss": float(divergence.double().sum() / mask.sum().clamp(min=1))}


def needed_columns(traits: EstimatorTraits) -> list[str]:
    """Return the names of the columns that an estimator can't do without, beside rewards and mask."""
    needs = {
        "values": traits.needs_critic,
        "reward_baselines": traits.needs_baseline,
        "old_log_probs": traits.needs_old_log_probs,
        "sum_pi_squared": traits.needs_sum_pi_squared,
    }
    return [name for name, is_needed in needs.items() if is_needed]


def advantage_columns(config: PPOTrainerConfig) -> list[str]:
    """Return the names of the columns that a run gives its estimator beside rewards and mask.

    Besides those that the estimator needs, these are columns that the run has for another reason: an estimator in
    verl's form takes whatever there is.
    """
    has = {
        "values": config.needs_critic,
        "old_log_probs": needs_old_log_prob(config),
        "rollout_is_weights": config.algorithm.rollout_correction.weighs_tokens,
    }
    needed = needed_columns(estimator_traits(config.algorithm.adv_estimator))
    return [*needed, *(name for name, is_there in has.items() if is_there and name not in needed)]


def rows_without_advantage(data: DataProto) -> np.ndarray:
    """Return which rows have advantage 0 at every trained token, as (B,) bool.

    They move no weight through losses with the trait `zero_at_zero_advantage`.
    """
    trained = data.batch["response_mask"].bool()
    return ~((data.batch["advantages"] != 0) & trained).any(-1).numpy()
