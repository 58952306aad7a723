"""verl's launch scripts: every key they set is honoured, describes what is always so, or is refused with advice.

`verl_keys.txt` lists the keys that the public scripts for FSDP set, in January and in August 2026.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from hrl.config import ConfigError, compose_cli, spellings
from hrl.config.compose import compose_kind, config_problems
from hrl.config.load import validate_kind
from hrl.config.placement import resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.rules import warnings
from hrl.config.run_kind import PPO, SFT
from hrl.config.section import leaves
from hrl.config.spellings import OFFLINE_SPELLINGS, PPO_SPELLINGS, Verdict, lookup
from hrl.errors import Reason

validate = partial(validate_kind, PPO)
OUTSIDE = PPO_SPELLINGS.outside

KEYS = Path(__file__).with_name("verl_keys.txt").read_text().split()
ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))


def verdict(key: str) -> str:
    name = key if key in OUTSIDE else PPO_SPELLINGS.present_name(key)
    above = (name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1))
    if name not in OUTSIDE and any(key in leaves(PPOTrainerConfig) for key in above):
        return "honoured"
    if name in PPO_SPELLINGS.must_equal:
        return "must equal"
    if name in PPO_SPELLINGS.converted:
        return "converted"
    entry = lookup(OUTSIDE, name)
    if entry is None:
        return "forgotten"
    return "without effect" if entry[1].taken else "refused"


def problem_of(key: str, value: object, **others: object):
    with pytest.raises(ConfigError) as caught:
        validate({key: value, **others})
    (problem,) = caught.value.problems
    return problem


def test_no_key_of_a_launch_script_is_forgotten():
    assert [key for key in KEYS if verdict(key) == "forgotten"] == []


def test_most_keys_are_honoured():
    honoured = [key for key in KEYS if verdict(key) == "honoured"]
    assert len(honoured) >= 85


HOW_NOT_WHAT = {
    "actor_rollout_ref.hybrid_engine": [True],
    f"{MODEL}.use_remove_padding": [True, False],
    f"{MODEL}.use_shm": [True, False],
    f"{MODEL}.use_fused_kernels": [True, False],
    f"{MODEL}.fused_kernel_options.impl_backend": ["torch", "triton"],
    "reward_model.model.enable_activation_offload": [True, False],
    f"{ACTOR}.optim.optimizer_impl": ["torch.optim", "torchao.optim", "bitsandbytes.optim"],
    f"{MODEL}.use_liger": [True],
    f"{ACTOR}.use_torch_compile": [True, False],
    f"{ACTOR}.entropy_checkpointing": [True, False],
    f"{ACTOR}.fsdp_config.forward_prefetch": [True, False],
    f"{ACTOR}.fsdp_config.use_orig_params": [True, False],
    f"{ACTOR}.fsdp_config.entropy_from_logits_with_chunking": [True, False],
    f"{ACTOR}.fsdp_config.wrap_policy.min_num_params": [0],
    f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype": ["fp32", "bf16"],
    f"{ACTOR}.data_loader_seed": [42],
    f"{ACTOR}.profiler.ranks": [[0]],
    f"{ACTOR}.profiler.enable": [True, False],
    f"{REF}.fsdp_config.model_dtype": ["fp32", "bfloat16"],
    f"{REF}.fsdp_config.optimizer_offload": [True, False],
    f"{ROLLOUT}.enable_sleep_mode": [True, False],
    f"{ROLLOUT}.layered_summon": [True, False],
    f"{ROLLOUT}.load_format": ["auto", "dummy", "safetensors"],
    f"{ROLLOUT}.disable_log_stats": [True, False],
    f"{ROLLOUT}.calculate_log_probs": [True, False],
    f"{ROLLOUT}.mode": ["async", "sync"],
    f"{ROLLOUT}.cudagraph_capture_sizes": [[8, 16]],
    f"{ROLLOUT}.checkpoint_engine.backend": ["nccl"],
    f"{ROLLOUT}.prometheus.port": [9090],
    "actor_rollout_ref.nccl_timeout": [14400],
    "critic.forward_micro_batch_size_per_gpu": [4],
    "data.dataloader_num_workers": [0, 8],
    "data.filter_overlong_prompts_workers": [64],
    "data.return_raw_chat": [True, False],
    "reward_model.use_reward_loop": [True, False],
    "reward_model.reward_manager": ["naive", "dapo", "prime"],
    "reward_model.rollout.gpu_memory_utilization": [0.8],
    "reward_model.rollout.name": ["vllm", "sglang"],
    "trainer.balance_batch": [True, False],
    "trainer.use_legacy_worker_impl": ["auto", "disable"],
    "trainer.rollout_data_dir": ["dumps"],
    "trainer.use_v1": [True],
    "transfer_queue.enable": [True],
    "global_profiler.save_path": ["profiles"],
    "global_profiler.tool": ["nsys", "torch"],
    "ray_kwargs.ray_init.runtime_env.py_executable": ["uv run --frozen --extra vllm"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in HOW_NOT_WHAT.items() for value in values])
def test_what_says_how_fast_and_not_what_is_taken_and_said_aloud_where_it_has_no_effect(key, value):
    config = validate({key: value})
    entry = lookup(OUTSIDE, key if key in OUTSIDE else PPO_SPELLINGS.present_name(key))
    assert entry is not None
    assert config == validate({})
    if entry[1].is_same(value):
        assert config.remarks == ()
    else:
        (line,) = config.remarks
        assert line.startswith(f"taken without effect: {key}=") and entry[1].says in line


def test_one_line_lists_what_was_taken_without_effect_by_what_hrl_does_instead():
    given = {
        f"{MODEL}.use_remove_padding": False,
        "critic.model.use_remove_padding": False,
        "data.use_shm": True,
        f"{MODEL}.use_liger": False,
    }
    assert validate(given).remarks == (
        f"taken without effect: {MODEL}.use_remove_padding=false, critic.model.use_remove_padding=false "
        "(padding never enters a model); data.use_shm=true (model files are read from where they are).",
    )


def test_the_notes_of_a_command_line_are_warnings_of_check_and_banner():
    config = compose_cli(["trainer.balance_batch=False"])
    assert any("trainer.balance_batch=false (rows are balanced" in line for line in warnings(config))


WHAT_IS_LEARNT = {
    f"{ROLLOUT}.ignore_eos": True,
    f"{ROLLOUT}.do_sample": False,
    f"{ROLLOUT}.over_sample_rate": 0.1,
    f"{ROLLOUT}.multi_turn.enable": True,
    f"{ROLLOUT}.quantization": "torchao",
    f"{ACTOR}.optim.num_cycles": 2,
    f"{ACTOR}.optim.zero_indexed_step": False,
    f"{ACTOR}.optim.optimizer": "SGD",
    f"{ACTOR}.optim.override_optimizer_config": {"eps": 1e-6},
    f"{ACTOR}.optim.total_training_steps": 100,
    f"{REF}.router_replay.mode": "R2",
    f"{ACTOR}.qat.enable": True,
    f"{MODEL}.lora_dropout": 0.05,
    f"{MODEL}.lora.target_modules": ["linear_qkv"],
    "reward_model.model.lora_rank": 8,
    f"{MODEL}.mtp.enable": True,
    "data.mm_processor_kwargs": {"max_pixels": 1},
    "reward_model.reward_manager": "batch",
    "distillation.teacher_models.gsm8k.model_path": "my/teacher",
}


@pytest.mark.parametrize(("key", "value"), WHAT_IS_LEARNT.items())
def test_what_would_change_what_is_learnt_is_refused_with_a_reason(key, value):
    problem = problem_of(key, value)
    assert problem.key == key
    assert problem.reason in (Reason.ALTERNATIVE, Reason.ABSENT)
    assert problem.hint.endswith(".")


def concrete(outside: Mapping[str, Verdict], wanted: Callable[[Verdict], Sequence[Any]]) -> list[tuple[str, str, Any]]:
    """(Key or pattern, a key that it is for, value): every entry of a table with each value that is wanted of it."""
    cases = []
    for pattern, entry in outside.items():
        key = pattern.removesuffix("*") + "some_key" if pattern.endswith(".*") else pattern
        assert lookup(outside, key) == (pattern, entry), f"{pattern} is never reached"
        cases += [(pattern, key, value) for value in wanted(entry)]
    return cases


BOTH = [(PPO, PPO_SPELLINGS), (SFT, OFFLINE_SPELLINGS)]


@pytest.mark.parametrize(("kind", "tables"), BOTH, ids=["ppo", "sft"])
def test_every_entry_takes_silently_what_hrl_does_anyway(kind, tables):
    base = validate_kind(kind, {})
    cases = concrete(tables.outside, lambda entry: entry.same)
    while cases:
        given = {key: value for _, key, value in reversed(cases)}  # of every entry one value, those left come next
        config = validate_kind(kind, given)
        assert config == base and config.remarks == ()
        cases = [case for case in cases if given[case[1]] is not case[2]]


@pytest.mark.parametrize(("kind", "tables"), BOTH, ids=["ppo", "sft"])
def test_every_entry_notes_what_has_no_effect(kind, tables):
    cases = concrete(tables.outside, lambda entry: ["x"] if entry.taken == "all" else entry.taken[:1])
    config = validate_kind(kind, {key: value for _, key, value in cases})
    assert config == validate_kind(kind, {})
    (remark,) = config.remarks
    assert [key for _, key, _ in cases if f"{key}=" not in remark] == []


@pytest.mark.parametrize(("kind", "tables"), BOTH, ids=["ppo", "sft"])
def test_every_entry_refuses_other_values_with_a_way_out(kind, tables):
    cases = concrete(tables.outside, lambda entry: [] if entry.taken == "all" else ["x"])
    with pytest.raises(ConfigError) as caught:
        validate_kind(kind, {key: value for _, key, value in cases})
    problems = {problem.key: problem for problem in caught.value.problems}
    for pattern, key, _ in cases:
        entry = tables.outside[pattern]
        assert (problems[key].hint, problems[key].reason) == (entry.hint, entry.reason)


@pytest.mark.parametrize("name", ["verl_keys.yaml", "synonyms.yaml"])
def test_no_row_of_a_table_hides_another(name):
    table = yaml.compose((Path(spellings.__file__).with_name(name)).read_text())
    nodes = [table]
    for node in nodes:
        if isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value]
            assert len(set(names)) == len(names), names
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    for rows in (spellings._VERL["outside"], spellings._VERL["offline"]["outside"]):
        keys = [key for row in rows for key in spellings._keys_of(row)]
        assert len(set(keys)) == len(keys)


def test_a_switch_tells_false_from_zero():
    assert problem_of(f"{MODEL}.use_remove_padding", 0).reason is Reason.ALTERNATIVE


def test_settings_of_what_is_absent_and_off_are_accepted():
    off = {
        f"{MODEL}.lora_rank": 0,
        f"{MODEL}.lora.rank": 0,
        f"{ROLLOUT}.multi_turn.enable": False,
        f"{ROLLOUT}.multi_turn.max_user_turns": None,
        f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent",
        f"{ACTOR}.ulysses_sequence_parallel_size": 1,
        f"{ACTOR}.router_replay.mode": "disabled",
        "distillation.enabled": False,
        "global_profiler.steps": None,
        "trainer.v1.trainer_mode": "sync",
        "model_engine": "dp",
    }
    assert validate(off).remarks == ()


def test_a_section_of_verls_yaml_says_what_class_it_becomes_there():
    assert validate({"algorithm.filter_groups._target_": "verl.trainer.config.FilterGroupsConfig"}) == validate({})
    assert problem_of("algorithm.filter_groups._target_", "mine.Filter").key == "algorithm.filter_groups._target_"


def test_null_where_verl_chooses_nothing_is_the_default():
    given = {
        f"{ROLLOUT}.name": None,
        "custom_reward_function.name": None,
        "algorithm.rollout_correction.rollout_is_threshold": None,
        f"{ACTOR}.optim.min_lr_ratio": None,
    }
    assert validate(given) == validate({})


# verl's examples with pictures: what they have in common, and what each sets beside.
GEO3K = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "geo3k/train.parquet",
    "data.val_files": "geo3k/test.parquet",
    "data.image_key": "images",
    "data.max_prompt_length": 1024,
    "data.max_response_length": 2048,
    "data.truncation": "error",
    f"{MODEL}.use_fused_kernels": True,
    f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.fsdp_config.optimizer_offload": False,
    f"{REF}.fsdp_config.param_offload": True,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.enable_chunked_prefill": False,
    f"{ROLLOUT}.n": 5,
    f"{ROLLOUT}.free_cache_engine": True,
    "trainer.n_gpus_per_node": 8,
}
QWEN3_5 = {
    f"{ACTOR}.entropy_from_logits_with_chunking": True,
    f"{ACTOR}.fsdp_config.fsdp_size": 8,
    f"{ACTOR}.fsdp_config.entropy_checkpointing": True,
    f"{ACTOR}.fsdp_config.offload_policy": True,
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 1,
    f"{REF}.fsdp_config.offload_policy": True,
    f"{ROLLOUT}.ignore_eos": False,
    f"{ROLLOUT}.max_num_batched_tokens": 8192,
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 6144,
}
OF_ANSWERS = {"data.image_patch_size": 16, f"{ROLLOUT}.prompt_length": 1024, f"{ROLLOUT}.response_length": 2048}
TEACHER = {
    f"{ACTOR}.use_kl_loss": False,
    "distillation.enabled": True,
    "distillation.n_gpus_per_node": 4,
    "distillation.teacher_models.teacher_model.model_path": "Qwen/Qwen3-VL-32B-Instruct",
    "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size": 2,
    "distillation.distillation_loss.loss_mode": "k1",
    "distillation.distillation_loss.use_policy_gradient": True,
}
EXAMPLES_WITH_PICTURES: dict[str, dict[str, Any]] = {
    "grpo_trainer/run_qwen2_5_vl_7b_fsdp.sh": {f"{ROLLOUT}.multi_stage_wake_up": True},
    "grpo_trainer/run_qwen3_vl_8b_fsdp.sh": {},
    "grpo_trainer/run_qwen3_vl_30b_a3b_fsdp.sh": {
        "algorithm.rollout_correction.rollout_is": "sequence",
        "algorithm.rollout_correction.rollout_is_batch_normalize": True,
        "algorithm.rollout_correction.rollout_rs": "token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "0.6_1.6",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2,
        f"{ACTOR}.fsdp_config.forward_prefetch": True,
    },
    "grpo_trainer/run_glm4_1v_9b_fsdp.sh": {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 10},
    "grpo_trainer/run_minicpm_o_2_6_fsdp.sh": {
        "data.trust_remote_code": True,
        "data.custom_cls.path": "rl_dataset.py",
        "data.custom_cls.name": "RLHFDataset",
        f"{ACTOR}.fsdp_config.use_orig_params": True,
    },
    "grpo_trainer/run_qwen3_5_27b_fsdp.sh": QWEN3_5 | {"trainer.resume_from_path": "checkpoints/"},
    "grpo_trainer/run_qwen3_5_27b_fsdp_turbo.sh": QWEN3_5
    | {
        f"{ACTOR}.strategy": "fsdp_turbo",
        f"{ACTOR}.fsdp_config.turbo_config.distributed.fully_shard_parallel_size": 8,
        f"{ACTOR}.fsdp_config.turbo_config.memory.recompute": True,
    },
    "grpo_trainer/run_qwen3_5_35b_fsdp.sh": QWEN3_5 | {f"{ROLLOUT}.enable_prefix_caching": False},
    "grpo_trainer/run_qwen3_5_2b_openr1_fsdp.sh": QWEN3_5
    | OF_ANSWERS
    | {"reward.custom_reward_function.path": "verl/utils/reward_score/openr1mm.py"},
    "grpo_trainer/run_qwen3_5_2b_video_fsdp.sh": QWEN3_5 | OF_ANSWERS | {"data.video_key": "videos"},
    "on_policy_distillation_trainer/run_qwen3_5_4b_fsdp.sh": TEACHER
    | {"distillation.distillation_loss.log_prob_min_clamp": -10.0},
    "on_policy_distillation_trainer/run_qwen3_vl_8b_fsdp.sh": TEACHER | {f"{ROLLOUT}.max_model_len": 3073},
    "profile/run_qwen2_5_vl_7b_torch_memory.sh": {
        "global_profiler.tool": "torch_memory",
        "global_profiler.global_tool_config.torch_memory.stack_depth": 32,
    },
    "tuning/lora/run_qwen2_5_vl_7b_fsdp.sh": {
        f"{MODEL}.lora_rank": 64,
        f"{MODEL}.target_modules": "all-linear",
        f"{MODEL}.exclude_modules": ".*visual.*",
    },
}


@pytest.mark.parametrize("own", EXAMPLES_WITH_PICTURES.values(), ids=EXAMPLES_WITH_PICTURES.keys())
def test_an_example_of_verl_with_pictures_composes(own):
    config = validate({**GEO3K, **own})
    assert config.data.image_key == "images" and config.trainer.n_gpus_per_node == 8


# Values that become those of other keys.


def test_a_micro_batch_of_all_processes_is_divided_among_them():
    given = {
        f"{ACTOR}.ppo_micro_batch_size": 64,
        f"{REF}.log_prob_micro_batch_size": 100,
        f"{ROLLOUT}.log_prob_micro_batch_size": 8,
        "trainer.n_gpus_per_node": 8,
        "trainer.nnodes": 2,
    }
    config = validate(given)
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is False
    assert config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu == 6  # 100 // 16, as in verl
    assert config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu == 1  # never none
    assert f"{ACTOR}.ppo_micro_batch_size=64 is read as {ACTOR}.ppo_micro_batch_size_per_gpu=4." in config.remarks


def test_a_micro_batch_that_is_no_number_is_refused_with_the_key_to_set():
    problem = problem_of(f"{ACTOR}.ppo_micro_batch_size", "many")
    assert problem.hint == f"Set {ACTOR}.ppo_micro_batch_size_per_gpu, of one process."


def test_the_offload_of_fsdp2_is_that_of_a_model_that_trains_and_of_parameters_elsewhere():
    config = validate({f"{ACTOR}.fsdp_config.offload_policy": True, f"{REF}.fsdp_config.offload_policy": True})
    actor, ref = config.actor_rollout_ref.actor.fsdp_config, config.actor_rollout_ref.ref.fsdp_config
    assert (actor.offload_policy, actor.param_offload, ref.param_offload) == (True, False, True)


def test_the_class_of_an_optimizer_becomes_its_name():
    for spelt, name in {"AdamW": "adamw", "adamw": "adamw", "Muon": "muon", "AdamW8bit": "adamw8bit"}.items():
        config = validate({f"{ACTOR}.optim.optimizer": spelt, f"{ACTOR}.optim.optimizer_impl": "torch.optim"})
        assert config.actor_rollout_ref.actor.optim.name == name
    assert validate({"critic.optim.optimizer": "Adafactor"}).critic.optim.name == "adafactor"
    assert validate({f"{ACTOR}.optim.optimizer": None}).actor_rollout_ref.actor.optim.name == "adamw"


def test_validation_alone_is_a_run_without_steps():
    assert validate({"trainer.val_only": True}).trainer.total_training_steps == 0
    assert validate({"trainer.val_only": False}).trainer.total_training_steps is None


def test_a_sampling_batch_scales_how_many_batches_may_be_sampled():
    dapo = {
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.max_num_gen_batches": 10,
        "data.train_batch_size": 512,
        f"{ROLLOUT}.n": 16,
    }
    for size, batches in {1536: 30, 512: 10, 100: 2}.items():  # 15,360, 5,120 and 1,000 prompts of 512 each
        config = validate({**dapo, "data.gen_batch_size": size})
        assert config.algorithm.filter_groups.max_num_gen_batches == batches
    without = problem_of("data.gen_batch_size", 1536, **{"data.train_batch_size": 512})
    assert "without algorithm.filter_groups.enable a step samples what it trains on" in without.hint


def test_machines_of_a_teacher_are_a_pool_of_its_own():
    line = TEACHER | {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 2, "data.train_files": "rows.jsonl"}
    placement = resolve_placement(validate(line | {"distillation.nnodes": 1}))
    assert placement.pools == {"global": (8, 8), "teacher": (4,)} and placement.roles["ref"] == "teacher"
    nowhere = ({}, {"distillation.nnodes": 0}, {"distillation.nnodes": 1, "distillation.enabled": False})
    assert all("teacher" not in validate(line | changes).trainer.resource_pools for changes in nowhere)
    placed = {"trainer.resource_pools": {"global": [8], "big": [2]}, "trainer.role_pools": {"ref": "big"}}
    kept = resolve_placement(validate(line | placed | {"trainer.nnodes": 1, "distillation.nnodes": 1}))
    assert kept.pools == {"global": (8,), "big": (2,)}
    assert "trainer.role_pools.ref" in problem_of("distillation.nnodes", -1, **line).hint


def test_a_reward_model_decides_alone_unless_a_function_is_named():
    model = {"reward_model.enable": True, "reward_model.model.path": "some/classifier"}
    assert validate(model).reward.entries == ()
    (named,) = validate({**model, "custom_reward_function.path": "my.py"}).reward.entries
    assert named.file_and_function == ("my.py", "compute_score") and named.weight == 1.0
    (half,) = validate({**model, "reward.function_weight": 0.5}).reward.entries
    assert (half.name, half.weight) == ("data_source", 0.5)
    assert [entry.name for entry in validate({}).reward.entries] == ["data_source"]


@pytest.mark.parametrize(
    ("given", "steps"), [(2, [2]), ([2, 3], [2, 3]), ([], []), (None, []), (False, []), (10**6, [10**6])]
)
def test_steps_to_profile_are_one_or_many(given, steps):
    assert validate({"trainer.profile": given}).trainer.profile == steps
    assert validate({"global_profiler.steps": given}).trainer.profile == steps


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (0, "[0] is 0, must be more than 0."),
        ([2, -1], "[1] is -1, must be more than 0."),
        (1.5, "[0] is 1.5, expected a whole number."),
        (True, "[0] is true, expected a whole number."),
        ("all", "[0] is 'all', expected a whole number."),
    ],
)
def test_what_is_no_step_can_not_be_profiled(given, what):
    problem = problem_of("trainer.profile", given)
    assert problem.what == what
    assert problem_of("global_profiler.steps", given).key == "trainer.profile"


def test_other_profilers_of_verl_are_refused_with_what_hrl_has():
    problem = problem_of("global_profiler.tool", "npu")
    assert problem.reason is Reason.ABSENT and "torch's profiler writes traces" in problem.hint


def test_chunked_prefill_is_an_argument_of_vllm():
    key, kwargs = f"{ROLLOUT}.enable_chunked_prefill", f"{ROLLOUT}.engine_kwargs"
    config = validate({key: True, kwargs: {"vllm": {"swap_space": 4}}})
    assert config.actor_rollout_ref.rollout.engine_kwargs == {"vllm": {"swap_space": 4, "enable_chunked_prefill": True}}
    (remark,) = config.remarks
    assert remark.startswith(f"{key}=true is read as {kwargs}=")
    assert validate({key: None}).actor_rollout_ref.rollout.engine_kwargs == {}
    contrary = {kwargs: {"vllm": {"enable_chunked_prefill": False}}}
    assert "engine_kwargs.vllm.enable_chunked_prefill alone" in problem_of(key, True, **contrary).hint
    assert "true or false" in problem_of(key, "no").hint


@pytest.mark.parametrize("kind", [PPO, SFT], ids=["ppo", "sft"])
@pytest.mark.parametrize("name", ["clearml", "vemlp_wandb", "rl_insight"])
def test_a_tracker_of_verl_that_is_not_built_has_a_reason_and_a_way_out(kind, name):
    for value in (name, ["console", name]):
        with pytest.raises(ConfigError) as caught:
            validate_kind(kind, {"trainer.logger": value})
        (problem,) = caught.value.problems
        assert (problem.key, problem.reason) == ("trainer.logger", Reason.ABSENT)
        assert problem.what == f"can't be {name!r} here:" and "metrics.jsonl" in problem.hint


def test_fp8_is_an_argument_of_vllm():
    key = f"{ROLLOUT}.quantization"
    assert validate({key: "fp8"}).actor_rollout_ref.rollout.engine_kwargs == {"vllm": {"quantization": "fp8"}}
    assert "engine_kwargs.vllm.quantization alone, to fp8" in problem_of(key, "torchao").hint


def test_a_line_for_fsdp_turbo_trains_on_fsdp2_with_its_groups():
    turbo = f"{ACTOR}.fsdp_config.turbo_config"
    config = validate(
        {
            f"{ACTOR}.strategy": "fsdp_turbo",
            f"{turbo}.distributed.fully_shard_parallel_size": 4,
            f"{turbo}.distributed.ulysses_parallel_size": 2,
            f"{turbo}.distributed.fsdp_plan.hook_modules": ["model.layers.{*}"],
            f"{turbo}.memory.recompute": True,
            "trainer.n_gpus_per_node": 8,
        }
    )
    sharding = config.actor_rollout_ref.actor.fsdp_config
    assert (sharding.fsdp_size, sharding.ulysses_sequence_parallel_size) == (4, 2)
    assert all(key in config.remarks[-1] for key in (f"{ACTOR}.strategy", "hook_modules", "memory.recompute"))
    assert problem_of(f"{turbo}.mine", 1).reason is Reason.ABSENT


def test_validation_with_a_temperature_draws_samples():
    temperature, flag = f"{ROLLOUT}.val_kwargs.temperature", f"{ROLLOUT}.val_kwargs.do_sample"

    def samples(**given):
        return validate(given).actor_rollout_ref.rollout.val_kwargs.do_sample

    assert samples(**{temperature: 0.6, f"{ROLLOUT}.val_kwargs.n": 30}) is True
    assert samples(**{temperature: 0.6, flag: False}) is False
    assert samples() is False


@pytest.mark.parametrize(
    ("written", "meant"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("torch.bfloat16", "bfloat16"), ("auto", "auto")],
)
def test_a_dtype_may_be_spelt_as_elsewhere(written, meant):
    config = validate({f"{ROLLOUT}.dtype": written, f"{REF}.fsdp_config.dtype": written})
    assert config.actor_rollout_ref.rollout.dtype == meant
    assert config.actor_rollout_ref.ref.fsdp_config.dtype == meant


def test_the_dtype_of_master_weights_may_be_spelt_as_elsewhere():
    def stored(written):
        return validate({f"{ACTOR}.fsdp_config.model_dtype": written}).actor_rollout_ref.actor.fsdp_config.model_dtype

    assert [stored(written) for written in ("bf16", "fp32", "float32")] == ["bf16", "fp32", "fp32"]
    assert problem_of(f"{ACTOR}.fsdp_config.model_dtype", "int8").key == f"{ACTOR}.fsdp_config.model_dtype"


def test_other_places_of_the_same_settings_are_read():
    config = validate(
        {
            "reward_model.overlong_buffer.enable": True,
            "reward_model.overlong_buffer.len": 64,
            f"{ACTOR}.policy_loss.tau_pos": 1.5,
            f"{ACTOR}.policy_loss.tau_neg": 2.5,
            f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "bf16",
            f"{ROLLOUT}.update_weights_bucket_megabytes": 512,
        }
    )
    assert (config.reward.overlong_buffer.enable, config.reward.overlong_buffer.len) == (True, 64)
    assert (config.actor_rollout_ref.actor.tau_pos, config.actor_rollout_ref.actor.tau_neg) == (1.5, 2.5)
    assert config.actor_rollout_ref.actor.fsdp_config.dtype == "bfloat16"
    assert config.actor_rollout_ref.rollout.weight_sync.bucket_mb == 512


def test_a_file_of_another_engine_is_refused_as_one_and_verls_own_folder_is_hrls():
    (problem, *_) = config_problems(PPO, ["--config-path=config", "--config-name=ppo_veomni_trainer.yaml"])
    assert problem.reason is Reason.ABSENT and "FSDP2" in problem.hint
    assert config_problems(PPO, ["--config-path=config", "--config-name=ppo_trainer", "trainer.total_epochs=1"]) == ()


def test_a_line_for_megatron_trains_on_fsdp2_with_its_sizes_and_says_so():
    megatron, transformer = f"{ACTOR}.megatron", f"{ACTOR}.megatron.override_transformer_config"
    line = [
        "--config-path=config",
        "--config-name=ppo_megatron_trainer.yaml",
        "trainer.n_gpus_per_node=8",
        f"{ACTOR}.strategy=megatron",
        f"{megatron}.tensor_model_parallel_size=4",
        f"{megatron}.pipeline_model_parallel_size=1",
        f"{megatron}.param_offload=true",
        f"{megatron}.optimizer_offload=true",
        f"{megatron}.grad_offload=true",
        f"{megatron}.use_mbridge=true",
        f"{REF}.megatron.param_offload=true",
        f"+{transformer}.recompute_granularity=full",
        f"+{transformer}.moe_aux_loss_coeff=0",
        f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=true",
    ]
    config = compose_kind(PPO, [*line, "data.train_files=rows.parquet"])
    sharding = config.actor_rollout_ref.actor.fsdp_config
    assert (sharding.tensor_parallel_size, sharding.param_offload, sharding.optimizer_offload) == (4, True, True)
    assert config.actor_rollout_ref.ref.fsdp_config.param_offload
    (remark,) = [remark for remark in config.remarks if "taken without effect" in remark]
    assert "model_engine='megatron'" in remark and f"{ACTOR}.strategy='megatron'" in remark
    assert "training runs on FSDP2" in remark
    for more, reason in {
        f"{megatron}.pipeline_model_parallel_size=2": Reason.ABSENT,
        f"+{megatron}.virtual_pipeline_model_parallel_size=2": Reason.ABSENT,
        f"+{transformer}.moe_z_loss_coeff=0.1": Reason.ABSENT,
        f"+{transformer}.moe_aux_loss_coeff=0.1": Reason.ALTERNATIVE,
        f"{megatron}.use_dist_checkpointing=true": Reason.ALTERNATIVE,
    }.items():
        (problem,) = config_problems(PPO, [*line, "data.train_files=rows.parquet", more])
        assert problem.reason is reason, problem


def test_a_row_that_is_cut_over_processes_needs_the_budget_of_all_of_them():
    # The budget holds a quarter of a row, which is what each of four processes has.
    line = {
        "data.max_prompt_length": 1024,
        "data.max_response_length": 3072,
        "trainer.n_gpus_per_node": 4,
        f"{ACTOR}.ulysses_sequence_parallel_size": 4,
    }
    assert validate(line | {f"{ACTOR}.ppo_max_token_len_per_gpu": 1024}).remarks == ()
    problem = problem_of(f"{ACTOR}.ppo_max_token_len_per_gpu", 1023, **line)
    assert "1023 tokens on each of 4 processes, but one row may have 4096" in problem.what
    assert problem.hint == "Set it to at least 1024."


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (f"{ACTOR}.ulysses_sequence_parallel_size", "actor_rollout_ref.actor"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", "actor_rollout_ref.actor"),
        (f"{REF}.ulysses_sequence_parallel_size", "actor_rollout_ref.ref"),
        ("critic.ulysses_sequence_parallel_size", "critic.model"),
        ("critic.fsdp_config.ulysses_sequence_parallel_size", "critic.model"),
        ("reward_model.ulysses_sequence_parallel_size", "reward.reward_model.model"),
        ("reward.reward_model.ulysses_sequence_parallel_size", "reward.reward_model.model"),
    ],
)
def test_every_spelling_of_sequence_parallelism_is_that_of_the_roles_sharding(written, read):
    config = validate({written: 2, "trainer.n_gpus_per_node": 2})
    assert attrgetter(f"{read}.fsdp_config.ulysses_sequence_parallel_size")(config) == 2
    assert config.actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size == (
        1 if read.startswith(("critic", "reward")) else 2
    )


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (f"{ACTOR}.", "actor_rollout_ref.actor"),
        (f"{ACTOR}.fsdp_config.", "actor_rollout_ref.actor"),
        (f"{ACTOR}.megatron.", "actor_rollout_ref.actor"),
        (f"{REF}.megatron.", "actor_rollout_ref.ref"),
        ("critic.megatron.", "critic.model"),
        ("critic.", "critic.model"),
        ("reward_model.megatron.", "reward.reward_model.model"),
        ("reward_model.", "reward.reward_model.model"),
    ],
)
@pytest.mark.parametrize("kind", ["tensor", "expert"])
def test_megatrons_sizes_are_those_of_the_roles_sharding_where_they_mean_the_same(written, read, kind):
    name = f"{kind}_model_parallel_size" if "megatron" in written else f"{kind}_parallel_size"
    config = validate({f"{written}{name}": 2, "trainer.n_gpus_per_node": 2})
    assert attrgetter(f"{read}.fsdp_config.{kind}_parallel_size")(config) == 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pipeline_model", "leave them to FSDP2, or cut each by tensor_parallel_size"),
        ("context", "set ulysses_sequence_parallel_size"),
        ("expert_tensor", "set expert_parallel_size"),
    ],
)
def test_what_megatron_alone_does_is_told_and_one_is_none(name, hint):
    key = f"{ACTOR}.megatron.{name}_parallel_size"
    assert validate({key: 1}).remarks == () and problem_of(key, 2).hint.endswith(f"{hint}.")


def test_a_supervised_run_has_the_key_at_its_root_and_in_the_engine():
    for kind in ("ulysses_sequence", "tensor", "expert"):
        of_megatron = () if "_" in kind else (f"engine.{kind}_model_parallel_size",)
        for key in (f"{kind}_parallel_size", f"engine.{kind}_parallel_size", *of_megatron):
            config = compose_kind(SFT, ["data.train_files=rows.parquet", f"{key}=2", "trainer.n_gpus_per_node=4"])
            assert getattr(config.model.fsdp_config, f"{kind}_parallel_size") == 2


def test_a_supervised_run_takes_the_same_switches():
    line = ["data.train_files=rows.parquet", "model.use_remove_padding=False", "engine.forward_prefetch=True"]
    assert config_problems(SFT, line) == ()
    (problem,) = config_problems(SFT, ["data.train_files=rows.parquet", "engine=megatron"])
    assert problem.reason is Reason.ABSENT


def test_older_spellings_are_read_under_their_present_name():
    config = validate(
        {
            "reward_model.enable": True,
            "reward_model.model.path": "some/classifier",
            "reward_model.model.fsdp_config.param_offload": True,
            "reward_model.num_workers": 4,
            "reward_model.reward_manager": "dapo",
            "reward_model.reward_kwargs.overlong_buffer_cfg.enable": True,
            "reward_model.reward_kwargs.overlong_buffer_cfg.len": 128,
            "reward_model.reward_kwargs.max_resp_len": 512,
            "custom_reward_function.path": "my.py",
            "critic.fsdp.optimizer_offload": True,
            "actor_rollout_ref.actor.optim.clip_grad": 0.5,
            "ray_kwargs.ray_init.num_cpus": 8,
        }
    )
    assert config.reward.reward_model.model_path == "some/classifier"
    assert config.reward.reward_model.model.fsdp_config.param_offload
    assert config.reward.num_workers == 4
    assert config.reward.overlong_buffer.len == 128
    assert config.reward.custom_reward_function.path == "my.py"
    assert config.critic.model.fsdp_config.optimizer_offload
    assert config.actor_rollout_ref.actor.grad_clip == 0.5
    assert config.trainer.ray_kwargs == {"num_cpus": 8}


def test_two_spellings_of_one_key_must_agree():
    same = {"custom_reward_function.path": "a.py", "reward.custom_reward_function.path": "a.py"}
    assert validate(same).reward.custom_reward_function.path == "a.py"
    with pytest.raises(ConfigError, match="both mean reward.custom_reward_function.path"):
        validate({**same, "reward.custom_reward_function.path": "b.py"})


def test_a_second_spelling_of_a_length_must_agree():
    with pytest.raises(ConfigError, match="is 100, but data.max_response_length is 512"):
        validate({"reward_model.reward_kwargs.max_resp_len": 100})


PPO_LINE = """
    data.train_files=/data/gsm8k/train.parquet data.val_files=/data/gsm8k/test.parquet
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=512
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.4
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
    critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.ppo_micro_batch_size_per_gpu=4
    algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=console trainer.val_before_train=False
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10 trainer.test_freq=10 trainer.total_epochs=15
"""

GRPO_LINE = """
    algorithm.adv_estimator=grpo data.train_files=/data/gsm8k/train.parquet data.val_files=/data/gsm8k/test.parquet
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
    data.filter_overlong_prompts=True data.truncation=error actor_rollout_ref.model.path=Qwen/Qwen3-8B
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.ref.fsdp_config.param_offload=True
    algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","wandb"]
    trainer.project_name=verl_grpo_example_gsm8k trainer.experiment_name=qwen3_8b_function_rm
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""


