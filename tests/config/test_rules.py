"""Rules between keys: what can't work is refused with the arithmetic and the nearest value that can."""

import pytest

from hrl.config import ConfigError
from hrl.config.load import validate_kind
from hrl.config.outline import outline_of
from hrl.config.placement import resolve_placement
from hrl.config.rules import PPO_RULES, warnings
from hrl.config.run_kind import PPO
from tests.config.refusals import names, require_refused, validate

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"

CORRECTION = "algorithm.rollout_correction"
GDPO = {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["a", "b"]}
BYPASS = {f"{CORRECTION}.bypass_mode": True}
TEACHER = "distillation.teacher_models.teacher_model.model_path"
DISTILS = {"distillation.enabled": True, TEACHER: "my/teacher"}
TEACHER_URLS = "distillation.teacher_models.teacher_model.server.urls"
TEACHER_KEY = "distillation.teacher_models.teacher_model.server.api_key"
SERVED_TEACHER = {"distillation.enabled": True, TEACHER_URLS: ["http://10.0.0.5:8000"]}
DIVERGENCE = "distillation.distillation_loss"

SERVED = {
    "reward.reward_model.enable": True,
    "reward.reward_model.model_path": "rm",
    "reward.reward_model.serve": True,
    "trainer.resource_pools": {"global": [1], "judge": [2]},
    "trainer.role_pools": {"rm": "judge"},
}


