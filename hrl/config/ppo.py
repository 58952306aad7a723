"""The whole configuration of a run as one typed, immutable object."""

from hrl.algos.registry import estimator_traits, pair_loss_traits
from hrl.config.actor import ActorRolloutRefConfig
from hrl.config.algorithm import AlgorithmConfig
from hrl.config.critic import CriticConfig
from hrl.config.data import DataConfig
from hrl.config.reward import RewardConfig
from hrl.config.section import WholeConfig, section
from hrl.config.trainer import TrainerConfig


class PPOTrainerConfig(WholeConfig):
    """Everything a PPO run reads, with every default filled in; `load_config` also checks what holds between keys."""

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
