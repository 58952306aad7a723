"""The configurations of `main_dpo`, `main_sft` and `main_rm`, as typed, immutable objects."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hrl.algos.registry import AGGREGATION_NAMES, OFFLINE_LOSSES, learns_from_labels, pair_loss_traits
from hrl.config.data import RowsConfig
from hrl.config.model import CheckpointConfig, FsdpConfig, MicroBatches, ModelConfig, OptimConfig
from hrl.config.section import Get, NameOf, Section, Unit, WholeConfig, follows, section
from hrl.config.sources import SourceList
from hrl.config.trainer import Frequency, RunConfig


class OfflineDataConfig(RowsConfig):
    """`data.*`: which rows are trained on, and how many at once."""

    data_source_key: str = "data_source"
    """Column with the row's source, by which validation metrics are grouped; the file's name if there is no column."""
    train_batch_size: Annotated[PositiveInt, Unit("rows per optimizer step")] = 64
    """Rows per step, which is one optimizer step; in DPO and reward models a row is a pair."""
    max_length: Annotated[PositiveInt, Unit("tokens")] = 1024
    """Maximum number of tokens of prompt and answer together, after the chat template."""
    truncation: Literal["error", "drop", "left", "right"] = "error"
    """What happens to a longer row: stop the run (error), leave it out and count it (drop), cut the beginning of the
    prompt (left), or the end of the answer (right)."""
    max_token_len_per_gpu: Annotated[PositiveInt, Unit("tokens per process")] = 16384
    """Maximum number of tokens in one micro-batch on one process."""
    micro_batch_size_per_gpu: Annotated[PositiveInt | None, Unit("rows per process")] = None
    """Rows in one micro-batch on one process; null fills it up to `max_token_len_per_gpu`."""


class PairDataConfig(OfflineDataConfig):
    """`data.*`: pairs of a preferred and a rejected answer."""

    prompt_key: str = "prompt"
    """Column that holds the prompt, a chat or a string; in rows without it, the prompt is the common beginning of both
    answers."""
    chosen_key: str = "chosen"
    """Column that holds the preferred answer: a chat or a string."""
    rejected_key: str = "rejected"
    """Column that holds the other answer."""


def _rows_of_the_loss(get: Get) -> list[str]:
    labelled = learns_from_labels(str(get("algorithm.loss_type")))
    return ["bundled:addition_labelled/train" if labelled else "bundled:addition_pairs/train"]


class PreferenceDataConfig(PairDataConfig):
    """`data.*`: pairs of answers, or single answers with a label."""

    train_files: Annotated[SourceList, Field(min_length=1)] = follows(_rows_of_the_loss)
    """Training rows, one source or a list: a file (.parquet, .jsonl, .json, .csv), a folder, a data set of the hub as
    `<owner>/<name>:<configuration>:<split>`, or `bundled:<task>/<split>`. `{path: …, weight: 2.0}` is a source with
    options, see docs/your-own-data.md. Default: bundled pairs, or labelled answers if `algorithm.loss_type` reads
    those."""
    completion_key: str = "completion"
    """`kto`, `apo_zero_unpaired`: column that holds the answer, a chat or a string."""
    label_key: str = "label"
    """`kto`, `apo_zero_unpaired`: column that says whether the answer is a good one, true or false."""


class ScoredPairDataConfig(PairDataConfig):
    """`data.*`: pairs of a preferred and a rejected answer, optionally with a margin."""

    margin_key: str = "margin"
    """Column with the margin by which the preferred answer should score higher; 0 in rows without it."""


class DemonstrationDataConfig(OfflineDataConfig):
    """`data.*`: answers to imitate."""

    messages_key: str = "messages"
    """Column that holds a whole chat; every message of the assistant is trained on."""
    prompt_key: str = "prompt"
    """Column that holds the prompt, in rows without a whole chat: a chat or a string."""
    completion_key: str | None = None
    """Column that holds the answer to the prompt; null takes `completion` or `response`."""


class OfflineModelConfig(ModelConfig):
    """`model.*`: the transformer that is trained."""

    freeze_vision_tower: bool = False
    """In a run on pictures, leave the part of the model that reads them as it is."""
    fsdp_config: FsdpConfig = section(FsdpConfig)


class OfflineOptimConfig(OptimConfig):
    """`optim.*`: the optimizer and its learning-rate schedule."""

    clip_grad: PositiveFloat = 1.0
    """Largest global gradient norm."""


class OfflineRunConfig(RunConfig):
    """`trainer.*`: the run itself."""

    total_epochs: Annotated[PositiveInt, Unit("passes over the training rows")] = 1
    """Passes over the training rows."""
    save_freq: Annotated[Frequency, Unit("steps between checkpoints")] = 500
    """Write a checkpoint every this many steps and after the last one; -1 or 0 is never."""


class OfflineConfig(WholeConfig):
    """The sections that the three offline trainers have in common."""

    data: OfflineDataConfig
    model: OfflineModelConfig = section(OfflineModelConfig)
    optim: OfflineOptimConfig = section(OfflineOptimConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    trainer: OfflineRunConfig = section(OfflineRunConfig)

    def micro_batches(self) -> dict[str, MicroBatches]:
        """Return the micro-batches of the run's one model, `model`."""
        keys = ("max_token_len_per_gpu", "micro_batch_size_per_gpu")
        return {"model": MicroBatches.of(self.data, "data", *keys, sharding=self.model.fsdp_config)}

    @property
    def num_processes(self) -> int:
        """Number of processes that hold the model."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def learns_from_pairs(self) -> bool:
        """Whether a row is a pair of answers, instead of a single one."""
        return isinstance(self.data, PairDataConfig)


class DPOAlgorithmConfig(Section):
    """`algorithm.*`: how a pair becomes a loss."""

    loss_type: Annotated[str, NameOf(OFFLINE_LOSSES)] = "sigmoid"
    """The loss of a pair: sigmoid is DPO, hinge is SLiC; simpo and orpo need no reference. Or of a single answer with a
    label: kto, apo_zero_unpaired."""
    beta: PositiveFloat = 0.1
    """How strongly the policy is kept close to the reference; tau for ipo, the scale for simpo, the weight of the odds
    ratio for orpo."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Probability that the two answers of a pair are swapped (conservative DPO)."""
    target_margin: NonNegativeFloat = 0.0
    """`simpo`: gamma, the margin by which the preferred answer should win."""
    desirable_weight: PositiveFloat = 1.0
    """`kto`, `apo_zero_unpaired`: weight of the losses of good answers."""
    undesirable_weight: PositiveFloat = 1.0
    """`kto`, `apo_zero_unpaired`: weight of the losses of bad answers."""
    reference_free: bool = False
    """Use no reference model; all answers count as equally likely under it."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Of a mixture of experts: weight of the loss that balances the load of experts over a batch; 0 is off."""


