"""How keys outside the schema are read: by verl's tables, or as names from TRL or OpenRLHF."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hrl.verl import keys as verl
from hrl.verl.keys import ACTOR, MODEL, ROLLOUT, Conversion, Verdict


class Synonym(NamedTuple):
    """The counterpart in hrl of another library's name.

    Attributes:
        key: Key with the same meaning.
        but: How meaning or unit differ, as a clause.
    """

    key: str
    but: str = ""

    @property
    def hint(self) -> str:
        """A sentence that tells the user what to write instead."""
        return f"It is {self.key} here{f': {self.but}' if self.but else ''}."


_PROMPTS = "it counts prompts, each sampled rollout.n times"
_SEQUENCES = "it counts sequences on one process"
_ONE_SWITCH = "the YAML of placement= says who shares a device"

PPO_SYNONYMS: dict[str, Synonym] = {
    # Both, or plain words
    "learning_rate": Synonym(f"{ACTOR}.optim.lr"),
    "lr": Synonym(f"{ACTOR}.optim.lr"),
    "actor_learning_rate": Synonym(f"{ACTOR}.optim.lr"),
    "critic_learning_rate": Synonym("critic.optim.lr"),
    "weight_decay": Synonym(f"{ACTOR}.optim.weight_decay"),
    "warmup_steps": Synonym(f"{ACTOR}.optim.lr_warmup_steps", "it counts optimizer steps"),
    "warmup_ratio": Synonym(f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    "lr_warmup_ratio": Synonym(f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    "lr_scheduler": Synonym(f"{ACTOR}.optim.lr_scheduler_type", "constant, cosine or linear"),
    "lr_scheduler_type": Synonym(f"{ACTOR}.optim.lr_scheduler_type", "constant, cosine or linear"),
    "max_grad_norm": Synonym(f"{ACTOR}.grad_clip"),
    "max_norm": Synonym(f"{ACTOR}.grad_clip"),
    "gradient_checkpointing": Synonym(f"{MODEL}.enable_gradient_checkpointing"),
    "model_name_or_path": Synonym(f"{MODEL}.path"),
    "model_path": Synonym(f"{MODEL}.path"),
    "adv_estimator": Synonym("algorithm.adv_estimator"),
    "advantage_estimator": Synonym("algorithm.adv_estimator", "grpo for group_norm, reinforce_plus_plus for reinforce"),
    "gamma": Synonym("algorithm.gamma"),
    "lam": Synonym("algorithm.lam"),
    "temperature": Synonym(f"{ROLLOUT}.temperature"),
    "seed": Synonym("trainer.seed"),
    # TRL
    "beta": Synonym(f"{ACTOR}.kl_loss_coef", f"the KL term is on with {ACTOR}.use_kl_loss=true"),
    "num_generations": Synonym(f"{ROLLOUT}.n", "samples per prompt"),
    "max_prompt_length": Synonym("data.max_prompt_length", "tokens after the chat template"),
    "max_completion_length": Synonym("data.max_response_length", "tokens"),
    "max_new_tokens": Synonym("data.max_response_length", "tokens"),
    "response_length": Synonym("data.max_response_length", "tokens"),
    "per_device_train_batch_size": Synonym(f"{ACTOR}.ppo_micro_batch_size_per_gpu", _SEQUENCES),
    "per_device_eval_batch_size": Synonym("data.val_batch_size", "it counts prompts over all processes"),
    "gradient_accumulation_steps": Synonym(
        f"{ACTOR}.ppo_mini_batch_size", "prompts of one optimizer step; how many micro-batches those are, follows"
    ),
    "generation_batch_size": Synonym("data.train_batch_size", _PROMPTS),
    "steps_per_generation": Synonym(
        f"{ACTOR}.ppo_mini_batch_size", "it counts prompts: data.train_batch_size ÷ the steps per generation"
    ),
    "loss_type": Synonym(
        f"{ACTOR}.loss_agg_mode",
        "seq-mean-token-mean for grpo, token-mean for dapo and bnpo, seq-mean-token-sum-norm for dr_grpo",
    ),
    "bf16": Synonym(f"{ACTOR}.fsdp_config.dtype", "it says in which dtype the model computes, e.g. bfloat16"),
    "num_iterations": Synonym(f"{ACTOR}.ppo_epochs"),
    "num_ppo_epochs": Synonym(f"{ACTOR}.ppo_epochs"),
    "epsilon": Synonym(f"{ACTOR}.clip_ratio"),
    "epsilon_high": Synonym(f"{ACTOR}.clip_ratio_high"),
    "delta": Synonym(f"{ACTOR}.clip_ratio_c", "it bounds the loss of negative advantages, in units of the advantage"),
    "cliprange": Synonym(f"{ACTOR}.clip_ratio"),
    "cliprange_value": Synonym("critic.cliprange_value"),
    "scale_rewards": Synonym("algorithm.norm_adv_by_std_in_grpo"),
    "importance_sampling_level": Synonym(f"{ACTOR}.policy_loss.loss_mode", "gspo takes whole sequences"),
    "mask_truncated_completions": Synonym("reward.overlong_buffer.enable", "it lowers the reward of long responses"),
    "reward_funcs": Synonym("reward.custom_reward_function.path", "one function; its number is the reward"),
    "reward_model_path": Synonym("reward.reward_model.model_path", "with reward.reward_model.enable=true"),
    "num_train_epochs": Synonym("trainer.total_epochs"),
    "max_steps": Synonym("trainer.total_training_steps", "it counts steps of the trainer, each of several updates"),
    "save_steps": Synonym("trainer.save_freq", "it counts steps of the trainer"),
    "eval_steps": Synonym("trainer.test_freq", "it counts steps of the trainer"),
    "save_total_limit": Synonym("trainer.max_ckpt_to_keep"),
    "output_dir": Synonym("trainer.default_local_dir"),
    "report_to": Synonym("trainer.logger", "a list, e.g. [console,wandb]"),
    "run_name": Synonym("trainer.experiment_name"),
    "resume_from_checkpoint": Synonym("trainer.resume_from_path", "with trainer.resume_mode=resume_path"),
    "dataset_name": Synonym("data.train_files", ".parquet or .jsonl files"),
    "vllm_gpu_memory_utilization": Synonym(f"{ROLLOUT}.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": Synonym(f"{ROLLOUT}.tensor_model_parallel_size"),
    "vllm_max_model_length": Synonym(f"{ROLLOUT}.max_model_len"),
    "vllm_importance_sampling_cap": Synonym(
        "algorithm.rollout_correction.rollout_is_threshold", "with rollout_is=token"
    ),
    "vllm_mode": Synonym("placement", "colocated or separate"),
    "adam_beta1": Synonym(f"{ACTOR}.optim.betas", "both, as [0.9,0.999]"),
    "adam_beta2": Synonym(f"{ACTOR}.optim.betas", "both, as [0.9,0.999]"),
    # OpenRLHF
    "pretrain": Synonym(f"{MODEL}.path"),
    "reward_pretrain": Synonym("reward.reward_model.model_path", "with reward.reward_model.enable=true"),
    "critic_pretrain": Synonym("critic.model.path"),
    "remote_rm_url": Synonym("reward.custom_reward_function.path", "a file with the function"),
    "prompt_data": Synonym("data.train_files", ".parquet or .jsonl files"),
    "eval_dataset": Synonym("data.val_files", ".parquet or .jsonl files"),
    "input_key": Synonym("data.prompt_key"),
    "max_samples": Synonym("data.train_max_samples"),
    "n_samples_per_prompt": Synonym(f"{ROLLOUT}.n"),
    "eval_n_samples_per_prompt": Synonym(f"{ROLLOUT}.val_kwargs.n", "with val_kwargs.do_sample=true"),
    "eval_temperature": Synonym(f"{ROLLOUT}.val_kwargs.temperature"),
    "rollout_batch_size": Synonym("data.train_batch_size", _PROMPTS),
    "train_batch_size": Synonym(
        f"{ACTOR}.ppo_mini_batch_size",
        "it counts prompts of one optimizer step; data.train_batch_size those of a step",
    ),
    "micro_train_batch_size": Synonym(f"{ACTOR}.ppo_micro_batch_size_per_gpu", _SEQUENCES),
    "micro_rollout_batch_size": Synonym(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", _SEQUENCES),
    "train_max_tokens_per_gpu": Synonym(f"{ACTOR}.ppo_max_token_len_per_gpu"),
    "rollout_max_tokens_per_gpu": Synonym(f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
    "prompt_max_len": Synonym("data.max_prompt_length", "tokens after the chat template"),
    "generate_max_len": Synonym("data.max_response_length", "tokens"),
    "max_epochs": Synonym(f"{ACTOR}.ppo_epochs"),
    "num_episodes": Synonym("trainer.total_epochs"),
    "init_kl_coef": Synonym(
        "algorithm.kl_ctrl.kl_coef", f"with algorithm.use_kl_in_reward=true; in the loss it is {ACTOR}.kl_loss_coef"
    ),
    "kl_target": Synonym("algorithm.kl_ctrl.target_kl", "with kl_ctrl.type=adaptive"),
    "kl_horizon": Synonym("algorithm.kl_ctrl.horizon", "with kl_ctrl.type=adaptive"),
    "kl_estimator": Synonym("algorithm.kl_penalty", f"of the reward; that of the loss is {ACTOR}.kl_loss_type"),
    "use_kl_loss": Synonym(f"{ACTOR}.use_kl_loss"),
    "entropy_loss_coef": Synonym(f"{ACTOR}.entropy_coeff"),
    "lambd": Synonym("algorithm.lam"),
    "eps_clip": Synonym(f"{ACTOR}.clip_ratio"),
    "eps_clip_low_high": Synonym(f"{ACTOR}.clip_ratio_high", "and clip_ratio_low"),
    "dual_clip": Synonym(f"{ACTOR}.clip_ratio_c"),
    "value_clip": Synonym("critic.cliprange_value"),
    "dynamic_filtering": Synonym("algorithm.filter_groups.enable"),
    "freezing_actor_steps": Synonym("trainer.critic_warmup"),
    "adam_offload": Synonym(f"{ACTOR}.fsdp_config.optimizer_offload"),
    "adam_betas": Synonym(f"{ACTOR}.optim.betas", "as [0.9,0.999]"),
    "l2": Synonym(f"{ACTOR}.optim.weight_decay"),
    "colocate_all_models": Synonym("placement", _ONE_SWITCH),
    "vllm_num_engines": Synonym("placement", "every tensor_model_parallel_size processes get an engine"),
    "vllm_enable_sleep": Synonym(f"{ROLLOUT}.free_cache_engine"),
    "actor_num_nodes": Synonym("trainer.nnodes"),
    "actor_num_gpus_per_node": Synonym("trainer.n_gpus_per_node"),
    "enable_vllm_is_correction": Synonym("algorithm.rollout_correction.rollout_is", "token or sequence"),
    "save_path": Synonym("trainer.default_local_dir"),
    "ckpt_path": Synonym("trainer.default_local_dir"),
    "max_ckpt_num": Synonym("trainer.max_ckpt_to_keep"),
    "load_checkpoint": Synonym("trainer.resume_mode", "auto continues where a checkpoint is"),
    "use_wandb": Synonym("trainer.logger", "a list, e.g. [console,wandb]"),
    "use_tensorboard": Synonym("trainer.logger", "a list, e.g. [console,tensorboard]"),
    "wandb_project": Synonym("trainer.project_name"),
    "wandb_run_name": Synonym("trainer.experiment_name"),
}
"""Name in TRL or OpenRLHF, without section → key of a PPO run; of a name with two meanings, the one in RL."""

OFFLINE_SYNONYMS: dict[str, Synonym] = {
    "learning_rate": Synonym("optim.lr"),
    "lr": Synonym("optim.lr"),
    "beta": Synonym("algorithm.beta"),
    "weight_decay": Synonym("optim.weight_decay"),
    "warmup_ratio": Synonym("optim.lr_warmup_steps_ratio"),
    "warmup_steps": Synonym("optim.lr_warmup_steps"),
    "max_grad_norm": Synonym("optim.clip_grad"),
    "max_norm": Synonym("optim.clip_grad"),
    "gradient_checkpointing": Synonym("model.enable_gradient_checkpointing"),
    "model_name_or_path": Synonym("model.path"),
    "pretrain": Synonym("model.path"),
    "dataset": Synonym("data.train_files", ".parquet or .jsonl files"),
    "dataset_name": Synonym("data.train_files", ".parquet or .jsonl files"),
    "max_length": Synonym("data.max_length", "tokens of prompt and answer together"),
    "max_seq_length": Synonym("data.max_length", "tokens of prompt and answer together"),
    "max_len": Synonym("data.max_length", "tokens of prompt and answer together"),
    "train_batch_size": Synonym("data.train_batch_size", "rows of one optimizer step, over all processes"),
    "per_device_train_batch_size": Synonym("data.micro_batch_size_per_gpu", "rows on one process"),
    "micro_train_batch_size": Synonym("data.micro_batch_size_per_gpu", "rows on one process"),
    "gradient_accumulation_steps": Synonym("data.train_batch_size", "rows of one optimizer step, over all processes"),
    "num_train_epochs": Synonym("trainer.total_epochs"),
    "max_epochs": Synonym("trainer.total_epochs"),
    "max_steps": Synonym("trainer.total_training_steps"),
    "save_steps": Synonym("trainer.save_freq"),
    "eval_steps": Synonym("trainer.test_freq"),
    "output_dir": Synonym("trainer.default_local_dir"),
    "save_path": Synonym("trainer.default_local_dir"),
    "ckpt_path": Synonym("trainer.default_local_dir"),
    "report_to": Synonym("trainer.logger", "a list, e.g. [console,wandb]"),
    "seed": Synonym("trainer.seed"),
}
"""Name in TRL or OpenRLHF → key of a run of SFT, DPO or a reward model."""


@dataclass(frozen=True)
class Spellings:
    """How keys outside a schema are read: the tables of `hrl.verl.keys` and the synonyms.

    Attributes:
        renamed: Other spelling → key of hrl.
        must_equal: Second key of verl for a value that has one key in hrl → that key.
        outside: Key that hrl does not have → verdict on it.
        values: (key, value) that hrl does not have → verdict on it.
        null_is_unset: Keys whose null means their default.
        synonyms: Another library's name, without section → its counterpart in hrl.
        converted: Keys whose value is converted to values of other keys.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    must_equal: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, Verdict] = field(default_factory=dict)
    values: Mapping[tuple[str, Any], Verdict] = field(default_factory=dict)
    null_is_unset: frozenset[str] = frozenset()
    synonyms: Mapping[str, Synonym] = field(default_factory=dict)
    converted: Mapping[str, Conversion] = field(default_factory=dict)

    def present_name(self, key: str) -> str:
        """Return the name of `key` in hrl; `key` itself if it was never renamed."""
        entry = lookup(self.renamed, key)
        if entry is None:
            return key
        pattern, target = entry
        return target.removesuffix("*") + key.removeprefix(pattern.removesuffix("*"))


def lookup(table: Mapping[str, Any], key: str) -> tuple[str, Any] | None:
    """Return the (pattern, value) for `key`, by the key itself or the longest pattern `a.b.*` above it, else None."""
    if key in table:
        return key, table[key]
    parts = key.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        pattern = ".".join(parts[:depth]) + ".*"
        if pattern in table:
            return pattern, table[pattern]
    return None


PPO_SPELLINGS = Spellings(
    verl.RENAMED, verl.MUST_EQUAL, verl.OUTSIDE, verl.VALUES, verl.NULL_IS_UNSET, PPO_SYNONYMS, verl.CONVERTED
)
OFFLINE_SPELLINGS = Spellings(
    renamed=verl.SFT_RENAMED,
    outside=verl.SFT_OUTSIDE,
    values=verl.SFT_VALUES,
    synonyms=OFFLINE_SYNONYMS,
    converted=verl.SFT_CONVERTED,
)
