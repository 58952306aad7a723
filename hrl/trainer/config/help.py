"""The text of `--help`: how to say what to run, and the keys people set most."""

from hrl.trainer.config.folder import config_folder
from hrl.trainer.config.keys import leaves

MOST_USED = (
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "algorithm.adv_estimator",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.use_kl_loss",
    "algorithm.use_kl_in_reward",
    "critic.optim.lr",
    "reward.custom_reward_function.path",
    "trainer.total_epochs",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.test_freq",
    "trainer.save_freq",
    "trainer.logger",
    "trainer.project_name",
    "trainer.experiment_name",
)
_WIDTH = 100


def run_help(program: str = "python -m hrl.trainer.main_ppo") -> str:
    """Usage, groups, most used keys and examples."""
    groups = [
        f"  {folder.name + '=':<12}{', '.join(sorted(path.stem for path in folder.glob('*.yaml')))}"
        for folder in sorted(path for path in config_folder().iterdir() if path.is_dir())
    ]
    keys = [line for key in MOST_USED for line in _key_lines(key)]
    return "\n".join(
        [
            f"usage: {program} [group=choice ...] [key=value ...]",
            "",
            "Without arguments this runs the quickstart: GRPO on a small model that learns to add.",
            "",
            "groups:",
            *groups,
            "",
            "options:",
            "  --config-path, -cp DIR    folder of your own YAML file (its defaults list may name ppo_trainer)",
            "  --config-name, -cn NAME   its name; ppo_trainer unless given",
            "  --config-dir, -cd DIR     one more folder to look for groups in",
            "  --cfg, -c                 print the resolved configuration and stop",
            "  --help, -h                this text",
            "",
            "most used keys (all of them: docs/configuration.md):",
            *keys,
            "",
            "examples:",
            f"  {program} recipe=ppo",
            f"  {program} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\",
            "      data.train_files=train.parquet data.val_files=val.parquet trainer.n_gpus_per_node=8",
            "  hrl check recipe=ppo placement=separate    what a run would do, without starting it",
        ]
    )


def _key_lines(key: str) -> list[str]:
    first_sentence = leaves()[key].help.split(". ")[0].split("; ")[0].rstrip(".")
    room = _WIDTH - 6
    text = first_sentence if len(first_sentence) <= room else first_sentence[: room - 1].rstrip() + "…"
    return [f"  {key}", f"      {text}"]
