"""`reward.*`: what a response is worth."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from hrl.algos.registry import REWARD_SHAPER_NAMES
from hrl.config.model import ForwardShardingConfig
from hrl.config.section import ACTOR, Get, NameOf, Section, Unit, follows, section

FUNCTION_NAMES = (
    "data_source",
    "numeric",
    "gsm8k",
    "gsm8k_flexible",
    "math_verify",
    "math_dapo",
    "multiple_choice",
    "exact_match",
    "reasoning_gym",
    "code",
    "regex",
    "tags",
    "length",
    "repetition",
    "language",
    "json_schema",
    "judge",
    "remote",
)
"""Names of the library's reward functions, which `hrl.reward.library.catalogue` describes. `data_source` stands for the
one that the data source of each row chooses."""


TAKEN_NAMES = {
    "score": "as their sum is",
    "acc": "as the part by which validation counts right responses",
    "pred": "as the part by which validation counts votes",
    "turn_scores": "as what turns are worth one by one",
}
"""Names that none of several functions can have → what has them."""


FROM_PYTHON = "python:"
"""What the path of a function begins with that a run was given as an object: `config.yaml` says so what it was."""


class RewardEntry(Section):
    """An entry of `reward.functions`: one function and its weight.

    A text is short for `{name: text}`, or for `{path: text}` if it names a Python file. Keys other than those below are
    keyword arguments.
    """

    name: Annotated[str | None, NameOf(FUNCTION_NAMES)] = None
    """A function of the library."""
    path: str | None = None
    """A Python file and, after a colon, the function in it (`compute_score` if left out)."""
    weight: float = 1.0
    """Weight of its score in the sum; 0 only shows it."""
    label: str | None = None
    """Name of its score in metrics and samples. Default: the function's name."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments. A text `env:NAME` stands for the environment variable NAME, as in
    `reward.custom_reward_function.reward_kwargs`."""

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, entry: Any) -> Any:
        return spelt_out(entry) if isinstance(entry, str | Mapping) else entry

    @property
    def file_and_function(self) -> tuple[str, str]:
        """The two parts of `path`."""
        file, _, function = (self.path or "").rpartition(":")
        return (file, function) if file and function.isidentifier() else (self.path or "", "compute_score")

    @property
    def is_object(self) -> bool:
        """Whether it stands for a function that a run was given as an object."""
        return (self.path or "").startswith(FROM_PYTHON)

    @property
    def part(self) -> str:
        """The name of its score: the label, or the function's name."""
        return self.label or self.name or self.file_and_function[1]


def spelt_out(entry: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of `reward.functions` without its short forms."""
    if isinstance(entry, str):
        is_file = entry.endswith(".py") or ".py:" in entry or "/" in entry
        return {"path" if is_file else "name": entry}
    own = {key: value for key, value in entry.items() if key in RewardEntry.model_fields}
    rest = {key: value for key, value in entry.items() if key not in RewardEntry.model_fields}
    kwargs = own.get("kwargs") or {}
    if not isinstance(kwargs, Mapping):  # which the section refuses
        return own
    return {**own, "kwargs": {**kwargs, **rest}} if rest else own


def _one_or_many(entries: object) -> object:
    return [entries] if isinstance(entries, str | Mapping) else entries


class CustomRewardFunctionConfig(Section):
    """`reward.custom_reward_function`: a Python function of your own."""

    path: str | None = None
    """Python file with the reward function; null scores by the row's data source."""
    name: str = "compute_score"
    """Name of the function in that file."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call. `api_key: "env:NAME"` passes the value of the environment variable NAME, which
    is then also set in the function's process."""


class RewardBackboneConfig(Section):
    """`reward.reward_model.model`: how the classifier is held in memory."""

    enable_gradient_checkpointing: ClassVar[bool] = False  # it has no backward pass
    recompute_num_layers: ClassVar[int | None] = None
    enable_activation_offload: ClassVar[bool] = False
    override_config: ClassVar[dict[str, Any]] = {}

    fsdp_config: ForwardShardingConfig = section(ForwardShardingConfig)


def _actor_rows(get: Get) -> object:
    return None if get(f"{ACTOR}.use_dynamic_bsz") else get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")


class RewardModelConfig(Section):
    """`reward.reward_model`: a model that scores responses, or their steps."""

    enable: bool = False
    """Also score responses with a reward model."""
    model_path: str | None = None
    """Folder or hub id of a sequence classifier with one label. If its vocabulary or chat template is not the policy's,
    it gets each chat rendered as its own, see docs/reward-models.md."""
    weight: float = 1.0
    """Weight of the model's score in the sum."""
    step_token: str | None = None
    """Token that a process reward model reads behind each step of an answer, and at which it gives the step's score,
    e.g. `<extra_0>` of Qwen2.5-Math-PRM; spaces before it are written too. Each score then stands on the last token of
    its step. Null: one score for the whole answer."""
    reward_tokens: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2, max_length=2)] | None = None
    """Two words of which a language model that scores steps says one behind `step_token`: that of a right step, then
    that of a wrong one, e.g. `["+", "-"]` of Math-Shepherd. A step's score is the probability of the first over both.
    Null: the model is a classifier of tokens."""
    step_separator: str = Field("\n\n", min_length=1)
    """What stands between two steps of an answer."""
    serve: bool = False
    """Have vLLM's server run the model, on a pool of its own (`trainer.role_pools.rm`), and functions ask it: `remote`
    takes a classifier's score, `judge` asks a language model, and one of your own finds the address in the environment
    variable HRL_REWARD_MODEL. Without `reward.functions`, `remote` asks."""
    server_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that server, as `vllm serve` has them, with underscores, e.g. `{tensor_parallel_size: 2,
    max_model_len: 8192}`. On a CPU its cache has 1 GiB, unless the environment variable VLLM_CPU_KVCACHE_SPACE says."""
    max_token_len_per_gpu: Annotated[PositiveInt, Unit("tokens per process")] = follows(
        f"{ACTOR}.ppo_max_token_len_per_gpu"
    )
    """Maximum number of tokens in one micro-batch. Default: `actor_rollout_ref.actor.ppo_max_token_len_per_gpu`."""
    micro_batch_size_per_gpu: Annotated[PositiveInt | None, Unit("sequences per process")] = follows(_actor_rows)
    """Sequences in one micro-batch; null fills it up to the token budget. Default: the actor's."""
    model: RewardBackboneConfig = section(RewardBackboneConfig)

    @property
    def is_served(self) -> bool:
        """Whether a server of the run's own has it, which reward functions ask."""
        return self.enable and self.serve


