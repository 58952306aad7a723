"""A common view of all kinds of run: models, lengths and processes, wherever a kind's schema keeps them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hrl.config.model import LearnerConfig, ModelConfig
from hrl.config.offline import OfflineConfig, RMTrainerConfig
from hrl.config.placement import Placement, resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.section import ACTOR, REF, ROLLOUT, TEACHER

RunConfiguration = PPOTrainerConfig | OfflineConfig


@dataclass(frozen=True)
class NamedModel:
    """A model that a run reads.

    Attributes:
        key: Key of the configuration that names the model.
        path: Value of that key, a folder or hub id.
        override_config: Fields of the model's config.json to replace.
        is_scalar: Whether the model gives one number per token, as critics and reward models do.
        degrees: Keys of the numbers of processes that share its heads, weights or experts, in the groups of the roles
            that train or score with it and in engines → their values.
        learner: Its section, if it learns.
        replays: Key and value that have its choices of experts replayed; empty where nothing does.
        balances: Key and value that have the load of its experts balanced; empty likewise.
        copies: Of `degrees`, the keys of groups that cut weights → how many processes share a copy of the model.
    """

    key: str
    path: str
    override_config: Mapping[str, Any]
    is_scalar: bool = False
    degrees: Mapping[str, int] = field(default_factory=dict)
    learner: LearnerConfig | None = None
    replays: str = ""
    balances: str = ""
    copies: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Lengths:
    """How long sequences may be, in tokens.

    Attributes:
        total: The longest row: prompt and response together.
        keys: Keys whose values add up to `total`.
        model: The longest sequence that models must support.
    """

    total: int
    keys: tuple[str, ...]
    model: int


@dataclass(frozen=True)
class Outline:
    """One run.

    Attributes:
        section: Key of the section of the trained model.
        model: That section, which also has the settings that apply to the models of all roles.
        models: Role (`actor`, `ref`, `critic`, `rm`) → model, the one with the tokenizer first. The engine uses the
            actor's, and so does the reference, unless it is a teacher.
        lengths: Lengths of the run's sequences.
        placement: Processes and the roles on them.
    """

    section: str
    model: ModelConfig
    models: Mapping[str, NamedModel]
    lengths: Lengths
    placement: Placement

    @property
    def num_processes(self) -> int:
        """Number of worker processes of the run."""
        return sum(map(sum, self.placement.pools.values()))

    @property
    def most_processes_on_a_node(self) -> int:
        """The largest number of processes that a pool has on one node."""
        return max(map(max, self.placement.pools.values()))


def outline_of(config: RunConfiguration) -> Outline:
    """Return the outline of a run of any kind."""
    return _of_ppo(config) if isinstance(config, PPOTrainerConfig) else _of_offline(config)


def _of_ppo(config: PPOTrainerConfig) -> Outline:
    section, model, data = "actor_rollout_ref.model", config.actor_rollout_ref.model, config.data
    policy, placement = config.actor_rollout_ref, resolve_placement(config)
    degrees, of_ref = _degree(ACTOR, policy.actor), _degree(REF, policy.ref)

    def copies(section: str, owner: Any, role: str) -> dict[str, int]:
        return _copies(section, owner, placement.processes(role)) if role in placement.roles else {}

    of_policy, of_reference = copies(ACTOR, policy.actor, placement.actor), copies(REF, policy.ref, "ref")
    if config.teacher_path is None:
        of_policy |= of_reference
    has_own = config.builds_reference and config.teacher_path is None
    if has_own and [*of_ref.values()] != [*degrees.values()]:  # else it follows the actor
        degrees |= of_ref
    degrees |= {f"{ROLLOUT}.tensor_model_parallel_size": policy.rollout.tensor_model_parallel_size}
    mode, balance = policy.actor.router_replay.mode, _balance(ACTOR, policy.actor)
    replays = "" if mode == "disabled" else f"{ACTOR}.router_replay.mode={mode}"
    models = {
        "actor": NamedModel(
            f"{section}.path", model.path, model.override_config, False, degrees, model, replays, balance, of_policy
        )
    }
    if config.teacher_path is not None:
        models["ref"] = NamedModel(TEACHER, config.teacher_path, {}, False, of_ref, copies=of_reference)
    if config.needs_critic:
        critic, degrees = config.critic.model, _degree("critic.model", config.critic.model)
        shares = copies("critic.model", critic, "critic")
        models["critic"] = NamedModel(
            "critic.model.path", critic.path, critic.override_config, True, degrees, critic, copies=shares
        )
    rm = config.reward.reward_model
    if config.needs_reward_model and rm.model_path is not None:  # what is served only its server looks into
        degrees = _degree("reward.reward_model.model", rm.model)
        shares = copies("reward.reward_model.model", rm.model, "rm")
        is_scalar = rm.reward_tokens is None
        models["rm"] = NamedModel(
            "reward.reward_model.model_path", rm.model_path, {}, is_scalar, degrees, copies=shares
        )
    total = data.max_prompt_length + data.max_response_length
    lengths = Lengths(
        total=total,
        keys=("data.max_prompt_length", "data.max_response_length"),
        model=config.actor_rollout_ref.rollout.max_model_len or total,
    )
    return Outline(section, model, models, lengths, placement)


def _balance(section: str, owner: Any) -> str:
    """Return key and value of the weight of a section's loss of the load of experts; nothing where it is off."""
    weight = getattr(owner, "router_aux_loss_coef", 0.0)
    return f"{section}.router_aux_loss_coef={weight:g}" if weight else ""


def _degree(section: str, owner: Any) -> dict[str, int]:
    """Return the keys of the sizes of a section's groups → their values."""
    names = ("ulysses_sequence_parallel_size", "tensor_parallel_size", "expert_parallel_size")
    return {f"{section}.fsdp_config.{name}": getattr(owner.fsdp_config, name) for name in names}


def _copies(section: str, owner: Any, processes: int) -> dict[str, int]:
    """Return the keys of the sizes of groups that cut a section's weights → processes that share a copy of it."""
    size = owner.fsdp_config.fsdp_size
    names = ("tensor_parallel_size", "expert_parallel_size")
    return dict.fromkeys((f"{section}.fsdp_config.{name}" for name in names), processes if size == -1 else size)


def _of_offline(config: OfflineConfig) -> Outline:
    model, longest, trainer = config.model, config.data.max_length, config.trainer
    is_scalar = isinstance(config, RMTrainerConfig)
    role = "rm" if is_scalar else "actor"
    balance = _balance("algorithm", getattr(config, "algorithm", None))
    degree, held = _degree("model", model), _copies("model", model, config.num_processes)
    named = NamedModel(
        "model.path", model.path, model.override_config, is_scalar, degree, learner=model, balances=balance, copies=held
    )
    return Outline(
        section="model",
        model=model,
        models={role: named},
        lengths=Lengths(longest, ("data.max_length",), longest),
        placement=Placement({"global": (trainer.n_gpus_per_node,) * trainer.nnodes}, {role: "global"}),
    )
