"""How the processes of a run share work and devices, and how few of them keep that.

A layout keeps its shape: what was shared by several processes still is, by two, and what lay beside that still does
where so many processes are allowed. Pools that take the devices of others still do, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

from hrl.config.outline import RunConfiguration
from hrl.config.placement import Placement, resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.trainer import PoolOptions

MOST_PROCESSES = 4
"""Processes of a pool: two that share a copy, a sequence or an engine, and as many beside them."""
GROUPS = ("ulysses_sequence_parallel_size", "tensor_parallel_size", "expert_parallel_size")
"""Keys of a sharding that say how many processes do something together."""
_SIZES = (1, 2, 4, 8)
"""Processes of a pool, of which groups of two are a part."""
_OF_NODES = {
    "nodes": "this machine stands for all of them",
    "accelerator_type": "this machine stands for those with it",
}
"""Options of pools that choose machines → why a rehearsal has none of them."""


class Shape(NamedTuple):
    """How the processes of a pool share work: numbers of processes.

    Attributes:
        processes: All of them.
        copy: Those that share one sharded copy of a model.
        sequences: Those that run a micro-batch together.
        engine: Those that share an engine.
        weights: Those that compute parts of each product together.
        experts: Those that share out a mixture's experts.
    """

    processes: int
    copy: int
    sequences: int
    engine: int
    weights: int = 1
    experts: int = 1

    def wanted(self) -> int:
        """Return the least number of processes with which nothing of the shape is lost."""
        if self.processes == 1:
            return 1
        groups = self[1:]
        return 4 if any(1 < size < self.processes for size in groups) else 2

    def within(self, processes: int) -> Shape:
        """Return the same shape of so many processes."""

        def fewer(size: int) -> int:
            return processes if size == self.processes else min(size, 2, processes)

        return Shape(processes, *map(fewer, self[1:]))


def shardings_of(config: PPOTrainerConfig) -> dict[str, Any]:
    """Return role → how its model is sharded; of a reward model that is served nothing is."""
    placement, policy = resolve_placement(config), config.actor_rollout_ref
    found: dict[str, Any] = {
        placement.actor: policy.actor.fsdp_config,
        "ref": policy.ref.fsdp_config,
        "critic": config.critic.model.fsdp_config,
    }
    return (
        found if config.reward.reward_model.is_served else found | {"rm": config.reward.reward_model.model.fsdp_config}
    )


def shapes_of(config: RunConfiguration) -> dict[str, Shape]:
    """Return the shape of every pool that has a role."""
    if not isinstance(config, PPOTrainerConfig):
        sharding, processes = config.model.fsdp_config, config.num_processes
        copy = processes if sharding.fsdp_size == -1 else sharding.fsdp_size
        sequences, weights, experts = (getattr(sharding, name) for name in GROUPS)
        return {"global": Shape(processes, copy, sequences, 1, weights, experts)}
    placement = resolve_placement(config)
    found = {}
    for pool, counts in placement.pools.items():
        roles, processes = placement.roles_on(pool), sum(counts)
        shardings = [sharding for role, sharding in shardings_of(config).items() if role in roles]
        copies = [processes if one.fsdp_size == -1 else one.fsdp_size for one in shardings]
        # Where roles of a pool differ, the one that splits it counts.
        split = [size for size in copies if 1 < size < processes]
        sequences, weights, experts = (max((getattr(one, name) for one in shardings), default=1) for name in GROUPS)
        engine = _processes_of_engine(config, placement, roles)
        found[pool] = Shape(processes, (split or copies or [1])[0], sequences, engine, weights, experts)
    return found


def _processes_of_engine(config: PPOTrainerConfig, placement: Placement, roles: Sequence[str]) -> int:
    """Return how many processes of a pool share an engine, the policy's or that of a reward model."""
    if placement.rollout in roles:
        return config.actor_rollout_ref.rollout.tensor_model_parallel_size
    served = config.reward.reward_model
    return served_degree(served.server_kwargs) if "rm" in roles and served.is_served else 1


def served_degree(arguments: Mapping[str, Any]) -> int:
    """Return how many devices share a copy of a model, by the arguments of its server."""
    return int(arguments.get("tensor_parallel_size", 1))


def small_pools(config: RunConfiguration, most: int) -> dict[str, int]:
    """Return pool → processes, of every pool with a role, and of those whose devices such a pool takes.

    Args:
        config: The configuration of the line.
        most: The largest pool. More are taken only where a pool is split into more parts.
    """
    wanted = {pool: min(shape.wanted(), most) for pool, shape in shapes_of(config).items()}
    if not isinstance(config, PPOTrainerConfig):
        return wanted
    placement = resolve_placement(config)
    if not placement.places:
        return wanted
    taken = dict.fromkeys(device.pool for devices in placement.places.values() for device in devices)
    own = {pool: size for pool, size in wanted.items() if pool not in placement.places and pool not in taken}
    apart, together = _pairs(placement)

    def cost(pools: Mapping[str, int]) -> tuple[int, int, int]:
        """Return by how much too many processes there are, then how much of the shape is lost, then all devices."""
        still_apart, still_together = _pairs(resolve_placement(with_pools(config, pools)))
        torn = len(together - still_together) + len(wanted) * len(apart - still_apart)
        few = sum(max(wanted[pool] - pools[pool], 0) for pool in wanted)
        return sum(max(pools[pool] - most, 0) for pool in wanted), torn + few, sum(pools[pool] for pool in taken)

    largest = max(most, 1 << len(config.trainer.resource_pools).bit_length())
    candidates = (
        pools
        for sizes in product(range(1, largest + 1), repeat=len(taken))
        for pools in _with_derived(config, own | dict(zip(taken, sizes, strict=True)))
        if all(pools[pool] in _SIZES for pool in wanted)
    )
    return min(candidates, key=cost)


