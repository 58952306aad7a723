"""Keys and values that verl has and hrl has not: taken without effect, or refused with advice.

Every table is data: a dotted key, or a prefix that ends in `.*`. `docs/configuration.md` prints them.
"""

from collections.abc import Iterable
from typing import Any

from hrl.config.problems import Reason
from hrl.config.verdicts import Verdict, how

_ACTOR, _REF, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))
_RM = "reward.reward_model"
_TRAINED = (_ACTOR, "critic")
_SCORED = (_ACTOR, _REF, "critic")
_MODELS = (_MODEL, "critic.model", f"{_RM}.model")
_FROZEN = (f"{_REF}.fsdp_config", f"{_RM}.model.fsdp_config")
_LEARNING = (f"{_ACTOR}.fsdp_config", "critic.model.fsdp_config")
_SHARDED = (*_LEARNING, *_FROZEN)
OTHER_ENGINES = ("megatron", "mcore", "veomni", "torchtitan", "automodel", "mindspeed")
"""verl's engines beside FSDP; its YAML files are named after them."""


def _each(owners: Iterable[str], *names: str) -> list[str]:
    return [f"{owner}.{name}" for owner in owners for name in names]


ONLY_FSDP2 = Verdict("training runs on FSDP2", "use strategy=fsdp2", reason=Reason.ABSENT)
_LATER_LORA = Verdict("LoRA comes later", "train the full model with a lower lr", reason=Reason.ABSENT)
_LATER_TURNS = Verdict("multi-turn, tools and agent loops come later", same=(None, False), reason=Reason.ABSENT)
_TEXT_ONLY = Verdict(
    "hrl trains on text", "remove the key and use a text model", same=(None, False), reason=Reason.ABSENT
)
_LATER_ASYNC = Verdict("asynchronous training comes later", same=(None, False), reason=Reason.ABSENT)
_NO_PROFILE = Verdict("no profile is taken", "use an external profiler", same=(None, False), reason=Reason.ABSENT)
_OWN_POOL = Verdict(
    "engines apart from the trainer are a placement",
    "add placement=separate, or set trainer.resource_pools and trainer.role_pools.rollout",
    same=(None, 0),
)
_RM_POOL = Verdict(
    "a reward model apart from the trainer is a placement",
    "set trainer.resource_pools.<pool> and trainer.role_pools.rm=<pool>",
    same=(None, 0, False),
)
_OWN_FUNCTION = Verdict("a function takes the manager's place", "set reward.custom_reward_function.path", same=(None,))


def _how(says: str, keys: Iterable[str], *, same: Iterable[Any] = ()) -> dict[str, Verdict]:
    return dict.fromkeys(keys, how(says, same=same))


def _switch(says: str, always: bool, keys: Iterable[str]) -> dict[str, Verdict]:
    """Return a switch that stands at one side here and says how fast, not what."""
    return dict.fromkeys(keys, Verdict(says, same=(always, None), noted=(not always,)))


def _set(says: str, instead: str, keys: Iterable[str], *, same: Iterable[Any] = (None,)) -> dict[str, Verdict]:
    """Return a key that hrl has under another name."""
    return dict.fromkeys(keys, Verdict(says, instead, same=tuple(same)))


def _absent(says: str, keys: Iterable[str], *, same: Iterable[Any] = (None, False)) -> dict[str, Verdict]:
    """Return a key of something that hrl can't do."""
    return dict.fromkeys(keys, Verdict(says, same=tuple(same), reason=Reason.ABSENT))