REWARD_MODEL = """
    reward_model.enable=True reward_model.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1 reward_model.num_workers=8
"""
ITS_ENGINE = """
    reward_model.rollout.name=vllm reward_model.rollout.gpu_memory_utilization=0.8
    reward_model.rollout.tensor_model_parallel_size=4 reward_model.rollout.prompt_length=8192
    reward_model.rollout.response_length=4096
"""


def test_a_launch_line_with_a_reward_model_composes_and_says_that_it_gets_no_engine():
    config = compose_cli([*PPO_LINE.split(), *REWARD_MODEL.split(), *ITS_ENGINE.split()])
    assert config.needs_reward_model and config.reward.num_workers == 8
    assert config.reward.entries == ()
    (line,) = config.remarks
    assert all(part.split("=")[0] in line for part in ITS_ENGINE.split())
    assert "runs on the training workers unless the run is to serve it" in line


def test_a_reward_model_that_a_function_asks_is_to_be_served():
    with pytest.raises(ConfigError) as caught:
        compose_cli([*PPO_LINE.split(), *REWARD_MODEL.split(), *ITS_ENGINE.split(), "custom_reward_function.path=a.py"])
    (problem,) = caught.value.problems
    assert problem.key == "reward_model.rollout.name" and problem.reason is Reason.ALTERNATIVE
    assert "set reward.reward_model.serve=true with a pool of its own" in problem.hint


