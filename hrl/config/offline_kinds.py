"""The three kinds of run that learn from a data set."""

from hrl.config import offline_words as words
from hrl.config.conversions import switches
from hrl.config.derived_defaults import DERIVED_VALIDATION, Derive, load_contents, run_folder, same_as
from hrl.config.offline import DPOTrainerConfig, RMTrainerConfig, SFTTrainerConfig
from hrl.config.offline_rules import DPO_RULES, OFFLINE_RULES, warnings
from hrl.config.outside import NO_NPU, ONLY_FSDP2, OTHER_ENGINES, of_section
from hrl.config.problems import Reason
from hrl.config.run_kind import Help, RunKind, Words
from hrl.config.spellings import Spellings
from hrl.config.synonyms import OFFLINE_SYNONYMS
from hrl.config.verdicts import Verdict, how

_LATER_LORA = Verdict("LoRA comes later", "train the full model with a lower lr", same=(0, None), reason=Reason.ABSENT)
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
_ONE_LENGTH = Verdict("prompt and answer have one length", "set data.max_length, of both together", same=(None,))
_SPELLINGS = Spellings(
    renamed={
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
    },
    outside={
        # What both kinds of run have in common stands in one table, under the policy's keys.
        **of_section("actor_rollout_ref.actor.fsdp_config", "model.fsdp_config"),
        **of_section("actor_rollout_ref.actor.optim", "optim"),
        **of_section("actor_rollout_ref.model", "model"),
        **of_section("trainer", "trainer"),
        **of_section("global_profiler", "global_profiler"),
        **of_section("hydra", "hydra"),
        "data.multiturn.enable": how("rows say themselves whether they are a whole chat"),
        "data.multiturn.*": Verdict("a chat is one column", "set data.messages_key", same=(None,)),
        "data.prompt_dict_keys": _OWN_COLUMNS,
        "data.response_dict_keys": _OWN_COLUMNS,
        "data.pad_mode": Verdict("rows are packed, not padded", noted=None),
        "data.ignore_input_ids_mismatch": how("every row is rendered once, whole"),
        "data.balance_dp_token": how("rows are balanced over processes"),
        "data.num_workers": how("rows become tokens once, at load"),
        "data.micro_batch_size": Verdict(
            "a micro-batch belongs to one process", "set data.micro_batch_size_per_gpu", same=(None,)
        ),
        "data.use_dynamic_bsz": how("data.micro_batch_size_per_gpu decides; null packs up to max_token_len_per_gpu"),
        "data.max_prompt_length": _ONE_LENGTH,
        "data.max_response_length": _ONE_LENGTH,
        "use_remove_padding": how("padding never enters a model"),
        "model.lora_rank": _LATER_LORA,
        "model.lora.rank": _LATER_LORA,
        "model.strategy": ONLY_FSDP2._replace(same=("fsdp", "fsdp2")),
        **dict.fromkeys(
            ["engine", *(f"model.fsdp_config.{name}" for name in _OTHER_ENGINES_KEYS)],
            ONLY_FSDP2._replace(instead="remove the key"),
        ),
        "model.fsdp_config.use_remove_padding": how("padding never enters a model"),
        "ulysses_sequence_parallel_size": Verdict(
            "sequence parallel training comes later", same=(1, None), reason=Reason.ABSENT
        ),
    },
    values={("trainer.device", "npu"): NO_NPU},
    synonyms=OFFLINE_SYNONYMS,
    converted={
        "model.fsdp_config.offload_policy": switches(
            "model.fsdp_config.param_offload", "model.fsdp_config.optimizer_offload"
        )
    },
)
_DERIVED: dict[str, Derive] = {
    "data.seed": same_as("trainer.seed"),
    **DERIVED_VALIDATION,
    "checkpoint.load_contents": load_contents("checkpoint"),
    "trainer.default_local_dir": run_folder,
}
_WORDS = Words(
    arithmetic=words.batch_arithmetic,
    placement=words.placement_facts,
    units=words.units_in_words,
    warnings=warnings,
)
_MOST_USED = (
    "model.path",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_length",
    "data.truncation",
    "data.max_token_len_per_gpu",
    "optim.lr",
    "trainer.total_epochs",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.test_freq",
    "trainer.save_freq",
    "trainer.logger",
    "trainer.project_name",
    "trainer.experiment_name",
)
_EXAMPLES = (
    "trainer.total_epochs=2 optim.lr=5e-6",
    "model.path=Qwen/Qwen2.5-0.5B-Instruct \\\n"
    "      data.train_files=train.parquet data.val_files=val.parquet trainer.n_gpus_per_node=8 \\\n"
    "      data.train_batch_size=64 data.max_length=2048 data.max_token_len_per_gpu=16384 optim.lr=1e-5 \\\n"
    "      model.enable_gradient_checkpointing=true trainer.total_epochs=1 trainer.test_freq=50 \\\n"
    "      trainer.experiment_name=mine",
)
_PAGE = "docs/configuration-offline.md"


def _help(summary: str, *keys: str) -> Help:
    return Help(
        summary=f"Without arguments this runs the quickstart: {summary}",
        groups=(),
        most_used=(*_MOST_USED[:6], *keys, *_MOST_USED[6:]),
        examples=_EXAMPLES,
        check="data.train_files=train.parquet",
        page=_PAGE,
    )


DPO = RunKind(
    name="dpo",
    schema=DPOTrainerConfig,
    config_name="dpo_trainer",
    program="python -m hrl.trainer.main_dpo",
    rules=DPO_RULES,
    derived=_DERIVED,
    spellings=_SPELLINGS,
    help=_help("DPO on pairs of a right and a wrong sum.", "algorithm.loss_type", "algorithm.beta"),
    words=_WORDS,
)
SFT = RunKind(
    name="sft",
    schema=SFTTrainerConfig,
    config_name="sft_trainer",
    program="python -m hrl.trainer.main_sft",
    rules=OFFLINE_RULES,
    derived=_DERIVED,
    spellings=_SPELLINGS,
    help=_help("supervised fine-tuning on sums and their answers.", "algorithm.loss_agg_mode"),
    words=_WORDS,
)
RM = RunKind(
    name="rm",
    schema=RMTrainerConfig,
    config_name="rm_trainer",
    program="python -m hrl.trainer.main_rm",
    rules=OFFLINE_RULES,
    derived=_DERIVED,
    spellings=_SPELLINGS,
    help=_help("a reward model that tells right sums from wrong ones."),
    words=_WORDS,
)
KINDS = {kind.name: kind for kind in (DPO, SFT, RM)}
