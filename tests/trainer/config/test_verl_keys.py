"""verl's launch scripts: every key they set is honoured, describes what is always so, or is refused with advice.

`verl_keys.txt` lists the keys that 44 public PPO, GRPO and RLOO scripts for FSDP and vLLM set.
"""

from pathlib import Path

import pytest

from hrl.trainer.config import ConfigError, compose_cli
from hrl.trainer.config.compat import FIXED, MUST_EQUAL, REFUSED, lookup, present_name
from hrl.trainer.config.keys import leaves
from hrl.trainer.config.load import validate

KEYS = Path(__file__).with_name("verl_keys.txt").read_text().split()
OPEN = ("actor_rollout_ref.model.override_config.", "data.apply_chat_template_kwargs.")


def verdict(key: str) -> str:
    name = present_name(key)
    if name in leaves() or name.startswith(OPEN):
        return "honoured"
    if name in MUST_EQUAL:
        return "must equal"
    if name in FIXED:
        return "always so"
    return "refused" if lookup(REFUSED, name) else "forgotten"


def test_no_key_of_a_launch_script_is_forgotten():
    assert [key for key in KEYS if verdict(key) == "forgotten"] == []


def test_most_keys_are_honoured():
    honoured = [key for key in KEYS if verdict(key) == "honoured"]
    assert len(honoured) >= 85


@pytest.mark.parametrize("key", [key for key in KEYS if verdict(key) == "always so"])
def test_what_is_always_so_accepts_its_value_and_refuses_another(key):
    fixed = FIXED[present_name(key)]
    validate({key: fixed.accepted[0]})
    with pytest.raises(ConfigError) as caught:
        validate({key: "something else"})
    assert fixed.advice in str(caught.value)


@pytest.mark.parametrize("key", [key for key in KEYS if verdict(key) == "refused"])
def test_a_refusal_says_what_to_do_instead(key):
    with pytest.raises(ConfigError) as caught:
        validate({key: "x"})
    (problem,) = caught.value.problems
    assert problem.key == key
    assert problem.hint.endswith(".")


def test_a_fixed_key_tells_true_from_one():
    with pytest.raises(ConfigError):
        validate({"actor_rollout_ref.model.use_remove_padding": 1})


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


def test_a_launch_line_with_a_reward_model_needs_its_engine_removed_and_nothing_else():
    line = [*PPO_LINE.split(), *REWARD_MODEL.split()]
    config = compose_cli(line)
    assert config.needs_reward_model and config.reward.num_workers == 8
    with pytest.raises(ConfigError) as caught:
        compose_cli([*line, *ITS_ENGINE.split()])
    assert [problem.key for problem in caught.value.problems] == [part.split("=")[0] for part in ITS_ENGINE.split()]
    assert all("run on the training workers" in problem.hint for problem in caught.value.problems)


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
