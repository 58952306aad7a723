"""Rules of engines: what they are told, where servers are, and what they round and draft. See `rules`."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from hrl.config.model import LORA_RANKS
from hrl.config.placement import placement_problems, resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.rollout import RolloutConfig
from hrl.config.section import ACTOR, MODEL, ROLLOUT
from hrl.errors import Problem, Reason
from hrl.loopback import is_loopback
from hrl.nearest import did_you_mean

_ARGUMENTS = f"{ROLLOUT}.engine_kwargs"
_RESPONSE = ("data.max_prompt_length", "data.max_response_length")


def engine_holds_whole_sequences(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Lengths and parallelism of the engine fit the data and its pool."""
    rollout = config.actor_rollout_ref.rollout
    row = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < row:
        what = f"is {rollout.max_model_len} tokens, but prompt + response may be {row}."
        yield Problem(f"{ROLLOUT}.max_model_len", what, f"Set it to at least {row}, or null.", _RESPONSE)
    arguments = rollout.engine_kwargs.get("vllm")
    is_whole = isinstance(arguments, dict) and arguments.get("enable_chunked_prefill") is False
    if is_whole and rollout.max_num_batched_tokens < (rollout.max_model_len or row):
        what = f"is {rollout.max_num_batched_tokens} tokens; without chunked prefill it must hold a whole sequence."
        hint = f"Set it to at least {rollout.max_model_len or row}."
        yield Problem(f"{ROLLOUT}.max_num_batched_tokens", what, hint, (f"{ROLLOUT}.max_model_len", *_RESPONSE))
    if rollout.name != "vllm" and rollout.tensor_model_parallel_size > 1:
        what = f"is {rollout.tensor_model_parallel_size}, which the {rollout.name} engine can't do."
        yield Problem(f"{ROLLOUT}.tensor_model_parallel_size", what, "Set it to 1.", (f"{ROLLOUT}.name",))


_ENGINES = ("vllm", "sglang", "hf", "scripted")
_ELSEWHERE = ("trtllm",)
"""Engines of verl that hrl does not start."""
_SET_BY = {
    **{name: f"{ROLLOUT}.{name}" for name in RolloutConfig.model_fields},
    "model": f"{MODEL}.path",
    "hf_overrides": f"{MODEL}.override_config",
    "trust_remote_code": f"{MODEL}.trust_remote_code",
    "kv_cache_memory_bytes": f"{ROLLOUT}.kv_cache_gib",
    "enable_sleep_mode": f"{ROLLOUT}.free_cache_engine",
    "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
}
"""Arguments of vLLM that hrl has a key for, so they are refused here."""
_FIXED = {
    "logprobs_mode": "log-probs are those of the distribution that was sampled from",
    "skip_tokenizer_init": "engines get and return only token ids",
    "generation_config": "sampling follows the keys, not the model's folder",
    "distributed_executor_backend": "engine processes end with their rank",
    "worker_extension_cls": "weight sync uses it",
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_dtype", "lora_target_modules"),
        f"an adapter is that of {MODEL}.lora_rank",
    ),
    "data_parallel_size": "every group of processes has an engine of its own",
    "pipeline_parallel_size": "engines are tensor parallel only",
}
"""Arguments of vLLM whose value the rest of a run relies on, and why."""
_SET_BY_FOR_SGLANG = {
    "model_path": f"{MODEL}.path",
    "json_model_override_args": f"{MODEL}.override_config",
    "trust_remote_code": f"{MODEL}.trust_remote_code",
    "dtype": f"{ROLLOUT}.dtype",
    "tp_size": f"{ROLLOUT}.tensor_model_parallel_size",
    "context_length": f"{ROLLOUT}.max_model_len",
    "max_running_requests": f"{ROLLOUT}.max_num_seqs",
    "chunked_prefill_size": f"{ROLLOUT}.max_num_batched_tokens",
    "mem_fraction_static": f"{ROLLOUT}.gpu_memory_utilization",
    "disable_radix_cache": f"{ROLLOUT}.enable_prefix_caching",
    "disable_cuda_graph": f"{ROLLOUT}.enforce_eager",
    "enable_memory_saver": f"{ROLLOUT}.free_cache_engine",
}
"""Arguments of SGLang that hrl has a key for."""
_FIXED_FOR_SGLANG = {
    "device": "the engine is where its rank is",
    "enable_deterministic_inference": "samples follow their seeds",
    "enable_fp32_lm_head": "logits are float32, as the trainer's",
    "sampling_defaults": "sampling follows the keys, not the model's folder",
    "preferred_sampling_params": "sampling follows the keys",
    "skip_tokenizer_init": "engines get and return only token ids",
    "weight_version": "every answer names the weights of its sync",
    **dict.fromkeys(("dp_size", "pp_size", "nnodes"), "every process has an engine of its own"),
}
"""Arguments of SGLang whose value the rest of a run relies on, and why."""
_OF_ENGINES = {
    "vllm": ("vLLM's", _SET_BY, _FIXED),
    "sglang": ("SGLang's", _SET_BY_FOR_SGLANG, _FIXED_FOR_SGLANG),
}


