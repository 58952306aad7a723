"""Launch lines as their users write them become lines of hrl that compose and mean the same."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hrl import cli
from hrl.config.compose import compose_kind, config_problems
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import KINDS
from hrl.migrate.line import Migrated, MigrationError, quoted, script
from hrl.migrate.migrate import migrate
from hrl.migrate.values import value_of


def one(text: str, name: str = "run.sh", processes: int = 1) -> Migrated:
    (found,) = migrate(text, name, processes)
    assert found.composes, found.lost
    return found


def config_of(found: Migrated) -> Any:
    return compose_kind(KINDS[found.kind], found.arguments)


def lost(found: Migrated) -> dict[str, str]:
    return {remark.written: remark.why for remark in found.lost}


# ------------------------------------------------------------------------------------------------- verl

VERL = """
set -x
MODEL=${MODEL:-Qwen/Qwen2-7B-Instruct}
PROMPTS=1024
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    data.train_batch_size=$PROMPTS \\
    data.max_response_length=$((512 * 2)) \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size=128 \\
    actor_rollout_ref.actor.optim.warmup_style=cosine \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.model.lora_rank=32 \\
    +actor_rollout_ref.model.override_config.attention_dropout=0. \\
    reward_model.reward_manager=dapo \\
    trainer.logger=['console','wandb'] \\
    trainer.n_gpus_per_node=8 \\
    trainer.default_hdfs_dir=hdfs://somewhere $@
