"""Blocks shared by every model that is trained or scored: weights, optimizer, sharding, checkpoints."""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from hrl.config.section import ACTOR, Derive, Get, MinusOneOrMore, Section, Unit, UnitInterval, follows, section

_LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_SHORT_NAMES = {"bfloat16": "bf16", "float32": "fp32"}


def _spelt(names: dict[str, str]) -> BeforeValidator:
    """Accept other spellings of a dtype, with or without `torch.` in front."""

    def translate(value: object) -> object:
        plain = value.removeprefix("torch.") if isinstance(value, str) else value
        return names.get(plain, plain) if isinstance(plain, str) else plain

    return BeforeValidator(translate)


LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM has kernels; a smaller adapter takes those of the next."""
ADAPTER_RATE = 5e-4
"""A learning rate at which the adapter of a small model learns; whole models take a tenth and less."""

LEAST_RELATIVE_RATE = 1e-5
"""A smaller rate is none for Adafactor: where weights are about 0.02, an AdamW rate of 1e-6 moves them as 5e-5 does."""

DType = Annotated[Literal["auto", "bfloat16", "float16", "float32"], _spelt(_LONG_NAMES)]
"""`auto` is bfloat16 on GPUs and on CPUs with matrix instructions for it, and float32 on other CPUs."""
Content = Literal["model", "optimizer", "extra", "hf_model"]
_ACTORS_FLAG = f"{ACTOR}.use_dynamic_bsz"


def packs_as_the_actor(rows_key: str) -> Derive:
    """Derive whether micro-batches are packed: the actor's flag if it was given, else true unless `rows_key` was."""

    def derive(get: Get) -> object:
        return (
            get(_ACTORS_FLAG)
            if _ACTORS_FLAG in get.given or get.full(rows_key) not in get.given
            else get(rows_key) is None
        )

    return derive


class LogProbConfig(Section):
    """A role that computes log-probs of samples."""

    log_prob_use_dynamic_bsz: bool = follows(packs_as_the_actor(".log_prob_micro_batch_size_per_gpu"))
    """Fill micro-batches of log-probs up to a token budget. Default: the actor's, unless
    `log_prob_micro_batch_size_per_gpu` is set."""
    log_prob_max_token_len_per_gpu: Annotated[PositiveInt, Unit("tokens per process")] = follows(
        f"{ACTOR}.ppo_max_token_len_per_gpu"
    )
    """Maximum number of tokens in such a micro-batch. Default: `actor.ppo_max_token_len_per_gpu`."""
    log_prob_micro_batch_size_per_gpu: Annotated[PositiveInt | None, Unit("sequences per process")] = follows(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    )
    """Sequences in such a micro-batch, with `log_prob_use_dynamic_bsz=false`. Default:
    `actor.ppo_micro_batch_size_per_gpu`."""