def engines_are_told_what_is_theirs(config: PPOTrainerConfig) -> Iterator[Problem]:
    """`engine_kwargs` is keyed by engine and has no argument that hrl has a key for or fixes."""
    for engine, arguments in config.actor_rollout_ref.rollout.engine_kwargs.items():
        if engine not in _ENGINES or not isinstance(arguments, dict):
            if engine in _ELSEWHERE:
                if arguments and config.actor_rollout_ref.rollout.name != engine:
                    what, hint = f"has arguments of {engine}, which does not run here.", "Remove them."
                    yield Problem(f"{_ARGUMENTS}.{engine}", what, hint, (f"{ROLLOUT}.name",), Reason.ABSENT)
                continue
            hint = did_you_mean(engine, _ENGINES, f"Write it as {{vllm: {{{engine}: ...}}}}.")
            yield Problem(_ARGUMENTS, f"has {engine!r}, which is not an engine with arguments.", hint)
        elif engine in _OF_ENGINES:
            of, set_by, fixed = _OF_ENGINES[engine]
            for name in arguments:
                if name in set_by:
                    yield Problem(_ARGUMENTS, f"sets {of} {name}.", f"Set {set_by[name]}.", (set_by[name],))
                elif name in fixed:
                    yield Problem(_ARGUMENTS, f"sets {of} {name}, which is fixed: {fixed[name]}.", "Remove it.")


_SERVER = f"{ROLLOUT}.server"


