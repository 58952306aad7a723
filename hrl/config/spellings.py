"""Second spellings of keys, and how the tables of a kind of run are read.

Every table is data: a dotted key, or a prefix that ends in `.*`. `docs/configuration.md` prints them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hrl.config.conversions import Conversion
from hrl.config.synonyms import Synonym
from hrl.config.verdicts import Verdict

_ACTOR, _REF, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))
_RM = "reward.reward_model"
_TRAINED = (_ACTOR, "critic")
_SHARDED = (f"{_ACTOR}.fsdp_config", "critic.model.fsdp_config", f"{_REF}.fsdp_config", f"{_RM}.model.fsdp_config")

RENAMED: dict[str, str] = {
    # What verl now spells reward.*
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.model.*": "reward.reward_model.model.*",
    "reward.reward_model.model.path": "reward.reward_model.model_path",
    "reward.reward_model.fsdp_config.*": "reward.reward_model.model.fsdp_config.*",
    "reward_model.micro_batch_size_per_gpu": "reward.reward_model.micro_batch_size_per_gpu",
    "reward_model.forward_max_token_len_per_gpu": "reward.reward_model.max_token_len_per_gpu",
    **{
        f"reward_model.{name}": f"reward.reward_model.{name}"
        for name in (
            "enable_resource_pool",
            "n_gpus_per_node",
            "nnodes",
            "strategy",
            "micro_batch_size",
            "max_length",
            "ulysses_sequence_parallel_size",
            "profiler.*",
        )
    },
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.use_dynamic_bsz": "reward.reward_model.use_dynamic_bsz",
    "reward_model.use_reward_loop": "reward.use_reward_loop",
    "reward_model.launch_reward_fn_async": "reward.launch_reward_fn_async",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_manager.*": "reward.reward_manager.*",
    "reward_model.overlong_buffer.*": "reward.overlong_buffer.*",
    "reward_model.reward_kwargs.overlong_buffer_cfg.*": "reward.overlong_buffer.*",
    "reward_model.reward_kwargs.*": "reward.reward_kwargs.*",
    "reward_model.rollout.*": "reward.reward_model.rollout.*",
    "reward_model.sandbox_fusion.*": "reward.sandbox_fusion.*",
    "reward.reward_kwargs.overlong_buffer_cfg.*": "reward.overlong_buffer.*",
    "custom_reward_function.*": "reward.custom_reward_function.*",
    "sandbox_fusion.*": "reward.sandbox_fusion.*",
    # One block per role, spelt the same everywhere
    "critic.fsdp_config.*": "critic.model.fsdp_config.*",
    "critic.fsdp.*": "critic.model.fsdp_config.*",
    **{f"{owner}.optim.clip_grad": f"{owner}.grad_clip" for owner in _TRAINED},
    **{f"{owner}.optim.warmup_style": f"{owner}.optim.lr_scheduler_type" for owner in _TRAINED},
    **{f"{owner}.optim.min_lr_factor": f"{owner}.optim.min_lr_ratio" for owner in _TRAINED},
    **{f"{owner}.mixed_precision.param_dtype": f"{owner}.dtype" for owner in _SHARDED},
    f"{_ACTOR}.policy_loss.tau_pos": f"{_ACTOR}.tau_pos",
    f"{_ACTOR}.policy_loss.tau_neg": f"{_ACTOR}.tau_neg",
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": f"{_ROLLOUT}.weight_sync.bucket_mb",
    f"{_ROLLOUT}.update_weights_bucket_megabytes": f"{_ROLLOUT}.weight_sync.bucket_mb",
    # One switch for remote code
    "data.trust_remote_code": f"{_MODEL}.trust_remote_code",
    # The run
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.ray_wait_register_center_timeout": "trainer.timeouts.init_s",
    "ray_kwargs.ray_init.*": "trainer.ray_kwargs.*",
    "ray_init.*": "trainer.ray_kwargs.*",
}
"""Older spelling → name in hrl, or the one name under which the tables below know it."""

MUST_EQUAL: dict[str, str] = {
    "reward.reward_kwargs.max_resp_len": "data.max_response_length",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    f"{_ACTOR}.rollout_n": f"{_ROLLOUT}.n",
    f"{_REF}.rollout_n": f"{_ROLLOUT}.n",
    "critic.rollout_n": f"{_ROLLOUT}.n",
    "critic.shuffle": f"{_ACTOR}.shuffle",
    "critic.model.trust_remote_code": f"{_MODEL}.trust_remote_code",
    f"{_RM}.model.trust_remote_code": f"{_MODEL}.trust_remote_code",
}
"""A second spelling of a value that has one key here; accepted when it agrees with it."""

NULL_IS_UNSET = frozenset(
    [
        f"{_ROLLOUT}.name",
        "reward.custom_reward_function.name",
        "algorithm.rollout_correction.rollout_is_threshold",
        *(f"{owner}.optim.{name}" for owner in _TRAINED for name in ("min_lr_ratio", "lr_warmup_steps")),
    ]
)
"""Keys that verl writes as null where nothing is chosen, and whose default is meant then."""


def lookup(table: Mapping[str, Any], key: str) -> tuple[str, Any] | None:
    """Return the entry for `key`: itself, or the longest prefix pattern `a.b.*` above it.

    Returns:
        (pattern, value) or None.
    """
    if key in table:
        return key, table[key]
    parts = key.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        pattern = ".".join(parts[:depth]) + ".*"
        if pattern in table:
            return pattern, table[pattern]
    return None


def present_name(key: str, renamed: Mapping[str, str] = RENAMED) -> str:
    """Return the name of `key` in hrl; `key` itself when it was never renamed."""
    entry = lookup(renamed, key)
    if entry is None:
        return key
    pattern, target = entry
    return target.removesuffix("*") + key.removeprefix(pattern.removesuffix("*"))


@dataclass(frozen=True)
class Spellings:
    """What becomes of keys that are no fields of a schema; each table is as its namesake here or in `outside`.

    Attributes:
        synonyms: A name that another library has, without its section → what it is here.
        converted: Keys whose value becomes that of other keys, see `hrl.config.conversions`.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    must_equal: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, Verdict] = field(default_factory=dict)
    values: Mapping[tuple[str, Any], Verdict] = field(default_factory=dict)
    null_is_unset: frozenset[str] = frozenset()
    synonyms: Mapping[str, Synonym] = field(default_factory=dict)
    converted: Mapping[str, Conversion] = field(default_factory=dict)