def test_a_ppo_launch_line_composes_to_what_it_means_in_verl():
    config = compose_cli(PPO_LINE.split())
    assert config.algorithm.adv_estimator == "gae"
    assert config.needs_critic and not config.needs_reference
    assert config.actor_rollout_ref.rollout.n == 1
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is False
    assert config.critic.ppo_mini_batch_size == 64
    assert config.trainer.total_training_steps is None


def test_a_grpo_launch_line_composes_to_what_it_means_in_verl():
    config = compose_cli(GRPO_LINE.split())
    assert not config.needs_critic and config.needs_reference
    assert config.actor_rollout_ref.rollout.n == 5
    assert config.trainer.resource_pools == {"global": [8]}
    assert config.trainer.logger == ["console", "wandb"]
    assert config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu == 32


# ---------------------------------------------------------------------------------------------- episodes

TURNS = f"{ROLLOUT}.multi_turn"
OWN = {"environment.path": "my_env.py:Game"}


def test_verls_limits_and_parsers_of_turns_are_those_of_the_environment():
    config = validate(
        {
            f"{TURNS}.enable": True,
            f"{TURNS}.max_user_turns": 4,  # the order does not matter
            f"{TURNS}.max_assistant_turns": 5,
            f"{TURNS}.format": "gpt-oss",
            f"{ROLLOUT}.agent.num_workers": 3,
            f"{ROLLOUT}.agent.default_agent_loop": "tool_agent",
            **OWN,
        }
    )
    environment = config.environment
    assert (environment.max_turns, environment.tool_parser, environment.num_workers) == (5, "openai", 3)