OUTSIDE: dict[str, Verdict] = {
    # The model and its memory.
    **_switch("padding never enters a model", True, _each((*_MODELS, *_SCORED), "use_remove_padding")),
    **_switch("model files are read where they lie", False, [*_each(_MODELS, "use_shm"), "data.use_shm"]),
    **_switch(
        "log-probs and entropy run over the vocabulary in chunks",
        True,
        [
            *_each((*_SCORED, *_SHARDED), "entropy_from_logits_with_chunking"),
            *_each((*_MODELS, *_SCORED), "use_fused_kernels"),
        ],
    ),
    **_how(
        "log-probs and entropy run over the vocabulary in chunks",
        [
            *_each((*_SCORED, *_SHARDED), "entropy_from_logits_chunk_size"),
            *_each(_MODELS, "fused_kernel_options.*"),
        ],
    ),
    **_switch(
        "entropy is recomputed in the backward pass",
        True,
        _each((*_SCORED, *_SHARDED), "entropy_checkpointing", "sum_pi_squared_checkpointing"),
    ),
    **_switch("the model runs without liger's kernels", False, _each(_MODELS, "use_liger")),
    **_switch("activations stay on their device", False, _each(_MODELS, "enable_activation_offload")),
    **_how("MLPs run over whole rows", _each(_MODELS, "tiled_mlp.*")),
    **_switch("the model runs uncompiled", False, _each((*_SCORED, *_SHARDED), "use_torch_compile")),
    **_how(
        "micro-batches have the length that their rows have",
        _each((*_SCORED, *_SHARDED), "pad_to_length", "pad_to_length_bucket"),
    ),
    **_switch("FSDP2 keeps the original parameters", True, _each(_SHARDED, "use_orig_params")),
    **_switch("FSDP2 prefetches by itself", False, _each((*_SHARDED, _RM), "forward_prefetch")),
    **_how("FSDP2 shards each decoder layer", _each(_SHARDED, "wrap_policy.*")),
    **_how(
        "gradients are reduced in float32",
        _each(_SHARDED, "mixed_precision.reduce_dtype", "mixed_precision.buffer_dtype"),
        same=("fp32", "float32"),
    ),
    **_how(
        "a model that is only evaluated is stored in the dtype it computes in, fsdp_config.dtype",
        _each(_FROZEN, "model_dtype"),
    ),
    **_switch("a model that is only evaluated frees what it gathered", True, _each(_FROZEN, "reshard_after_forward")),
    **_how("a model that is only evaluated has no optimizer", _each(_FROZEN, "optimizer_offload"), same=(False,)),
    **_how("what is evaluated and what is trained is known", _each(_SHARDED, "forward_only")),
    **_how(
        "trainer.seed seeds everything",
        [*_each(_SHARDED, "seed"), *_each(_TRAINED, "data_loader_seed"), *_each(_SCORED, "seed")],
    ),
    **_absent(
        "kernels are not forced to be deterministic",
        [*_each(_SHARDED, "full_determinism"), f"{_ROLLOUT}.full_determinism"],
    ),
    **dict.fromkeys(_each((*_SCORED, *_SHARDED, _RM), "strategy"), ONLY_FSDP2._replace(same=("fsdp", "fsdp2"))),
    "model_engine": ONLY_FSDP2._replace(same=("dp", "fsdp", "fsdp2", None), instead="remove the key"),
    **dict.fromkeys(
        [
            *_each((*_SCORED, *_MODELS, _RM), *(f"{name}.*" for name in OTHER_ENGINES), "engine.*"),
            *_each(_SHARDED, "turbo_config.*"),
            *_each(_SCORED, "model_engine"),
            "actor",
            "ref",
        ],
        ONLY_FSDP2._replace(instead="remove the key"),
    ),
    **_absent(
        "sequence parallel training comes later",
        _each((*_SCORED, *_SHARDED, _RM), "ulysses_sequence_parallel_size"),
        same=(1, None),
    ),
    **dict.fromkeys(
        _each(_MODELS, "lora_rank", "lora_adapter_path", "lora.rank", "lora.adapter_path"),
        _LATER_LORA._replace(same=(0, None)),
    ),
    **_how("LoRA comes later", _each(_MODELS, "lora_alpha", "target_modules", "exclude_modules", "lora.*")),
    **_absent("quantisation-aware training is not here", [*_each((*_SCORED, *_SHARDED, _ROLLOUT), "qat.enable")]),
    **_how("quantisation-aware training is not here", [*_each((*_SCORED, *_SHARDED, _ROLLOUT), "qat.*")]),
    **_absent("multi-token prediction is not here", _each((*_MODELS, _ROLLOUT), "mtp.enable")),
    **_how("multi-token prediction is not here", _each((*_MODELS, _ROLLOUT), "mtp.*")),
    **_absent(
        "router replay is not here",
        [*_each(_SCORED, "router_replay.mode"), f"{_ROLLOUT}.enable_rollout_routing_replay"],
        same=("disabled", None, False),
    ),
    **_how("router replay is not here", _each(_SCORED, "router_replay.*")),
    **_how("text never reaches other towers, and they are not trained", _each(_SCORED, "freeze_vision_tower")),
    **_set(
        "code of your own is found by Python",
        "put it into the model folder and set trust_remote_code, or import it before the trainer starts",
        _each(_MODELS, "external_lib"),
    ),
    **_set(
        "the chat template is the tokenizer's",
        f"save the template in a tokenizer's folder and set {_MODEL}.tokenizer_path",
        _each(_MODELS, "custom_chat_template"),
    ),
    **_set("the model's folder has its config.json", "set override_config", _each(_MODELS, "hf_config_path")),
    **_set(
        "the model's folder has its config.json", "edit it there", [f"{_RM}.model.override_config"], same=(None, {})
    ),
    **_set("dtypes belong to FSDP2", f"set {_ACTOR}.fsdp_config.dtype", _each(_MODELS, "torch_dtype")),
    "critic.model.tokenizer_path": Verdict(
        "the critic reads the policy's tokens", f"set {_MODEL}.tokenizer_path", same=(None,)
    ),
    f"{_RM}.model.input_tokenizer": Verdict(
        "the reward model reads the policy's tokens, and has to have its vocabulary", "", noted=None
    ),
    f"{_RM}.max_length": Verdict("a reward model reads whole rows", same=(None,)),
    # The update.
    **_set(
        "schedules run over the length of the run",
        "set trainer.total_training_steps or total_epochs",
        _each(_TRAINED, "optim.total_training_steps"),
        same=(-1, None),
    ),
    **_absent("the optimizer is torch's AdamW", _each(_TRAINED, "optim.optimizer"), same=("AdamW", "adamw", None)),
    **_absent("the optimizer is torch's AdamW", _each(_TRAINED, "optim.optimizer_impl"), same=("torch.optim", None)),
    **_absent(
        "the settings of other engines' optimizers are not here",
        _each(
            _TRAINED,
            "optim.override_optimizer_config.*",
            *(
                f"optim.{name}"
                for name in (
                    "min_lr",
                    "lr_warmup_init",
                    "lr_decay_style",
                    "lr_decay_steps",
                    "lr_wsd_decay_style",
                    "lr_wsd_decay_steps",
                    "weight_decay_incr_style",
                    "use_checkpoint_opt_param_scheduler",
                    "init_lr_ratio",
                    "store_param_remainders",
                    "master_weights",
                    "exp_avg_dtype",
                    "exp_avg_sq_dtype",
                )
            ),
        ),
    ),
    **_absent(
        "AdamW has the settings lr, betas and weight_decay",
        _each(_TRAINED, "optim.override_optimizer_config"),
        same=(None, {}),
    ),
    **_absent("a cosine falls once, to min_lr_ratio", _each(_TRAINED, "optim.num_cycles"), same=(0.5, None)),
    **_absent("schedules start at step 0", _each(_TRAINED, "optim.zero_indexed_step"), same=(True, None)),
    **_switch("a checkpoint is complete when the step ends", False, _each(_TRAINED, "checkpoint.async_save")),
    f"{_ACTOR}.checkpoint.strict": Verdict("a state that doesn't match is an error", same=(True,)),
    **_absent("checkpoints are FSDP2's", [f"{_ACTOR}.checkpoint.mbridge_config.*"], same=(None, {})),
    **_how("the critic is saved whole beside the actor", ["critic.checkpoint.*"]),
    **_switch("entropy is measured", True, _each(_SCORED, "calculate_entropy")),
    **_switch(
        "it is computed exactly when algorithm.adv_estimator reads it",
        True,
        _each(_SCORED, "calculate_sum_pi_squared"),
    ),
    **_switch(
        "the prompt of a group is computed once",
        True,
        [*_each(_SCORED, "use_prefix_grouper"), f"{_MODEL}.share_prefix"],
    ),
    "critic.loss_scale_factor": Verdict(
        "the critic's seq-mean-token-sum-norm divides by data.max_response_length", same=(None,)
    ),
    **_how(
        "critic.ppo_micro_batch_size_per_gpu holds for values too",
        ["critic.forward_micro_batch_size", "critic.forward_micro_batch_size_per_gpu"],
    ),
    f"{_ACTOR}.tis_imp_ratio_cap": Verdict(
        "the sampler's correction has a section of its own",
        "set algorithm.rollout_correction.rollout_is=token and rollout_is_threshold",
        same=(None, -1),
    ),
    **_how(
        "processes wait as long as trainer.timeouts says", ["actor_rollout_ref.nccl_timeout", "critic.nccl_timeout"]
    ),
    "actor_rollout_ref.hybrid_engine": _OWN_POOL._replace(same=(True, None)),
    # Sampling.
    f"{_ROLLOUT}.mode": Verdict(
        "requests are asynchronous", same=("async", None), noted=("sync",), reason=Reason.ABSENT
    ),
    f"{_ROLLOUT}.data_parallel_size": Verdict(
        "every tensor_model_parallel_size processes get an engine", "set that key", same=(1, None)
    ),
    f"{_ROLLOUT}.pipeline_model_parallel_size": Verdict(
        "an engine is tensor parallel", "set tensor_model_parallel_size", same=(1, None)
    ),
    **_how(
        "experts are split as the engine's other weights are",
        _each([_ROLLOUT], "expert_parallel_size", "moe_tensor_parallel_size"),
        same=(1, None),
    ),
    **_switch("the sampler's log-probs are kept", True, [f"{_ROLLOUT}.calculate_log_probs"]),
    **_switch("weights are gathered bucket by bucket", True, [f"{_ROLLOUT}.layered_summon"]),
    **_how("a sleeping engine drops its weights, which are synced anew", [f"{_ROLLOUT}.sleep_level"], same=(2, None)),
    **_switch("an engine wakes in stages", True, [f"{_ROLLOUT}.multi_stage_wake_up"]),
    **_switch("an engine sleeps when free_cache_engine says so", True, [f"{_ROLLOUT}.enable_sleep_mode"]),
    f"{_ROLLOUT}.load_format": Verdict(
        "the engine reads the model folder once, then weights are synced",
        "use safetensors",
        same=("auto", "safetensors", None),
        noted=("dummy", "hf", "dtensor", "dummy_dtensor", "dummy_hf", "dummy_megatron", "megatron"),
    ),
    f"{_ROLLOUT}.do_sample": Verdict(
        "training samples are drawn", "validation has val_kwargs.do_sample", same=(True, None)
    ),
    **_absent("a response ends at the model's own stop token", [f"{_ROLLOUT}.ignore_eos"]),
    f"{_ROLLOUT}.logprobs_mode": Verdict(
        "log-probs are those of the sampled distribution", same=("processed_logprobs", None)
    ),
    **_how(
        "engine figures are in metrics.jsonl",
        _each(
            [_ROLLOUT], "disable_log_stats", "prometheus.*", "moe_load_balance_metrics_interval", "moe_load_balance.*"
        ),
    ),
    **_how("the engine sees token ids alone", [f"{_ROLLOUT}.skip_tokenizer_init"], same=(True,)),
    **_how("requests are served in their order", [f"{_ROLLOUT}.scheduling_policy"], same=("fcfs", None)),
    f"{_ROLLOUT}.cudagraph_capture_sizes": how(
        "vLLM chooses the sizes of its graphs, or engine_kwargs.vllm.cudagraph_capture_sizes does", same=(None,)
    ),
    f"{_ROLLOUT}.quantization": Verdict(
        "an engine's quantisation is an argument of its own", "set engine_kwargs.vllm.quantization=fp8", same=(None,)
    ),
    **_absent("an engine has no file of its quantisation", [f"{_ROLLOUT}.quantization_config_file"], same=(None,)),
    **_absent("SGLang comes later", _each([_ROLLOUT], "server.*", "sglang_rollout_mode")),
    **_absent("prefill and decoding run in one engine", [f"{_ROLLOUT}.disaggregation.enabled"]),
    **_how("prefill and decoding run in one engine", [f"{_ROLLOUT}.disaggregation.*"]),
    **_how(
        "weights go by handles on one device and by broadcast to others, as the placement asks",
        [f"{_ROLLOUT}.checkpoint_engine.*"],
    ),
    f"{_ROLLOUT}.over_sample_rate": Verdict(
        "exactly as many prompts are sampled as are wanted", same=(0, 0.0, None), reason=Reason.ABSENT
    ),
    **_absent(
        "samples of an earlier run can't be taken up", [f"{_ROLLOUT}.skip_rollout", "skip.*"], same=(None, False, [])
    ),
    **_how("samples of an earlier run can't be taken up", [f"{_ROLLOUT}.skip_dump_dir"]),
    f"{_ROLLOUT}.agent.default_agent_loop": _LATER_TURNS._replace(same=(None, "single_turn_agent")),
    **_how("prompts are sent as they come", [f"{_ROLLOUT}.agent.num_workers"]),
    **dict.fromkeys(_each([_ROLLOUT], "multi_turn.*", "agent.*"), _LATER_TURNS),
    **_how("every rollout is in rollouts/step_N.jsonl of the run folder", [f"{_ROLLOUT}.trace.*"]),
    f"{_ROLLOUT}.limit_images": _TEXT_ONLY,
    **dict.fromkeys([*_each([_ROLLOUT], "nnodes", "n_gpus_per_node"), "rollout.nnodes"], _OWN_POOL),
    "rollout.n_gpus_per_node": _OWN_POOL,
    **dict.fromkeys(["rollout.*", "async_training.*", "fully_async.*"], _LATER_ASYNC),
    # Data.
    **_switch("the chat travels with its row, as raw_prompt", True, ["data.return_raw_chat"]),
    **_how("token ids travel with their row", ["data.return_raw_input_ids"]),
    **_how("rollouts/step_N.jsonl holds the prompts", ["data.return_full_prompt"]),
    **_switch("validation keeps the order of the file", False, ["data.validation_shuffle"]),
    **_how("rows become tokens once, at load", ["data.filter_overlong_prompts_workers", "data.dataloader_num_workers"]),
    **_set("the tokenizer is the model's", f"set {_MODEL}.tokenizer_path", ["data.tokenizer"]),
    **_set("rows come in the order of (seed, epoch)", "subclass the trainer for another one", ["data.sampler.*"]),
    **_absent("rows are not made while training", ["data.datagen.*"]),
    **_absent("a response has no shortest length", ["data.min_response_length"], same=(None, 0)),
    **dict.fromkeys(
        _each(
            ["data"],
            "image_key",
            "video_key",
            "audio_key",
            "image_patch_size",
            "mm_processor_kwargs.*",
            "mm_processor_kwargs",
            "return_multi_modal_inputs",
        ),
        _TEXT_ONLY._replace(same=(None, False, {})),
    ),
    "data.tool_config_path": _LATER_TURNS,
    "data.function_tool_path": _LATER_TURNS,
    # Rewards.
    "reward.overlong_buffer.log": how("the penalty is a reward part of its own, overlong", same=(True, False)),
    "reward.reward_manager.name": Verdict(
        "rewards run concurrently, one call per sample",
        "use naive, or dapo with reward.overlong_buffer; what another manager computes is a function, "
        "reward.custom_reward_function.path",
        same=("naive", "dapo", None),
        noted=("prime", "rate_limited"),
    ),
    "reward.reward_manager.source": _OWN_FUNCTION._replace(same=("register", None)),
    "reward.reward_manager.module.name": _OWN_FUNCTION._replace(same=("custom_reward_manager", None)),
    "reward.reward_manager.*": _OWN_FUNCTION,
    "reward.reward_kwargs.*": Verdict(
        "arguments go to the function", "set reward.custom_reward_function.reward_kwargs", same=(None,)
    ),
    **_how(
        "rewards are computed while others are sampled", ["reward.use_reward_loop", "reward.launch_reward_fn_async"]
    ),
    "reward.sandbox_fusion.url": Verdict(
        "code runs in a sandbox of your own", "call it from reward.custom_reward_function", same=(None,)
    ),
    "reward.sandbox_fusion.*": how("code runs in a sandbox of your own"),
    f"{_RM}.enable_resource_pool": _RM_POOL,
    f"{_RM}.n_gpus_per_node": _RM_POOL,
    f"{_RM}.nnodes": _RM_POOL,
    f"{_RM}.rollout.*": Verdict(
        "a reward model runs on the training workers, not in an engine that a function could ask",
        noted=None,
        reason=Reason.ABSENT,
        beside="reward.custom_reward_function.path",
    ),
    **_how(f"{_RM}.micro_batch_size_per_gpu decides; null fills max_token_len_per_gpu", [f"{_RM}.use_dynamic_bsz"]),
    # The algorithm.
    **_how("one batch is sampled after the other", ["algorithm.filter_groups.max_inflight_gen_batches"]),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": Verdict(
        "both bounds stand in one key", "write rollout_rs_threshold='\"0.999_1.001\"'", same=(None,)
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": Verdict(
        "rules of rollout_rs leave sequences out by their worst token", "set rollout_rs=seq_max_k3", same=(None,)
    ),
    # The run.
    **_switch("rows are balanced over processes", True, ["trainer.balance_batch"]),
    **_set("checkpoints go to trainer.default_local_dir", "mount or copy from there", ["trainer.default_hdfs_dir"]),
    **_set(
        "checkpoints stay where they were read",
        "set trainer.max_ckpt_to_keep",
        ["trainer.del_local_ckpt_after_load"],
        same=(None, False),
    ),
    **_how(
        "every sample is written to rollouts/ in the run folder",
        ["trainer.rollout_data_dir", "trainer.validation_data_dir"],
        same=(None,),
    ),
    **_how("trackers write into the run folder", _each(["trainer"], "tensorboard_dir", "rl_logging_board_dir")),
    **_how(
        "there is one trainer, and it is synchronous",
        ["trainer.use_legacy_worker_impl", "trainer.use_v1", "trainer.v1.*"],
    ),
    "trainer.v1.trainer_mode": _LATER_ASYNC._replace(same=("sync", None)),
    "trainer.v1.sampler.custom_sampler.*": Verdict(
        "rows come in the order of (seed, epoch)", "subclass the trainer for another one", same=(None,)
    ),
    **_how(
        "trainer.save_freq says when to save; a run resumes from its newest checkpoint", ["trainer.esi_redundant_time"]
    ),
    **_set("phases of the trainer are methods", "subclass it", ["trainer.checkpoint_callback_class"]),
    **_how(
        "workers run in the driver's own Python",
        _each(["ray_kwargs.ray_init", "ray_init"], "runtime_env.py_executable"),
        same=(None,),
    ),
    **_absent("distillation is not here", ["distillation.enabled", "distillation.*"]),
    **_how("rows travel packed through Ray's object store", ["transfer_queue.*"]),
    **dict.fromkeys(_each((*_SCORED, _ROLLOUT, _RM), "profiler.enable"), _NO_PROFILE),
    **dict.fromkeys(["global_profiler.tool", "global_profiler.steps"], _NO_PROFILE._replace(same=(None, []))),
    **_how("no profile is taken", [*_each((*_SCORED, _ROLLOUT, _RM), "profiler.*"), "global_profiler.*"]),
    **_set("Ray records its own timeline", "use `ray timeline`", ["ray_kwargs.timeline_json_file"]),
    **_how(
        "hrl keeps its own run folder, trainer.default_local_dir", ["hydra.run.*", "hydra.job.*", "hydra.output_subdir"]
    ),
    **_set("hrl keeps its own run folder", "set trainer.default_local_dir", ["hydra.*"]),
}
"""Key or prefix → what becomes of it."""

NO_NPU = Verdict("models run on NVIDIA GPUs or on CPUs", "use auto", reason=Reason.ABSENT)
VALUES: dict[tuple[str, Any], Verdict] = {
    **{
        (f"{_ROLLOUT}.name", name): Verdict(f"{shown} comes later", "use vllm", reason=Reason.ABSENT)
        for name, shown in {"sglang": "SGLang", "trtllm": "TensorRT-LLM"}.items()
    },
    ("trainer.device", "npu"): NO_NPU,
    **{
        ("algorithm.rollout_correction.rollout_rs", level): Verdict(
            "a rule names a level and a divergence", f"use {rule}, with both bounds in rollout_rs_threshold"
        )
        for level, rule in {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}.items()
    },
}
"""(Key, value) that verl has and hrl lacks → what to write."""


def of_section(section: str, name: str) -> dict[str, Verdict]:
    """Return the verdicts on the keys of one section, for another kind of run that has the section as `name`."""
    return {
        f"{name}{key.removeprefix(section)}": verdict._replace(
            says=verdict.says.replace(section, name), instead=verdict.instead.replace(section, name)
        )
        for key, verdict in OUTSIDE.items()
        if key.startswith(f"{section}.")
    }
