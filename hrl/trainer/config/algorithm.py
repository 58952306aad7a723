"""`algorithm.*`: from rewards to advantages."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hrl.trainer.config.base import Section, UnitInterval


class KlCtrlConfig(Section):
    """`algorithm.kl_ctrl`: the weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep the weight, or steer it towards `target_kl`."""
    kl_coef: NonNegativeFloat = 0.001
    """The weight, or its first value."""
    horizon: PositiveInt = 10000
    """Adaptive: sequences over which the weight adapts."""
    target_kl: PositiveFloat = 0.1
    """Adaptive: the KL divergence to hold."""


class AlgorithmConfig(Section):
    """`algorithm.*`: from rewards to advantages."""

    adv_estimator: str = "grpo"
    """Name of a registered advantage estimator: gae (PPO), grpo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, opo, gpg, grpo_passk, gdpo, optimal_token_baseline. Default: gae where a
    `critic.*` key is set, else grpo."""
    gamma: UnitInterval = 1.0
    """Discount per token."""
    lam: UnitInterval = 1.0
    """GAE's trade-off between bias (0) and variance (1)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide a group's advantages by its standard deviation; false is Dr.GRPO."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference from every token's reward."""
    kl_penalty: str = "kl"
    """Estimator of that KL: kl (k1), abs, mse (k2), low_var_kl (k3)."""
    kl_ctrl: KlCtrlConfig = Field(default_factory=KlCtrlConfig)