def test_settings_of_turns_have_no_effect_without_turns():
    config = validate({f"{TURNS}.format": "hermes", f"{TURNS}.max_user_turns": 2, f"{ROLLOUT}.agent.num_workers": 3})
    assert config.environment == validate({}).environment and config.remarks == ()


@pytest.mark.parametrize("given", [{f"{TURNS}.enable": True}, {f"{ROLLOUT}.agent.default_agent_loop": "tool_agent"}])
def test_turns_without_an_environment_are_refused_with_the_keys_to_set(given):
    (key, value), *_ = given.items()
    problem = problem_of(key, value)
    assert problem.reason is Reason.ALTERNATIVE
    assert "environment.path=tools and environment.tools=[my_tools.py:function]" in problem.hint


def test_verls_limit_of_answers_is_one_less_than_the_turns():
    limit = f"{TURNS}.max_user_turns"
    assert [validate({limit: most, **OWN}).environment.max_turns for most in (3, 20)] == [4, 21]
    assert validate({limit: 0, **OWN}).environment.max_turns == validate(OWN).environment.max_turns, "0 is none there"
    assert "set environment.max_turns" in problem_of(limit, "many", **OWN).hint.lower()


@pytest.mark.parametrize("most", [3, 6, 9])
def test_the_lower_of_verls_two_limits_of_turns_holds_whatever_their_order(most):
    own, of_others = {f"{TURNS}.max_assistant_turns": 7}, {f"{TURNS}.max_user_turns": most}
    for given in (own | of_others, of_others | own):
        assert validate({**given, **OWN}).environment.max_turns == min(7, most + 1)