def _overlong_zone(get: Get) -> object:
    # A fifth, as in DAPO's paper (arXiv:2503.14476, section 4.1: 4,096 of 20,480 tokens).
    longest = get("data.max_response_length")
    wanted = get(".enable") is True and isinstance(longest, int)
    return max(longest // 5, 1) if wanted else 0


class OverlongBufferConfig(Section):
    """`reward.overlong_buffer`: DAPO's soft penalty for long responses."""

    enable: bool = False
    """Lower the reward of a response linearly over the last `len` tokens before `data.max_response_length`. Of an
    episode the longest row counts, with what its environment said, since that is what the limit cuts off."""
    len: Annotated[NonNegativeInt, Unit("tokens")] = follows(_overlong_zone)
    """Width of that zone in tokens. Default: a fifth of `data.max_response_length`."""
    penalty_factor: NonNegativeFloat = 1.0
    """Penalty of a response of the full length."""


class RewardConfig(Section):
    """`reward.*`: what a response is worth."""

    num_workers: Annotated[PositiveInt, Unit("processes")] = 1
    """Processes that run reward functions."""
    timeout_s: PositiveFloat = 30.0
    """Seconds that one call of a reward function may take; then it is cancelled or its process is replaced."""
    max_concurrency: Annotated[PositiveInt, Unit("async calls per process")] = 64
    """Calls of an async reward function that one process awaits at the same time; other functions run one call at a
    time."""
    memory_limit_gib: PositiveFloat | None = 8.0
    """Address space of one such process in GiB; a function that uses more fails without affecting others. null sets no
    limit, which a function on a GPU needs."""
    env: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(=.*)?$")]] = Field(default_factory=list)
    """Environment variables of these processes, each a NAME, whose value the run's own environment has, or NAME=value.
    Without it they get those that libraries need (PATH, HOME, PYTHON*, CUDA*, HF_* and their like, proxies), and no
    secret."""
    on_error: Literal["raise", "skip"] = "raise"
    """What happens when a reward function fails: stop the run (raise), or leave the sample out of training and count it
    (skip). A response that a built-in function can't read scores as a wrong answer and is counted in
    `reward/num_unscorable`."""
    functions: Annotated[list[RewardEntry] | None, BeforeValidator(_one_or_many)] = None
    """Functions whose weighted scores are added up, e.g. `[numeric, {name: length, weight: 0.2, most: 50},
    "my.py:brief"]`; an entry is a `name` of the library (`hrl reward` lists them) or a `path`, with `weight`, `label`
    and the function's arguments. Null takes the function of `custom_reward_function`, else that of each row's data
    source, or none beside a reward model or an environment of your own, to whose rewards functions that are named add
    theirs. `[]` scores nothing, where a teacher alone is learnt from."""
    shaping: dict[Annotated[str, NameOf(REWARD_SHAPER_NAMES)], PositiveFloat | None] = Field(default_factory=dict)
    """Transformations of the weighted sum before training, in the order written, e.g. `{standardise: null, clip: 5}`:
    clip limits it to [-limit, limit], scale divides it by its standard deviation over the run, standardise subtracts
    its mean over the run first."""
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig)

    @property
    def names_none(self) -> bool:
        """Whether no key names functions, nor that there are none."""
        return self.functions is None and self.custom_reward_function.path is None

    @property
    def entries(self) -> tuple[RewardEntry, ...]:
        """The functions to add up, whichever keys name them; none where the reward model alone decides."""
        if self.functions is not None:
            return tuple(self.functions)
        custom = self.custom_reward_function
        if custom.path is not None:
            return (RewardEntry(path=f"{custom.path}:{custom.name}", kwargs=custom.reward_kwargs),)
        model = self.reward_model
        if model.is_served:
            return (RewardEntry(name="remote", label="reward_model", weight=model.weight),)
        return () if model.enable else (RewardEntry(name="data_source"),)
