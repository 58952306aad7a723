"""Advantage estimators of :mod:`hrl.algos` under verl's names and signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hrl.algos import advantages as native
from hrl.algos.advantages import GROUP_EPSILON, AdvantageConfig, AdvantageInput, compute_advantages
from hrl.algos.groups import group_codes
from hrl.algos.policy_filtration import draw_rows

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]


class AdvantageEstimator(StrEnum):
    """Names of the built-in advantage estimators."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


def _option(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def _algorithm(config: Any, **known: Any) -> AdvantageConfig:
    return AdvantageConfig(**{"gamma": _option(config, "gamma", 1.0)} | known)


def _grouped(
    name: str, rewards: Tensor, mask: Tensor, index: np.ndarray, epsilon: float, config: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    if epsilon != GROUP_EPSILON:
        raise ValueError(f"epsilon is fixed at {GROUP_EPSILON}, got {epsilon}")
    return compute_advantages(name, AdvantageInput(rewards, mask, group_ids=group_codes(index)), config)


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """See :func:`hrl.algos.advantages.gae_advantage`."""
    inp = AdvantageInput(token_level_rewards, response_mask, values=values)
    return compute_advantages("gae", inp, AdvantageConfig(gamma=float(gamma), lam=float(lam)))


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`hrl.algos.advantages.grpo_advantage`."""
    settings = _algorithm(config, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    return _grouped("grpo", token_level_rewards, response_mask, index, epsilon, settings)


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """See :func:`hrl.algos.advantages.grpo_passk_advantage`. As in verl a setting in `config` goes first."""
    divide = _option(config, "norm_adv_by_std_in_grpo", norm_adv_by_std_in_grpo)
    settings = _algorithm(config, norm_adv_by_std_in_grpo=divide)
    return _grouped("grpo_passk", token_level_rewards, response_mask, index, epsilon, settings)


def _group_door(name: str) -> AdvantageFn:
    def compute(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: np.ndarray,
        epsilon: float = 1e-6,
        config: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        return _grouped(name, token_level_rewards, response_mask, index, epsilon, _algorithm(config))

    compute.__doc__ = f"See :func:`hrl.algos.advantages.{name}_advantage`."
    return compute


compute_rloo_outcome_advantage = _group_door("rloo")
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage
compute_opo_outcome_advantage = _group_door("opo")
compute_reinforce_plus_plus_baseline_outcome_advantage = _group_door("reinforce_plus_plus_baseline")


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """See :func:`hrl.algos.advantages.gpg_advantage`. `alpha` is computed from the batch, as in verl."""
    advantages, _ = _grouped("gpg", token_level_rewards, response_mask, index, epsilon, _algorithm(config))
    return advantages / f_norm, advantages / f_norm


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """See :func:`hrl.algos.advantages.reinforce_plus_plus_advantage`."""
    inp = AdvantageInput(token_level_rewards, response_mask)
    return compute_advantages("reinforce_plus_plus", inp, _algorithm(config))


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """See :func:`hrl.algos.advantages.remax_advantage`."""
    inp = AdvantageInput(token_level_rewards, response_mask, reward_baselines=reward_baselines)
    return compute_advantages("remax", inp, _algorithm(config))


def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """See :func:`hrl.algos.advantages.gdpo_advantage`.

    The reward parts are the columns of `non_tensor_batch` that `config.gdpo_reward_keys` names; without them the
    token-level rewards are the only part.
    """
    if epsilon != GROUP_EPSILON:
        raise ValueError(f"epsilon is fixed at {GROUP_EPSILON}, got {epsilon}")
    keys = _option(config, "gdpo_reward_keys", None)
    if keys and non_tensor_batch is not None:
        missing = [key for key in keys if key not in non_tensor_batch]
        if missing:
            raise ValueError(f"the batch lacks the rewards {missing} that algorithm.gdpo_reward_keys names")
        columns = [torch.as_tensor(np.asarray(non_tensor_batch[key], dtype=np.float64)) for key in keys]
        parts = torch.stack(columns, dim=1).to(token_level_rewards.device)
    else:
        parts = AdvantageInput(token_level_rewards, response_mask).scores().unsqueeze(1)
    weights = _option(config, "gdpo_reward_weights", None)
    settings = _algorithm(
        config, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo, gdpo_reward_weights=weights and tuple(weights)
    )
    inp = AdvantageInput(token_level_rewards, response_mask, group_ids=group_codes(index), reward_parts=parts)
    return compute_advantages("gdpo", inp, settings)


def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """See :func:`hrl.algos.advantages.optimal_token_baseline_advantage`."""
    if not handle_zero_tail:
        raise ValueError("where only one response of a group is left the baseline is 0; handle_zero_tail must be True")
    inp = AdvantageInput(
        token_level_rewards,
        response_mask,
        group_ids=group_codes(index),
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
        rollout_is_weights=rollout_is_weights,
    )
    return compute_advantages("optimal_token_baseline", inp, AdvantageConfig())


compute_multi_turn_optimal_token_baseline_advantage = compute_optimal_token_baseline_advantage

ADV_ESTIMATOR_REGISTRY: dict[str, AdvantageFn] = {
    "gae": compute_gae_advantage_return,
    "grpo": compute_grpo_outcome_advantage,
    "grpo_vectorized": compute_grpo_vectorized_outcome_advantage,
    "grpo_passk": compute_grpo_passk_outcome_advantage,
    "gdpo": compute_gdpo_outcome_advantage,
    "gpg": compute_gpg_outcome_advantage,
    "rloo": compute_rloo_outcome_advantage,
    "rloo_vectorized": compute_rloo_vectorized_outcome_advantage,
    "opo": compute_opo_outcome_advantage,
    "reinforce_plus_plus": compute_reinforce_plus_plus_outcome_advantage,
    "reinforce_plus_plus_baseline": compute_reinforce_plus_plus_baseline_outcome_advantage,
    "remax": compute_remax_outcome_advantage,
    "optimal_token_baseline": compute_optimal_token_baseline_advantage,
    "tir_optimal_token_baseline": compute_multi_turn_optimal_token_baseline_advantage,
}
"""Estimators in verl's form. To read: what is to be chosen by `algorithm.adv_estimator` goes through
:func:`register_adv_est`."""


def register_adv_est(name_or_enum: str) -> Callable[[AdvantageFn], AdvantageFn]:
    """Register an advantage estimator of verl's form under a name that `algorithm.adv_estimator` then takes.

    It is called with `token_level_rewards`, `response_mask` and `config`, and with those of `index`,
    `values`, `reward_baselines`, `old_log_probs` and `sum_pi_squared` that the batch has. `index` holds
    integer codes of the groups.

    Raises:
        ValueError: The name is taken by another function.
    """
    name = str(name_or_enum)

    def decorator(function: AdvantageFn) -> AdvantageFn:
        if ADV_ESTIMATOR_REGISTRY.get(name) is function:
            return function

        def adapted(inp: AdvantageInput, config: Any) -> tuple[Tensor, Tensor]:
            index = None if inp.group_ids is None else inp.group_ids.numpy()
            columns = {
                "index": index,
                "values": inp.values,
                "reward_baselines": inp.reward_baselines,
                "old_log_probs": inp.old_log_probs,
                "sum_pi_squared": inp.sum_pi_squared,
            }
            given = {key: column for key, column in columns.items() if column is not None}
            return function(
                token_level_rewards=inp.token_level_rewards, response_mask=inp.response_mask, config=config, **given
            )

        native.register_adv_est(name)(adapted)
        ADV_ESTIMATOR_REGISTRY[name] = function
        return function

    return decorator


def compute_pf_ppo_reweight_data(data: Any, reweight_method: str = "pow", weight_pow: float = 2.0) -> Any:
    """Rows of a batch (`DataProto`) drawn by their scores; see :func:`hrl.algos.policy_filtration.draw_rows`.

    Draws from torch's global generator, as verl's does. Rows without a trained token are never drawn.
    """
    counted = data.batch["response_mask"].bool().any(-1)
    scores = data.batch["token_level_scores"].sum(-1)
    rows = draw_rows(scores, counted, reweight_method, weight_pow, generator=torch.default_generator)
    return data.select_idxs(rows)


def get_adv_estimator_fn(name_or_enum: str) -> AdvantageFn:
    """Return the estimator of that name in verl's form.

    Raises:
        ValueError: Unknown name.
    """
    if name_or_enum not in ADV_ESTIMATOR_REGISTRY:
        raise ValueError(
            f"unknown advantage estimator {name_or_enum!r}; choose one of {sorted(ADV_ESTIMATOR_REGISTRY)}"
        )
    return ADV_ESTIMATOR_REGISTRY[name_or_enum]