#: The fields of verl 0.9.1's MultiTurnConfig, AgentLoopConfig and CustomAsyncServerConfig, and of its data section.
OF_TURNS = {
    f"{TURNS}.enable": (False, True),
    f"{TURNS}.max_assistant_turns": (None, 5),
    f"{TURNS}.tool_config_path": (None, "tools.yaml"),
    f"{TURNS}.function_tool_path": (None, "tools.py"),
    f"{TURNS}.max_user_turns": (None, 5),
    f"{TURNS}.max_parallel_calls": (1, 2),
    f"{TURNS}.max_tool_response_length": (256, 512),
    f"{TURNS}.tool_response_truncate_side": ("middle", "left"),
    f"{TURNS}.use_inference_chat_template": (False, True),
    f"{TURNS}.tokenization_sanity_check_mode": ("strict", "disable"),
    f"{TURNS}.format": ("hermes", "glm"),
    f"{TURNS}.num_repeat_rollouts": (None, 4),
    f"{ROLLOUT}.agent.num_workers": (8, 4),
    f"{ROLLOUT}.agent.default_agent_loop": ("single_turn_agent", "tool_agent"),
    f"{ROLLOUT}.agent.agent_loop_config_path": (None, "loops.yaml"),
    f"{ROLLOUT}.agent.agent_loop_manager_class": (None, "mine.Manager"),
    f"{ROLLOUT}.agent.custom_async_server.path": (None, "server.py"),
    f"{ROLLOUT}.agent.custom_async_server.name": (None, "Server"),
    "data.need_tools_kwargs": (False, True),
    "data.tool_config_path": (None, "tools.yaml"),
    "data.function_tool_path": (None, "tools.py"),
}


