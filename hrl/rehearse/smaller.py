"""A run made small: the same configuration with fewer processes, samples and tokens, and what of it was reduced.

Everything that is reduced is told, from what to what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hrl.algos.registry import estimator_traits
from hrl.config.load import load_kind
from hrl.config.outline import RunConfiguration, outline_of
from hrl.config.placement import resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import RunKind
from hrl.config.section import ACTOR, REF, RM, ROLLOUT, flatten, unflatten
from hrl.rehearse.engines import keys_of_engine, run_by_vllm_here, shrink_server
from hrl.rehearse.layout import GROUPS, Shape, kept_options, shapes_of, shardings_of, small_pools
from hrl.rehearse.parts import Change, told

RESPONSE_TOKENS = 16
EPISODE_TOKENS = 1024
"""Longest response of a rehearsal, and longest episode, in which the environment's words count too."""
TRAIN_ROWS = 1024
"""Rows that the two starts read; all of them are read once before."""
_TURNS, _SAMPLES, _VAL_ROWS, _ROWS, _PASSES = 2, 2, 4, 4, 2
_KV_CACHE_GIB = 0.25
LIMIT_S = 900.0
"""Seconds that each of the two starts of a rehearsal may take, if nothing else is said."""
_SHARE_OF_A_WAIT = 2 / 3
"""Of that time, what one wait of the run may take: its error says more than that the time is over."""
_UNTOUCHED = {
    "trainer.total_training_steps": 1000,  # a signal ends it
    "trainer.save_freq": 1,
    "trainer.max_ckpt_to_keep": 2,
    "trainer.resume_mode": "auto",
    "trainer.resume_from_path": None,
    "trainer.default_remote_dir": None,
    "trainer.dashboard": False,
    "trainer.logger": ["console-json"],
    "trainer.profile": [],
    "trainer.max_restarts": 0,
    "trainer.on_save_error": "stop",
    "trainer.ray_kwargs": {},
    "trainer.device": "cpu",
}
"""Values of every rehearsal: nothing of the user's is written to, and nobody else is told of it."""


class Smaller(NamedTuple):
    """A small run.

    Attributes:
        config: Its configuration.
        changes: What was reduced.
    """

    config: RunConfiguration
    changes: list[Change]


def smaller(
    kind: RunKind[Any],
    config: RunConfiguration,
    run_folder: Path,
    most_processes: int,
    *,
    engine: str | None = None,
    limit_s: float = LIMIT_S,
) -> Smaller:
    """Return a small run of the same kind; its models are still those of the line.

    Args:
        kind: The kind of run.
        config: The configuration of the line.
        run_folder: Its run folder.
        most_processes: The largest pool.
        engine: The engine in place of the line's, where that can't run here.
        limit_s: Seconds that a start of it may take.
    """
    longest_s = _SHARE_OF_A_WAIT * limit_s
    values = dict(flatten(config.model_dump(), kind.schema))
    before = dict(values)
    changes: list[Change] = []
    values |= _UNTOUCHED | {"trainer.default_local_dir": str(run_folder)}
    for key in ("trainer.timeouts.init_s", "trainer.timeouts.call_s"):
        values[key] = min(values[key], longest_s)
    values["data.train_max_samples"] = _at_most(values["data.train_max_samples"], TRAIN_ROWS)
    values["data.val_max_samples"] = _at_most(values["data.val_max_samples"], _VAL_ROWS)
    if isinstance(config, PPOTrainerConfig):
        values |= keys_of_engine(engine) if engine is not None else {}
        changes += run_by_vllm_here(values, config)
    pools = small_pools(config, most_processes)
    layout = {pool: shape.within(pools[pool]) for pool, shape in shapes_of(config).items()}
    if isinstance(config, PPOTrainerConfig):
        _shrink_policy(values, config, layout)
        if config.environment.is_used:
            _shrink_episodes(values, config, longest_s)
    else:
        (shape,) = layout.values()
        _place(values, "model", config.model.fsdp_config, shape, config.num_processes)
        values["data.train_batch_size"] = min(config.data.train_batch_size, _ROWS)
        _shrink_passes(values, config, config.data.max_length * (2 if hasattr(config.data, "chosen_key") else 1))
    _shrink_processes(values, config, pools)
    if isinstance(config, PPOTrainerConfig) and config.reward.reward_model.is_served:
        changes += shrink_server(values, layout[resolve_placement(config).roles["rm"]].engine)
    for pool, shape in shapes_of(config).items():
        name = "processes" if len(layout) == 1 else f"processes of pool {pool}"
        changes += _changed_shape(name, shape, layout[pool], config.trainer.nnodes)
    changes += [Change(key, told(before[key]), told(values[key])) for key in _TOLD if _differs(key, before, values)]
    return Smaller(load_kind(kind, unflatten(values)), changes)