CASES = [
    (
        {f"{MODEL}.load_in_4bit": True},
        f"{MODEL}.load_in_4bit is true, and weights of 4 bits can't be trained themselves. Set {MODEL}.lora_rank",
    ),
    (
        {f"{MODEL}.lora_rank": 8, f"{ACTOR}.fsdp_config.model_dtype": "bf16"},
        f"{ACTOR}.fsdp_config.model_dtype is bf16, and with {MODEL}.lora_rank an adapter is trained, which is in "
        f"float32. Set {ACTOR}.fsdp_config.model_dtype=fp32",
    ),
    (
        {
            "critic.model.lora_adapter_path": "/an/adapter",
            "critic.model.fsdp_config.model_dtype": "bf16",
            "algorithm.adv_estimator": "gae",
        },
        "critic.model.fsdp_config.model_dtype is bf16, and with critic.model.lora_adapter_path an adapter is trained",
    ),
    (
        {
            f"{MODEL}.load_in_4bit": True,
            f"{MODEL}.lora_rank": 8,
            f"{ACTOR}.fsdp_config.tensor_parallel_size": 2,
            "trainer.n_gpus_per_node": 2,
        },
        f"{ACTOR}.fsdp_config.tensor_parallel_size is 2, and a tensor group does not cut weights of 4 bits. Set it to "
        f"1, or remove {MODEL}.load_in_4bit.",
    ),
    (
        {"data.train_batch_size": 12, f"{ACTOR}.ppo_mini_batch_size": 5},
        f"{ACTOR}.ppo_mini_batch_size is 5 prompts and does not divide data.train_batch_size=12. "
        "Nearest that do: 4 and 6.",
    ),
    (
        {"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 16},
        f"{ACTOR}.ppo_mini_batch_size is 16 prompts and does not divide data.train_batch_size=8. Nearest that do: 8.",
    ),
    (
        {
            "algorithm.adv_estimator": "gae",
            "data.train_batch_size": 8,
            f"{ACTOR}.ppo_mini_batch_size": 4,
            "critic.ppo_mini_batch_size": 3,
        },
        "critic.ppo_mini_batch_size is 3 prompts and does not divide data.train_batch_size=8. "
        "Nearest that do: 2 and 4.",
    ),
    (
        {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 1},
        f"{ROLLOUT}.n is 1, but algorithm.adv_estimator=grpo compares the samples of a prompt and needs at least 2. "
        f"Set {ROLLOUT}.n=8, or another estimator.",
    ),
    ({"algorithm.adv_estimator": "rloo", f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n is 1"),
    ({"distillation.enabled": True}, f"{TEACHER} needs a value, because distillation.enabled is true."),
    (DISTILS | {f"{ACTOR}.use_kl_loss": True}, f"{ACTOR}.use_kl_loss is true, but the teacher takes the place"),
    (
        SERVED_TEACHER | {f"{ROLLOUT}.temperature": 0.7},
        f"{ROLLOUT}.temperature is 0.7, and a served teacher says how likely tokens are at 1. Set it to 1, or let the",
    ),
    (SERVED_TEACHER | {TEACHER_URLS: ["10.0.0.5:8000"]}, f"{TEACHER_URLS} has '10.0.0.5:8000', which is no address."),
    (SERVED_TEACHER | {TEACHER_URLS: ["http://a:1", "http://a:1/v1"]}, f"{TEACHER_URLS} names a server twice."),
    (
        SERVED_TEACHER | {TEACHER_URLS: {"a": ["http://a:1"], "b": ["a:1"]}},
        f"{TEACHER_URLS} has 'a:1', which is no add",
    ),
    (SERVED_TEACHER | {TEACHER_URLS: {"a": ["http://a:1"] * 2}}, f"{TEACHER_URLS} names a server twice"),
    (SERVED_TEACHER | {TEACHER_URLS: {"a": "http://a:1", "b": 3}}, f"{TEACHER_URLS} [b] is 3, expected a list."),
    ({"distillation.enabled": True, TEACHER_URLS: {"a": [3]}}, f"{TEACHER_URLS} [a.0] is 3, expected text."),
    (
        SERVED_TEACHER | {TEACHER_URLS: {"a": "http://a:1", "b": "http://b:1"}, TEACHER_KEY: "sk-1"},
        f"1 problem in the configuration:\n  1. {TEACHER_KEY} is not env:NAME; written out, it would be saved with the",
    ),
    (SERVED_TEACHER | {TEACHER_URLS: {"a": []}}, f"{TEACHER_URLS} has a name without an address. Name the servers"),
    (DISTILS | {"algorithm.preference_loss": "sigmoid"}, "distillation.enabled has no effect on algorithm.preference"),
    (DISTILS | {f"{DIVERGENCE}.loss_mode": "k1"}, f"{DIVERGENCE}.loss_mode is k1, whose expected gradient in a loss"),
    (
        DISTILS | {f"{DIVERGENCE}.loss_mode": "reverse_kl_topk", f"{DIVERGENCE}.use_policy_gradient": True},
        f"{DIVERGENCE}.loss_mode is reverse_kl_topk, which a sampled token's advantage can't hold: it has a gradient "
        f"of its own. Set k1, or {DIVERGENCE}.use_policy_gradient=false.",
    ),
    (
        {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora_alpha": 0},
        "actor_rollout_ref.model.lora_alpha is 0, by which what the adapter adds is multiplied. Set it to 16",
    ),
    (
        SERVED_TEACHER | {f"{DIVERGENCE}.loss_mode": "reverse_kl"},
        f"{DIVERGENCE}.loss_mode is reverse_kl, and a served teacher says how likely a few tokens are. "
        "Set reverse_kl_topk, or let the run hold the teacher.",
    ),
    (
        DISTILS | {f"{DIVERGENCE}.loss_mode": "forward_kl", f"{ACTOR}.fsdp_config.tensor_parallel_size": 2},
        f"{DIVERGENCE}.loss_mode is forward_kl, and with {ACTOR}.fsdp_config.tensor_parallel_size=2 no rank has",
    ),
    (DISTILS | {"reward.functions": []}, "reward.functions is empty and there is no reward model, so every reward"),
    ({"algorithm.adv_estimator": "gae", "critic.enable": False}, "critic.enable is false"),
    ({"algorithm.adv_estimator": "grpo", "trainer.critic_warmup": 5}, "trainer.critic_warmup is 5"),
    (
        {"algorithm.adv_estimator": "grpo_turns", "environment.on_truncation": "bootstrap"},
        "environment.on_truncation is bootstrap, but algorithm.adv_estimator=grpo_turns reads no values. "
        "Set algorithm.adv_estimator=gae, or score or mask.",
    ),
    (
        {"algorithm.preference_loss": "sigmoid", "environment.path": "my_env.py:Env"},
        "algorithm.preference_loss compares pairs of responses",
    ),
    (
        {f"{ACTOR}.router_replay.mode": "R3", f"{ROLLOUT}.enable_rollout_routing_replay": False},
        f"{ROLLOUT}.enable_rollout_routing_replay is false, but {ACTOR}.router_replay.mode is R3: only R3 takes the "
        "engine's experts. Remove the key: it follows the mode.",
    ),
    (
        {f"{ROLLOUT}.enable_rollout_routing_replay": True},
        f"{ROLLOUT}.enable_rollout_routing_replay is true, but {ACTOR}.router_replay.mode is disabled",
    ),
    (
        {f"{ACTOR}.router_replay.mode": "R2", "algorithm.preference_loss": "sigmoid"},
        f"{ACTOR}.router_replay.mode is R2, which takes the experts of the pass over old log-probs, and with "
        "algorithm.preference_loss there is none. Set it to R3, or disabled.",
    ),
    ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "kl"}, f"{ACTOR}.kl_loss_type is kl"),
    ({f"{ROLLOUT}.top_p": 0.9}, f"{ROLLOUT}.top_p is 0.9"),
    ({f"{ROLLOUT}.top_k": 50}, f"{ROLLOUT}.top_k is 50"),
    ({f"{ROLLOUT}.top_k": 0}, "Set it to -1 for off."),
    ({f"{ROLLOUT}.val_kwargs.n": 4}, f"{ROLLOUT}.val_kwargs.n is 4, but greedy decoding"),
    ({f"{ROLLOUT}.val_kwargs.do_sample": True}, f"{ROLLOUT}.val_kwargs.temperature is 0, which is greedy."),
    (
        {f"{ACTOR}.ppo_max_token_len_per_gpu": 1000},
        f"{ACTOR}.ppo_max_token_len_per_gpu is 1000 tokens, but one row may have 1024 (512 prompt + 512 response). "
        "Set it to at least 1024.",
    ),
    ({f"{ACTOR}.use_dynamic_bsz": False}, f"{ACTOR}.ppo_micro_batch_size_per_gpu needs a number of sequences"),
    (
        {f"{ACTOR}.fsdp_config.dtype": "float16"},
        f"{ACTOR}.fsdp_config.dtype is float16, in which small gradients become zero: the loss isn't scaled. "
        "Set it to bfloat16.",
    ),
    (
        {"algorithm.adv_estimator": "gae", "critic.model.fsdp_config.dtype": "float16"},
        "critic.model.fsdp_config.dtype is float16",
    ),
    ({"reward.reward_model.enable": True}, "reward.reward_model.model_path needs a folder or hub id"),
    ({"reward.functions": []}, "every reward would be 0"),
    (
        {"reward.custom_reward_function": {"path": "my.py", "reward_kwargs": {"api_key": "sk-123"}}},
        "reward.custom_reward_function.reward_kwargs has api_key written out, which would be saved with the run.",
    ),
    (
        {"reward.functions": ["numeric", {"path": "my.py", "db_password": "x"}]},
        "reward.functions [1] has db_password written out",
    ),
    (
        {"reward.functions": ["numeric"], "reward.custom_reward_function.reward_kwargs": {"k": 1}},
        "reward.custom_reward_function.reward_kwargs has k, and reward.functions names the functions, each with its "
        "own arguments. Write them into the entry of the function that takes them.",
    ),
    ({"reward.functions": [{"path": "my.py", "where": "https://me:pw@host"}]}, "[0] has where written out"),
    (
        {"environment.kwargs": {"api_key": "sk-123"}},
        "environment.kwargs has api_key written out, which would be saved with the run. Export it as an environment",
    ),
    ({"environment.env": ["API_KEY=sk-123"]}, "environment.env has the value of API_KEY written out"),
    (
        {"environment.path": "python", "environment.kwargs": {"time_s": 30}},
        "environment.kwargs.time_s is 30 s, and must be less than environment.tool_timeout_s=30, at which the",
    ),
    (
        {"environment.path": "tools", "environment.row_environments": {"python": {"time_s": 45}}},
        "environment.row_environments.python.time_s is 45 s, and must be less than environment.tool_timeout_s=30",
    ),
    (
        {"environment.path": "tools", "environment.tools": ["python"], "environment.tool_timeout_s": 10},
        "environment.tool_timeout_s is 10 s, and must be more than the 10 s that a program of the tool python may",
    ),
    (
        {"environment.path": "tools", "environment.episode_timeout_s": 60},
        "environment.step_timeout_s is 60 s, and must be less than environment.episode_timeout_s=60, at which the",
    ),
    (
        {"environment.path": "tools", "trainer.timeouts.call_s": 750},
        "environment.episode_timeout_s is 600 s, and must be less than 600 s, 80% of trainer.timeouts.call_s=750,",
    ),
    ({"reward.overlong_buffer": {"enable": True, "len": 0}}, "reward.overlong_buffer.len is 0 tokens"),
    ({"data.custom_cls.path": "my.py"}, "data.custom_cls.name needs the name of the class"),
    ({"data.val_files": [], "trainer.test_freq": 5}, "trainer.test_freq is 5, but data.val_files is empty."),
    ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path needs a checkpoint folder"),
    (
        {"trainer.save_freq": 5, f"{ACTOR}.checkpoint.save_contents": ["optimizer", "hf_model"]},
        f"{ACTOR}.checkpoint.save_contents is [optimizer,hf_model], from which no run can continue. "
        "Add model, or set trainer.save_freq=-1.",
    ),
    ({f"{ACTOR}.policy_loss.loss_mode": "dro"}, f"{ACTOR}.policy_loss.dro_beta needs a value"),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio": 0.0},
        f"{ACTOR}.policy_loss.kl_cov_ratio is 0, but must be a share of the tokens.",
    ),
    ({f"{ACTOR}.policy_loss.clip_cov_lb": 6.0}, f"{ACTOR}.policy_loss.clip_cov_lb is 6, not below clip_cov_ub=5."),
    ({"reward.shaping": {"clamp": 5.0}}, "reward.shaping names 'clamp', which nothing is registered under."),
    ({"reward.shaping": {"clip": None}}, "reward.shaping has clip without a limit. Give one, e.g. {clip: 5}."),
    ({"algorithm.adv_estimator": "gdpo"}, "algorithm.gdpo_reward_keys needs the names of the rewards"),
    ({"algorithm.gdpo_reward_keys": ["a"]}, "algorithm.gdpo_reward_keys is not read by grpo. Set algorithm.adv_est"),
    (GDPO | {"algorithm.gdpo_reward_keys": ["a", "a"]}, "names a reward twice"),
    (GDPO | {"algorithm.gdpo_reward_weights": [1.0]}, "has 1 weights for 2 rewards."),
    (GDPO | {"algorithm.use_kl_in_reward": True}, "which hold no KL"),
    (
        {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.filter_groups.enable": True, f"{ROLLOUT}.n": 1},
        f"{ROLLOUT}.n is 1, so no group could ever have different rewards.",
    ),
    ({"algorithm.filter_groups.max_num_gen_batches": 0}, "max_num_gen_batches is 0, must be more than 0."),
    ({f"{CORRECTION}.rollout_is_threshold": "a_b"}, f"{CORRECTION}.rollout_is_threshold can't be read: 'a_b' is no"),
    ({f"{CORRECTION}.rollout_is_threshold": 0.55}, "all of them would be cut down"),  # 0.5_5 as YAML reads it
    ({f"{CORRECTION}.rollout_rs": "token_k1"}, "rollout_rs_threshold needs a value, because rollout_rs is token_k1."),
    (
        {f"{CORRECTION}.rollout_rs": "token_k9", f"{CORRECTION}.rollout_rs_threshold": 2.0},
        f"{CORRECTION}.rollout_rs can't be read: unknown rejection rule 'token_k9'",
    ),
    ({f"{CORRECTION}.loss_type": "reinforce"}, f"{CORRECTION}.loss_type is reinforce, which only bypass mode reads."),
    (
        BYPASS | {"algorithm.adv_estimator": "optimal_token_baseline"},
        "needs the forward pass that it skips. Set it to false.",
    ),
    (
        BYPASS | {f"{CORRECTION}.loss_type": "reinforce", f"{ACTOR}.policy_loss.loss_mode": "gspo"},
        f"would replace {ACTOR}.policy_loss.loss_mode=gspo.",
    ),
    (BYPASS | {f"{CORRECTION}.rollout_is_batch_normalize": True}, "not for the whole batch"),
    (
        {f"{MODEL}.lora_rank": 600},
        f"{MODEL}.lora_rank is 600, and vLLM takes adapters up to rank 512. Lower",
    ),
    (
        {f"{ACTOR}.optim.name": "muon", f"{ACTOR}.fsdp_config.offload_policy": True},
        f"{ACTOR}.fsdp_config.offload_policy takes the optimizer's step on the CPU, and {ACTOR}.optim.name=muon",
    ),
    (
        {f"{ACTOR}.optim.name": "adamw8bit", f"{ACTOR}.fsdp_config.optimizer_offload": True},
        f"{ACTOR}.fsdp_config.optimizer_offload moves AdamW's moments, and {ACTOR}.optim.name=adamw8bit",
    ),
    (
        {
            "reward.reward_model.enable": True,
            "reward.reward_model.model_path": "prm",
            "reward.reward_model.step_token": "<s>",
            "reward.shaping": {"clip": 1.0},
        },
        "reward.shaping can't be used beside a reward model that scores steps",
    ),
    (
        {"reward.reward_model.reward_tokens": ["+", "-"]},
        "reward.reward_model.reward_tokens are said behind steps, and reward.reward_model.step_token is null",
    ),
    (
        {"reward.reward_model.reward_tokens": ["+", "+"], "reward.reward_model.step_token": "<s>"},
        "reward.reward_model.reward_tokens are twice '+'",
    ),
    (SERVED | {"trainer.role_pools": {}}, "trainer.role_pools.rm is 'global', whose devices actor_rollout has too"),
    (
        SERVED | {"trainer.resource_pools": {"global": [1], "judge": [1, 1]}},
        "trainer.role_pools.rm is 'judge', which has processes on 2 machines, and a server is on one",
    ),
    (
        SERVED | {"reward.reward_model.server_kwargs": {"tensor_parallel_size": 3}},
        "tensor_parallel_size=3, which does not divide the 2 devices of 'judge'",
    ),
    (SERVED | {"reward.reward_model.server_kwargs": {"port": 80}}, "server_kwargs has port, which the run sets itself"),
    (
        SERVED | {"reward.reward_model.step_token": "<s>"},
        "step_token is for a model that scores in the training workers, and reward.reward_model.serve is true",
    ),
    ({f"{ACTOR}.optim.name": "sgd"}, f"{ACTOR}.optim.name"),
    ({f"{MODEL}.target_modules": "*_proj"}, f"{MODEL}.target_modules is '*_proj', which is no regular expression"),
    ({"critic.model.exclude_modules": []}, "critic.model.exclude_modules is an empty list."),
    (
        {f"{MODEL}.lora_rank": 8, "trainer.role_pools": {"actor": None, "rollout": "global"}},
        "asks for an adapter, but trainer.role_pools.actor is null",
    ),
]


@pytest.mark.parametrize(("given", "sentence"), CASES, ids=names(CASES))
def test_what_cannot_work_is_refused(given, sentence):
    require_refused(given, sentence)


def test_arguments_that_only_sound_like_secrets_are_possible():
    kwargs = {"api_key": "env:KEY", "max_tokens": "9", "stop_token": "</s>", "key": "final", "tokenizer": "a/b"}
    config = validate({"reward.custom_reward_function": {"path": "my.py", "reward_kwargs": kwargs}})
    assert config.reward.custom_reward_function.reward_kwargs == kwargs


def test_standard_output_is_for_people_or_for_programs():
    with pytest.raises(ConfigError, match="names console and console-json, which both write to standard output"):
        validate({"trainer.logger": ["console", "console-json"]})
    assert validate({"trainer.logger": ["console-json", "wandb"]}).trainer.logger == ["console-json", "wandb"]


def test_every_rule_is_named_for_what_it_enforces_and_documented():
    assert all(rule.__doc__ and rule.__name__.count("_") >= 1 for rule in PPO_RULES)


def test_one_small_budget_is_one_problem_although_other_passes_inherit_it():
    with pytest.raises(ConfigError) as caught:
        validate({"algorithm.adv_estimator": "gae", f"{ACTOR}.ppo_max_token_len_per_gpu": 10})
    assert len(caught.value.problems) == 1


def test_budgets_set_apart_are_problems_apart():
    with pytest.raises(ConfigError) as caught:
        validate_kind(
            PPO,
            {
                "algorithm.adv_estimator": "gae",
                f"{ACTOR}.ppo_max_token_len_per_gpu": 10,
                "critic.forward_max_token_len_per_gpu": 20,
            },
        )
    assert [problem.key for problem in caught.value.problems] == [
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "critic.forward_max_token_len_per_gpu",
    ]


def test_models_without_gradients_may_be_float16():
    validate_kind(
        PPO, {f"{REF}.fsdp_config.dtype": "float16", f"{ACTOR}.use_kl_loss": True, f"{ROLLOUT}.dtype": "float16"}
    )


def test_greedy_and_sampled_validation_are_both_possible():
    validate({f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ROLLOUT}.val_kwargs.temperature": 0.7})
    sampled = {"do_sample": True, "temperature": 1.0, "n": 16, "top_p": 0.7, "top_k": 20}
    validate({f"{ROLLOUT}.val_kwargs.{name}": value for name, value in sampled.items()})


def test_one_sample_of_a_prompt_is_enough_where_the_teacher_alone_is_learnt_from():
    one = DISTILS | {"actor_rollout_ref.rollout.n": 1, "algorithm.adv_estimator": "grpo"}
    with pytest.raises(ConfigError, match="algorithm.adv_estimator=grpo compares the samples of a prompt"):
        validate(one)
    validate(one | {f"{DIVERGENCE}.use_task_rewards": False, f"{DIVERGENCE}.loss_mode": "forward_kl_topk"})


def test_a_served_teacher_has_no_place_in_the_run():
    pools = {"trainer.resource_pools": {"global": [1], "own": [1]}, "trainer.role_pools": {"ref": "own"}}
    config = validate_kind(PPO, SERVED_TEACHER | pools)
    assert config.needs_reference and "ref" not in resolve_placement(config).roles | config.micro_batches()
    assert "ref" not in outline_of(config).models
    assert any(line.startswith("trainer.role_pools.ref has no effect: servers score") for line in warnings(config))
    shared = validate_kind(PPO, SERVED_TEACHER | {"trainer.role_pools.ref": "global"})  # as every placement has it
    assert not any("role_pools" in line for line in warnings(shared))
    others = validate_kind(PPO, SERVED_TEACHER | {"distillation.teacher_key": "subject"})
    assert any(line.startswith("distillation.teacher_key has no effect") for line in warnings(others))
    shared = validate_kind(
        PPO, SERVED_TEACHER | {TEACHER_URLS: {"a": "http://a:1", True: ["http://a:1"], 3: "http://b:1"}}
    )
    server = shared.distillation.teacher_models.teacher_model.server
    assert server.of_each == (("http://a:1",), ("http://b:1",)) and [*server.urls] == ["a", "true", "3"]
    named = [shared.distillation.named_in(value, {}) for value in ("a", True, 3.0, 2.5)]
    assert named == ["a", "true", "3", "2.5"]
    of_each = SERVED_TEACHER | {"distillation.teacher_key": "subject", TEACHER_URLS: {"maths": "http://a:1"}}
    assert not any("teacher_key" in line for line in warnings(validate_kind(PPO, of_each)))
    off = validate_kind(PPO, SERVED_TEACHER | {"distillation.enabled": False})
    assert any(line.startswith(f"{TEACHER_URLS} has no effect while distillation") for line in warnings(off))


def test_a_run_without_validation_rows_is_possible():
    off = {"trainer.val_before_train": False}
    assert validate({"data.val_files": None, **off}).data.val_files == []


def test_kl_in_reward_and_loss_together_is_a_warning():
    config = validate_kind(
        PPO, {f"{ACTOR}.use_kl_loss": True, "algorithm.use_kl_in_reward": True, "trainer.save_freq": 10}
    )
    assert warnings(config) == [
        f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward penalise the same divergence twice."
    ]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({f"{MODEL}.lora_rank": 8}, [f"{ACTOR}.optim.lr=1e-06"]),
        ({f"{MODEL}.lora_rank": 8, f"{ACTOR}.optim.lr": 5e-4}, []),
        ({f"{MODEL}.lora_rank": 8, f"{ACTOR}.optim.lr": 0.0}, []),
        ({"critic.model.lora_rank": 8, "algorithm.adv_estimator": "grpo"}, []),  # of which there is none
        ({"critic.model.lora_rank": 8, "algorithm.adv_estimator": "gae"}, ["critic.optim.lr=1e-05"]),
        ({}, []),
    ],
)
def test_a_rate_of_whole_models_is_a_warning_beside_an_adapter(given, named):
    found = [warning for warning in warnings(validate_kind(PPO, given)) if "adapters need larger ones" in warning]
    assert [warning.split(" is ")[0] for warning in found] == named


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {f"{ACTOR}.fsdp_config.offload_policy": True, f"{ACTOR}.fsdp_config.param_offload": True},
            f"{ACTOR}.fsdp_config.param_offload has no effect: {ACTOR}.fsdp_config.offload_policy",
        ),
        (
            {f"{MODEL}.recompute_num_layers": 2, f"{MODEL}.enable_gradient_checkpointing": False},
            f"{MODEL}.recompute_num_layers has no effect: {MODEL}.enable_gradient_checkpointing is false.",
        ),
        ({f"{ACTOR}.optim.name": "adafactor"}, f"{ACTOR}.optim.lr=1e-06 is a rate for AdamW"),
    ],
)
def test_a_key_of_memory_that_nothing_reads_and_a_rate_of_another_optimizer_are_warnings(given, sentence):
    assert [warning for warning in warnings(validate_kind(PPO, given)) if warning.startswith(sentence)]
    assert not [warning for warning in warnings(validate_kind(PPO, {})) if warning.startswith(sentence)]