"""


def test_a_line_of_verl_means_the_same_without_what_hrl_lacks() -> None:
    found = one(VERL)
    assert list(lost(found)) == ["$@"]
    config = config_of(found)
    assert isinstance(config, PPOTrainerConfig)
    assert config.actor_rollout_ref.model.lora_rank == 32
    assert config.data.train_files == ["$HOME/data/gsm8k/train.parquet"]
    assert (config.data.train_batch_size, config.data.max_response_length) == (1024, 1024)
    actor = config.actor_rollout_ref.actor
    assert (actor.ppo_micro_batch_size_per_gpu, actor.optim.lr_scheduler_type) == (16, "cosine")
    assert config.trainer.logger == ["console", "wandb"]
    assert config.trainer.default_remote_dir == "hdfs://somewhere"
    said = {remark.written: remark.why for remark in found.needless}
    assert said["actor_rollout_ref.model.use_remove_padding=True"] == "padding never enters a model"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--config-path=conf --config-name=mine", {"--config-path conf", "--config-name mine"}),
        ("--config-path conf --config-name mine", {"--config-path conf", "--config-name mine"}),
        ("--config-path conf --config-name=ppo_trainer -m", {"--config-path conf", "-m"}),
        ("stray --config-path=conf", {"stray", "--config-path conf"}),
    ],
)
def test_files_of_verl_are_each_named_once(options: str, named: set[str]) -> None:
    found = one(f"python3 -m verl.trainer.main_ppo {options} data.train_files=rows.parquet trainer.total_epochs=1")
    assert {remark.written for remark in found.lost if remark.written[:1] in "-s"} == named


def test_what_composes_as_it_is_stays_the_same_configuration() -> None:
    line = [
        "data.train_files=a.parquet",
        "algorithm.adv_estimator=rloo",
        "custom_reward_function.path=mine.py",
        "reward_model.enable=False",
        "actor_rollout_ref.actor.optim.clip_grad=0.5",
        "actor_rollout_ref.ref.fsdp_config.offload_policy=True",
        "trainer.max_actor_ckpt_to_keep=3",
        "trainer.n_gpus_per_node=8",
    ]
    found = one("python3 -m verl.trainer.main_ppo " + " ".join(line))
    before, after = compose_kind(KINDS["ppo"], line), config_of(found)
    assert before.model_dump() == after.model_dump()
    assert found.lost == [] and not any("optim.clip_grad" in argument for argument in found.arguments)


def test_what_a_line_of_verl_leaves_to_its_defaults_is_written_where_hrl_has_others() -> None:
    found = one(
        "python3 -m verl.trainer.main_ppo data.train_files=a.parquet "
        "algorithm.adv_estimator=reinforce_plus_plus_baseline"
    )
    config = config_of(found)
    said = {remark.written: remark.why for remark in found.differs}
    assert config.trainer.n_gpus_per_node == 8
    assert said["trainer.n_gpus_per_node=8"] == "was not in the line and is verl's default"
    actor = "actor_rollout_ref.actor"
    of_devices = {
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        f"{actor}.fsdp_config.fsdp_size": 4,
        f"{actor}.ulysses_sequence_parallel_size": 2,
        f"{actor}.ppo_micro_batch_size": 16,
    }
    cut = one(
        "python3 -m verl.trainer.main_ppo data.train_files=a.parquet algorithm.adv_estimator=grpo "
        f"actor_rollout_ref.rollout.n=4 {' '.join(f'{key}={value}' for key, value in of_devices.items())}"
    )
    policy = config_of(cut).actor_rollout_ref
    shared = policy.actor.fsdp_config
    assert cut.lost == [] and policy.rollout.tensor_model_parallel_size == 2
    assert (shared.fsdp_size, shared.ulysses_sequence_parallel_size) == (4, 2)
    assert policy.actor.ppo_micro_batch_size_per_gpu == 2  # 16 ÷ 8
    assert (
        said["actor_rollout_ref.rollout.n"] == "was not in the line and is 8 here; verl has 1"
    )  # of 1 there is no group
    sft = one(
        "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer data.train_files=a.parquet "
        "engine.ulysses_sequence_parallel_size=2"
    )
    assert (config_of(sft).trainer.total_epochs, config_of(sft).trainer.n_gpus_per_node) == (4, 4) and sft.lost == []


def test_a_warm_up_of_verl_is_as_long_in_optimizer_steps() -> None:
    line = (
        "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_epochs=2"
    )
    warmup = "actor_rollout_ref.actor.optim.lr_warmup_steps=10"
    found = one(
        f"python3 -m verl.trainer.main_ppo data.train_files=a.parquet algorithm.adv_estimator=grpo {line} {warmup}"
    )
    assert config_of(found).actor_rollout_ref.actor.optim.lr_warmup_steps == 80
    assert {remark.written: remark.why for remark in found.differs}[
        warmup
    ] == "is 80 optimizer steps, 8 for each trainer step"


def test_the_output_of_a_command_stays_in_a_value() -> None:
    found = one("python3 -m verl.trainer.main_ppo data.train_files=a.parquet trainer.experiment_name=run_$(date +%H)")
    assert lost(found) == {} and "\"trainer.experiment_name='run_$(date +%H)'\"" in script(found)


def test_arguments_of_an_engine_join_those_of_the_line() -> None:
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    words = f"+{engine}.mm_processor_cache_gb=0 actor_rollout_ref.rollout.enable_chunked_prefill=False"
    found = one(f"python3 -m verl.trainer.main_ppo data.train_files=a.parquet {words}")
    assert f"{engine}.enable_chunked_prefill=false" in found.arguments
    vllm = config_of(found).actor_rollout_ref.rollout.engine_kwargs["vllm"]
    assert vllm == {"mm_processor_cache_gb": 0, "enable_chunked_prefill": False}


def test_what_has_one_reason_is_told_once() -> None:
    teachers = " ".join(f"+distillation.teacher_models.{name}.model_path={name}/x" for name in ("a", "b"))
    text = script(migrate(f"python3 -m verl.trainer.main_ppo data.train_files=a.parquet {teachers}", "-")[0])
    (line,) = [line for line in text.splitlines() if "the run holds one teacher" in line]
    assert "teacher_models.a" in line and "teacher_models.b" in line and "can't be" not in line


def test_the_script_reads_variables_of_the_environment_where_it_runs() -> None:
    text = script(one(VERL))
    assert '    "data.train_files=$HOME/data/gsm8k/train.parquet" \\\n' in text
    assert text.startswith("# from run.sh: verl.trainer.main_ppo\nhrl train \\\n")
    body = text[text.index("hrl train") : text.index("\n\n")].replace("\\\n", " ")
    assert config_problems(KINDS["ppo"], shlex.split(body)[2:]) == ()


def test_several_lines_of_a_script_become_several() -> None:
    text = "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet\n" + VERL
    assert [found.kind for found in migrate(text, "run.sh")] == ["sft", "ppo"]


# ------------------------------------------------------------------------------------------------- OpenRLHF

OPENRLHF = """
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \\
   --colocate_all_models \\
   --pretrain some/policy --reward_pretrain some/reward \\
   --train_batch_size 128 --rollout_batch_size 256 --n_samples_per_prompt 4 --micro_train_batch_size 2 \\
   --prompt_max_len 1024 --generate_max_len 512 --bf16 --zero_stage 3 \\
   --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --init_kl_coef 1e-3 \\
   --actor_learning_rate 5e-7 --prompt_data some/prompts --input_key question --normalize_reward \\
   --lora_rank 8 --unheard_of 3 --use_wandb token
