"""`actor_rollout_ref.{model,actor,ref}`: the policy that learns and the reference it is compared with."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hrl.algos.registry import AGGREGATION_NAMES, KL_NAMES, POLICY_LOSS_TRAITS
from hrl.config.model import (
    CheckpointConfig,
    ForwardShardingConfig,
    FsdpConfig,
    LogProbConfig,
    OptimConfig,
    PolicyModelConfig,
)
from hrl.config.rollout import RolloutConfig
from hrl.config.section import ACTOR, Get, NameOf, Section, Unit, follows, section


class PolicyLossConfig(Section):
    """`actor.policy_loss`: which loss, and the constants of the less common ones."""

    loss_mode: Annotated[str, NameOf(POLICY_LOSS_TRAITS, in_files=True)] = "vanilla"
    """The policy loss. `my.py:name` is one that this Python file registers."""
    clip_cov_ratio: NonNegativeFloat = 0.0002
    """`clip_cov`: share of the tokens that are clipped."""
    clip_cov_lb: float = 1.0
    """`clip_cov`: lower bound of the covariance of a clipped token."""
    clip_cov_ub: float = 5.0
    """`clip_cov`: upper bound of the covariance of a clipped token."""
    kl_cov_ratio: NonNegativeFloat = 0.0002
    """`kl_cov`: share of the tokens that are penalised."""
    ppo_kl_coef: NonNegativeFloat = 0.1
    """`kl_cov`: weight of the penalty."""
    dro_beta: PositiveFloat | None = None
    """`dro`: weight of the squared log-ratio; required by that loss."""


class RouterReplayConfig(Section):
    """`actor.router_replay`: which experts the tokens of a mixture of experts go to in the trainer."""

    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """Of a mixture of experts: each pass of the policy chooses experts by itself (disabled), the update takes those of
    the pass that computes old log-probs (R2), or that pass and the update take the sampler's (R3)."""


_ONE_OPTIMIZER_STEP = 256
"""Prompts."""


def _mini_batch(get: Get) -> object:
    batch = get("data.train_batch_size")
    if not isinstance(batch, int) or batch <= 0:
        return _ONE_OPTIMIZER_STEP
    near = range(min(batch, _ONE_OPTIMIZER_STEP), _ONE_OPTIMIZER_STEP // 2 - 1, -1)
    return next((size for size in near if batch % size == 0), batch)


class ActorConfig(Section):
    """`actor_rollout_ref.actor`: the update of the policy."""

    ppo_mini_batch_size: Annotated[PositiveInt, Unit("prompts per optimizer step")] = follows(_mini_batch)
    """Prompts per optimizer step; each has `rollout.n` sequences. Default: 256, or the nearest smaller
    divisor of `data.train_batch_size`, down to 128; the whole batch where there is none."""
    ppo_epochs: PositiveInt = 1
    """Passes over each step's batch."""
    use_dynamic_bsz: bool = follows(lambda get: get(".ppo_micro_batch_size_per_gpu") is None)
    """Fill micro-batches up to a token budget instead of a fixed number of rows. Default: true, unless
    `actor.ppo_micro_batch_size_per_gpu` is set."""
    ppo_max_token_len_per_gpu: Annotated[PositiveInt, Unit("tokens per process")] = 16384
    """Maximum number of tokens in one micro-batch on one process."""
    ppo_micro_batch_size_per_gpu: Annotated[PositiveInt | None, Unit("sequences per process")] = None
    """Sequences in one micro-batch on one process, with `use_dynamic_bsz=false`."""
    shuffle: bool = False
    """Shuffle a step's prompts before each pass over them; false keeps the order of the data."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""
    freeze_vision_tower: bool = False
    """In a run on pictures, leave the part of the model that reads them as it is."""
    clip_ratio: NonNegativeFloat = 0.2
    """PPO's clip range."""
    clip_ratio_low: NonNegativeFloat | None = None
    """Clip range below 1; null is `clip_ratio`."""
    clip_ratio_high: NonNegativeFloat | None = None
    """Clip range above 1 (DAPO's clip-higher); null is `clip_ratio`."""
    clip_ratio_c: float = Field(default=3.0, gt=1.0)
    """Dual clip: for negative advantages the ratio is capped at this value."""
    tau_pos: PositiveFloat = 1.0
    """`sapo`: temperature of the gate for positive advantages."""
    tau_neg: PositiveFloat = 1.05
    """`sapo`: temperature of the gate for negative advantages."""
    loss_agg_mode: Annotated[str, NameOf(AGGREGATION_NAMES)] = "token-mean"
    """How token losses are averaged into one number; divisors count the whole mini-batch on all processes."""
    loss_scale_factor: PositiveFloat | None = None
    """The constant that `seq-mean-token-sum-norm` divides by; null is `data.max_response_length`."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of that KL term."""
    kl_loss_type: Annotated[str, NameOf(KL_NAMES, "+")] = "low_var_kl"
    """Estimator of that KL term; low_var_kl is k3, mse is k2. With `+` its gradient is that of k2."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Of a mixture of experts: weight of the loss that balances the load of experts over a mini-batch; 0 is off."""
    router_replay: RouterReplayConfig = section(RouterReplayConfig)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    optim: OptimConfig = section(OptimConfig)
    fsdp_config: FsdpConfig = section(FsdpConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)


class RefShardingConfig(ForwardShardingConfig):
    """`actor_rollout_ref.ref.fsdp_config`: FSDP2 settings of the reference."""

    ulysses_sequence_parallel_size: PositiveInt = follows(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
    """Processes that run each micro-batch of the reference together. Default: the actor's."""
    tensor_parallel_size: PositiveInt = follows(f"{ACTOR}.fsdp_config.tensor_parallel_size")
    """Processes that hold parts of the reference's weights. Default: the actor's."""
    expert_parallel_size: PositiveInt = follows(f"{ACTOR}.fsdp_config.expert_parallel_size")
    """Processes that share out the reference's experts. Default: the actor's."""


class RefConfig(LogProbConfig):
    """`actor_rollout_ref.ref`: the frozen reference policy."""

    fsdp_config: RefShardingConfig = section(RefShardingConfig)


class ActorRolloutRefConfig(Section):
    """`actor_rollout_ref.*`: the policy in its three roles."""

    model: PolicyModelConfig = section(PolicyModelConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    rollout: RolloutConfig = section(RolloutConfig)
