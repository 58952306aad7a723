"""The whole configuration of a PPO run as one typed, immutable object."""

from hrl.algos.registry import estimator_traits, pair_loss_traits
from hrl.config.actor import ActorRolloutRefConfig
from hrl.config.algorithm import AlgorithmConfig
from hrl.config.critic import CriticConfig
from hrl.config.data import DataConfig
from hrl.config.distillation import DistillationConfig
from hrl.config.environment import EnvironmentConfig
from hrl.config.model import MicroBatches, ShardingConfig
from hrl.config.reward import RewardConfig, RewardEntry
from hrl.config.section import ACTOR, REF, RM, ROLLOUT, WholeConfig, section
from hrl.config.trainer import TrainerConfig


class PPOTrainerConfig(WholeConfig):
    """Everything that a PPO run reads, with all defaults; `load_config` also checks the rules between keys."""

    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    environment: EnvironmentConfig = section(EnvironmentConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    distillation: DistillationConfig = section(DistillationConfig)
    trainer: TrainerConfig = section(TrainerConfig)

    @property
    def needs_critic(self) -> bool:
        """Whether a value model is built."""
        if self.critic.enable is not None:
            return self.critic.enable
        return estimator_traits(self.algorithm.adv_estimator).needs_critic

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference policy, or of a teacher in its place, are computed."""
        loss = self.algorithm.preference_loss
        compares_pairs = loss is not None and pair_loss_traits(loss).reference
        return (
            self.distillation.enabled
            or compares_pairs
            or self.algorithm.use_kl_in_reward
            or self.actor_rollout_ref.actor.use_kl_loss
        )

    @property
    def reference_is_actor(self) -> bool:
        """Whether the reference is the trained policy without its adapter, and no copy of it is built."""
        trains_adapter = self.actor_rollout_ref.model.trains_adapter
        return self.needs_reference and trains_adapter and not self.distillation.enabled

    @property
    def teacher_is_served(self) -> bool:
        """Whether servers score the samples, and no process of the run holds a teacher."""
        return self.distillation.enabled and bool(self.distillation.teacher_models.teacher_model.server.urls)

    @property
    def runs_reference(self) -> bool:
        """Whether ranks of the run compute log-probs of a reference policy, or of a teacher in its place."""
        return self.needs_reference and not self.teacher_is_served

    @property
    def builds_reference(self) -> bool:
        """Whether a process of the run holds a reference policy, or a teacher in its place, beside the policy."""
        return self.runs_reference and not self.reference_is_actor

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards are learnt from, and not measured alone beside a teacher."""
        return not self.distillation.enabled or self.distillation.distillation_loss.use_task_rewards

    @property
    def distils_by_reward(self) -> bool:
        """Whether the divergence from a teacher is subtracted from advantages."""
        return self.distillation.enabled and self.distillation.distillation_loss.use_policy_gradient

    @property
    def distils_by_loss(self) -> bool:
        """Whether the divergence from a teacher is part of the policy's loss."""
        return self.distillation.enabled and not self.distillation.distillation_loss.use_policy_gradient

    @property
    def num_teacher_tokens(self) -> int:
        """How many of a teacher's likeliest tokens the loss reads in each place; 0 where it reads none."""
        loss = self.distillation.distillation_loss
        return loss.topk if self.distils_by_loss and loss.traits.reads_top else 0

    @property
    def reads_whole_teacher(self) -> bool:
        """Whether the loss reads the teacher's whole distribution in each place."""
        return self.distils_by_loss and self.distillation.distillation_loss.traits.reads_all

    @property
    def teacher_path(self) -> str | None:
        """Folder or hub id of a teacher that the run holds; None without one."""
        held = self.distillation.enabled and not self.teacher_is_served
        return self.distillation.teacher_models.teacher_model.model_path if held else None

    @property
    def reward_entries(self) -> tuple[RewardEntry, ...]:
        """The reward functions to add up; none where a reward model or an environment alone decides."""
        reward = self.reward
        decides = self.environment.pays and not reward.reward_model.is_served  # of which a function asks
        return () if decides and reward.names_none else reward.entries

    @property
    def may_leave_unscored(self) -> bool:
        """Whether samples need no score: a teacher alone is learnt from, and nothing that scores is named."""
        reward = self.reward
        names_none = reward.names_none or reward.functions == []
        return (
            not self.learns_from_rewards
            and names_none
            and not reward.reward_model.enable
            and not self.environment.is_used
        )

    @property
    def needs_reward_model(self) -> bool:
        """Whether a reward model is built that scores batches; one that is served answers to functions instead."""
        return self.reward.reward_model.enable and not self.reward.reward_model.serve

    def micro_batches(self) -> dict[str, MicroBatches]:
        """Return the micro-batches of every pass that the run makes: a role's, or `log_prob` and `values`."""
        policy, critic, reward_model = self.actor_rollout_ref, self.critic, self.reward.reward_model
        rows_of_learner = ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz")
        learns = ("ppo_max_token_len_per_gpu", *rows_of_learner)
        scores = ("log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz")
        sharding: ShardingConfig = policy.actor.fsdp_config
        passes = {
            "actor": MicroBatches.of(policy.actor, ACTOR, *learns, sharding=sharding),
            "log_prob": MicroBatches.of(policy.rollout, ROLLOUT, *scores, sharding=sharding),
        }
        if self.runs_reference:
            # A policy that is its own reference runs in its own groups, whatever those of a reference would be.
            if not self.reference_is_actor:
                sharding = policy.ref.fsdp_config
            passes["ref"] = MicroBatches.of(policy.ref, REF, *scores, sharding=sharding)
        if self.needs_critic:
            sharding = critic.model.fsdp_config
            forward = ("forward_max_token_len_per_gpu", *rows_of_learner)
            passes["critic"] = MicroBatches.of(critic, "critic", *learns, sharding=sharding)
            passes["values"] = MicroBatches.of(critic, "critic", *forward, sharding=sharding)
        if self.needs_reward_model:
            keys = ("max_token_len_per_gpu", "micro_batch_size_per_gpu")
            sharding = reward_model.model.fsdp_config
            passes["rm"] = MicroBatches.of(reward_model, RM, *keys, sharding=sharding)
        return passes