"""


def test_a_line_of_openrlhf_in_its_older_names() -> None:
    found = one(OPENRLHF)
    config = config_of(found)
    actor = config.actor_rollout_ref.actor
    assert config.algorithm.adv_estimator == "grpo"
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (256, 32)  # 128 sequences ÷ 4 samples
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 512)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.001, "k3")
    assert not config.algorithm.use_kl_in_reward
    assert (actor.optim.lr, actor.optim.betas, actor.optim.lr_scheduler_type) == (5e-7, [0.9, 0.95], "cosine")
    assert (config.trainer.n_gpus_per_node, config.trainer.total_epochs, config.trainer.seed) == (8, 1, 42)
    assert config.reward.reward_model.model_path == "some/reward"
    assert config.reward.shaping == {"standardise": None, "clip": 10.0}
    assert set(lost(found)) == {"--unheard_of 3"}
    assert config.actor_rollout_ref.model.lora_rank == 8
    assert config.trainer.logger == ["console", "wandb"] and "token" not in script(found).replace("tokens", "")


def test_a_correction_of_openrlhf_has_its_bounds_and_a_long_row_its_budget() -> None:
    flags = (
        "--actor.model_name_or_path a/b --data.prompt_dataset rows.jsonl --data.max_len 40000 "
        "--rollout.max_new_tokens 30000 --train.dynamic_batch_enable --train.max_tokens_per_gpu 16192 "
        "--ds.ring_attn_size 2 --actor.num_gpus_per_node 2 --actor.aux_loss_coef 0.001 --algo.kl.init_coef 0 "
        "--algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0.5 4 "
        "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 "
    )
    found = one(f"python -m openrlhf.cli.train_ppo_ray {flags} --algo.advantage.is_correction_type icepop")
    config = config_of(found)
    assert lost(found) == {}
    actor = config.actor_rollout_ref.actor
    assert (actor.ppo_max_token_len_per_gpu, actor.fsdp_config.ulysses_sequence_parallel_size) == (20000, 2)
    assert actor.router_aux_loss_coef == 0.001
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", "0.5_4")
    masked = config_of(
        one(f"python -m openrlhf.cli.train_ppo_ray {flags} --algo.advantage.is_correction_type seq-mask-tis")
    )
    correction = masked.algorithm.rollout_correction
    assert (correction.rollout_rs, correction.rollout_rs_threshold) == ("seq_mean_k1", "0.25_2")
    begin = "python -m openrlhf.cli.train_ppo_ray --algo.advantage.is_correction_enable"
    typed = f"{begin} --algo.advantage.is_correction_type seq-mask-tis --algo.advantage.is_correction_threshold"
    open_below = config_of(one(f"{typed} 0 5 --actor.model_name_or_path a/b --data.prompt_dataset rows.jsonl"))
    assert open_below.algorithm.rollout_correction.rollout_rs_threshold == "0.2_1e+09"
    assert "--algo.advantage.is_correction_threshold 5" in lost(one(f"{typed} 5 --actor.model_name_or_path a/b"))


def test_the_present_names_of_openrlhf_mean_the_same() -> None:
    older = "--pretrain a/b --rollout_batch_size 64 --train_batch_size 64 --init_kl_coef 0 --eps_clip_low_high 0.2 0.3"
    newer = (
        "--actor.model_name_or_path a/b --rollout.batch_size 64 --train.batch_size 64 --algo.kl.init_coef 0 "
        "--actor.eps_clip_low_high 0.2 0.3"
    )
    data = "--prompt_data rows.jsonl --max_new_tokens 100 --max_len 300"
    module = "python -m openrlhf.cli.train_ppo_ray"
    one_way, other = (one(f"{module} {flags} {data}") for flags in (older, newer))
    assert sorted(one_way.arguments) == sorted(other.arguments)
    config = config_of(other)
    assert (config.actor_rollout_ref.actor.clip_ratio_low, config.actor_rollout_ref.actor.clip_ratio_high) == (0.2, 0.3)
    assert not (config.needs_reference) and config.data.max_prompt_length == 200


def test_a_dpo_script_of_openrlhf_that_holds_its_flags_in_a_heredoc() -> None:
    text = """
set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --save_path ./checkpoint/dpo --train_batch_size 256 --micro_train_batch_size 1 --pretrain some/sft \\
   --max_epochs 1 --max_len 8192 --learning_rate 5e-7 --beta 0.1 --dataset some/pairs --apply_chat_template \\
   --chosen_key chosen --rejected_key rejected --flash_attn --load_checkpoint --gradient_checkpointing
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""
    found = one(text)
    config = config_of(found)
    assert found.words[:3] == ["hrl", "train", "dpo"] and found.lost == []
    assert (config.data.train_batch_size, config.data.max_length, config.optim.lr) == (256, 8192, 5e-7)
    assert config.data.train_files == ["some/pairs"]


# ------------------------------------------------------------------------------------------------- TRL

TRL = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("this file is read and not run")
STEPS = 2 * 100
dataset = load_dataset("openai/gsm8k", "main", split="train")

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