def with_pools(config: PPOTrainerConfig, pools: Mapping[str, int]) -> PPOTrainerConfig:
    """Return a configuration with pools of so many processes on one machine, whose rules are not looked at again."""
    update = {
        "resource_pools": {pool: [size] for pool, size in pools.items()},
        "pool_options": kept_options(config, pools),
    }
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=update)})


def kept_options(config: PPOTrainerConfig, pools: Mapping[str, int]) -> dict[str, PoolOptions]:
    """Return the options of these pools, without those that choose machines."""
    anywhere = {name: PoolOptions.model_fields[name].get_default(call_default_factory=True) for name in _OF_NODES}
    options = config.trainer.pool_options
    return {pool: own.model_copy(update=anywhere) for pool, own in options.items() if pool in pools}


def not_kept(config: RunConfiguration) -> Iterator[tuple[str, str]]:
    """Yield the options of pools that mean nothing on one machine without GPUs, and why."""
    if not isinstance(config, PPOTrainerConfig):
        return
    for pool, own in config.trainer.pool_options.items():
        key = f"trainer.pool_options.{pool}"
        for name, why in _OF_NODES.items():
            if value := getattr(own, name):
                words = value if isinstance(value, str) else f"[{', '.join(value)}]"
                yield f"{key}.{name}={words}", why
        if not own.use_gpu:
            yield f"{key}.use_gpu=false", "every process is on a CPU here"


def _with_derived(config: PPOTrainerConfig, own: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield pools with those that take devices of these, in the order of the line; none where some are too few."""
    options = config.trainer.pool_options
    before = {pool: sum(sizes) for pool, sizes in config.trainer.resource_pools.items()}
    now = dict(own)
    for pool in before:
        parts = options[pool].merge_of if pool in options else []
        if parts and all(part in now for part in parts):
            now[pool] = sum(now[part] for part in parts)
    turns = [
        (turn, [*_shares(len(turn), now[whole], is_all=is_all)])
        for whole in [pool for pool in before if pool in now]
        for turn, is_all in _turns([pool for pool in before if _whole_of(options, pool) == whole], before, whole)
    ]
    for chosen in product(*(shares for _, shares in turns)):
        of_parts = {
            part: size
            for (turn, _), sizes in zip(turns, chosen, strict=True)
            for part, size in zip(turn, sizes, strict=True)
        }
        yield {pool: (now | of_parts)[pool] for pool in before if pool in now or pool in of_parts}


def _whole_of(options: Mapping[str, PoolOptions], pool: str) -> str | None:
    return options[pool].split_of if pool in options else None


def _turns(parts: Sequence[str], sizes: Mapping[str, int], whole: str) -> Iterator[tuple[list[str], bool]]:
    """Yield the parts of a pool that lie beside each other, and whether they are all of it."""
    turn = list[str]()
    for part in parts:
        turn.append(part)
        if sum(sizes[each] for each in turn) == sizes[whole]:
            yield turn, True
            turn = []
    if turn:
        yield turn, False


def _shares(number: int, ranks: int, *, is_all: bool) -> Iterator[tuple[int, ...]]:
    """Yield sizes of so many parts of a pool, which are all of it, or leave a rank where there are enough."""
    for sizes in product(_SIZES, repeat=number):
        if sum(sizes) == ranks if is_all else sum(sizes) <= max(ranks - 1, number) and sum(sizes) <= ranks:
            yield sizes


def _pairs(placement: Placement) -> tuple[frozenset[frozenset[str]], frozenset[frozenset[str]]]:
    """Return the pairs of pools that share no device, and those that share some."""
    devices = {pool: {*placement.devices(pool)} for pool in placement.pools}
    apart = {frozenset(pair) for pair in combinations(devices, 2) if devices[pair[0]].isdisjoint(devices[pair[1]])}
    together = {frozenset(pair) for pair in combinations(devices, 2)} - apart
    return frozenset(apart), frozenset(together)


def lost(config: RunConfiguration, small: RunConfiguration) -> list[str]:
    """Return what of the layout's shape the processes of the small run are too few for, in words."""
    words = {"copy": "copies beside each other", "sequences": "sequence groups beside each other",
             "engine": "several engines", "weights": "tensor groups beside each other",
             "experts": "expert groups beside each other"}  # fmt: skip
    found = []
    pools = shapes_of(small)
    for pool, was in shapes_of(config).items():
        now = pools[pool]
        for field, title in words.items():
            if getattr(was, field) < was.processes and getattr(now, field) == now.processes > 1:
                found.append(title if len(pools) == 1 else f"{title} in pool {pool}")
        if was.processes > now.processes == 1:
            found.append("several processes" if len(pools) == 1 else f"several processes in pool {pool}")
    return found