def servers_have_addresses(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Engines that somebody else started have addresses, each once, and a key that a variable holds."""
    rollout, key, name = config.actor_rollout_ref.rollout, f"{_SERVER}.urls", f"{ROLLOUT}.name"
    settings = rollout.server
    if rollout.is_served and settings.urls and rollout.engine_kwargs.get(rollout.name):
        what = f"has arguments, and {name} is {rollout.name}, whose servers have those that they were started with."
        yield Problem(f"{_ARGUMENTS}.{rollout.name}", what, "Remove them.", (name,))
    if not rollout.is_served:
        if settings.urls:
            what = f"has addresses, and {name} is {rollout.name}, which runs in the run itself."
            yield Problem(key, what, f"Set {name}=server (vLLM's) or sglang, or remove them.", (name,))
        return
    if not settings.urls:
        what = f"is {rollout.name}, whose servers are started by somebody else, and {key} names none."
        hint = f"Start servers, and name them: {key}=[http://127.0.0.1:8000]; or use vllm."
        yield Problem(name, what, hint, (key,), Reason.ALTERNATIVE)
    broken = [*broken_addresses(_SERVER, settings.urls), *written_out_key(_SERVER, settings.api_key)]
    yield from broken
    for url in settings.urls if not broken and rollout.name == "server" and settings.weights_folder is None else ():
        if not is_loopback(urlsplit(url).hostname or ""):
            what = f"is null, and {url} is not on this machine, whose memory it can't read."
            hint = "Name a folder that both see, or the servers of this machine as http://127.0.0.1:port."
            yield Problem(f"{_SERVER}.weights_folder", what, hint, (key,))
    if rollout.name == "sglang" and settings.weights_folder is None:
        what = f"needs a value, because {name} is sglang, which reads weights from a folder."
        yield Problem(f"{_SERVER}.weights_folder", what, "Name one that its servers see too.", (name,))


def broken_addresses(section: str, urls: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for what is no address in `urls` of a section, or stands there twice."""
    key = f"{section}.urls"
    for url in urls:
        try:
            parts = urlsplit(url)
            is_whole = parts.hostname and parts.scheme in ("http", "https") and parts.port != 0
        except ValueError:
            is_whole, parts = False, urlsplit("")
        if not is_whole:
            yield Problem(key, f"has {url!r}, which is no address.", "Write http://host:port.")
        elif parts.username or parts.password or parts.query or parts.fragment:
            what = "has an address with a login, a query or a fragment in it."
            yield Problem(key, what, f"Write http://host:port; a key goes to {section}.api_key.")
    roots = [url.rstrip("/").removesuffix("/v1").rstrip("/") for url in urls]
    if len(set(roots)) < len(roots):
        yield Problem(key, "names a server twice.", "Name each once.")


def written_out_key(section: str, api_key: str | None) -> Iterator[Problem]:
    """Yield a problem for `api_key` of a section where it is the key, and not the variable that has it."""
    if api_key is not None and not re.fullmatch(r"env:[A-Za-z_]\w*", api_key):
        what = "is not env:NAME; written out, it would be saved with the run."
        yield Problem(f"{section}.api_key", what, "Export the key as an environment variable, and name that.")


def servers_can_do_what_is_asked(config: PPOTrainerConfig) -> Iterator[Problem]:
    """What only an engine of the run's own can do is refused with engines that somebody else started."""
    policy = config.actor_rollout_ref
    name, key = policy.rollout.name, f"{ROLLOUT}.name"
    if not policy.rollout.is_served or list(placement_problems(config)):
        return
    placement = resolve_placement(config)
    if not placement.trains:
        what = f"is null, and {key}={name}: nobody would give the servers the weights that are to be sampled from."
        yield Problem("trainer.role_pools.actor", what, f"Use {key}=vllm.", (key,))
    elif placement.rollout != placement.actor:
        what = f"names a pool, and {key}={name}: the servers are not in the run's processes."
        yield Problem("trainer.role_pools.rollout", what, "Remove it.", (key,))


def engines_of_others_can_do_what_is_asked(config: PPOTrainerConfig) -> Iterator[Problem]:
    """What hrl asks of its own vLLM alone is refused with servers and with SGLang."""
    policy = config.actor_rollout_ref
    name, key = policy.rollout.name, f"{ROLLOUT}.name"
    if not policy.rollout.is_of_others:
        return
    if policy.rollout.enable_rollout_routing_replay:
        what = f"is R3, and {key}={name}, whose engines are not asked for the experts that tokens went to."
        yield Problem(f"{ACTOR}.router_replay.mode", what, "Set it to R2, or disabled.", (key,))
    if policy.model.trains_adapter and not policy.model.lora.merge:
        what = f"is false, and {key}={name}, whose engines get whole models."
        yield Problem(f"{MODEL}.lora.merge", what, "Set it to true.", (key,))
    for part, off in (("top_p", 1.0), ("top_k", -1)):
        value = getattr(policy.rollout, part)
        if name == "sglang" and value != off:
            what = f"is {value}, and {key} is sglang, which returns log-probs among all tokens, not among these."
            yield Problem(f"{ROLLOUT}.{part}", what, f"Set it to {off:g}.", (key,))


_ROUNDS_WHAT_IS_LOADED = (
    "fp8",
    "fp8_per_channel",
    "fp8_per_tensor",
    "fp8_per_block",
    "mxfp8",
    "mxfp4",
    "nvfp4_per_token",
    "int8_per_channel_weight_only",
    "experts_int8",
    "online",
)
"""What vLLM's `quantization` may be beside a trainer: it rounds weights of 16 or 32 bits as they are loaded."""


def an_engine_rounds_what_a_trainer_sends(config: PPOTrainerConfig) -> Iterator[Problem]:
    """A trainer sends weights in full: an engine that reads stored codes and scales would find none in a sync."""
    arguments = config.actor_rollout_ref.rollout.engine_kwargs.get("vllm")
    method = arguments.get("quantization") if isinstance(arguments, dict) else None
    if method is not None and method not in _ROUNDS_WHAT_IS_LOADED:
        what = f"is {method}, whose codes and scales lie in a folder; a sync brings weights in full precision."
        hint = f"Take one that rounds what is loaded: {', '.join(_ROUNDS_WHAT_IS_LOADED)}."
        yield Problem(f"{_ARGUMENTS}.vllm.quantization", what, hint)
    elif method is not None and config.actor_rollout_ref.rollout.dtype == "float32":
        what = f"is float32, beside which vLLM has no kernel for {method}."
        yield Problem(f"{ROLLOUT}.dtype", what, "Set it to bfloat16.", (f"{_ARGUMENTS}.vllm.quantization",))


_DRAFTS_FROM_THE_CONTEXT = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that have no weights."""


def _speculation(rollout: RolloutConfig) -> Any:
    """Return vLLM's `speculative_config` as it is given; None without it, or with another engine."""
    arguments = rollout.engine_kwargs.get("vllm")
    return arguments.get("speculative_config") if rollout.name == "vllm" and isinstance(arguments, dict) else None


def drafts_change_no_distribution(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Speculative decoding says what it drafts with, and keeps the policy's distribution."""
    rollout = config.actor_rollout_ref.rollout
    given, key = _speculation(rollout), f"{_ARGUMENTS}.vllm.speculative_config"
    if given is None:
        return
    if not isinstance(given, dict) or not (given.get("method") or given.get("model")):
        what = f"is {given!r}, which does not say what drafts."
        yield Problem(key, what, "Write {method: ngram, num_speculative_tokens: 4}, or name a model.")
        return
    if given.get("rejection_sample_method") == "synthetic":
        what = "accepts drafts at a given rate without asking the policy, so its samples would be of another one."
        yield Problem(f"{key}.rejection_sample_method", what, "Remove it.")
    if rollout.enable_rollout_routing_replay:
        what = "is set, and R3 would replay the experts of drafts that were not kept."
        mode = f"{ACTOR}.router_replay.mode"
        yield Problem(key, what, f"Remove it, or set {mode} to R2 or disabled.", (mode,))


_OF_LOADING = ("load_format", "additional_config", "model_loader_extra_config")
"""Arguments of vLLM by which its loader rounds weights."""


def an_engine_rounds_what_it_loads(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Under an adapter that is sent alone, an engine's own loader gives it the trainer's numbers in 4 bits."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if not model.load_in_4bit or model.lora.merge or rollout.name != "vllm":
        return
    for name in rollout.engine_kwargs.get("vllm") or ():
        if name in _OF_LOADING:
            what = f"sets vLLM's {name}, and with {MODEL}.load_in_4bit the engine rounds weights as it loads them."
            hint = f"Remove it, or set {MODEL}.lora.merge=true."
            yield Problem(_ARGUMENTS, what, hint, (f"{MODEL}.load_in_4bit", f"{MODEL}.lora.merge"))


def the_engine_has_kernels_for_the_rank(config: PPOTrainerConfig) -> Iterator[Problem]:
    """vLLM takes an adapter alone up to a rank."""
    model, engine = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.name
    if engine == "vllm" and not model.lora.merge and model.lora_rank > LORA_RANKS[-1]:
        what = f"is {model.lora_rank}, and vLLM takes adapters up to rank {LORA_RANKS[-1]}."
        yield Problem(
            f"{MODEL}.lora_rank", what, f"Lower it, or set {MODEL}.lora.merge=true.", (f"{MODEL}.lora.merge",)
        )


ENGINE_RULES: tuple[Callable[[PPOTrainerConfig], Iterator[Problem]], ...] = (
    engine_holds_whole_sequences,
    engines_are_told_what_is_theirs,
    servers_have_addresses,
    servers_can_do_what_is_asked,
    engines_of_others_can_do_what_is_asked,
    an_engine_rounds_what_it_loads,
    an_engine_rounds_what_a_trainer_sends,
    the_engine_has_kernels_for_the_rank,
    drafts_change_no_distribution,
)


def engine_warnings(config: PPOTrainerConfig) -> Iterator[str]:
    """Yield what is allowed of engines, and probably not meant."""
    engine, arguments = config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.rollout.engine_kwargs
    for name, given in arguments.items():
        if name != engine and given:
            yield f"{_ARGUMENTS}.{name} has no effect while {ROLLOUT}.name is {engine}."
    drafts = _speculation(config.actor_rollout_ref.rollout)
    if isinstance(drafts, dict) and drafts.get("method") not in _DRAFTS_FROM_THE_CONTEXT:
        yield (
            f"{_ARGUMENTS}.vllm.speculative_config: what drafts keeps the weights of its folder, since a sync "
            "brings the policy's alone. Samples stay the policy's; the further it moves, the fewer drafts are accepted "
            "(rollout/acceptance_rate)."
        )
