"""The whole configuration of a PPO run as one typed, immutable object."""

from collections.abc import Iterator
from typing import NamedTuple

from hrl.algos.registry import estimator_traits, pair_loss_traits
from hrl.config.actor import ActorConfig, ActorRolloutRefConfig
from hrl.config.algorithm import AlgorithmConfig
from hrl.config.critic import CriticConfig
from hrl.config.data import DataConfig
from hrl.config.model import LogProbConfig
from hrl.config.reward import RewardConfig
from hrl.config.section import ACTOR, REF, RM, ROLLOUT, WholeConfig, section
from hrl.config.trainer import TrainerConfig


class MicroBatches(NamedTuple):
    """How a role's rows are split into micro-batches.

    Attributes:
        role: Name of the role; `rollout` for the log-probs of the policy's own samples.
        section: Key of the role's section.
        dynamic: Whether micro-batches are packed up to a token budget instead of a number of rows.
        flag: Name of the key that sets `dynamic`; empty if it follows from the number of rows.
        tokens: Keys of the budgets → tokens per process.
        rows: Sequences per process, if not dynamic.
        rows_name: Name of the key of `rows`.
    """

    role: str
    section: str
    dynamic: bool
    flag: str
    tokens: dict[str, int]
    rows: int | None
    rows_name: str


class PPOTrainerConfig(WholeConfig):
    """Everything that a PPO run reads, with all defaults; `load_config` also checks the rules between keys."""

    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    trainer: TrainerConfig = section(TrainerConfig)

    @property
    def needs_critic(self) -> bool:
        """Whether a value model is built."""
        if self.critic.enable is not None:
            return self.critic.enable
        return estimator_traits(self.algorithm.adv_estimator).needs_critic

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy is built."""
        loss = self.algorithm.preference_loss
        compares_pairs = loss is not None and pair_loss_traits(loss).reference
        return compares_pairs or self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def needs_reward_model(self) -> bool:
        """Whether a reward model is built."""
        return self.reward.reward_model.enable

    def micro_batches(self) -> Iterator[MicroBatches]:
        """Yield the micro-batch settings of every role that the run builds, the actor's first."""
        actor, rollout, critic = self.actor_rollout_ref.actor, self.actor_rollout_ref.rollout, self.critic
        yield _of_learner("actor", ACTOR, actor, ())
        yield _of_scorer("rollout", ROLLOUT, rollout)
        if self.needs_reference:
            yield _of_scorer("ref", REF, self.actor_rollout_ref.ref)
        if self.needs_critic:
            yield _of_learner("critic", "critic", critic, ("forward_max_token_len_per_gpu",))
        if self.needs_reward_model:
            model = self.reward.reward_model
            tokens = {f"{RM}.max_token_len_per_gpu": model.max_token_len_per_gpu}
            yield MicroBatches("rm", RM, model.use_dynamic_bsz, "", tokens, model.micro_batch_size_per_gpu, "")


def _of_learner(role: str, key: str, section: ActorConfig | CriticConfig, more: tuple[str, ...]) -> MicroBatches:
    tokens = {f"{key}.{name}": getattr(section, name) for name in ("ppo_max_token_len_per_gpu", *more)}
    rows = "ppo_micro_batch_size_per_gpu"
    return MicroBatches(role, key, section.use_dynamic_bsz, "use_dynamic_bsz", tokens, getattr(section, rows), rows)


def _of_scorer(role: str, key: str, section: LogProbConfig) -> MicroBatches:
    tokens = {f"{key}.log_prob_max_token_len_per_gpu": section.log_prob_max_token_len_per_gpu}
    flag, rows = "log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu"
    return MicroBatches(role, key, section.log_prob_use_dynamic_bsz, flag, tokens, getattr(section, rows), rows)
