"""`algorithm.*`: from rewards to advantages."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hrl.algos.registry import (
    ESTIMATOR_TRAITS,
    IMPORTANCE_LEVEL_NAMES,
    KL_NAMES,
    PAIR_LOSS_TRAITS,
    REWEIGHT_METHOD_NAMES,
)
from hrl.config.section import Get, NameOf, Section, StrList, Unit, UnitInterval, follows, section


class KlCtrlConfig(Section):
    """`algorithm.kl_ctrl`: the weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep the weight constant (fixed), or adjust it so that the KL divergence approaches `target_kl` (adaptive)."""
    kl_coef: NonNegativeFloat = 0.001
    """The weight; with `type=adaptive` its first value."""
    horizon: Annotated[PositiveInt, Unit("sequences")] = 10000
    """Adaptive: number of sequences over which the weight adjusts; a larger number adjusts it more slowly."""
    target_kl: PositiveFloat = 0.1
    """Adaptive: the KL divergence to aim for."""


class PfPpoConfig(Section):
    """`algorithm.pf_ppo`: which samples policy filtration trains on more often."""

    reweight_method: Annotated[str, NameOf(REWEIGHT_METHOD_NAMES)] = "pow"
    """Weight of a sample in the draw: |score|^`weight_pow` (pow), only the best and the worst score of the batch
    (max_min), or all samples with the best score four times as likely (max_random)."""
    weight_pow: NonNegativeFloat = 2.0
    """`pow`: the exponent."""


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups`: DAPO's dynamic sampling."""

    enable: bool = False
    """Train only on groups whose samples differ; further prompts are sampled in the same step until the batch is full.
    An epoch then has fewer steps, but the run has the same number."""
    metric: str = "reward"
    """What has to differ: reward (the value trained on), score (the reward function's own), or another number that the
    function returns, e.g. acc."""
    max_num_gen_batches: Annotated[PositiveInt, Unit("batches of prompts per step")] = 10
    """Maximum number of batches of `data.train_batch_size` prompts that one step may sample; a run that needs more
    stops with an error that says why."""


class RolloutCorrectionConfig(Section):
    """`algorithm.rollout_correction`: for a sampler whose probabilities differ from the trainer's."""

    rollout_is: Annotated[str | None, NameOf(IMPORTANCE_LEVEL_NAMES)] = None
    """Weight losses by the ratio of the trainer's probability to the sampler's, per token (token) or as the product
    over a sequence (sequence); null is off."""
    rollout_is_threshold: float | str = 2.0
    """Ratios are capped at this value; "0.5_5.0" gives ratios outside the two bounds the weight 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Leave out tokens or sequences on which sampler and trainer disagree, by rules such as token_k1 or
    "token_k1,seq_max_k3" (token, seq_sum, seq_mean or seq_max, of k1, k2 or k3)."""
    rollout_rs_threshold: float | str | None = None
    """Largest divergence that is kept: one for all rules, or one for each ("0.1,0.5"); k1 takes bounds of the ratio,
    "0.5_2.0"."""
    bypass_mode: bool = False
    """Use the sampler's log-probs as the old ones and skip that forward pass. When they differ from the trainer's by
    more than the alarm `sampler_gap` allows, the next step computes them again."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """In bypass mode: the configured policy loss with its ratio to the sampler (ppo_clip), or REINFORCE weighted by
    that ratio."""

    @property
    def corrects(self) -> bool:
        """Whether it asks for weights or for rejection."""
        return self.rollout_is is not None or bool(self.rollout_rs)

    @property
    def weighs_tokens(self) -> bool:
        """Whether the correction leaves weights in the batch; in bypass mode the update makes its own."""
        return self.rollout_is is not None and not self.bypass_mode


def _estimator(get: Get) -> str:
    # PPO's launch scripts set the critic and leave the estimator at verl's default, gae.
    mentions_critic = any(key.startswith("critic.") and value not in (None, False) for key, value in get.given.items())
    return "gae" if mentions_critic else "grpo"


class AlgorithmConfig(Section):
    """`algorithm.*`: from rewards to advantages."""

    adv_estimator: Annotated[str, NameOf(ESTIMATOR_TRAITS, in_files=True)] = follows(_estimator)
    """The advantage estimator; gae is PPO's. `my.py:name` is one that this Python file registers. Default: gae where a
    `critic.*` key is set, else grpo."""
    gamma: UnitInterval = 1.0
    """Discount per token; per turn in `grpo_turns` and `gae_turns`."""
    lam: UnitInterval = 1.0
    """GAE's trade-off between bias (0) and variance (1)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide a group's advantages by its standard deviation; false is Dr.GRPO."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference from every token's reward."""
    kl_penalty: Annotated[str, NameOf(KL_NAMES, "+")] = "kl"
    """Estimator of that KL; kl is k1, mse is k2, low_var_kl is k3."""
    kl_ctrl: KlCtrlConfig = section(KlCtrlConfig)
    preference_loss: Annotated[str | None, NameOf(PAIR_LOSS_TRAITS)] = None
    """Learn from the best and the worst sample of each prompt by this loss instead of advantages (online DPO); its beta
    is `kl_ctrl.kl_coef`. null is off."""
    gdpo_reward_keys: StrList = Field(default_factory=list)
    """gdpo: the rewards, each normalised separately within its group: numbers that the reward function returns, score,
    reward_model, or overlong (with `reward.overlong_buffer.enable`)."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: one weight per reward; null weighs them equally."""
    use_pf_ppo: bool = False
    """Policy filtration (PF-PPO): resample the batch with replacement, weighted by the samples' scores."""
    pf_ppo: PfPpoConfig = section(PfPpoConfig)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
