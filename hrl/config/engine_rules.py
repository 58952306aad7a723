"""What `rollout.engine_kwargs` may tell an engine, and what other keys or hrl itself tell it."""

from collections.abc import Iterator

from hrl.config.keys import nearest
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.problems import Problem, Reason

_ROLLOUT = "actor_rollout_ref.rollout"
_KEY = f"{_ROLLOUT}.engine_kwargs"
_ENGINES = ("vllm", "hf", "scripted")

_ELSEWHERE = ("sglang", "trtllm")
"""Engines of verl that hrl does not have."""

_SET_BY = {
    "model": "actor_rollout_ref.model.path",
    "hf_overrides": "actor_rollout_ref.model.override_config",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "kv_cache_memory_bytes": f"{_ROLLOUT}.kv_cache_gib",
    "enable_sleep_mode": f"{_ROLLOUT}.free_cache_engine",
    **{
        name: f"{_ROLLOUT}.{name}"
        for name in (
            "dtype",
            "seed",
            "gpu_memory_utilization",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "enforce_eager",
            "enable_chunked_prefill",
            "enable_prefix_caching",
        )
    },
    "tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
}
"""vLLM's arguments that have a key here: said twice, one of the two would be wrong."""

_FIXED = {
    "logprobs_mode": "log-probs are those of the distribution that was sampled from",
    "skip_tokenizer_init": "engines see token ids alone",
    "generation_config": "sampling is what the keys say, not what the model's folder says",
    "distributed_executor_backend": "engine processes end with their rank",
    "worker_extension_cls": "weights come in through it",
    "data_parallel_size": "every group of processes has an engine of its own",
    "pipeline_parallel_size": "an engine is tensor parallel",
}
"""vLLM's arguments on which the rest of a run relies."""


def engines_are_told_what_is_theirs(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Arguments stand below the name of an engine, and none of them is said elsewhere."""
    for engine, arguments in config.actor_rollout_ref.rollout.engine_kwargs.items():
        if engine not in _ENGINES or not isinstance(arguments, dict):
            if engine in _ELSEWHERE:
                if arguments:
                    what, hint = f"has arguments of {engine}, which does not run here.", "Remove them."
                    yield Problem(f"{_KEY}.{engine}", what, hint, (f"{_ROLLOUT}.name",), Reason.ABSENT)
                continue
            close = nearest(engine, _ENGINES)
            hint = f"Did you mean {close[0]}?" if close else f"Write it as {{vllm: {{{engine}: ...}}}}."
            yield Problem(_KEY, f"has {engine!r}, which is no engine with its arguments.", hint)
        elif engine == "vllm":
            for name in arguments:
                if name in _SET_BY:
                    yield Problem(_KEY, f"sets vLLM's {name}.", f"Set {_SET_BY[name]}.", (_SET_BY[name],))
                elif name in _FIXED:
                    yield Problem(_KEY, f"sets vLLM's {name}, which is fixed: {_FIXED[name]}.", "Remove it.")