@pytest.mark.parametrize("key", OF_TURNS)
def test_every_key_of_verls_turns_is_read_or_says_what_to_write(key):
    default, other = OF_TURNS[key]
    assert validate({**OWN, key: None}).environment == validate(OWN).environment
    if not key.endswith("max_tool_response_length"):  # characters there, tokens here
        validate({**OWN, key: default})
    try:
        validate({**OWN, key: other})
    except ConfigError as error:
        generic = OUTSIDE[f"{TURNS}.*"].instead
        assert all(problem.key == key and problem.hint and generic not in problem.hint for problem in error.problems)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (f"{TURNS}.max_tool_response_length", 256, "environment.max_observation_tokens"),
        (f"{TURNS}.tool_response_truncate_side", "left", "loses its middle"),
        (f"{TURNS}.tool_config_path", "tools.yaml", "environment.tools"),
        ("data.tool_config_path", "tools.yaml", "environment.tools"),
        (f"{TURNS}.function_tool_path", "tools.py", "names each of them"),
        (f"{TURNS}.interaction_config_path", "partner.yaml", "environment.path=my_env.py:Class"),
        (f"{ROLLOUT}.agent.agent_loop_config_path", "loop.yaml", "environment.path=my_env.py:Class"),
        (f"{TURNS}.num_repeat_rollouts", 4, "rollout.n"),
        (f"{TURNS}.of_next_year", 4, "docs/environments.md"),
    ],
)
def test_what_is_written_differently_says_how(key, value, says):
    problem = problem_of(key, value, **OWN)
    assert says in problem.hint and problem.reason is Reason.ALTERNATIVE