def test_what_verls_lines_set_and_nothing_reads_is_told():
    path = "trainer.resume_from_path"
    assert any(line.startswith(f"{path} has no effect while") for line in warnings(validate({path: "checkpoints/"})))
    named = validate({path: "checkpoints/", "trainer.resume_mode": "resume_path"})
    assert not any(path in line for line in warnings(named))

    measured = BYPASS | {f"{CORRECTION}.rollout_is": "token"}
    assert any("rollout_is=token is measured and weighs nothing" in line for line in warnings(validate(measured)))
    weighing = validate(measured | {f"{CORRECTION}.loss_type": "reinforce"})
    assert not any("weighs nothing" in line for line in warnings(weighing))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, f"{ACTOR}.policy_loss.loss_mode=gspo: "),
        ({f"{ACTOR}.policy_loss.loss_mode": "geo_mean"}, f"{ACTOR}.policy_loss.loss_mode=geo_mean: "),
        (
            BYPASS
            | {f"{CORRECTION}.loss_type": "reinforce", f"{CORRECTION}.rollout_is": "sequence"}
            | {f"{CORRECTION}.rollout_rs": "seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold": "0.1"},
            f"{CORRECTION}.rollout_is=sequence, {CORRECTION}.rollout_rs=seq_mean_k3: ",
        ),
        (BYPASS | {f"{CORRECTION}.rollout_rs": "token_k3", f"{CORRECTION}.rollout_rs_threshold": "0.1"}, None),
        ({f"{CORRECTION}.rollout_is": "sequence"}, None),
        ({}, None),
    ],
)
def test_what_takes_a_row_for_a_sequence_is_a_warning_beside_an_environment(given, named):
    """Outside bypass mode the driver corrects, to which an episode is one sequence."""
    several = {"environment.path": "tools", "environment.tools": ["python"], "trainer.save_freq": 10}
    found = [text for text in warnings(validate(several | given)) if "takes each row for a sequence" in text]
    assert len(found) == (named is not None)
    assert named is None or found[0].startswith(named)
    alone = validate(several | given | {"environment.max_turns": 1})
    assert not any("takes each row" in text for text in [*warnings(alone), *warnings(validate(given))])


