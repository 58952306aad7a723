"""Rules of where roles run, and of how many processes share a model. See `rules`."""

from collections.abc import Iterator

from hrl.config.model import FsdpConfig, ShardingConfig
from hrl.config.offline import OfflineConfig
from hrl.config.placement import placement_problems, resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.section import ACTOR, REF, ROLLOUT
from hrl.errors import Problem
from hrl.nearest import nearest_divisors


def roles_have_pools(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Every role has a pool, and the sizes of engines and shards divide the pool's processes."""
    broken = list(placement_problems(config))
    yield from broken
    if broken:
        return
    placement = resolve_placement(config)
    involves = ("trainer.resource_pools", "trainer.role_pools", "trainer.n_gpus_per_node", "trainer.nnodes")
    ranks = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    processes = placement.processes(placement.rollout)
    if processes % ranks:
        what = f"is {ranks}, which does not divide the {processes} rollout processes."
        hint = f"Nearest that do: {nearest_divisors(processes, ranks)}."
        yield Problem(f"{ROLLOUT}.tensor_model_parallel_size", what, hint, involves)
    sharded: dict[str, tuple[str, ShardingConfig]] = {
        placement.actor: (ACTOR, config.actor_rollout_ref.actor.fsdp_config),
        "ref": (REF, config.actor_rollout_ref.ref.fsdp_config),
        "critic": ("critic.model", config.critic.model.fsdp_config),
        "rm": ("reward.reward_model.model", config.reward.reward_model.model.fsdp_config),
    }
    # The reference follows the actor: what is wrong with both is said once, unless they have pools of their own.
    said: set[tuple[int, ...]] = set()
    for role, (owner, sharding) in sharded.items():
        if role not in placement.roles:
            continue
        processes, whose = placement.processes(role), f" of {role}"
        yield from _uneven_copies(owner, sharding, processes, whose, involves)
        groups = sharding.tensor_parallel_size, sharding.expert_parallel_size
        sizes = sharding.ulysses_sequence_parallel_size, *groups, processes
        if role != "ref" or sizes not in said:
            yield from _uneven_groups(owner, sharding, processes, whose, involves)
        said.add(sizes)


def shards_divide_the_processes(config: OfflineConfig) -> Iterator[Problem]:
    """The sizes of a sharded copy and of every kind of group divide the number of processes."""
    involves = ("trainer.n_gpus_per_node", "trainer.nnodes")
    sharding, processes = config.model.fsdp_config, config.num_processes
    yield from _uneven_copies("model", sharding, processes, "", involves)
    yield from _uneven_groups("model", sharding, processes, "", involves)


def _uneven_copies(
    owner: str, sharding: ShardingConfig, processes: int, whose: str, involves: tuple[str, ...]
) -> Iterator[Problem]:
    """Report a size of a sharded copy that does not divide the number of processes."""
    size = sharding.fsdp_size
    if size != -1 and (size == 0 or processes % size):
        what = f"is {size}, which does not divide the {processes} processes{whose}."
        yield Problem(f"{owner}.fsdp_config.fsdp_size", what, "Set it to -1 for all of them.", involves)


def _uneven_groups(
    owner: str, sharding: ShardingConfig, processes: int, whose: str, involves: tuple[str, ...]
) -> Iterator[Problem]:
    """Report sizes of groups that don't divide the processes, or don't go with the rest."""
    degree = sharding.ulysses_sequence_parallel_size
    if processes % degree:
        what = f"is {degree}, which does not divide the {processes} processes{whose}."
        divisors = nearest_divisors(processes, degree)
        hint = f"Nearest that do: {divisors}; or start a multiple of {degree} processes (trainer.n_gpus_per_node)."
        yield Problem(f"{owner}.fsdp_config.ulysses_sequence_parallel_size", what, hint, involves)
    copy = processes if sharding.fsdp_size in (-1, 0) else min(sharding.fsdp_size, processes)
    for name in ("tensor_parallel_size", "expert_parallel_size"):
        degree = getattr(sharding, name)
        if copy % degree:
            what = f"is {degree}, which does not divide the {copy} processes{whose} that share a copy of the model."
            hint = f"Nearest that do: {nearest_divisors(copy, degree)}; or start a multiple of {degree} processes."
            yield Problem(f"{owner}.fsdp_config.{name}", what, hint, (*involves, f"{owner}.fsdp_config.fsdp_size"))
    degree, key = sharding.tensor_parallel_size, f"{owner}.fsdp_config.tensor_parallel_size"
    if degree > 1 and sharding.expert_parallel_size > 1:
        other = f"{owner}.fsdp_config.expert_parallel_size"
        what = f"is {sharding.expert_parallel_size}, and {key} is {degree}: a tensor group shares out experts itself."
        yield Problem(other, what, "Set one of the two to 1.", (key,))
    if degree > 1 and sharding.ulysses_sequence_parallel_size > 1:
        other = f"{owner}.fsdp_config.ulysses_sequence_parallel_size"
        what = f"is {degree}, and {other} is {sharding.ulysses_sequence_parallel_size}: a row has one kind of group."
        yield Problem(key, what, "Set one of the two to 1.", (other,))
    if degree > 1 and isinstance(sharding, FsdpConfig) and sharding.model_dtype == "bf16":
        what = f"is {degree}, and masters in bf16 are rounded by whole rows, which tensor groups cut."
        yield Problem(key, what, f"Set {owner}.fsdp_config.model_dtype=fp32.", (f"{owner}.fsdp_config.model_dtype",))
