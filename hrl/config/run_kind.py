"""The kinds of run as seen by the configuration: a schema and everything derived from it."""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Generic, TypeVar

from hrl.config.offline import DPOTrainerConfig, OfflineConfig, RMTrainerConfig, SFTTrainerConfig
from hrl.config.outline import RunConfiguration
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.rules import DPO_RULES, OFFLINE_RULES, PPO_RULES, Rule
from hrl.config.section import WholeConfig
from hrl.config.spellings import OFFLINE_SPELLINGS, PPO_SPELLINGS, Spellings

C = TypeVar("C", bound=WholeConfig)
C_co = TypeVar("C_co", bound=WholeConfig, covariant=True)


@dataclass(frozen=True)
class Help:
    """The text of `--help` for a kind of run.

    Attributes:
        quickstart: What the run is without arguments, in words.
        groups: Groups of YAML files to choose from.
        most_used: The keys set most often.
        examples: Example arguments of the program.
        check: Example arguments of `hrl check`.
        page: The page that documents all keys.
    """

    quickstart: str
    groups: tuple[str, ...]
    most_used: tuple[str, ...]
    examples: tuple[str, ...]
    check: str
    page: str


@dataclass(frozen=True)
class RunKind(Generic[C_co]):
    """A kind of run.

    Attributes:
        name: Name for `hrl check`; the primary YAML file and the program are named after it.
        schema: Class of the whole configuration.
        rules: Rules between keys.
        spellings: How keys that are not in the schema are read.
        help: Text for `--help`.
    """

    name: str
    schema: type[C_co]
    rules: tuple[Rule, ...]
    spellings: Spellings
    help: Help

    @property
    def config_name(self) -> str:
        """Name of the primary YAML file, without the suffix."""
        return f"{self.name}_trainer"

    @property
    def program(self) -> str:
        """The command that starts such a run."""
        return f"python -m hrl.trainer.main_{self.name}"

    @property
    def check(self) -> str:
        """The command that checks such a run."""
        return "hrl check" if self.name == "ppo" else f"hrl check {self.name}"


_RUN_KEYS = (
    "trainer.total_epochs",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.test_freq",
    "trainer.save_freq",
    "trainer.logger",
    "trainer.project_name",
    "trainer.experiment_name",
)

PPO = RunKind(
    name="ppo",
    schema=PPOTrainerConfig,
    rules=PPO_RULES,
    spellings=PPO_SPELLINGS,
    help=Help(
        quickstart="GRPO on a small model that learns to add.",
        groups=("placement", "recipe", "size"),
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
            *_RUN_KEYS,
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
)

_OFFLINE_DATA_KEYS = (
    "model.path",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_length",
    "data.truncation",
    "data.max_token_len_per_gpu",
)
_OFFLINE_EXAMPLES = (
    "trainer.total_epochs=2 optim.lr=5e-6",
    "model.path=Qwen/Qwen2.5-0.5B-Instruct \\\n"
    "      data.train_files=train.parquet data.val_files=val.parquet trainer.n_gpus_per_node=8 \\\n"
    "      data.train_batch_size=64 data.max_length=2048 data.max_token_len_per_gpu=16384 optim.lr=1e-5 \\\n"
    "      model.enable_gradient_checkpointing=true trainer.total_epochs=1 trainer.test_freq=50 \\\n"
    "      trainer.experiment_name=mine",
)


def _offline(
    name: str, schema: type[C], quickstart: str, *keys: str, rules: tuple[Rule, ...] = OFFLINE_RULES
) -> RunKind[C]:
    """Return a kind of run that learns from a data set; `keys` are the most used ones of its own."""
    help_text = Help(
        quickstart=quickstart,
        groups=(),
        most_used=(*_OFFLINE_DATA_KEYS, *keys, "optim.lr", *_RUN_KEYS),
        examples=_OFFLINE_EXAMPLES,
        check="data.train_files=train.parquet",
        page="docs/configuration-offline.md",
    )
    return RunKind(name, schema, rules, OFFLINE_SPELLINGS, help_text)


DPO = _offline(
    "dpo",
    DPOTrainerConfig,
    "DPO on pairs of a right and a wrong sum.",
    "algorithm.loss_type",
    "algorithm.beta",
    rules=DPO_RULES,
)
KTO = {"algorithm.loss_type": "kto", "trainer.experiment_name": "kto"}
"""Key → value: what makes KTO of a run of DPO's kind, whatever else is set."""
KTO_QUICKSTART = "KTO on sums that are labelled right or wrong."
SFT = _offline("sft", SFTTrainerConfig, "supervised fine-tuning on sums and their answers.", "algorithm.loss_agg_mode")
RM = _offline("rm", RMTrainerConfig, "a reward model that tells right sums from wrong ones.")
OFFLINE_KINDS: dict[str, RunKind[OfflineConfig]] = {kind.name: kind for kind in (DPO, SFT, RM)}
KINDS: dict[str, RunKind[RunConfiguration]] = {PPO.name: PPO, **OFFLINE_KINDS}
"""Name for `hrl check` → kind of run."""


@cache
def config_folder() -> Path:
    """Return the folder of `ppo_trainer.yaml`: inside the installed package, or at the root of the repository.

    Raises:
        FileNotFoundError: Neither is there; the installation is broken.
    """
    package = Path(str(resources.files("hrl")))
    candidates = (package / "_configs", package.parent / "configs")
    for candidate in candidates:
        if (candidate / "ppo_trainer.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"no ppo_trainer.yaml in {' or '.join(map(str, candidates))}; install hrl again")
