"""How large the micro-batches of every pass of a PPO run may be, as the configuration says."""

from __future__ import annotations

from dataclasses import dataclass

from hrl.batching.planner import MicroBatchLimits
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.section import Section

_LOG_PROB_KEYS = (
    "log_prob_use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu",
    "log_prob_micro_batch_size_per_gpu",
)
_UPDATE_KEYS = ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
_VALUE_KEYS = ("use_dynamic_bsz", "forward_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
_SCORE_KEYS = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")


@dataclass(frozen=True)
class AllLimits:
    """The limits of every pass of a run, read from the configuration once."""

    update_actor: MicroBatchLimits
    log_prob: MicroBatchLimits
    ref: MicroBatchLimits
    update_critic: MicroBatchLimits
    values: MicroBatchLimits
    rm: MicroBatchLimits

    @classmethod
    def of(cls, config: PPOTrainerConfig) -> AllLimits:
        """Read them from the whole configuration."""
        policy = config.actor_rollout_ref
        return cls(
            update_actor=_limits(policy.actor, "actor_rollout_ref.actor", *_UPDATE_KEYS),
            log_prob=_limits(policy.rollout, "actor_rollout_ref.rollout", *_LOG_PROB_KEYS),
            ref=_limits(policy.ref, "actor_rollout_ref.ref", *_LOG_PROB_KEYS),
            update_critic=_limits(config.critic, "critic", *_UPDATE_KEYS),
            values=_limits(config.critic, "critic", *_VALUE_KEYS),
            rm=_limits(config.reward.reward_model, "reward.reward_model", *_SCORE_KEYS),
        )


def _limits(section: Section, name: str, dynamic: str, tokens: str, rows: str) -> MicroBatchLimits:
    """Return the limits that a section sets.

    Args:
        section: A section of the configuration.
        name: Its name, for errors.
        dynamic: Its key that says whether micro-batches are filled up to a number of tokens.
        tokens: Its key with that number.
        rows: Its key with the number of rows otherwise.
    """
    filled = getattr(section, dynamic)
    return MicroBatchLimits(
        getattr(section, tokens) if filled else None, None if filled else getattr(section, rows), f"{name}.{tokens}"
    )
