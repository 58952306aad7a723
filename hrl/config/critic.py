"""`critic.*`: the value model of PPO."""

from typing import Annotated

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from hrl.algos.registry import AGGREGATION_NAMES
from hrl.config.model import FsdpConfig, LearnerConfig, OptimConfig, packs_as_the_actor
from hrl.config.section import ACTOR, MODEL, NameOf, Section, Unit, follows, section


class CriticModelConfig(LearnerConfig):
    """`critic.model`: the transformer under the value head."""

    path: str = follows(f"{MODEL}.path")
    """A local folder or hub id of a causal model or a sequence classifier. Default: `actor_rollout_ref.model.path`."""
    fsdp_config: FsdpConfig = section(FsdpConfig)


class CriticConfig(Section):
    """`critic.*`: the value model of PPO."""

    enable: bool | None = None
    """Build a critic; null builds one exactly when the advantage estimator needs it."""
    ppo_mini_batch_size: Annotated[PositiveInt, Unit("prompts per optimizer step")] = follows(
        f"{ACTOR}.ppo_mini_batch_size"
    )
    """Prompts per optimizer step of the critic. Default: the actor's."""
    ppo_epochs: PositiveInt = follows(f"{ACTOR}.ppo_epochs")
    """Passes over each step's batch. Default: the actor's."""
    use_dynamic_bsz: bool = follows(packs_as_the_actor(".ppo_micro_batch_size_per_gpu"))
    """Fill micro-batches up to a token budget. Default: the actor's, unless `critic.ppo_micro_batch_size_per_gpu` is
    set."""
    ppo_max_token_len_per_gpu: Annotated[PositiveInt, Unit("tokens per process")] = follows(
        f"{ACTOR}.ppo_max_token_len_per_gpu"
    )
    """Maximum number of tokens in one micro-batch of the update. Default: the actor's."""
    ppo_micro_batch_size_per_gpu: Annotated[PositiveInt | None, Unit("sequences per process")] = follows(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    )
    """Sequences in one micro-batch, with `use_dynamic_bsz=false`. Default: the actor's."""
    forward_max_token_len_per_gpu: Annotated[PositiveInt, Unit("tokens per process")] = follows(
        ".ppo_max_token_len_per_gpu"
    )
    """Maximum number of tokens in one micro-batch when values are computed. Default:
    `critic.ppo_max_token_len_per_gpu`."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""
    cliprange_value: NonNegativeFloat | None = 0.5
    """How far a value may move from its old one before the loss is clipped; null does not clip."""
    loss_agg_mode: Annotated[str, NameOf(AGGREGATION_NAMES)] = follows(f"{ACTOR}.loss_agg_mode")
    """How token losses are averaged into one number. Default: the actor's."""
    model: CriticModelConfig = section(CriticModelConfig)
    optim: OptimConfig = section(OptimConfig, lr=1e-5)
