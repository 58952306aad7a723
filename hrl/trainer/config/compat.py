"""What becomes of a verl key that is not a field of the schema: renamed, held fixed, or refused with the way out.

Every table is data: a dotted key, or a prefix that ends in `.*`. `docs/configuration.md` prints them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_ACTOR, _REF, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))
_RM = "reward.reward_model"
_TRAINED = (_ACTOR, "critic")
_SCORED = (_ACTOR, _REF, "critic")
_MODELS = (_MODEL, "critic.model", f"{_RM}.model")
_FROZEN = (f"{_REF}.fsdp_config", f"{_RM}.model.fsdp_config")
_SHARDED = (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.model.fsdp_config", f"{_RM}.model.fsdp_config")


class Fixed(NamedTuple):
    """A key whose one behaviour is always on: these values say so, any other is refused with `advice`."""

    accepted: tuple[Any, ...]
    advice: str


def _each(owners: Iterable[str], *names: str) -> list[str]:
    return [f"{owner}.{name}" for owner in owners for name in names]


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
        for name in ("enable_resource_pool", "n_gpus_per_node", "nnodes", "strategy", "micro_batch_size")
    },
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.use_dynamic_bsz": "reward.reward_model.use_dynamic_bsz",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs.overlong_buffer_cfg.*": "reward.overlong_buffer.*",
    "reward_model.reward_kwargs.*": "reward.reward_kwargs.*",
    "reward_model.rollout.*": "reward.reward_model.rollout.*",
    "reward.reward_kwargs.overlong_buffer_cfg.*": "reward.overlong_buffer.*",
    "custom_reward_function.*": "reward.custom_reward_function.*",
    # One block per role, spelt the same everywhere
    "critic.fsdp_config.*": "critic.model.fsdp_config.*",
    "critic.fsdp.*": "critic.model.fsdp_config.*",
    **{f"{owner}.optim.clip_grad": f"{owner}.grad_clip" for owner in _TRAINED},
    **{f"{owner}.optim.warmup_style": f"{owner}.optim.lr_scheduler_type" for owner in _TRAINED},
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": f"{_ROLLOUT}.weight_sync.bucket_mb",
    # One switch for remote code
    "data.trust_remote_code": f"{_MODEL}.trust_remote_code",
    # The run
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.ray_wait_register_center_timeout": "trainer.timeouts.init_s",
    "ray_kwargs.ray_init.*": "trainer.ray_kwargs.*",
    "ray_init.*": "trainer.ray_kwargs.*",
}
"""Older spelling → name in hrl."""

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


def _fixed(advice: str, accepted: Iterable[Any], keys: Iterable[str]) -> dict[str, Fixed]:
    return dict.fromkeys(keys, Fixed(tuple(accepted), advice))


_LORA_OFF = _each(_MODELS, "lora_rank", "lora_adapter_path", "lora.rank", "lora.adapter_path")
_PARALLEL = _each([_ROLLOUT], "data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size")

FIXED: dict[str, Fixed] = {
    # The model and its memory.
    **_fixed(
        "padding never enters a model here, so there is nothing to switch off; remove the key.",
        [True],
        _each((*_MODELS, _ACTOR), "use_remove_padding"),
    ),
    **_fixed("training runs on FSDP2; use fsdp2.", ["fsdp", "fsdp2"], _each((*_SCORED, *_SHARDED, _RM), "strategy")),
    **_fixed(
        "sequence parallel training comes later; use more processes (trainer.n_gpus_per_node).",
        [1],
        _each((*_SCORED, *_SHARDED), "ulysses_sequence_parallel_size"),
    ),
    **_fixed("LoRA comes later; train the full model with a lower lr, or stay at 0.", [0, None], _LORA_OFF),
    **_fixed(
        "model files are read where they lie; copy them to /dev/shm yourself and point the path there.",
        [False],
        [*_each(_MODELS, "use_shm"), "data.use_shm"],
    ),
    **_fixed(
        "log-probs and entropy always run over the vocabulary in chunks; remove the key.",
        [True],
        [
            *_each((*_SCORED, *_SHARDED), "entropy_from_logits_with_chunking"),
            *_each((*_MODELS, _ACTOR), "use_fused_kernels"),
        ],
    ),
    **_fixed(
        "entropy is always recomputed in the backward pass; remove the key.",
        [True],
        _each((*_SCORED, *_SHARDED), "entropy_checkpointing"),
    ),
    **_fixed(
        "log-probs run on hrl's own chunked torch operation; use torch or remove the key.",
        ["torch"],
        _each(_MODELS, "fused_kernel_options.impl_backend"),
    ),
    **_fixed(
        "liger kernels are not wired in; log-probs are fused already. Remove the key.",
        [False],
        _each(_MODELS, "use_liger"),
    ),
    **_fixed(
        "use enable_gradient_checkpointing and fsdp_config.param_offload to save memory.",
        [False],
        _each(_MODELS, "enable_activation_offload"),
    ),
    **_fixed("the model runs uncompiled; remove the key.", [False], _each((*_SCORED, *_SHARDED), "use_torch_compile")),
    **_fixed("set param_offload and optimizer_offload instead.", [False], _each(_SHARDED, "offload_policy")),
    **_fixed("FSDP2 always keeps the original parameters; remove the key.", [True], _each(_SHARDED, "use_orig_params")),
    **_fixed(
        "a model that is only evaluated frees what it gathered; remove the key.",
        [True],
        [f"{owner}.reshard_after_forward" for owner in _FROZEN],
    ),
    **_fixed(
        "a model that is only evaluated is stored in the dtype it computes in (fsdp_config.dtype); remove the key.",
        ["fp32", "bf16"],
        [f"{owner}.model_dtype" for owner in _FROZEN],
    ),
    **_fixed("FSDP2 prefetches by itself; remove the key.", [False], _each(_SHARDED, "forward_prefetch")),
    **_fixed(
        "schedules run over the length of the run; set trainer.total_training_steps or total_epochs.",
        [-1, None],
        _each(_TRAINED, "optim.total_training_steps"),
    ),
    **_fixed("the optimizer is AdamW.", ["AdamW"], _each(_TRAINED, "optim.optimizer")),
    **_fixed("the optimizer is torch's AdamW.", ["torch.optim"], _each(_TRAINED, "optim.optimizer_impl")),
    **_fixed(
        "a checkpoint is complete when the step ends; remove the key.",
        [False],
        _each(_TRAINED, "checkpoint.async_save"),
    ),
    **_fixed("a state that doesn't match is an error.", [True], [f"{_ACTOR}.checkpoint.strict"]),
    **_fixed(
        f"the critic reads the policy's tokens; set {_MODEL}.tokenizer_path.", [None], ["critic.model.tokenizer_path"]
    ),
    **_fixed("entropy is always measured; remove the key.", [True], [f"{_ACTOR}.calculate_entropy"]),
    **_fixed("the prompt of a group is always computed once.", [True], [f"{_ACTOR}.use_prefix_grouper"]),
    **_fixed(
        "the critic's seq-mean-token-sum-norm divides by data.max_response_length; remove the key.",
        [None],
        ["critic.loss_scale_factor"],
    ),
    # Sampling.
    **_fixed("requests are always asynchronous; use async or remove the key.", ["async"], [f"{_ROLLOUT}.mode"]),
    **_fixed("set tensor_model_parallel_size; every group of that many processes gets an engine.", [1], _PARALLEL),
    **_fixed("the sampler's log-probs are always kept; remove the key.", [True], [f"{_ROLLOUT}.calculate_log_probs"]),
    **_fixed("weights are always gathered bucket by bucket; remove the key.", [True], [f"{_ROLLOUT}.layered_summon"]),
    **_fixed("an engine always wakes in stages; remove the key.", [True], [f"{_ROLLOUT}.multi_stage_wake_up"]),
    **_fixed(
        "the engine reads the model folder once, then weights are synced; use safetensors.",
        ["auto", "safetensors"],
        [f"{_ROLLOUT}.load_format"],
    ),
    **_fixed("training samples are drawn; validation has val_kwargs.do_sample.", [True], [f"{_ROLLOUT}.do_sample"]),
    **_fixed("a response ends at the model's own stop token; remove the key.", [False], [f"{_ROLLOUT}.ignore_eos"]),
    **_fixed("log-probs are those of the sampled distribution.", ["processed_logprobs"], [f"{_ROLLOUT}.logprobs_mode"]),
    **_fixed("engine figures are in metrics.jsonl.", [True], [f"{_ROLLOUT}.disable_log_stats"]),
    **_fixed("the engine sees token ids only.", [True], [f"{_ROLLOUT}.skip_tokenizer_init"]),
    **_fixed("agent loops come later; every response is one turn.", [False], [f"{_ROLLOUT}.multi_turn.enable"]),
    **_fixed("exactly train_batch_size prompts are sampled.", [0], [f"{_ROLLOUT}.over_sample_rate"]),
    # Data, rewards, algorithm.
    **_fixed("the chat always travels with its row (raw_prompt); remove the key.", [True], ["data.return_raw_chat"]),
    **_fixed("validation keeps the order of the file.", [False], ["data.validation_shuffle"]),
    **_fixed(
        "the penalty is always a reward part of its own, overlong; remove the key.",
        [True, False],
        ["reward.overlong_buffer.log"],
    ),
    **_fixed("prompts are filtered in one process; remove the key.", [1], ["data.filter_overlong_prompts_workers"]),
    **_fixed("one batch is sampled after the other.", [1], ["algorithm.filter_groups.max_inflight_gen_batches"]),
    **_fixed(
        "it is computed exactly when algorithm.adv_estimator reads it; remove the key.",
        [True],
        [f"{_ACTOR}.calculate_sum_pi_squared"],
    ),
    **_fixed(
        "rewards run concurrently anyway; use naive, with reward.overlong_buffer for DAPO's penalty.",
        ["naive", "dapo"],
        ["reward.reward_manager.name"],
    ),
    **_fixed(
        "give the reward model its own pool: trainer.resource_pools.<pool> and trainer.role_pools.rm=<pool>.",
        [False],
        ["reward.reward_model.enable_resource_pool"],
    ),
    # The run.
    **_fixed("rows are always balanced over processes; remove the key.", [True], ["trainer.balance_batch"]),
    **_fixed("set trainer.total_training_steps=0: validation runs, no step does.", [False], ["trainer.val_only"]),
    **_fixed(
        "checkpoints go to trainer.default_local_dir; mount or copy from there.", [None], ["trainer.default_hdfs_dir"]
    ),
    **_fixed("set trainer.max_ckpt_to_keep.", [False], ["trainer.del_local_ckpt_after_load"]),
    **_fixed(
        "every sample is written to rollouts/ in the run folder; set trainer.default_local_dir.",
        [None],
        ["trainer.rollout_data_dir", "trainer.validation_data_dir"],
    ),
    **_fixed("there is one implementation; remove the key.", ["auto"], ["trainer.use_legacy_worker_impl"]),
}
"""Key → the values that describe what hrl always does. Accepted and dropped, or refused."""

_LATER_ROLLOUT = "multi-turn and agent loops come later; remove the key."
_TEXT_ONLY = "hrl trains on text; remove the key and use a text model."

_GLOBAL_MICRO_BATCH = "a global micro-batch depends on the number of processes; set the key that ends in _per_gpu."
_LATER_LORA = "LoRA comes later; remove the key."
_OWN_CODE = "put code into the model folder and set trust_remote_code, or import it before the trainer starts."
_OWN_TEMPLATE = f"save the template in the tokenizer's folder and set {_MODEL}.tokenizer_path."

REFUSED: dict[str, str] = {
    **dict.fromkeys(_each(_TRAINED, "ppo_micro_batch_size"), _GLOBAL_MICRO_BATCH),
    **dict.fromkeys(_each((_REF, _ROLLOUT), "log_prob_micro_batch_size"), _GLOBAL_MICRO_BATCH),
    "critic.forward_micro_batch_size": _GLOBAL_MICRO_BATCH,
    "reward.reward_model.micro_batch_size": _GLOBAL_MICRO_BATCH,
    "critic.forward_micro_batch_size_per_gpu": "set critic.ppo_micro_batch_size_per_gpu; it holds for values too.",
    **dict.fromkeys(_each(_MODELS, "lora_alpha", "target_modules", "exclude_modules", "lora.*"), _LATER_LORA),
    **dict.fromkeys(_each(_MODELS, "external_lib"), _OWN_CODE),
    **dict.fromkeys(_each(_MODELS, "custom_chat_template"), _OWN_TEMPLATE),
    **dict.fromkeys(_each(_MODELS, "hf_config_path"), "set override_config, or edit config.json in the folder."),
    **dict.fromkeys(_each([f"{_RM}.model"], "hf_config_path", "override_config"), "edit config.json in the folder."),
    **dict.fromkeys(_each(_MODELS, "tiled_mlp.*", "mtp.*"), "not supported; remove the key."),
    **dict.fromkeys(_each(_SHARDED, "wrap_policy.*"), "FSDP2 shards each decoder layer; remove the key."),
    **dict.fromkeys(_each(_TRAINED, "megatron.*", "veomni.*", "qat.*"), "only FSDP2 is here; remove the key."),
    **dict.fromkeys(_each((*_SCORED, _ROLLOUT), "profiler.*"), "use an external profiler; remove the key."),
    f"{_ACTOR}.freeze_vision_tower": _TEXT_ONLY,
    f"{_ACTOR}.data_loader_seed": "set trainer.seed.",
    "critic.data_loader_seed": "set trainer.seed.",
    "critic.checkpoint.*": f"the critic is saved whole beside the actor; set {_ACTOR}.checkpoint.",
    f"{_ROLLOUT}.multi_turn.*": _LATER_ROLLOUT,
    f"{_ROLLOUT}.agent.*": _LATER_ROLLOUT,
    f"{_ROLLOUT}.trace.*": "every rollout is in rollouts/step_N.jsonl of the run folder; remove the key.",
    f"{_ROLLOUT}.limit_images": _TEXT_ONLY,
    f"{_ROLLOUT}.nnodes": "give the engines their own pool: trainer.resource_pools and trainer.role_pools.rollout.",
    f"{_ROLLOUT}.n_gpus_per_node": "give the engines their own pool: trainer.resource_pools and role_pools.rollout.",
    "reward.reward_model.rollout.*": "reward models run on the training workers (FSDP), not in an engine; remove the "
    "key. Their micro-batches have reward.reward_model.max_token_len_per_gpu.",
    "reward.reward_model.n_gpus_per_node": "set trainer.resource_pools and trainer.role_pools.rm.",
    "reward.reward_model.nnodes": "set trainer.resource_pools and trainer.role_pools.rm.",
    "reward.reward_manager.*": "set reward.custom_reward_function.path; a function takes the manager's place.",
    "reward.reward_kwargs.*": "set reward.custom_reward_function.reward_kwargs.",
    "reward.sandbox_fusion.*": "code rewards need a sandbox of your own: call it from reward.custom_reward_function.",
    "sandbox_fusion.*": "code rewards need a sandbox of your own: call it from reward.custom_reward_function.",
    "data.image_key": _TEXT_ONLY,
    "data.video_key": _TEXT_ONLY,
    "data.audio_key": _TEXT_ONLY,
    "data.image_patch_size": _TEXT_ONLY,
    "data.mm_processor_kwargs.*": _TEXT_ONLY,
    "data.return_multi_modal_inputs": _TEXT_ONLY,
    "reward.reward_model.use_dynamic_bsz": "set reward.reward_model.micro_batch_size_per_gpu; null fills micro-batches "
    "up to max_token_len_per_gpu.",
    "data.gen_batch_size": "with algorithm.filter_groups every sampled batch has data.train_batch_size prompts; "
    "remove the key.",
    "data.dataloader_num_workers": "rows are tokenised once at load; remove the key.",
    "data.tokenizer": "set actor_rollout_ref.model.tokenizer_path.",
    "data.sampler.*": "rows come in the order of (seed, epoch); subclass the trainer for another one.",
    "data.return_raw_input_ids": "token ids always travel with their row; remove the key.",
    "data.return_full_prompt": "rollouts/step_N.jsonl holds the prompts; remove the key.",
    "data.tool_config_path": _LATER_ROLLOUT,
    "data.function_tool_path": _LATER_ROLLOUT,
    f"{_ACTOR}.tis_imp_ratio_cap": "set algorithm.rollout_correction.rollout_is=token and rollout_is_threshold.",
    "trainer.esi_redundant_time": "set trainer.save_freq; a run resumes from its newest checkpoint.",
    "trainer.checkpoint_callback_class": "subclass the trainer.",
    "trainer.use_v1": "there is one trainer; remove the key.",
    "trainer.v1.*": "there is one trainer; remove the key.",
    "distillation.*": "distillation is not here; remove the key.",
    "transfer_queue.*": "rows travel packed through Ray's object store; remove the key.",
    "global_profiler.*": "use an external profiler; remove the key.",
    "skip.*": "remove the key.",
    "ray_kwargs.timeline_json_file": "use `ray timeline`.",
    "hydra.*": "hrl keeps its own run folder; set trainer.default_local_dir.",
}
"""Key or prefix → what to do instead."""


def lookup(table: Mapping[str, Any], key: str) -> tuple[str, Any] | None:
    """The entry for `key`: itself, or the longest prefix pattern `a.b.*` above it.

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
    """The name of `key` in hrl; `key` itself when it was never renamed."""
    entry = lookup(renamed, key)
    if entry is None:
        return key
    pattern, target = entry
    return target.removesuffix("*") + key.removeprefix(pattern.removesuffix("*"))


@dataclass(frozen=True)
class Spellings:
    """What becomes of keys that are no fields of a schema; each table is as its namesake above."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    must_equal: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
