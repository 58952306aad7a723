"""verl's names of keys: those read as another key of hrl, those taken without effect, and those refused.

Every table is data: a dotted key, or a prefix that ends in `.*`. `docs/configuration.md` prints them. The first are for
a PPO run, the `SFT_` ones for runs that learn from a data set, whose keys are those of verl's SFT trainer.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hrl.errors import Reason

ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))
RM = "reward.reward_model"
_TRAINED = (ACTOR, "critic")
_SCORED = (ACTOR, REF, "critic")
_MODELS = (MODEL, "critic.model", f"{RM}.model")
_FROZEN = (f"{REF}.fsdp_config", f"{RM}.model.fsdp_config")
_LEARNING = (f"{ACTOR}.fsdp_config", "critic.model.fsdp_config")
_SHARDED = (*_LEARNING, *_FROZEN)


class Verdict(NamedTuple):
    """How a key that hrl does not have is treated.

    Attributes:
        says: What hrl does instead, as a clause for the note and for the hint of a refusal.
        instead: What to write instead, as a clause for the hint.
        same: Values that describe what hrl does anyway; accepted silently.
        noted: Values that are accepted with a note, because they affect how a run computes and not what it learns; None
            means all values.
        reason: Why any other value is refused.
        beside: A key with which every value is refused, because the two together mean something else.
    """

    says: str
    instead: str = "remove the key"
    same: tuple[Any, ...] = ()
    noted: tuple[Any, ...] | None = ()
    reason: Reason = Reason.ALTERNATIVE
    beside: str | None = None

    @property
    def hint(self) -> str:
        """What to write instead, as a sentence."""
        return f"{self.says}; {self.instead}." if self.instead else f"{self.says}."

    def is_same(self, value: object) -> bool:
        """Return whether the value says what hrl does anyway."""
        return any(_equal(value, other) for other in self.same)

    def is_noted(self, value: object) -> bool:
        """Return whether the value is accepted with a note."""
        return self.noted is None or any(_equal(value, other) for other in self.noted)


def _equal(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def how(says: str, *, same: Iterable[Any] = ()) -> Verdict:
    """Return the verdict on a key that affects only how a run computes, whatever its value."""
    return Verdict(says, "", same=tuple(same), noted=None)


Given = Callable[[str], Any]
"""Returns the value of a key, as written or the schema's default."""


class Conversion(NamedTuple):
    """How a value is converted to values of other keys.

    Attributes:
        convert: Takes the value and the other keys and returns key → value, or None if it can't be computed.
        says: Description for the documentation.
        instead: What to write if it can't be computed.
    """

    convert: Callable[[Any, Given], Mapping[str, Any] | None]
    says: str
    instead: str


