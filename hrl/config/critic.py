"""`critic.*`: the value model of PPO."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hrl.config.model import BackboneConfig, FsdpConfig, OptimConfig
from hrl.config.section import AggregationMode, Section


class CriticModelConfig(BackboneConfig):
    """`critic.model`: the transformer under the value head."""

    path: str = "bundled:smollm2-135m-instruct"
    """A local folder or hub id of a causal model or a sequence classifier. Default: `actor_rollout_ref.model.path`."""
    fsdp_config: FsdpConfig = Field(default_factory=FsdpConfig)


class CriticConfig(Section):
    """`critic.*`: the value model of PPO."""

    enable: bool | None = None
    """Build a critic; null builds one exactly when the advantage estimator needs it."""
    ppo_mini_batch_size: PositiveInt = 256
    """Prompts per optimizer step of the critic. Default: the actor's."""
    ppo_epochs: PositiveInt = 1
    """Passes over each step's batch. Default: the actor's."""
    use_dynamic_bsz: bool = True
    """Pack micro-batches up to a token budget. Default: the actor's, unless `ppo_micro_batch_size_per_gpu` is set."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Token budget of one micro-batch of the update. Default: the actor's."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences in one micro-batch, with `use_dynamic_bsz=false`. Default: the actor's."""
    forward_max_token_len_per_gpu: PositiveInt = 16384
    """Token budget of one micro-batch when values are computed. Default: `critic.ppo_max_token_len_per_gpu`."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""
    cliprange_value: NonNegativeFloat | None = 0.5
    """How far a value may move from its old value before the loss is clipped; null is the plain squared error."""
    loss_agg_mode: AggregationMode = "token-mean"
    """How token losses become one number. Default: the actor's."""
    model: CriticModelConfig = Field(default_factory=CriticModelConfig)
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=1e-5))
