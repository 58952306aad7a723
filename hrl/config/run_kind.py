"""What a run can be, as far as its configuration goes: a schema, and everything that follows from it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hrl.config import arithmetic
from hrl.config.arithmetic import Fact
from hrl.config.conversions import CONVERTED
from hrl.config.derived_defaults import DERIVED, Derive
from hrl.config.outside import OUTSIDE, VALUES
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.problems import Problem
from hrl.config.rules import RULES, warnings
from hrl.config.section import Section
from hrl.config.spellings import MUST_EQUAL, NULL_IS_UNSET, RENAMED, Spellings
from hrl.config.synonyms import PPO_SYNONYMS

C = TypeVar("C", bound=Section)
C_co = TypeVar("C_co", bound=Section, covariant=True)


@dataclass(frozen=True)
class Help:
    """What `--help` says of a kind of run.

    Attributes:
        summary: What happens without arguments.
        groups: Groups of YAML files to choose from.
        most_used: Keys that people set most.
        examples: What may follow the program's name.
        check: What may follow `hrl check`.
        page: Where all keys are.
    """

    summary: str
    groups: tuple[str, ...]
    most_used: tuple[str, ...]
    examples: tuple[str, ...]
    check: str
    page: str


@dataclass(frozen=True)
class Words:
    """A configuration in words, for `hrl check` and the banner.

    Attributes:
        arithmetic: One step and the whole run in numbers; takes `train_rows`, where these are known.
        placement: Which roles live on which processes.
        units: Keys whose name hides what they count, with value and unit.
        warnings: What is allowed but probably not meant.
    """

    arithmetic: Callable[..., list[Fact]]
    placement: Callable[[Any], list[Fact]]
    units: Callable[[Any], list[Fact]]
    warnings: Callable[[Any], list[str]]


@dataclass(frozen=True)
class RunKind(Generic[C_co]):
    """A kind of run.

    Attributes:
        name: As `hrl check` takes it.
        schema: The class of its whole configuration.
        config_name: Its primary YAML file.
        program: How it is started.
        rules: What must hold between keys.
        derived: Key → its default as a function of other keys, sources first.
        spellings: What becomes of keys that are no fields of the schema.
        help: For `--help`.
        words: For `hrl check` and the banner.
    """

    name: str
    schema: type[C_co]
    config_name: str
    program: str
    rules: tuple[Callable[[Any], Iterator[Problem]], ...]
    derived: Mapping[str, Derive]
    spellings: Spellings
    help: Help
    words: Words

    @property
    def check(self) -> str:
        """The command that checks such a run."""
        return "hrl check" if self.name == "ppo" else f"hrl check {self.name}"


PPO = RunKind(
    name="ppo",
    schema=PPOTrainerConfig,
    config_name="ppo_trainer",
    program="python -m hrl.trainer.main_ppo",
    rules=RULES,
    derived=DERIVED,
    spellings=Spellings(RENAMED, MUST_EQUAL, OUTSIDE, VALUES, NULL_IS_UNSET, PPO_SYNONYMS, CONVERTED),
    help=Help(
        summary="Without arguments this runs the quickstart: GRPO on a small model that learns to add.",
        groups=("placement", "recipe"),
        most_used=(
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
        ),
        examples=(
            "recipe=ppo",
            "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\\n"
            "      data.train_files=train.parquet data.val_files=val.parquet trainer.n_gpus_per_node=8 \\\n"
            "      data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024 \\\n"
            "      actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.optim.lr=1e-6 \\\n"
            "      actor_rollout_ref.model.enable_gradient_checkpointing=true \\\n"
            "      actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \\\n"
            "      trainer.total_epochs=3 trainer.test_freq=10 trainer.experiment_name=mine",
        ),
        check="recipe=ppo placement=separate",
        page="docs/configuration.md",
    ),
    words=Words(
        arithmetic=arithmetic.batch_arithmetic,
        placement=arithmetic.placement_facts,
        units=arithmetic.units_in_words,
        warnings=warnings,
    ),
)
