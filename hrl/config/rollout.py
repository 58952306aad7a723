"""`actor_rollout_ref.rollout`: how responses are sampled."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hrl.config.model import DType, LogProbConfig
from hrl.config.own_members import traits_of_estimator
from hrl.config.section import ACTOR, Fraction, Get, MinusOneOrMore, Section, StrList, Unit, follows, section

SYNC_MARGIN_S = 60.0
"""Time for the workers to report an aborted weight sync before the driver gives up on them."""


_GROUP_SIZE = 8
_OWN_GPU_SHARE = 0.9
"""A little lower than vLLM's own default, to leave room for the buffer of a weight sync."""
_SHARED_GPU_SHARE = 0.5


def _samples(get: Get) -> int:
    return _GROUP_SIZE if traits_of_estimator(get("algorithm.adv_estimator")).min_group_size > 1 else 1


def _validates_by_samples(get: Get) -> bool:
    temperature = get(".temperature")
    return isinstance(temperature, int | float) and temperature > 0


def _gpu_share(get: Get) -> float:
    # An engine that is the only role on its pool has its GPUs to itself, whether or not the other roles are built.
    placed, pools = get("trainer.role_pools"), get("trainer.resource_pools")
    pool = placed.get("rollout") if isinstance(placed, dict) else None
    home = placed.get("actor", next(iter(pools))) if pool is not None and isinstance(pools, dict) and pools else pool
    alone = pool is not None and pool not in (home, *(other for role, other in placed.items() if role != "rollout"))
    return _OWN_GPU_SHARE if alone else _SHARED_GPU_SHARE


class ValKwargsConfig(Section):
    """`rollout.val_kwargs`: sampling of the validation prompts."""

    n: PositiveInt = 1
    """Samples per validation prompt."""
    do_sample: bool = follows(_validates_by_samples)
    """Sample tokens; false takes the most likely one. Default: whether `val_kwargs.temperature` is above 0."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature, with `do_sample=true`."""
    top_p: Fraction = 1.0
    """Sample from the most likely tokens that together have this probability; 1 is off."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from this many of the most likely tokens; -1 is off."""


class WeightSyncConfig(Section):
    """`rollout.weight_sync`: the transfer of weights from the trainer to the sampler."""

    bucket_mb: Annotated[PositiveInt, Unit("MiB per buffer")] = 256
    """Size of one transfer buffer in MiB; there are two."""
    timeout_s: PositiveFloat = 300.0
    """Seconds that a sync may take before the workers abort it."""

    @property
    def driver_timeout_s(self) -> float:
        """Seconds that the driver waits, long enough for the workers to report first why a sync is late."""
        return self.timeout_s + SYNC_MARGIN_S


class ServerConfig(Section):
    """`rollout.server`: engines that somebody else started, for `rollout.name=server` (vLLM's) or `sglang`."""

    urls: StrList = Field(default_factory=list)
    """Their addresses, e.g. `[http://10.0.0.5:8000,http://10.0.0.6:8000]`."""
    api_key: str | None = None
    """`env:NAME`, where the environment variable NAME has the key that all of them take; null sends none."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds that a response may take, after which its server is taken for dead and another one is asked."""
    weights_folder: str | None = None
    """Folder that this machine and the servers' see under the same name, through which they get the weights; null takes
    this machine's memory, which vLLM's servers on it can read."""


class RolloutConfig(LogProbConfig):
    """`actor_rollout_ref.rollout`: how responses are sampled."""

    name: Literal["vllm", "hf", "server", "sglang", "scripted"] = "vllm"
    """Engine: vllm, hf (transformers, slow, for comparison), server (vLLM's servers that somebody else started, at
    `rollout.server.urls`), sglang (the same of SGLang; without addresses an engine of the run's own; never run on
    GPUs), or scripted (tests)."""
    n: Annotated[PositiveInt, Unit("samples per prompt")] = follows(_samples)
    """Samples per prompt. Default: 8 for estimators that compare samples of a group (grpo, rloo, …), 1 for others."""
    temperature: PositiveFloat = 1.0
    """Temperature of training samples and of their log-probs in the trainer."""
    top_p: Fraction = 1.0
    """Sample from the most likely tokens that together have this probability; 1 is off."""
    top_k: MinusOneOrMore = -1
    """Sample from this many of the most likely tokens; -1 is off."""
    dtype: DType = "auto"
    """Dtype of the engine's weights; `auto` means the same as for the trainer's `fsdp_config.dtype`."""
    tensor_model_parallel_size: Annotated[PositiveInt, Unit("processes per engine")] = 1
    """Processes that share one engine."""
    gpu_memory_utilization: Annotated[Fraction, Unit("of a GPU's memory")] = follows(_gpu_share)
    """Share of a GPU's memory that the engine may take while awake. Default: 0.5 where it shares its GPUs with a
    trainer or another model, 0.9 on a pool of its own."""
    kv_cache_gib: PositiveFloat = 1.0
    """Size of the engine's KV cache in GiB on a machine without a GPU."""
    max_num_seqs: Annotated[PositiveInt, Unit("sequences per engine at once")] = 256
    """Sequences that one engine decodes together."""
    max_num_batched_tokens: Annotated[PositiveInt, Unit("tokens per engine iteration")] = 8192
    """Maximum number of tokens that one engine processes in an iteration."""
    max_model_len: Annotated[PositiveInt | None, Unit("tokens")] = None
    """Longest sequence that the engine accepts, in tokens; null uses prompt + response."""
    enforce_eager: bool = False
    """Run the engine without CUDA graphs: it starts faster but samples more slowly."""
    enable_prefix_caching: bool = True
    """Share the prompt's KV cache among the samples of a group."""
    free_cache_engine: bool = True
    """Put an engine that shares its GPU with the trainer to sleep while the trainer works. No effect on engines that
    can't sleep, e.g. on a CPU."""
    enable_rollout_routing_replay: bool = follows(lambda get: get(f"{ACTOR}.router_replay.mode") == "R3")
    """Have the engine return the experts that each token went to. Default: with `actor.router_replay.mode=R3`."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the engine's constructor, e.g. `{vllm: {disable_custom_all_reduce: true}}`."""
    serve: bool = False
    """Let programs on this machine ask the policy while it is trained, over OpenAI's protocol; needs
    `environment.path`. Address and key are in the run folder's `serving.env`."""
    server: ServerConfig = section(ServerConfig)
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig)
    weight_sync: WeightSyncConfig = section(WeightSyncConfig)

    @property
    def is_of_others(self) -> bool:
        """Whether the engines are servers, or SGLang's: they get whole models, and tokens alone."""
        return self.name in ("server", "sglang")

    @property
    def is_served(self) -> bool:
        """Whether the engines are servers that somebody else started."""
        return self.name == "server" or (self.name == "sglang" and bool(self.server.urls))