config = GRPOConfig(
    output_dir="Qwen2-GRPO",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_steps=STEPS,
    beta=0.04,
    learning_rate=compute_lr(),
    loss_type="dr_grpo",
    epsilon_high=0.28,
    use_vllm=True,
    vllm_importance_sampling_mode="token_truncate",
    min_p=0.1,
    report_to=["wandb"],
)
trainer = GRPOTrainer("Qwen/Qwen2-0.5B-Instruct", reward_funcs=reward_len, args=config, train_dataset=dataset)
trainer.train()
"""


def test_a_python_file_of_trl_is_read_and_not_run() -> None:
    found = one(TRL, "train.py", 2)
    config = config_of(found)
    actor = config.actor_rollout_ref.actor
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2-0.5B-Instruct"
    assert config.data.train_files == ["openai/gsm8k:main:train"]
    # 4 completions × 4 micro-batches × 2 processes = 32 completions, which are 4 prompts × 8 samples.
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, config.actor_rollout_ref.rollout.n) == (4, 4, 8)
    assert config.trainer.total_training_steps == 200
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.loss_agg_mode) == (True, 0.04, "seq-mean-token-sum-norm")
    assert (actor.clip_ratio_high, actor.optim.weight_decay, actor.optim.lr_scheduler_type) == (0.28, 0.0, "linear")
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert config.algorithm.rollout_correction.rollout_is_threshold == 3.0
    assert config.trainer.logger == ["console", "wandb"]
    assert set(lost(found)) == {"learning_rate=compute_lr()", "min_p=0.1", "reward_funcs=reward_len"}
    assert "one response" in lost(found)["reward_funcs=reward_len"]


def test_rows_that_a_file_of_trl_makes_of_a_data_set_are_told_to_be_other_rows() -> None:
    made = ".filter(is_short).select(range(100))"
    found = one(TRL.replace('split="train")', f'split="train"){made}'), "train.py")
    assert config_of(found).data.train_files == ["openai/gsm8k:main:train"]
    assert f"leaves out `{made}`" in lost(found)["train_dataset=dataset"]


@pytest.mark.parametrize(
    ("arguments", "save", "test"),
    [
        ("max_steps=200, save_steps=0.25, eval_strategy='steps', eval_steps=0.1", 50, 20),
        (
            "max_steps=30, save_steps=0.25, eval_strategy='steps', eval_steps=1",
            8,
            1,
        ),  # rounded up, as transformers does
        ("max_steps=30, save_steps=7, eval_strategy='steps'", 7, 10),  # TRL's logging_steps
        ("max_steps=30, save_steps=7, eval_strategy='steps', logging_steps=3", 7, 3),
    ],
)
def test_steps_of_trl_below_one_are_shares_of_all_steps(arguments: str, save: int, test: int) -> None:
    found = one(f"from trl import SFTConfig\nargs = SFTConfig({arguments})\n", "train.py")
    assert (config_of(found).trainer.save_freq, config_of(found).trainer.test_freq) == (save, test)


def test_a_share_of_an_unknown_number_of_steps_is_lost_by_name() -> None:
    found = one("from trl import SFTConfig\nargs = SFTConfig(save_steps=0.25)\n", "train.py")
    assert "set trainer.save_freq" in lost(found)["save_steps=0.25"]
    assert not any(argument.startswith("trainer.save_freq=") for argument in found.arguments)


def test_steps_of_trl_are_optimizer_steps_and_become_steps_of_the_trainer() -> None:
    text = "from trl import GRPOConfig\nargs = GRPOConfig(max_steps=100, steps_per_generation=4, save_steps=20)\n"
    config = config_of(one(text, "train.py", 4))
    # 8 × 4 × 4 = 128 completions a generation, of which each optimizer step takes 8 × 4 = 32.
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (16, 4)
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (25, 5)


@pytest.mark.parametrize(("name", "kind"), [("DPO", "dpo"), ("KTO", "dpo"), ("SFT", "sft"), ("Reward", "rm")])
def test_the_other_trainers_of_trl(name: str, kind: str) -> None:
    text = (
        f"import trl\nargs = trl.{name}Config(output_dir='out', max_length=512, warmup_steps=0.1)\n"
        f"trl.{name}Trainer(model='some/model', args=args, train_dataset=rows)\n"
    )
    found = one(text, "train.py")
    config = config_of(found)
    assert found.kind == kind and config.model.path == "some/model" and config.data.max_length == 512
    assert config.optim.lr_warmup_steps_ratio == 0.1 and config.data.train_batch_size == 8
    assert "train_dataset=rows" in lost(found) and config.data.train_files == ["YOUR_ROWS.jsonl"]


@pytest.mark.parametrize(
    ("more", "loss", "weight"), [("", "kto", 1.0), (" --loss_type apo_zero_unpaired --desirable_weight 1.5", None, 1.5)]
)
def test_kto_of_trl_learns_from_labels_whatever_its_loss(more: str, loss: str | None, weight: float) -> None:
    line = f"trl kto --model_name_or_path some/model --dataset_name trl-lib/kto-mix-14k{more}"
    for text in (line, f"{line} --config kto.yaml"):  # whose settings replace TRL's defaults
        algorithm = config_of(one(text, "-")).algorithm
        assert (algorithm.loss_type, algorithm.desirable_weight) == (loss or "apo_zero_unpaired", weight)


@pytest.mark.parametrize(
    "line",
    [
        "python trl/scripts/dpo.py --model_name_or_path some/model --dataset_name some/pairs --max_steps 7 "
        "--no_remove_unused_columns --no_shuffle_dataset",
        "accelerate launch --num_processes 4 examples/scripts/dpo.py --model_name_or_path some/model \\\n"
        "  --dataset_name some/pairs --max_steps 7",
    ],
)
def test_a_script_of_trl_is_the_command_of_its_name(line: str) -> None:
    found = one(line, "-")
    config = config_of(found)
    assert (found.kind, config.model.path, config.trainer.total_training_steps) == ("dpo", "some/model", 7)
    assert config.trainer.n_gpus_per_node == (4 if "accelerate" in line else 1)
    assert config.data.shuffle is ("accelerate" in line) and not any("--no_" in word for word in lost(found))
    (reward,) = migrate("python examples/scripts/reward_modeling.py --model_name_or_path some/model", "-")
    assert reward.kind == "rm"


def test_an_example_with_prompts_of_python_is_read_without_them() -> None:
    text = """
    >>> from trl import SFTConfig, SFTTrainer
    >>> trainer = SFTTrainer(
    ...     model="some/model",
    ...     args=SFTConfig(max_steps=7),
    ... )
    >>> trainer.train()
    1.25
    """
    found = one(text, "-")
    assert (config_of(found).model.path, config_of(found).trainer.total_training_steps) == ("some/model", 7)


def test_the_names_that_the_readme_of_openrlhf_gives_an_sft_run() -> None:
    found = one(
        "deepspeed --module openrlhf.cli.train_sft --actor.model_name_or_path some/model "
        "--actor.gradient_checkpointing_enable --data.dataset some/rows"
    )
    assert config_of(found).model.path == "some/model" and config_of(found).model.enable_gradient_checkpointing
    assert not any(word.startswith("--actor") for word in lost(found))


def test_the_adapter_of_a_line_of_trl_is_kept() -> None:
    line = "trl sft --model_name_or_path a/b --dataset_name c/d --use_peft --lora_r 8"
    found = one(f"{line} --lora_target_modules q_proj v_proj --lora_dropout 0.1 --use_dora --load_in_4bit")
    model = config_of(found).model
    assert model.load_in_4bit
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (8, 32, ["q_proj", "v_proj"])
    assert [why for written, why in lost(found).items() if "dora" in written] == ["vLLM's kernels don't compute DoRA"]
    assert any("no dropout" in remark.why for remark in found.needless)
    plain = one("trl grpo --model_name_or_path a/b --dataset_name c/d --use_peft")
    policy = config_of(plain).actor_rollout_ref.model
    assert (policy.lora_rank, policy.lora_alpha, policy.target_modules) == (16, 32, "all-linear")
    assert any("peft's own choice" in remark.why for remark in plain.differs)
    frozen = one("trl grpo --model_name_or_path a/b --dataset_name c/d --load_in_4bit")
    assert any("weights of 4 bits are frozen" in why for why in lost(frozen).values())


def test_the_command_of_trl() -> None:
    found = one("trl grpo --num_processes 2 --model_name_or_path a/b --dataset_name c/d --num_generations 4 --beta 0")
    config = config_of(found)
    assert (config.actor_rollout_ref.model.path, config.data.train_files) == ("a/b", ["c/d"])
    assert (config.trainer.n_gpus_per_node, config.data.train_batch_size) == (2, 4)  # 8 × 2 completions ÷ 4


# ------------------------------------------------------------------------------------------------- what can't be read


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("echo hello", "run.sh", "has no launch line of verl, OpenRLHF or TRL, such as"),
        ("python -m verl.trainer.main_generation x=1", "run.sh", "no counterpart of verl.trainer.main_generation"),
        ("python -m openrlhf.cli.train_kto --beta 1", "run.sh", "no counterpart of openrlhf.cli.train_kto"),
        ("trl vllm-serve --model x", "run.sh", "has no launch line"),
        ("def broken(:", "train.py", "train.py is no Python: .* in line 1"),
        ("import os", "train.py", "has none of GRPOConfig"),
    ],
)
def test_what_has_no_launch_line_says_what_was_looked_for(text: str, name: str, why: str) -> None:
    with pytest.raises(MigrationError, match=why):
        migrate(text, name)


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("a.b=1e-06", "a.b=1e-06"),
        ("a=[x,y z]", "'a=[x,y z]'"),
        ("a=$HOME/x", '"a=$HOME/x"'),
        ("a='x+'", "\"a='x+'\""),
        ("a='$x'y", "\"a='$x'y\""),
        ("a=`x`'", "'a=`x`'\"'\"''"),
    ],
)
def test_words_are_quoted_for_a_shell(word: str, written: str) -> None:
    assert quoted(word) == written
    if "$" not in word:
        assert shlex.split(written) == [word]


def test_the_command_reads_files_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(TRL)
    assert cli.main(["migrate", str(tmp_path / "train.py"), "--processes", "2"]) == 0
    assert capsys.readouterr().out.startswith("# from train.py (grpo)\nhrl train \\\n    algorithm.adv_estimator=grpo")
    monkeypatch.setattr("sys.stdin", io.StringIO(OPENRLHF))
    assert cli.main(["migrate", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["command"][:2] == ["hrl", "train"] and found["composes"]
    assert cli.main(["migrate", str(tmp_path / "none.sh")]) == 2
    assert "none.sh can't be read" in capsys.readouterr().err


def test_an_empty_standard_input_is_called_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli.main(["migrate"]) == 2
    assert capsys.readouterr().err.startswith("standard input has no launch line of verl")


def test_a_file_whose_settings_come_from_a_command_line_gets_none_of_them() -> None:
    text = """
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser
parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
trainer = GRPOTrainer("Qwen/Qwen2-0.5B", reward_funcs=length, args=training_args, train_dataset=load_dataset("a/b"))
"""
    found = one(text, "train.py")
    assert {word.partition("=")[0] for word in found.arguments} == {
        "algorithm.adv_estimator",
        "trainer.n_gpus_per_node",
        "actor_rollout_ref.model.path",
        "data.train_files",
    }
    assert "`trl grpo --flag value …`" in lost(found)["args=training_args"]


def test_what_a_script_gives_its_line_from_outside_is_named_without_values() -> None:
    text = "export VLLM_ATTENTION_BACKEND=XFORMERS\nexport KEY=secret\nexport ROWS=a.parquet\n# $@\n"
    line = "python3 -m verl.trainer.main_ppo data.train_files=$ROWS"
    assert set(lost(one(text + line))) == {"export VLLM_ATTENTION_BACKEND", "export KEY"}
    found = one(f"{text}{line} $@")
    assert set(lost(found)) == {"export VLLM_ATTENTION_BACKEND", "export KEY", "$@"}
    assert "secret" not in script(found) and found.arguments[0] == "data.train_files=a.parquet"


def test_kto_of_trl_learns_from_labels_the_model_that_the_file_loads() -> None:
    text = """
