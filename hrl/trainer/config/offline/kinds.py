"""The three kinds of run that learn from a data set."""

from hrl.trainer.config.compat import Fixed, Spellings
from hrl.trainer.config.derived import DERIVED_VALIDATION, Derive, load_contents, run_folder, same_as
from hrl.trainer.config.kinds import Help, RunKind, Words
from hrl.trainer.config.offline import words
from hrl.trainer.config.offline.rules import DPO_RULES, OFFLINE_RULES, warnings
from hrl.trainer.config.offline.schema import DPOTrainerConfig, RMTrainerConfig, SFTTrainerConfig

_LATER_LORA = "LoRA comes later; remove the key."
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
    },
    fixed={
        "data.multiturn.enable": Fixed((True, False), "rows say themselves whether they are a whole chat."),
        "use_remove_padding": Fixed((True,), "rows are always packed; remove the key."),
        "model.use_remove_padding": Fixed((True,), "rows are always packed; remove the key."),
        "model.strategy": Fixed(("fsdp2",), "FSDP2 is the only strategy."),
        "model.lora_rank": Fixed((0,), _LATER_LORA),
    },
    refused={
        "model.lora_alpha": _LATER_LORA,
        "model.target_modules": _LATER_LORA,
        "data.micro_batch_size": "it depends on the number of processes; set data.micro_batch_size_per_gpu.",
        "data.use_dynamic_bsz": "set data.micro_batch_size_per_gpu; null packs up to data.max_token_len_per_gpu.",
        "data.max_prompt_length": "set data.max_length, of prompt and answer together.",
        "data.max_response_length": "set data.max_length, of prompt and answer together.",
        "ulysses_sequence_parallel_size": "not supported; remove the key.",
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
    memory=words.memory_facts,
    warnings=warnings,
    model_path=lambda config: config.model.path,
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
