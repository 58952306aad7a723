"""The two driver-side steps between a score and a gradient: the KL penalty and the advantage.

Both run over the whole batch on the driver, so neither can depend on how the batch was cut over ranks.
"""

from __future__ import annotations

import numpy as np

from hrl.algos.advantages import AdvantageConfig, AdvantageInput, AdvantageSettings, compute_advantages
from hrl.algos.groups import group_codes
from hrl.algos.kl import KLController, penalise_rewards
from hrl.protocol import DataProto
from hrl.trainer.ppo.reward_parts import reward_columns


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Take the scaled KL to the reference off the scores, token by token.

    `r_t = score_t - beta * kl_t` (Ziegler et al., 2019, arXiv:1909.08593, eq. 2). The controller then moves beta.

    Args:
        data: `token_level_scores`, `old_log_probs`, `ref_log_prob` and `response_mask`, each (B, R).
        kl_ctrl: Holds beta.
        kl_penalty: Name of the estimator, see `hrl.algos.kl`.

    Returns:
        `data` with `token_level_rewards (B, R)`, and the metrics `actor/reward_kl_penalty` (mean over sequences
        of their mean KL per token) and `actor/reward_kl_penalty_coeff` (the beta that was applied).
    """
    columns, beta = data.batch, kl_ctrl.value
    columns["token_level_rewards"], current_kl = penalise_rewards(
        columns["token_level_scores"],
        columns["old_log_probs"],
        columns["ref_log_prob"],
        columns["response_mask"],
        beta,
        kl_penalty,
    )
    kl_ctrl.update(current_kl=current_kl, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: AdvantageSettings | None = None,
) -> DataProto:
    """Add `advantages` and `returns`, both (B, R), by the named estimator.

    Args:
        data: `token_level_rewards`, `response_mask` (B, R), `values` (B, R) for estimators with a critic, and the
            non-tensor `uid` that says which rows are samples of one prompt.
        adv_estimator: A name in `hrl.algos.advantages.ADVANTAGE_ESTIMATORS`.
        gamma: Discount per token.
        lam: Lambda of GAE.
        num_repeat: Accepted as in verl and not needed: groups are told by `uid`.
        norm_adv_by_std_in_grpo: Divide by the group's standard deviation (GRPO) or not (Dr.GRPO).
        config: The `algorithm` part of the configuration, for estimators with settings of their own; replaces the
            three numbers above. Its `gdpo_reward_keys` name the parts of the reward that gdpo reads.

    Raises:
        ValueError: There is no such estimator, it needs a column that the batch lacks, or a reward is not finite.
    """
    columns = data.batch
    settings = AdvantageConfig(gamma, lam, norm_adv_by_std_in_grpo) if config is None else config
    part_names = settings.gdpo_reward_keys
    inputs = AdvantageInput(
        token_level_rewards=columns["token_level_rewards"],
        response_mask=columns["response_mask"],
        group_ids=group_codes(data.non_tensor_batch["uid"]),
        reward_parts=reward_columns(data, part_names, "algorithm.gdpo_reward_keys") if part_names else None,
        **{
            name: columns[name]
            for name in ("values", "reward_baselines", "old_log_probs", "sum_pi_squared", "rollout_is_weights")
            if name in columns.keys()
        },
    )
    columns["advantages"], columns["returns"] = compute_advantages(adv_estimator, inputs, settings)
    return data


def rows_without_advantage(data: DataProto) -> np.ndarray:
    """Rows, as (B,) bool, with advantage 0 at every trained token.

    They move no weight through losses with the trait `zero_at_zero_advantage`.
    """
    trained = data.batch["response_mask"].bool()
    return ~((data.batch["advantages"] != 0) & trained).any(-1).numpy()