def _over_processes(target: str) -> Conversion:
    """Return a micro-batch of all processes, cut into one for each; as in verl, a rest is dropped."""

    def convert(rows: Any, given: Given) -> Mapping[str, Any] | None:
        per_machine, machines = given("trainer.n_gpus_per_node"), given("trainer.nnodes")
        if not all(type(count) is int and count > 0 for count in (rows, per_machine, machines)):
            return None
        return {target: max(1, rows // (per_machine * machines))}

    return Conversion(convert, f"`{target}` × the number of processes", f"set {target}, of one process")


def switches(*targets: str) -> Conversion:
    """Return the conversion of one switch to several; switched off it sets none of them."""

    def convert(value: Any, _: Given) -> Mapping[str, Any] | None:
        if not isinstance(value, bool):
            return None
        return dict.fromkeys(targets, True) if value else {}

    return Conversion(convert, " and ".join(f"`{target}=true`" for target in targets), f"set {' and '.join(targets)}")


def _validation_alone() -> Conversion:
    def convert(value: Any, _: Given) -> Mapping[str, Any] | None:
        if not isinstance(value, bool):
            return None
        return {"trainer.total_training_steps": 0} if value else {}

    return Conversion(convert, "`trainer.total_training_steps=0`", "set trainer.total_training_steps=0")


def _sampled_at_once() -> Conversion:
    """Return the conversion of `gen_batch_size` to the same number of prompts in batches of `train_batch_size`."""
    enable, train, bound = (
        "algorithm.filter_groups.enable",
        "data.train_batch_size",
        "algorithm.filter_groups.max_num_gen_batches",
    )

    def convert(prompts: Any, given: Given) -> Mapping[str, Any] | None:
        wanted, batches = given(train), given(bound)
        if prompts == wanted:
            return {}
        if given(enable) is not True or not all(type(n) is int and n > 0 for n in (prompts, wanted, batches)):
            return None
        return {bound: -(-batches * prompts // wanted)}

    return Conversion(
        convert,
        f"with `{enable}=true` the bound `{bound}`, × `data.gen_batch_size` ÷ `{train}`",
        f"set {train}: without {enable} a step samples what it trains on",
    )


def _offload(owners: Iterable[str], *names: str) -> dict[str, Conversion]:
    return {f"{owner}.offload_policy": switches(*(f"{owner}.{name}" for name in names)) for owner in owners}


CONVERTED: dict[str, Conversion] = {
    f"{ACTOR}.ppo_micro_batch_size": _over_processes(f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    "critic.ppo_micro_batch_size": _over_processes("critic.ppo_micro_batch_size_per_gpu"),
    f"{REF}.log_prob_micro_batch_size": _over_processes(f"{REF}.log_prob_micro_batch_size_per_gpu"),
    f"{ROLLOUT}.log_prob_micro_batch_size": _over_processes(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    f"{RM}.micro_batch_size": _over_processes(f"{RM}.micro_batch_size_per_gpu"),
    **_offload((f"{ACTOR}.fsdp_config", "critic.model.fsdp_config"), "param_offload", "optimizer_offload"),
    **_offload((f"{REF}.fsdp_config", f"{RM}.model.fsdp_config"), "param_offload"),
    "data.gen_batch_size": _sampled_at_once(),
    "trainer.val_only": _validation_alone(),
}
"""Key → conversion to other keys. A key that is written itself takes precedence."""

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
    f"{ACTOR}.policy_loss.tau_pos": f"{ACTOR}.tau_pos",
    f"{ACTOR}.policy_loss.tau_neg": f"{ACTOR}.tau_neg",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": f"{ROLLOUT}.weight_sync.bucket_mb",
    f"{ROLLOUT}.update_weights_bucket_megabytes": f"{ROLLOUT}.weight_sync.bucket_mb",
    # One switch for remote code
    "data.trust_remote_code": f"{MODEL}.trust_remote_code",
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
    f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}.response_length": "data.max_response_length",
    f"{ACTOR}.rollout_n": f"{ROLLOUT}.n",
    f"{REF}.rollout_n": f"{ROLLOUT}.n",
    "critic.rollout_n": f"{ROLLOUT}.n",
    "critic.shuffle": f"{ACTOR}.shuffle",
    "critic.model.trust_remote_code": f"{MODEL}.trust_remote_code",
    f"{RM}.model.trust_remote_code": f"{MODEL}.trust_remote_code",
}
"""Second key of verl → hrl's key for the same value; accepted if the values agree."""

NULL_IS_UNSET = frozenset(
    [
        f"{ROLLOUT}.name",
        "reward.custom_reward_function.name",
        "algorithm.rollout_correction.rollout_is_threshold",
        *(f"{owner}.optim.{name}" for owner in _TRAINED for name in ("min_lr_ratio", "lr_warmup_steps")),
    ]
)
"""Keys that are null in verl's files if nothing is chosen; null then means the default."""

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
    **_switch("model files are read from where they are", False, [*_each(_MODELS, "use_shm"), "data.use_shm"]),
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
        "micro-batches are as long as their rows",
        _each((*_SCORED, *_SHARDED), "pad_to_length", "pad_to_length_bucket"),
    ),
    **_switch("FSDP2 keeps the original parameters", True, _each(_SHARDED, "use_orig_params")),
    **_switch("FSDP2 prefetches by itself", False, _each((*_SHARDED, RM), "forward_prefetch")),
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
    **_switch(
        "a model that is only evaluated frees gathered parameters after its forward pass",
        True,
        _each(_FROZEN, "reshard_after_forward"),
    ),
    **_how("a model that is only evaluated has no optimizer", _each(_FROZEN, "optimizer_offload"), same=(False,)),
    **_how("which models are trained follows from their roles", _each(_SHARDED, "forward_only")),
    **_how(
        "trainer.seed seeds everything",
        [*_each(_SHARDED, "seed"), *_each(_TRAINED, "data_loader_seed"), *_each(_SCORED, "seed")],
    ),
    **_absent(
        "kernels are not forced to be deterministic",
        [*_each(_SHARDED, "full_determinism"), f"{ROLLOUT}.full_determinism"],
    ),
    **dict.fromkeys(_each((*_SCORED, *_SHARDED, RM), "strategy"), ONLY_FSDP2._replace(same=("fsdp", "fsdp2"))),
    "model_engine": ONLY_FSDP2._replace(same=("dp", "fsdp", "fsdp2", None), instead="remove the key"),
    **dict.fromkeys(
        [
            *_each((*_SCORED, *_MODELS, RM), *(f"{name}.*" for name in OTHER_ENGINES), "engine.*"),
            *_each(_SHARDED, "turbo_config.*"),
            *_each(_SCORED, "model_engine"),
            "actor",
            "ref",
        ],
        ONLY_FSDP2._replace(instead="remove the key"),
    ),
    **_absent(
        "sequence parallel training comes later",
        _each((*_SCORED, *_SHARDED, RM), "ulysses_sequence_parallel_size"),
        same=(1, None),
    ),
    **dict.fromkeys(
        _each(_MODELS, "lora_rank", "lora_adapter_path", "lora.rank", "lora.adapter_path"),
        _LATER_LORA._replace(same=(0, None)),
    ),
    **_how("LoRA comes later", _each(_MODELS, "lora_alpha", "target_modules", "exclude_modules", "lora.*")),
    **_absent("quantisation-aware training is not supported", [*_each((*_SCORED, *_SHARDED, ROLLOUT), "qat.enable")]),
    **_how("quantisation-aware training is not supported", [*_each((*_SCORED, *_SHARDED, ROLLOUT), "qat.*")]),
    **_absent("multi-token prediction is not supported", _each((*_MODELS, ROLLOUT), "mtp.enable")),
    **_how("multi-token prediction is not supported", _each((*_MODELS, ROLLOUT), "mtp.*")),
    **_absent(
        "router replay is not supported",
        [*_each(_SCORED, "router_replay.mode"), f"{ROLLOUT}.enable_rollout_routing_replay"],
        same=("disabled", None, False),
    ),
    **_how("router replay is not supported", _each(_SCORED, "router_replay.*")),
    **_how("only the text model is trained; other towers keep their weights", _each(_SCORED, "freeze_vision_tower")),
    **_set(
        "your own code is an ordinary Python import",
        "put it into the model folder and set trust_remote_code, or import it before the trainer starts",
        _each(_MODELS, "external_lib"),
    ),
    **_set(
        "the chat template is the tokenizer's",
        f"save the template in a tokenizer's folder and set {MODEL}.tokenizer_path",
        _each(_MODELS, "custom_chat_template"),
    ),
    **_set("the model's folder has its config.json", "set override_config", _each(_MODELS, "hf_config_path")),
    **_set("the model's folder has its config.json", "edit it there", [f"{RM}.model.override_config"], same=(None, {})),
    **_set("the dtype is a setting of FSDP2", f"set {ACTOR}.fsdp_config.dtype", _each(_MODELS, "torch_dtype")),
    "critic.model.tokenizer_path": Verdict(
        "the critic reads the policy's tokens", f"set {MODEL}.tokenizer_path", same=(None,)
    ),
    f"{RM}.model.input_tokenizer": Verdict(
        "the reward model reads the policy's tokens, and has to have its vocabulary", "", noted=None
    ),
    f"{RM}.max_length": Verdict("a reward model reads whole rows", same=(None,)),
    # The update.
    **_set(
        "a schedule has the length of the run",
        "set trainer.total_training_steps or total_epochs",
        _each(_TRAINED, "optim.total_training_steps"),
        same=(-1, None),
    ),
    **_absent("the optimizer is torch's AdamW", _each(_TRAINED, "optim.optimizer"), same=("AdamW", "adamw", None)),
    **_absent("the optimizer is torch's AdamW", _each(_TRAINED, "optim.optimizer_impl"), same=("torch.optim", None)),
    **_absent(
        "the settings of other engines' optimizers are not supported",
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
    f"{ACTOR}.checkpoint.strict": Verdict("a state that doesn't match is an error", same=(True,)),
    **_absent("checkpoints are FSDP2's", [f"{ACTOR}.checkpoint.mbridge_config.*"], same=(None, {})),
    **_how("the critic is saved completely, with the actor", ["critic.checkpoint.*"]),
    **_switch("entropy is measured", True, _each(_SCORED, "calculate_entropy")),
    **_switch(
        "it is computed if algorithm.adv_estimator reads it",
        True,
        _each(_SCORED, "calculate_sum_pi_squared"),
    ),
    **_switch(
        "the prompt of a group is computed once",
        True,
        [*_each(_SCORED, "use_prefix_grouper"), f"{MODEL}.share_prefix"],
    ),
    "critic.loss_scale_factor": Verdict(
        "the critic's seq-mean-token-sum-norm divides by data.max_response_length", same=(None,)
    ),
    **_how(
        "critic.ppo_micro_batch_size_per_gpu also applies to values",
        ["critic.forward_micro_batch_size", "critic.forward_micro_batch_size_per_gpu"],
    ),
    f"{ACTOR}.tis_imp_ratio_cap": Verdict(
        "the sampler's correction has a section of its own",
        "set algorithm.rollout_correction.rollout_is=token and rollout_is_threshold",
        same=(None, -1),
    ),
    **_how(
        "processes wait as long as trainer.timeouts says", ["actor_rollout_ref.nccl_timeout", "critic.nccl_timeout"]
    ),
    "actor_rollout_ref.hybrid_engine": _OWN_POOL._replace(same=(True, None)),
    # Sampling.
    f"{ROLLOUT}.mode": Verdict(
        "requests are asynchronous", same=("async", None), noted=("sync",), reason=Reason.ABSENT
    ),
    f"{ROLLOUT}.data_parallel_size": Verdict(
        "every tensor_model_parallel_size processes get an engine", "set that key", same=(1, None)
    ),
    f"{ROLLOUT}.pipeline_model_parallel_size": Verdict(
        "an engine is tensor parallel", "set tensor_model_parallel_size", same=(1, None)
    ),
    **_how(
        "experts are split like the engine's other weights",
        _each([ROLLOUT], "expert_parallel_size", "moe_tensor_parallel_size"),
        same=(1, None),
    ),
    **_switch("the sampler's log-probs are kept", True, [f"{ROLLOUT}.calculate_log_probs"]),
    **_switch("weights are gathered bucket by bucket", True, [f"{ROLLOUT}.layered_summon"]),
    **_how(
        "a sleeping engine drops its weights and gets them again when it wakes",
        [f"{ROLLOUT}.sleep_level"],
        same=(2, None),
    ),
    **_switch("an engine wakes in stages", True, [f"{ROLLOUT}.multi_stage_wake_up"]),
    **_switch("an engine sleeps when free_cache_engine says so", True, [f"{ROLLOUT}.enable_sleep_mode"]),
    f"{ROLLOUT}.load_format": Verdict(
        "the engine reads the model folder once, then weights are synced",
        "use safetensors",
        same=("auto", "safetensors", None),
        noted=("dummy", "hf", "dtensor", "dummy_dtensor", "dummy_hf", "dummy_megatron", "megatron"),
    ),
    f"{ROLLOUT}.do_sample": Verdict(
        "training samples are drawn", "validation has val_kwargs.do_sample", same=(True, None)
    ),
    **_absent("a response ends at the model's own stop token", [f"{ROLLOUT}.ignore_eos"]),
    f"{ROLLOUT}.logprobs_mode": Verdict(
        "log-probs are those of the sampled distribution", same=("processed_logprobs", None)
    ),
    **_how(
        "engine figures are in metrics.jsonl",
        _each(
            [ROLLOUT], "disable_log_stats", "prometheus.*", "moe_load_balance_metrics_interval", "moe_load_balance.*"
        ),
    ),
    **_how("the engine sees token ids alone", [f"{ROLLOUT}.skip_tokenizer_init"], same=(True,)),
    **_how("requests are served in their order", [f"{ROLLOUT}.scheduling_policy"], same=("fcfs", None)),
    f"{ROLLOUT}.cudagraph_capture_sizes": how(
        "vLLM chooses the sizes of its graphs, or engine_kwargs.vllm.cudagraph_capture_sizes does", same=(None,)
    ),
    f"{ROLLOUT}.quantization": Verdict(
        "quantisation is an argument of the engine", "set engine_kwargs.vllm.quantization=fp8", same=(None,)
    ),
    **_absent("an engine reads no quantisation file", [f"{ROLLOUT}.quantization_config_file"], same=(None,)),
    **_absent("SGLang comes later", _each([ROLLOUT], "server.*", "sglang_rollout_mode")),
    **_absent("prefill and decoding run in one engine", [f"{ROLLOUT}.disaggregation.enabled"]),
    **_how("prefill and decoding run in one engine", [f"{ROLLOUT}.disaggregation.*"]),
    **_how(
        "weights go by handles on one device and by broadcast to others, as the placement asks",
        [f"{ROLLOUT}.checkpoint_engine.*"],
    ),
    f"{ROLLOUT}.over_sample_rate": Verdict(
        "no more prompts are sampled than a step needs", same=(0, 0.0, None), reason=Reason.ABSENT
    ),
    **_absent(
        "samples of an earlier run can't be reused", [f"{ROLLOUT}.skip_rollout", "skip.*"], same=(None, False, [])
    ),
    **_how("samples of an earlier run can't be reused", [f"{ROLLOUT}.skip_dump_dir"]),
    f"{ROLLOUT}.agent.default_agent_loop": _LATER_TURNS._replace(same=(None, "single_turn_agent")),
    **_how("prompts are sent as they come", [f"{ROLLOUT}.agent.num_workers"]),
    **dict.fromkeys(_each([ROLLOUT], "multi_turn.*", "agent.*"), _LATER_TURNS),
    **_how("every rollout is in rollouts/step_N.jsonl of the run folder", [f"{ROLLOUT}.trace.*"]),
    f"{ROLLOUT}.limit_images": _TEXT_ONLY,
    **dict.fromkeys([*_each([ROLLOUT], "nnodes", "n_gpus_per_node"), "rollout.nnodes"], _OWN_POOL),
    "rollout.n_gpus_per_node": _OWN_POOL,
    **dict.fromkeys(["rollout.*", "async_training.*", "fully_async.*"], _LATER_ASYNC),
    # Data.
    **_switch("the chat travels with its row, as raw_prompt", True, ["data.return_raw_chat"]),
    **_how("token ids travel with their row", ["data.return_raw_input_ids"]),
    **_how("rollouts/step_N.jsonl holds the prompts", ["data.return_full_prompt"]),
    **_switch("validation keeps the order of the file", False, ["data.validation_shuffle"]),
    **_how(
        "rows are tokenised once, when they are read",
        ["data.filter_overlong_prompts_workers", "data.dataloader_num_workers"],
    ),
    **_set("the tokenizer is the model's", f"set {MODEL}.tokenizer_path", ["data.tokenizer"]),
    **_set("rows come in the order of (seed, epoch)", "subclass the trainer for another one", ["data.sampler.*"]),
    **_absent("rows are not made while training", ["data.datagen.*"]),
    **_absent("a response has no minimum length", ["data.min_response_length"], same=(None, 0)),
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
    "reward.overlong_buffer.log": how(
        "the penalty is always recorded, as the reward part overlong", same=(True, False)
    ),
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
        "rewards are computed while other responses are sampled",
        ["reward.use_reward_loop", "reward.launch_reward_fn_async"],
    ),
    "reward.sandbox_fusion.url": Verdict(
        "code runs in a sandbox of your own", "call it from reward.custom_reward_function", same=(None,)
    ),
    "reward.sandbox_fusion.*": how("code runs in a sandbox of your own"),
    f"{RM}.enable_resource_pool": _RM_POOL,
    f"{RM}.n_gpus_per_node": _RM_POOL,
    f"{RM}.nnodes": _RM_POOL,
    f"{RM}.rollout.*": Verdict(
        "a reward model runs on the training workers, not in an engine that a function could ask",
        noted=None,
        reason=Reason.ABSENT,
        beside="reward.custom_reward_function.path",
    ),
    **_how(f"{RM}.micro_batch_size_per_gpu decides; null fills max_token_len_per_gpu", [f"{RM}.use_dynamic_bsz"]),
    # The algorithm.
    **_how("one batch is sampled after the other", ["algorithm.filter_groups.max_inflight_gen_batches"]),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": Verdict(
        "one key holds both bounds", "write rollout_rs_threshold='\"0.999_1.001\"'", same=(None,)
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": Verdict(
        "rules of rollout_rs leave sequences out by their worst token", "set rollout_rs=seq_max_k3", same=(None,)
    ),
    # The run.
    **_switch("rows are balanced over processes", True, ["trainer.balance_batch"]),
    **_set("checkpoints go to trainer.default_local_dir", "mount or copy from there", ["trainer.default_hdfs_dir"]),
    **_set(
        "checkpoints are not deleted when they are read",
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
    **_absent("distillation is not supported", ["distillation.enabled", "distillation.*"]),
    **_how("rows travel packed through Ray's object store", ["transfer_queue.*"]),
    **dict.fromkeys(_each((*_SCORED, ROLLOUT, RM), "profiler.enable"), _NO_PROFILE),
    **dict.fromkeys(["global_profiler.tool", "global_profiler.steps"], _NO_PROFILE._replace(same=(None, []))),
    **_how("no profile is taken", [*_each((*_SCORED, ROLLOUT, RM), "profiler.*"), "global_profiler.*"]),
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
        (f"{ROLLOUT}.name", name): Verdict(f"{shown} comes later", "use vllm", reason=Reason.ABSENT)
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


# The trainers that learn from a data set.

_OTHER_ENGINES_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "data_parallel_size",
    "data_parallel_shard_size",
    "data_parallel_replicate_size",
    "tensor_parallel_size",
    "expert_parallel_size",
    "tp_size",
    "pp_size",
    "cp_size",
    "ep_size",
    "dp_size",
    "distributed_strategy",
    "use_mbridge",
    "vanilla_mbridge",
    "use_megatron_fsdp",
    "override_transformer_config.*",
    "override_mcore_model_config.*",
    "override_ddp_config.*",
    "backend_config.*",
    "attn_implementation",
    "activation_checkpointing",
    *(f"{name}.*" for name in OTHER_ENGINES),
)
_OWN_COLUMNS = Verdict(
    "prompt and answer are columns of their own, not parts of one",
    "write them so, and set data.prompt_key and data.completion_key",
    same=(None, []),
)
_ONE_LENGTH = Verdict("prompt and answer share one limit", "set data.max_length, for both together", same=(None,))

SFT_RENAMED: dict[str, str] = {
    "model.partial_pretrain": "model.path",
    "data.trust_remote_code": "model.trust_remote_code",
    "engine.*": "model.fsdp_config.*",
    "optim.grad_clip": "optim.clip_grad",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "data.multiturn.messages_key": "data.messages_key",
    "data.response_key": "data.completion_key",
    "trainer.checkpoint.*": "checkpoint.*",
    "model.fsdp_config.mixed_precision.param_dtype": "model.fsdp_config.dtype",
}

SFT_OUTSIDE: dict[str, Verdict] = {
    # What both kinds of run have in common stands in one table, under the policy's keys.
    **of_section("actor_rollout_ref.actor.fsdp_config", "model.fsdp_config"),
    **of_section("actor_rollout_ref.actor.optim", "optim"),
    **of_section("actor_rollout_ref.model", "model"),
    **of_section("trainer", "trainer"),
    **of_section("global_profiler", "global_profiler"),
    **of_section("hydra", "hydra"),
    "data.multiturn.enable": how("each row shows whether it is a whole chat"),
    "data.multiturn.*": Verdict("a chat is one column", "set data.messages_key", same=(None,)),
    "data.prompt_dict_keys": _OWN_COLUMNS,
    "data.response_dict_keys": _OWN_COLUMNS,
    "data.pad_mode": Verdict("rows are packed, not padded", noted=None),
    "data.ignore_input_ids_mismatch": how("every row is rendered once, whole"),
    "data.balance_dp_token": how("rows are balanced over processes"),
    "data.num_workers": how("rows are tokenised once, when they are read"),
    "data.micro_batch_size": Verdict(
        "a micro-batch belongs to one process", "set data.micro_batch_size_per_gpu", same=(None,)
    ),
    "data.use_dynamic_bsz": how("data.micro_batch_size_per_gpu decides; null packs up to max_token_len_per_gpu"),
    "data.max_prompt_length": _ONE_LENGTH,
    "data.max_response_length": _ONE_LENGTH,
    "use_remove_padding": how("padding never enters a model"),
    "model.lora_rank": _LATER_LORA._replace(same=(0, None)),
    "model.lora.rank": _LATER_LORA._replace(same=(0, None)),
    "model.strategy": ONLY_FSDP2._replace(same=("fsdp", "fsdp2")),
    **dict.fromkeys(
        ["engine", *(f"model.fsdp_config.{name}" for name in _OTHER_ENGINES_KEYS)],
        ONLY_FSDP2._replace(instead="remove the key"),
    ),
    "model.fsdp_config.use_remove_padding": how("padding never enters a model"),
    "ulysses_sequence_parallel_size": Verdict(
        "sequence parallel training comes later", same=(1, None), reason=Reason.ABSENT
    ),
}

SFT_VALUES = {("trainer.device", "npu"): NO_NPU}

SFT_CONVERTED = {
    "model.fsdp_config.offload_policy": switches(
        "model.fsdp_config.param_offload", "model.fsdp_config.optimizer_offload"
    )
}