_TOLD = (
    "data.train_batch_size",
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_epochs",
    f"{ROLLOUT}.n",
    "data.max_response_length",
    "environment.max_turns",
    f"{ROLLOUT}.name",
    "algorithm.filter_groups.enable",
    "trainer.default_remote_dir",
    "trainer.resume_mode",
    "trainer.logger",
)
"""Keys that a change of theirs is told of; others follow from these, or tell nobody anything."""


def _differs(key: str, before: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    if key == "trainer.logger":  # only trackers are missed
        return any(not name.startswith("console") and name != "file" for name in before[key])
    return key in values and before[key] != values[key]


def _at_most(number: int, most: int) -> int:
    """Return the smaller of the two; -1 stands for all."""
    return most if number < 0 else min(number, most)


def _changed_shape(name: str, was: Shape, now: Shape, machines: int) -> Iterator[Change]:
    if was.processes != now.processes:
        on = f" on {machines} machines" if machines > 1 else ""
        yield Change(name, f"{was.processes}{on}", f"{now.processes} on this one")
    for title, old, new in (
        ("sharing a copy", was.copy, now.copy),
        ("sharing a sequence", was.sequences, now.sequences),
        ("sharing an engine", was.engine, now.engine),
        ("sharing weights", was.weights, now.weights),
        ("sharing out experts", was.experts, now.experts),
    ):
        if old != new and (old < was.processes or title != "sharing a copy"):
            yield Change(f"{name} {title}", str(old), str(new))


def _place(values: dict[str, Any], owner: str, sharding: Any, shape: Shape, processes: int) -> None:
    """Set the sharding of a model on the small shape of its pool."""

    def within(size: int) -> int:
        return shape.processes if size == processes else min(size, 2, shape.processes)

    if sharding.fsdp_size != -1:
        size = within(sharding.fsdp_size)
        values[f"{owner}.fsdp_config.fsdp_size"] = -1 if size == shape.processes > 1 else size
    for name in GROUPS:
        values[f"{owner}.fsdp_config.{name}"] = within(getattr(sharding, name))


def _shrink_processes(values: dict[str, Any], config: RunConfiguration, pools: Mapping[str, int]) -> None:
    values["trainer.nnodes"] = 1
    values["trainer.n_gpus_per_node"] = max(pools.values())
    if isinstance(config, PPOTrainerConfig):
        values["trainer.resource_pools"] = {pool: [size] for pool, size in pools.items()}
        options = kept_options(config, pools)
        values["trainer.pool_options"] = {pool: own.model_dump() for pool, own in options.items()}
        values["trainer.role_pools"] = {
            role: pool for role, pool in config.trainer.role_pools.items() if pool is None or pool in pools
        }


def _shrink_policy(values: dict[str, Any], config: PPOTrainerConfig, layout: Mapping[str, Shape]) -> None:
    """Shrink what only runs that sample have."""
    placement, rollout = resolve_placement(config), config.actor_rollout_ref.rollout
    owners = {placement.actor: ACTOR, "ref": REF, "critic": "critic.model", "rm": f"{RM}.model"}
    for role, sharding in shardings_of(config).items():
        if role in placement.roles:
            pool = placement.roles[role]
            _place(values, owners[role], sharding, layout[pool], sum(placement.pools[pool]))
    if config.reference_is_actor or "ref" not in placement.roles:
        for name in GROUPS:
            values[f"{REF}.fsdp_config.{name}"] = values.get(f"{ACTOR}.fsdp_config.{name}", 1)
        values[f"{REF}.fsdp_config.fsdp_size"] = -1
    shape = layout[placement.roles[placement.rollout]]
    runs_alone = values[f"{ROLLOUT}.name"] != "vllm"
    values[f"{ROLLOUT}.tensor_model_parallel_size"] = 1 if runs_alone else shape.engine
    least = estimator_traits(config.algorithm.adv_estimator).min_group_size
    values[f"{ROLLOUT}.n"] = min(rollout.n, max(_SAMPLES, least))
    values[f"{ROLLOUT}.val_kwargs.n"] = min(rollout.val_kwargs.n, _SAMPLES)
    values[f"{ROLLOUT}.kv_cache_gib"] = min(rollout.kv_cache_gib, _KV_CACHE_GIB)
    prompts = config.data.train_batch_size
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    batch = min(_ROWS // 2, mini) * min(prompts // mini, 2)
    values["data.train_batch_size"] = batch
    for key, size in ((ACTOR, mini), ("critic", config.critic.ppo_mini_batch_size)):
        values[f"{key}.ppo_mini_batch_size"] = max(batch // max(min(prompts // size, 2), 1), 1)
    values[f"{ACTOR}.ppo_epochs"] = min(config.actor_rollout_ref.actor.ppo_epochs, _PASSES)
    values["critic.ppo_epochs"] = min(config.critic.ppo_epochs, _PASSES)
    most = EPISODE_TOKENS if config.environment.is_used else RESPONSE_TOKENS
    response = min(config.data.max_response_length, most)
    values["data.max_response_length"] = response
    longest = config.data.max_prompt_length + response
    values[f"{ROLLOUT}.max_model_len"] = None
    values[f"{ROLLOUT}.max_num_batched_tokens"] = max(rollout.max_num_batched_tokens, longest)
    buffer = config.reward.overlong_buffer
    values["reward.overlong_buffer.len"] = min(buffer.len, max(response // 5, 1)) if buffer.enable else buffer.len
    values["algorithm.filter_groups.enable"] = False
    # A preference loss takes a prompt with both its answers for one row.
    _shrink_passes(values, config, longest + (0 if config.algorithm.preference_loss is None else response))


def _shrink_episodes(values: dict[str, Any], config: PPOTrainerConfig, longest_s: float) -> None:
    values["environment.max_turns"] = min(config.environment.max_turns, _TURNS)
    turn = config.environment.max_turn_tokens
    values["environment.max_turn_tokens"] = min(turn or RESPONSE_TOKENS, RESPONSE_TOKENS)
    for key, share in (("environment.episode_timeout_s", 0.5), ("environment.step_timeout_s", 0.4)):
        values[key] = min(values[key], share * longest_s)


def _shrink_passes(values: dict[str, Any], config: RunConfiguration, longest: int) -> None:
    """Make micro-batches as small as the longest row allows, so that a step has several."""
    sections = _sections_of_passes(config)
    for name, each in config.micro_batches().items():
        together = values[f"{sections[name]}.fsdp_config.ulysses_sequence_parallel_size"]
        if each.max_tokens is not None:
            values[each.tokens_key] = each._replace(slices=together).budget_for(longest)
        elif each.max_rows is not None:
            values[each.rows_key] = min(each.max_rows, 2)


def _sections_of_passes(config: RunConfiguration) -> dict[str, str]:
    """Return pass → section of the sharding by which its processes run together."""
    if not isinstance(config, PPOTrainerConfig):
        return {"model": "model"}
    ref = ACTOR if config.reference_is_actor else REF
    return {
        **dict.fromkeys(("actor", "log_prob"), ACTOR),
        "ref": ref,
        **dict.fromkeys(("critic", "values"), "critic.model"),
        "rm": f"{RM}.model",
    }


def with_twins(
    kind: RunKind[Any], config: RunConfiguration, twins: Mapping[str, Path], adapters: Mapping[str, Any]
) -> RunConfiguration:
    """Return a small run on the twins of its models.

    Args:
        kind: The kind of run.
        config: The small run.
        twins: Role → folder of its twin.
        adapters: Keys of the adapters beside them → values.
    """
    values = dict(flatten(config.model_dump(), kind.schema))
    for role, model in outline_of(config).models.items():
        section = model.key.rpartition(".")[0]
        values[model.key] = str(twins[role])
        if role not in ("rm", "ref") or not isinstance(config, PPOTrainerConfig):
            values[f"{section}.override_config"] = {}
    if isinstance(config, PPOTrainerConfig) and config.reward.reward_model.is_served:
        values[f"{RM}.model_path"] = str(twins["rm"])
    return load_kind(kind, unflatten(values | dict(adapters)))
