"""A rough estimate of memory from a model's config.json; nothing is loaded."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from hrl.trainer.config.arithmetic import Fact
from hrl.trainer.config.model import FsdpConfig
from hrl.trainer.config.placement import resolve_placement
from hrl.trainer.config.schema import PPOTrainerConfig

_BYTES = {"fp32": 4, "bf16": 2, "float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
"""`auto` as on a GPU: where a CPU takes float32 instead, memory is not what is short."""
_GIB = 1 << 30


class ModelSize(NamedTuple):
    """What the estimate needs to know of a transformer.

    Attributes:
        parameters: number of weights, tied ones once.
        kv_bytes_per_token: keys and values of one token in a 2-byte dtype.
    """

    parameters: int
    kv_bytes_per_token: int


def model_size(hf_config: Mapping[str, Any]) -> ModelSize | None:
    """Size of a dense decoder in the Llama family's layout.

    Args:
        hf_config: the contents of config.json.

    Returns:
        None for another layout (mixtures of experts, missing fields): a wrong estimate is worse than none.
    """
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if any(not isinstance(hf_config.get(name), int) for name in names) or "num_experts" in hf_config:
        return None
    hidden, layers, heads, inner, vocabulary = (hf_config[name] for name in names)
    head = hf_config.get("head_dim") or hidden // heads
    kv_heads = hf_config.get("num_key_value_heads") or heads
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    layer = attention + 3 * hidden * inner + 2 * hidden
    heads_of_vocabulary = 1 if hf_config.get("tie_word_embeddings", False) else 2
    parameters = layers * layer + heads_of_vocabulary * vocabulary * hidden + hidden
    return ModelSize(parameters, 2 * 2 * layers * kv_heads * head)


def memory_facts(config: PPOTrainerConfig, hf_config: Mapping[str, Any]) -> list[Fact]:
    """Bytes per process, from the contents of the policy's config.json; empty where these don't tell its size."""
    size = model_size(hf_config)
    return [] if size is None else memory_estimate(config, size)


def memory_estimate(config: PPOTrainerConfig, size: ModelSize) -> list[Fact]:
    """Bytes per process of weights, gradients and optimizer state; activations come on top.

    Args:
        config: a valid configuration.
        size: of the policy; critic and reference are taken to be of the same size.
    """
    placement, roles = resolve_placement(config), config.actor_rollout_ref
    facts = [Fact("model", f"about {size.parameters / 1e6:,.0f} million parameters")]
    trained = [(placement.actor, roles.actor.fsdp_config)]
    if config.needs_critic:
        trained.append(("critic", config.critic.model.fsdp_config))
    facts += [training_state(role, fsdp, size, placement.processes(role)) for role, fsdp in trained]
    if config.needs_reference:
        frozen = roles.ref.fsdp_config
        shards = placement.processes("ref") if frozen.fsdp_size == -1 else frozen.fsdp_size
        weights = _BYTES[frozen.model_dtype] * size.parameters / shards
        facts.append(Fact("ref, per process", f"{_gib(weights)} for weights{_sharded(shards)}"))
    return [*facts, *_engine_facts(config, size)]


def training_state(role: str, fsdp: FsdpConfig, size: ModelSize, processes: int) -> Fact:
    """Bytes per process of a model that is trained by `processes` processes."""
    shards = processes if fsdp.fsdp_size == -1 else fsdp.fsdp_size
    # Weights and gradients in the dtype of the stored weights; AdamW's two moments are float32 whatever that is.
    state = (2 * _BYTES[fsdp.model_dtype] + 2 * _BYTES["fp32"]) * size.parameters / shards
    text = f"{_gib(state)} for weights, gradients and optimizer state{_sharded(shards)}"
    return Fact(f"{role}, per process", text)


def _engine_facts(config: PPOTrainerConfig, size: ModelSize) -> list[Fact]:
    rollout = config.actor_rollout_ref.rollout
    weights = _BYTES[rollout.dtype] * size.parameters / rollout.tensor_model_parallel_size
    row = config.data.max_prompt_length + config.data.max_response_length
    at_once = rollout.kv_cache_gib * _GIB / (size.kv_bytes_per_token * row)
    return [
        Fact("engine, per process", f"{_gib(weights)} for weights, and the KV cache"),
        Fact(
            "KV cache on CPU",
            f"{size.kv_bytes_per_token:,} bytes a token, so {rollout.kv_cache_gib:g} GiB hold {at_once:,.0f} sequences",
        ),
    ]


def _sharded(shards: int) -> str:
    return f", sharded over {shards} processes" if shards > 1 else ""


def _gib(number_of_bytes: float) -> str:
    return f"{number_of_bytes / _GIB:.2f} GiB"