from trl import KTOConfig, KTOTrainer
NAME = "some/policy"
model = AutoModelForCausalLM.from_pretrained(NAME, dtype="auto")
args = KTOConfig(output_dir="out", beta=0.2, undesirable_weight=2.0, router_aux_loss_coef=0.01)
KTOTrainer(model=model, args=args, train_dataset=load_dataset("some/labels", split="train")).train()
"""
    found = one(text, "train_kto.py")
    config = config_of(found)
    assert lost(found) == {} and config.model.path == "some/policy" and config.optim.lr == 1e-6
    algorithm = config.algorithm
    assert (algorithm.loss_type, algorithm.beta, algorithm.undesirable_weight) == ("kto", 0.2, 2.0)
    assert algorithm.router_aux_loss_coef == 0.01
    changed = text.replace('dtype="auto"', "quantization_config=config")
    (quantised,) = migrate(changed, "train_kto.py")
    assert lost(quantised)["model=model"] == "is not a name; set model.path"  # what was loaded is another model


def test_a_line_of_trl_with_a_file_of_settings_gets_none_of_its_defaults() -> None:
    found = one("trl grpo --config recipe.yaml --learning_rate 3e-6", "-")
    assert "none of which are here" in lost(found)["--config recipe.yaml"]
    assert [word.partition("=")[0] for word in found.arguments] == [
        "algorithm.adv_estimator",
        "trainer.n_gpus_per_node",
        "actor_rollout_ref.actor.optim.lr",
    ]


def test_what_stands_before_the_command_and_what_the_script_is_called_with_is_named() -> None:
    text = (
        "rows=$1\nKEY=secret VLLM_USE_V1=1 python3 -m verl.trainer.main_ppo data.train_files=$rows trainer.seed=3 $2\n"
    )
    (found,) = migrate(text + "python3 -m verl.trainer.main_ppo data.train_files=a.parquet\n", "run.sh")[:1]
    assert {"KEY=…", "VLLM_USE_V1=…", "$1", "$2"} <= set(lost(found)) and "secret" not in script(found)
    assert "trainer.seed=3" in found.arguments
    other = migrate(text + "python3 -m verl.trainer.main_ppo data.train_files=a.parquet\n", "run.sh")[1]
    assert other.lost == []  # of another line's words
    found = one("env HF_HOME=/x nohup python3 -m verl.trainer.main_ppo data.train_files=a.parquet")
    assert set(lost(found)) == {"HF_HOME=…"}


def test_the_processes_of_a_launcher_are_those_of_the_run() -> None:
    line = "torchrun --standalone --nnodes=2 --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=a.parquet"
    assert config_of(one(line)).trainer.n_gpus_per_node == 8 and config_of(one(line)).trainer.nnodes == 2
    assert config_of(one(f"{line} trainer.n_gpus_per_node=4")).trainer.n_gpus_per_node == 4
    assert config_of(one(line.replace("_per_node=", "-per-node "))).trainer.n_gpus_per_node == 8
    sft = "--module openrlhf.cli.train_sft --pretrain m --dataset rows.jsonl"
    assert config_of(one(f"deepspeed --num_gpus 4 {sft}")).trainer.n_gpus_per_node == 4
    assert [remark.written for remark in one(f"deepspeed {sft}").differs] == ["deepspeed"]


def test_what_a_line_of_openrlhf_leaves_to_defaults_or_beside_a_remote_reward_is_named() -> None:
    line = "python3 -m openrlhf.cli.train_ppo_ray --prompt_data rows.jsonl --pretrain m"
    found = one(f"{line} --reward_pretrain r --remote_rm_url http://host/score")
    assert "is not taken beside a remote reward" in lost(found)["--reward_pretrain r"]
    assert "--actor.num_gpus_per_node 8" in {remark.written for remark in found.differs}
    assert "trainer.n_gpus_per_node=8" in found.arguments
    told = one(f"{line} --actor_num_gpus_per_node 8")
    assert "--actor.num_gpus_per_node 8" not in {remark.written for remark in told.differs}


@pytest.mark.parametrize("text", ["9" * 5000, "²e5", "[" * 3000, "2020-99-99", "{a"])
def test_a_value_that_yaml_fails_on_is_a_text(text):
    assert value_of(text) == text


@pytest.mark.parametrize(
    ("written", "files", "left_out"),
    [
        ('load_dataset("json", data_files="a.jsonl", split="train")', ["a.jsonl"], ""),
        ('load_dataset("json", data_files=FILE, split="train").shuffle(seed=1)', ["rows/a.jsonl"], ".shuffle(seed=1)"),
        ('load_dataset("parquet", data_files=["a.parquet", "b.parquet"])["train"]', ["a.parquet", "b.parquet"], ""),
        ('load_dataset(path="csv", data_files={"train": "a.csv", "test": "b.csv"}, split="test")', ["b.csv"], ""),
        ('WHOLE["test"]', ["t.jsonl"], ""),
        ('load_dataset("json", data_files="a.json", split="train[:90%]")', ["a.json"], "split='train[:90%]'"),
        ('load_dataset("json", data_files="a.json", field="rows")["train"]', ["a.json"], "field='rows'"),
        ('load_dataset("a/b")["validation"]', ["a/b::validation"], ""),
    ],
)
def test_files_that_a_script_of_trl_loads_are_the_rows(written: str, files: list[str], left_out: str) -> None:
    constants = 'FILE = "rows/a.jsonl"\nWHOLE = load_dataset("json", data_files={"train": FILE, "test": "t.jsonl"})\n'
    found = one(f'{constants}trainer = SFTTrainer("m", train_dataset={written})', "train.py")
    assert list(config_of(found).data.train_files) == files
    said = [why for name, why in lost(found).items() if name.startswith("train_dataset")]
    assert said == ([] if not left_out else [said[0]]) and all(left_out in why for why in said)


def test_files_that_only_a_run_could_tell_are_asked_for() -> None:
    found = one('SFTTrainer("m", train_dataset=load_dataset("json", data_files=sys.argv[1]))', "train.py")
    assert config_of(found).data.train_files == ["YOUR_ROWS.jsonl"] and any(
        "train_dataset" in name for name in lost(found)
    )


# ------------------------------------------------------------------------------------------------- episodes

TOOLS_OF_TRL = """
from trl import GRPOConfig, GRPOTrainer