class DPOTrainerConfig(OfflineConfig):
    """Everything that a run of `main_dpo` reads."""

    data: PreferenceDataConfig = section(PreferenceDataConfig)
    algorithm: DPOAlgorithmConfig = section(DPOAlgorithmConfig)
    trainer: OfflineRunConfig = section(OfflineRunConfig, experiment_name="dpo")

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference are computed."""
        return not self.algorithm.reference_free and pair_loss_traits(self.algorithm.loss_type).reference

    @property
    def learns_from_labels(self) -> bool:
        """Whether a row is a single answer with a label, instead of a pair."""
        return learns_from_labels(self.algorithm.loss_type)

    @property
    def learns_from_pairs(self) -> bool:
        """Whether a row is a pair of answers, instead of a single one."""
        return not self.learns_from_labels


class SFTAlgorithmConfig(Section):
    """`algorithm.*`: how token losses become one number."""

    loss_agg_mode: Annotated[str, NameOf(AGGREGATION_NAMES)] = "token-mean"
    """How token losses are averaged into one number: each token has the same weight (token-mean), or each answer (the
    seq-mean modes; -norm also divides by `data.max_length`). Divisors count the whole batch on all processes."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Of a mixture of experts: weight of the loss that balances the load of experts over a batch; 0 is off."""


class SFTTrainerConfig(OfflineConfig):
    """Everything that a run of `main_sft` reads."""

    data: DemonstrationDataConfig = section(DemonstrationDataConfig, train_files=["bundled:addition_answers/train"])
    optim: OfflineOptimConfig = section(OfflineOptimConfig, lr=1e-5)
    algorithm: SFTAlgorithmConfig = section(SFTAlgorithmConfig)
    trainer: OfflineRunConfig = section(OfflineRunConfig, experiment_name="sft")


class RMTrainerConfig(OfflineConfig):
    """Everything that a run of `main_rm` reads."""

    data: ScoredPairDataConfig = section(ScoredPairDataConfig, train_files=["bundled:addition_pairs/train"])
    optim: OfflineOptimConfig = section(OfflineOptimConfig, lr=1e-5)
    trainer: OfflineRunConfig = section(OfflineRunConfig, experiment_name="rm")