class MicroBatches(NamedTuple):
    """How large the micro-batches of a pass may be.

    Attributes:
        max_tokens: The budget of one process up to which they are packed; None where the number of sequences is fixed.
        max_rows: The number of sequences (of pairs, where pairs are learnt); None where they are packed.
        tokens_key: Key of the budget.
        rows_key: Key of the number of sequences.
        packs_key: Key that chooses between the two; empty where the budget counts unless a number is set.
        processes: Number of processes that run each micro-batch together.
        slices: Into how many parts its tokens are cut over these; each process has all of a part.
    """

    max_tokens: int | None
    max_rows: int | None
    tokens_key: str
    rows_key: str
    packs_key: str
    processes: int
    slices: int

    @classmethod
    def of(
        cls, section: Section, name: str, tokens: str, rows: str, packs: str = "", *, sharding: "ShardingConfig"
    ) -> Self:
        """Read them from the section `name` by its keys; the sharding says which processes run each of them."""
        is_packed = getattr(section, packs) if packs else getattr(section, rows) is None
        return cls(
            getattr(section, tokens) if is_packed else None,
            None if is_packed else getattr(section, rows),
            f"{name}.{tokens}",
            f"{name}.{rows}",
            packs and f"{name}.{packs}",
            sharding.processes_together,
            sharding.ulysses_sequence_parallel_size,
        )

    @property
    def budget(self) -> int | None:
        """The tokens up to which they are packed, of all processes that run one; None as for `max_tokens`."""
        return None if self.max_tokens is None else self.max_tokens * self.slices

    def budget_for(self, tokens: int) -> int:
        """Return the smallest `max_tokens` with which a micro-batch holds so many tokens."""
        return -(-tokens // self.slices)

    def largest(self, longest_row: int) -> int:
        """Return the tokens of the largest one: the budget, or a fixed number of the longest rows."""
        return (self.max_rows or 0) * longest_row if self.budget is None else self.budget


class BackboneConfig(Section):
    """A transformer and how it is held in memory."""

    path: str = "bundled:smollm2-135m-instruct"
    """A local folder, a hub id, or `bundled:smollm2-135m-instruct`."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's config.json to replace, e.g. `{max_position_embeddings: 32768}`."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: about a third more computation, far less memory."""
    recompute_num_layers: NonNegativeInt | None = None
    """With `enable_gradient_checkpointing`, how many layers recompute, the first ones; the others keep their
    activations, which is faster where there is memory for it. Null is all."""
    enable_activation_offload: bool = False
    """Keep what the backward pass needs of a layer in pinned host memory until then; it comes back before the layer is
    due. With `enable_gradient_checkpointing` that is each layer's input. No effect on a CPU."""


class LearnerConfig(BackboneConfig):
    """A transformer that is trained: all of it, or an adapter beside it."""

    lora_rank: NonNegativeInt = 0
    """Rank of the LoRA adapter that is trained instead of the model, whose weights are then frozen in
    `fsdp_config.dtype`; 0 trains the model, unless `lora_adapter_path` is set."""
    lora_alpha: NonNegativeInt = 16
    """The adapter's output is multiplied by `lora_alpha / lora_rank`."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter: `all-linear`, a list of names such as `[q_proj, v_proj]`, or a regular expression for
    whole names. Embedding and head get none."""
    exclude_modules: str | list[str] | None = None
    """Of these, the layers that get none: a list of names, or a regular expression."""
    lora_adapter_path: str | None = None
    """Folder of an adapter to go on from, whose `adapter_config.json` decides rank, alpha and layers instead of these
    keys; null begins with one that changes nothing."""
    use_rslora: bool = False
    """Multiply by `lora_alpha / sqrt(lora_rank)` instead (rsLoRA), so that a high rank does not learn more slowly."""
    load_in_4bit: bool = False
    """Hold the frozen linear layers in 4 bits (NF4), a quarter of what they take in bfloat16 (QLoRA); needs an adapter
    and the package bitsandbytes. Engines sample from the same rounded weights."""

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter is trained instead of the model."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


class ModelConfig(LearnerConfig):
    """The policy: the transformer that is trained and sampled from."""

    trust_remote_code: bool = False
    """Let transformers and vLLM run code from model folders; applies to the models of all roles."""
    probe: bool = True
    """Before anything starts, the driver compares a few layers of every role's model on packed rows, as in training,
    with the model's own forward pass, and refuses a model that packed training would compute wrongly. Where processes
    work together (`ulysses_sequence_parallel_size`, `tensor_parallel_size`, `expert_parallel_size`), or an adapter is
    trained, the layers are compared in that layout too. Takes seconds."""
    # The probe also covers shared prompts: a group's prompt is computed once for all its samples in a micro-batch,
    # which must not change any number.
    share_prefix: ClassVar[bool] = True
    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer; null uses the model's own."""


class AdapterSyncConfig(Section):
    """`actor_rollout_ref.model.lora`: how an adapter comes to the engine."""

    merge: bool = False
    """At each weight sync, send the model with the adapter added to it, rounded to the engine's dtype; false sends the
    adapter alone, far fewer bytes, and rounds no sum."""


class PolicyModelConfig(ModelConfig):
    """`actor_rollout_ref.model`: the policy that is trained and sampled from."""

    lora: AdapterSyncConfig = section(AdapterSyncConfig)


class ShardingConfig(Section):
    """FSDP2 settings common to all models."""

    param_offload: bool = False
    """Keep the parameters in pinned host memory while the model is idle. No effect on a CPU."""
    fsdp_size: MinusOneOrMore = -1
    """Processes that share one sharded copy; -1 uses all processes of the pool."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Processes that run each micro-batch together, for sequences that are too long for one: each computes a slice of
    the tokens, and in attention all tokens for a share of the heads. Divides the number of processes and of attention
    heads. Token budgets (`…max_token_len_per_gpu`) stay those of one process."""
    tensor_parallel_size: PositiveInt = 1
    """Processes that hold parts of every large weight and compute their parts of each product together, for layers
    that are too large for one. Divides the number of processes that share a copy, of attention heads and of experts,
    and that of key heads or is a multiple of it. Every process has all tokens of a micro-batch."""
    expert_parallel_size: PositiveInt = 1
    """Processes that share out a mixture's experts: each holds whole ones, to which the tokens of all of them travel,
    instead of gathering all experts of a layer. Divides the number of processes that share a copy, and of experts."""
    dtype: DType = "auto"
    """Dtype of matrix products; gradients are reduced in fp32. `auto` is bfloat16, or float32 on a CPU without matrix
    instructions for bfloat16, where it is faster."""

    @property
    def processes_together(self) -> int:
        """How many processes run each micro-batch."""
        return self.ulysses_sequence_parallel_size * self.tensor_parallel_size


class ForwardShardingConfig(ShardingConfig):
    """FSDP2 settings of a model that is only evaluated."""

    reshard_after_forward: ClassVar[bool] = True  # no backward pass needs the parameters again
    optimizer_offload: ClassVar[bool] = False  # there is no optimizer
    offload_policy: ClassVar[bool] = False

    @property
    def model_dtype(self) -> str:
        """Dtype of the stored parameters; the same as `dtype`, because only matrix products read them."""
        return self.dtype


class FsdpConfig(ShardingConfig):
    """FSDP2 settings of a model that is trained."""

    model_dtype: Annotated[Literal["fp32", "bf16"], _spelt(_SHORT_NAMES)] = "fp32"
    """Dtype of the master weights; an adapter is in fp32. With bf16, optimizers round stochastically, so even an update
    of 1e-6 of a weight takes effect on average; moments stay in fp32, and gradients of micro-batches are summed in
    bf16."""
    reshard_after_forward: bool = True
    """Free the gathered parameters between forward and backward pass; on a single GPU these are the copies in the
    compute dtype, half the size of the model."""
    optimizer_offload: bool = False
    """Keep AdamW's moments in pinned host memory; an optimizer step copies them to the GPU and back 256 MiB at a time.
    No effect on a CPU."""
    offload_policy: bool = False
    """Keep weights, gradients and the optimizer's state in pinned host memory during the update too, and take the
    optimizer's step on the CPU (FSDP2's `CPUOffloadPolicy`): the GPU has the layers at work and activations, and every
    micro-batch copies all weights to it twice. Takes the place of `param_offload` and `optimizer_offload`. No effect
    on a CPU."""


class OptimConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adafactor", "muon", "adamw8bit"] = "adamw"
    """The optimizer. `adamw8bit` keeps AdamW's moments in 2 bytes a weight instead of 8 and needs the package torchao;
    `adafactor` keeps hardly any, and its `lr` is relative to a parameter's size; `muon` keeps 4 bytes for matrices of
    layers, whose momentum it makes orthogonal, and takes AdamW for the rest, at the same `lr`."""
    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    betas: Annotated[list[UnitInterval], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: [0.9, 0.999]
    )
    """AdamW's two decay rates; `adafactor` has none."""
    lr_warmup_steps: Annotated[MinusOneOrMore, Unit("optimizer steps")] = -1
    """Optimizer steps of linear warm-up; -1 derives them from `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: UnitInterval = 0.0
    """Warm-up as a share of all optimizer steps."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after the warm-up."""
    min_lr_ratio: UnitInterval = 0.0
    """Learning rate at the end of cosine and linear, as a share of `lr`."""


def _load_contents(get: Get) -> object:
    saved = get(".save_contents")
    return [part for part in saved if part != "hf_model"] or ["model"] if isinstance(saved, list) else saved


class CheckpointConfig(Section):
    """What a checkpoint of the policy holds."""

    save_contents: list[Content] = Field(default=["model", "optimizer", "extra", "hf_model"], min_length=1)
    """Parts to write: `model` and `optimizer` (sharded weights and the optimizer's state), `extra` (position in the
    schedule and random states), `hf_model` (a folder `hf` that transformers and vLLM can load). With `[hf_model]` alone
    a checkpoint is small and no run continues from it."""
    load_contents: Annotated[list[Content], Field(min_length=1)] = follows(_load_contents)
    """Parts to read on resume. Default: `save_contents` without `hf_model`."""