def multiply(a: int, b: int) -> int: ...

GRPOTrainer(
    model="some/model",
    args=GRPOConfig(max_tool_calling_iterations=3),
    tools=[multiply],
    train_dataset=load_dataset("rows"),
)
"""


def test_tools_of_trl_are_named_and_its_rounds_are_one_turn_less() -> None:
    found = one(TOOLS_OF_TRL, "train.py")
    environment = config_of(found).environment
    assert (environment.path, environment.tools) == ("tools", ["YOUR_TOOLS.py:multiply"])
    assert environment.max_turns == 4 and "in place of YOUR_TOOLS.py" in lost(found)["tools=[multiply]"]
    assert any("max_turns=4" in remark.why for remark in found.differs)


def test_environments_and_agents_of_others_say_which_methods_are_theirs_here() -> None:
    found = one(TOOLS_OF_TRL.replace("tools=[multiply]", "environment_factory=Game"), "train.py")
    assert "hrl.ToolEnvironment" in lost(found)["environment_factory=Game"]
    found = one(TOOLS_OF_TRL.replace("tools=[multiply]", "rollout_func=play"), "train.py")
    assert "hrl's own" in lost(found)["rollout_func=play"]
    assert config_of(found).environment.path == "YOUR_ENVIRONMENT.py:Class"
    line = "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --train.agent_func_path agent.py"
    ((_, why),) = [(k, v) for k, v in lost(one(line)).items() if "agent_func" in k]
    assert "environment_feedback" in why and "environment.path=my_env.py:Class" in why


TURNS, AGENT = (f"actor_rollout_ref.rollout.{section}" for section in ("multi_turn", "agent"))


def of_turns(*words: str) -> Migrated:
    return one(" ".join(["python3 -m verl.trainer.main_ppo data.train_files=a.parquet", *words]))


@pytest.mark.parametrize(
    ("words", "path", "tools"),
    [
        ([f"{TURNS}.enable=True"], "tools", ["YOUR_TOOLS.py:YOUR_FUNCTION"]),
        ([f"{TURNS}.tool_config_path=tools.yaml"], "tools", ["YOUR_TOOLS.py:YOUR_FUNCTION"]),
        ([f"{TURNS}.function_tool_path=my/tools.py"], "tools", ["my/tools.py:YOUR_FUNCTION"]),
        (["data.function_tool_path=tools.py"], "tools", ["tools.py:YOUR_FUNCTION"]),
        ([f"{AGENT}.default_agent_loop=tool_agent"], "tools", ["YOUR_TOOLS.py:YOUR_FUNCTION"]),
        ([f"{AGENT}.default_agent_loop=mine"], "YOUR_ENVIRONMENT.py:Class", []),
        ([f"{TURNS}.enable=True", f"{TURNS}.interaction_config_path=i.yaml"], "YOUR_ENVIRONMENT.py:Class", []),
        ([f"{AGENT}.agent_loop_config_path=a.yaml"], "YOUR_ENVIRONMENT.py:Class", []),
    ],
)
def test_a_line_of_verl_with_turns_has_the_place_of_its_environment_and_keeps_its_limits(
    words: list[str], path: str, tools: list[str]
) -> None:
    found = of_turns(*words, f"{TURNS}.format=gpt-oss", f"{AGENT}.num_workers=4", f"{TURNS}.max_user_turns=5")
    environment = config_of(found).environment
    assert (environment.path, environment.tools) == (path, tools)
    assert (environment.tool_parser, environment.num_workers, environment.max_turns) == ("openai", 4, 6)
    assert any("in place of YOUR_" in why or f"in place of {''.join(tools)}" in why for why in lost(found).values())
    assert any("extra_info.tools_kwargs" in remark.written for remark in found.differs)


def test_an_environment_of_the_line_stays_and_the_lower_limit_of_turns_holds() -> None:
    limits = [f"{TURNS}.max_user_turns=2", f"{TURNS}.max_assistant_turns=5", f"{TURNS}.max_tool_response_length=500"]
    found = of_turns("environment.path=mine.py:Game", *limits, f"{AGENT}.default_agent_loop=tool_agent")
    environment = config_of(found).environment
    assert (environment.path, environment.max_turns, environment.max_observation_tokens) == ("mine.py:Game", 3, 125)
    assert lost(found) == {} and all(remark.why != "is off" for remark in found.differs)


def test_turns_of_a_line_without_any_are_not_taken_along() -> None:
    idle = [
        f"{TURNS}.enable=False",
        f"{TURNS}.max_assistant_turns=5",
        f"{TURNS}.format=hermes",
        f"{AGENT}.num_workers=8",
    ]
    found = of_turns(*idle, f"{AGENT}.default_agent_loop=single_turn_agent", f"{TURNS}.max_user_turns=5")
    given = {argument.partition("=")[0] for argument in found.arguments}
    defaults = {"algorithm.adv_estimator", "actor_rollout_ref.rollout.n", "trainer.n_gpus_per_node"}
    assert given == {"data.train_files"} | defaults and lost(found) == {}
    assert {remark.written for remark in found.needless} >= set(idle)


def test_a_remote_reward_of_openrlhf_is_asked_for_by_the_same_address() -> None:
    urls = "http://a:5000/get_reward,http://b:5000/get_reward"
    found = one(
        "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Q --data.prompt_dataset t.jsonl "
        f"--data.label_key answer --reward.remote_url {urls}"
    )
    assert not lost(found)
    config = config_of(found)
    assert isinstance(config, PPOTrainerConfig)
    (entry,) = config.reward.entries
    assert (entry.name, entry.kwargs) == ("remote", {"url": urls.split(","), "tokenizer": "Qwen/Q"})