def test_corrections_of_every_kind_are_possible():
    weights = {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"}
    rules = {f"{CORRECTION}.rollout_rs": "token_k1,seq_max_k3", f"{CORRECTION}.rollout_rs_threshold": "0.5_2.0,0.1"}
    validate(weights | rules)
    validate(BYPASS | rules)
    validate(BYPASS | weights | {f"{CORRECTION}.loss_type": "reinforce"})


def test_remote_code_is_pointed_out():
    config = validate({"data.trust_remote_code": True, "trainer.save_freq": 10})
    assert config.actor_rollout_ref.model.trust_remote_code
    assert len(warnings(config)) == 1


@pytest.mark.parametrize(
    ("save", "test", "keep", "warned"),
    [(10, 15, 2, True), (10, 5, 2, False), (5, 10, 2, False), (10, 15, None, False), (10, -1, 2, False)],
)
def test_a_best_checkpoint_that_few_checkpoints_can_be_is_a_warning(save, test, keep, warned):
    given = {"trainer.save_freq": save, "trainer.test_freq": test, "trainer.max_ckpt_to_keep": keep}
    found = [text for text in warnings(validate(given)) if "best checkpoint" in text]
    assert bool(found) == warned
    assert not found or "meet every 30 steps only" in found[0]


def test_a_run_that_trains_nothing_has_nothing_to_save():
    assert any("save_freq is off" in text for text in warnings(validate({})))
    assert not warnings(validate({"trainer.total_training_steps": 0}))
    assert not warnings(validate({"trainer.total_training_steps": 0, "trainer.save_freq": 0, "trainer.test_freq": 3}))
