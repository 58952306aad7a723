"""Which roles run in which processes."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from hrl.algos.registry import estimator_traits
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.trainer import PoolOptions
from hrl.errors import Problem
from hrl.nearest import did_you_mean

ROLES = ("actor_rollout", "actor", "rollout", "ref", "critic", "rm")


class Device(NamedTuple):
    """A device that a pool reserves.

    Attributes:
        pool: That pool.
        number: Of the device among the pool's, from 0.
    """

    pool: str
    number: int


@dataclass(frozen=True)
class Placement:
    """Pools of processes and the roles on them.

    Attributes:
        pools: Pool name → processes on each machine, for pools that have a role.
        roles: Role → pool name, for roles that the run builds. Either `actor_rollout`, or `actor` and `rollout`, or
            `rollout` without a policy that learns.
        reserved: Pool name → devices on each machine, for pools whose devices any of `pools` takes; empty where each
            of `pools` has its own.
        places: Pool name → the device of each of its ranks, for pools that take those of others.
        options: Pool name → its options, where it has any.
    """

    pools: dict[str, tuple[int, ...]]
    roles: dict[str, str]
    reserved: dict[str, tuple[int, ...]] = field(default_factory=dict)
    places: dict[str, tuple[Device, ...]] = field(default_factory=dict)
    options: dict[str, PoolOptions] = field(default_factory=dict)

    @property
    def reservations(self) -> dict[str, tuple[int, ...]]:
        """Pool name → devices on each machine, of all that is reserved."""
        return self.reserved or self.pools

    def devices(self, pool: str) -> tuple[Device, ...]:
        """Return the device of each rank of a pool."""
        return self.places.get(pool) or tuple(Device(pool, number) for number in range(sum(self.pools[pool])))

    def options_of(self, pool: str) -> PoolOptions:
        """Return the options of a pool."""
        return self.options.get(pool) or PoolOptions()

    def sharing(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Return the pools that have a process on the same devices → how many of these there are on each machine."""
        there: dict[Device, list[str]] = {}
        for pool in self.pools:
            for device in self.devices(pool):
                there.setdefault(device, []).append(pool)
        shared: dict[tuple[str, ...], list[Device]] = {}
        for device, pools in there.items():
            shared.setdefault(tuple(pools), []).append(device)
        return {pools: _by_machine(devices, self.reservations) for pools, devices in shared.items()}

    def is_apart(self, role: str, but: Collection[str] = ()) -> bool:
        """Return whether no other role of the run is on a role's devices; those in `but` may be."""
        own = {*self.devices(self.roles[role])}
        others = (pool for other, pool in self.roles.items() if other != role and other not in but)
        return all(own.isdisjoint(self.devices(pool)) for pool in others)

    @property
    def num_devices(self) -> int:
        """Number of devices that are reserved, those of pools on CPUs alone included."""
        return sum(map(sum, self.reservations.values()))

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that are reserved in a run that has any."""
        return sum(sum(sizes) for pool, sizes in self.reservations.items() if self.options_of(pool).use_gpu)

    @property
    def num_cpus(self) -> int:
        """Number of CPUs that are reserved: one for each process that may be on a device."""
        return sum(self.options_of(pool).max_colocate_count * sum(sizes) for pool, sizes in self.reservations.items())

    def uses_gpu(self, role: str) -> bool:
        """Return whether a role is on GPUs in a run that has any."""
        return self.options_of(self.devices(self.roles[role])[0].pool).use_gpu

    def processes(self, role: str) -> int:
        """Return the number of processes that hold `role`."""
        return sum(self.pools[self.roles[role]])

    def roles_on(self, pool: str) -> list[str]:
        """Return the roles that share the processes of `pool`."""
        return [role for role, place in self.roles.items() if place == pool]

    @property
    def trains(self) -> bool:
        """Whether there is a policy that learns, beside the engines."""
        return self.actor in self.roles

    @property
    def actor(self) -> str:
        """The role that holds the trained policy."""
        return "actor" if "actor" in self.roles else "actor_rollout"

    @property
    def rollout(self) -> str:
        """The role that holds the engines."""
        return "rollout" if "rollout" in self.roles else "actor_rollout"


def resolve_placement(config: PPOTrainerConfig) -> Placement:
    """Assign every role that the run builds to its pool; roles without an entry join the actor's pool."""
    pools, roles = config.trainer.resource_pools, _built_roles(config)
    used, options = set(roles.values()), config.trainer.pool_options
    sizes = {pool: tuple(each) for pool, each in pools.items()}
    derived = {pool for pool in used if pool in options and options[pool].is_derived}
    places = {pool: tuple(_devices_of(pool, sizes, options)) for pool in sizes if pool in derived}
    taken = {device.pool for devices in places.values() for device in devices}
    reserved = {pool: each for pool, each in sizes.items() if pool in taken | used - derived} if taken else {}
    own = {pool: _by_machine(places[pool], sizes) if pool in places else each for pool, each in sizes.items()}
    return Placement({pool: each for pool, each in own.items() if pool in used}, roles, reserved, places, dict(options))


def model_scores_apart(config: PPOTrainerConfig) -> bool:
    """Return whether a reward model scores while others compute what they do of the same rows.

    It has devices of its own, and nothing may happen to rows between their scores and what comes next: no filter, no
    greedy samples that are only compared with, no episodes.
    """
    may_change = config.algorithm.filter_groups.enable or config.environment.is_used
    if not config.needs_reward_model or may_change or estimator_traits(config.algorithm.adv_estimator).needs_baseline:
        return False
    return resolve_placement(config).is_apart("rm", but=("rollout",))


def _built_roles(config: PPOTrainerConfig) -> dict[str, str]:
    """Return the pool of every role that the run builds."""
    wanted, pools = config.trainer.role_pools, config.trainer.resource_pools
    apart = "actor" in wanted or "rollout" in wanted
    alone = _engines_alone(config)
    first = "rollout" if alone else "actor" if apart else "actor_rollout"
    home = wanted.get(first) or next(iter(pools))
    built = ["rollout"] if alone else ["actor", "rollout"] if apart else ["actor_rollout"]
    built += [role for role, needed in _optional_roles(config).items() if needed]
    roles = {role: wanted.get(role) or home for role in built}
    if apart and not alone and roles["actor"] == roles["rollout"]:
        del roles["actor"], roles["rollout"]
        roles = {"actor_rollout": home, **roles}
    return roles


_Sizes = Mapping[str, tuple[int, ...]]
_Options = Mapping[str, PoolOptions]


def _devices_of(pool: str, sizes: _Sizes, options: _Options) -> list[Device]:
    """Return the device of each rank of a pool.

    Raises:
        _NoPlaceError: A part does not fit.
    """
    own = options.get(pool)
    if own is not None and own.merge_of:
        return [device for part in own.merge_of for device in _devices_of(part, sizes, options)]
    if own is None or own.split_of is None:
        return [Device(pool, number) for number in range(sum(sizes[pool]))]
    whole, start = _devices_of(own.split_of, sizes, options), 0
    for part in sizes:
        if part not in options or options[part].split_of != own.split_of:
            continue
        start, size = start % len(whole), sum(sizes[part])
        if start + size > len(whole):
            raise _NoPlaceError(part, own.split_of, size, len(whole) - start, len(whole))
        if part == pool:
            return whole[start : start + size]
        start += size
    raise AssertionError("a pool is among the parts of its own whole")


def _by_machine(devices: Sequence[Device], sizes: _Sizes) -> tuple[int, ...]:
    """Return how many of these devices are on each machine of the pools that reserve them."""
    machines = [
        (device.pool, next(m for m, end in enumerate(accumulate(sizes[device.pool])) if device.number < end))
        for device in devices
    ]
    return tuple(Counter(machines).values())


class _NoPlaceError(Exception):
    """A part of a pool has more ranks than are left."""

    def __init__(self, part: str, whole: str, size: int, left: int, ranks: int) -> None:
        super().__init__(part, whole)
        rest = f"{left} of its {ranks} ranks" if left < ranks else f"{ranks} ranks"
        self.problem = Problem(
            f"trainer.resource_pools.{part}",
            f"has {size} {'process' if size == 1 else 'processes'}, and is split off pool {whole!r}, which has "
            f"{rest} left for it.",
            f"Give it at most {left}, or change the pools that are split off {whole!r} before it.",
            (f"trainer.resource_pools.{whole}", f"trainer.pool_options.{part}.split_of"),
        )


def _optional_roles(config: PPOTrainerConfig) -> Mapping[str, bool]:
    has_rm = config.needs_reward_model or config.reward.reward_model.is_served
    return {"ref": config.builds_reference, "critic": config.needs_critic, "rm": has_rm}


def _engines_alone(config: PPOTrainerConfig) -> bool:
    """Return whether no policy that learns is built."""
    return config.trainer.role_pools.get("actor", "") is None


def placement_problems(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Yield a problem for unknown roles and pools, and for roles that exclude each other."""
    pools, wanted = config.trainer.resource_pools, config.trainer.role_pools
    if not pools:
        yield Problem("trainer.resource_pools", "has no pool.", "Name one, e.g. {global: [1]}.")
    for role, pool in wanted.items():
        key = f"trainer.role_pools.{role}"
        if role not in ROLES:
            yield Problem(key, "is not a role.", did_you_mean(role, ROLES, f"Roles are {', '.join(ROLES)}."))
        elif pool is None and role != "actor":
            yield Problem(key, "is null, which only the actor can be.", f"Name a pool: {', '.join(pools)}.")
        elif pool is not None and pool not in pools and pool not in config.trainer.pool_options:  # which is told below
            hint = did_you_mean(pool, tuple(pools), f"Pools are {', '.join(pools)}.")
            what = f"names the pool {pool!r}, which trainer.resource_pools lacks."
            yield Problem(key, what, hint, ("trainer.resource_pools", "trainer.pool_options"))
    if pools:
        yield from _option_problems(config)
    if "actor_rollout" in wanted and ("actor" in wanted or "rollout" in wanted):
        yield Problem(
            "trainer.role_pools", "has actor_rollout beside actor or rollout.", "Write either one role or two."
        )
    trainer = config.trainer
    if _engines_alone(config) and (trainer.total_training_steps != 0 or trainer.resume_mode != "disable"):
        what = "is null, so that nothing can be trained or taken from a checkpoint."
        hint = "Set trainer.total_training_steps=0 and trainer.resume_mode=disable, or name a pool."
        involves = ("trainer.total_training_steps", "trainer.resume_mode")
        yield Problem("trainer.role_pools.actor", what, hint, involves)


def _option_problems(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Yield a problem for options of no pool, of pools that can't be cut or joined so, and of devices that are full."""
    pools, options, known = (
        config.trainer.resource_pools,
        config.trainer.pool_options,
        ", ".join(config.trainer.resource_pools),
    )
    sizes = {pool: tuple(each) for pool, each in pools.items()}
    found = False
    for problem in _broken_options(sizes, options, known):
        found = True
        yield problem
    if found:
        return
    try:
        places = {pool: _devices_of(pool, sizes, options) for pool in sizes}
    except _NoPlaceError as error:
        yield error.problem
        return
    wanted = {role: pool for role, pool in _built_roles(config).items() if pool in sizes}
    yield from _full_devices(wanted, places, options)
    yield from _misplaced_roles(wanted, places, options)
    if config.reward.reward_model.is_served and "rm" in wanted:
        yield from _served_badly(config, wanted, places)


def _broken_options(sizes: _Sizes, options: _Options, known: str) -> Iterator[Problem]:
    said: set[str] = set()  # pools of circles that were told
    for pool, own in options.items():
        key, parents = f"trainer.pool_options.{pool}", _parents(own)
        if pool not in sizes and not parents:
            hint = did_you_mean(pool, tuple(sizes), f"Pools are {known}.")
            yield Problem(key, "is no pool of trainer.resource_pools.", hint, ("trainer.resource_pools",))
            continue
        if own.split_of is not None and own.merge_of:
            yield Problem(key, "has split_of beside merge_of.", "Write one of the two.")
            continue
        name = "split_of" if own.split_of is not None else "merge_of"
        circles = {parent: above for parent in parents if pool in (above := {parent, *_all_above(parent, options)})}
        if circles:
            parent, above = next(iter(circles.items()))
            if pool not in said:
                what = f"names {parent!r}, which is itself made of it."
                yield Problem(f"{key}.{name}", what, "Name another pool.")
            said |= above
            continue
        for parent in parents:
            if parent not in sizes and not (parent in options and options[parent].is_derived):
                hint = did_you_mean(parent, tuple(sizes), f"Pools are {known}.")
                yield Problem(f"{key}.{name}", f"names the pool {parent!r}, which there is not.", hint)
            elif name == "merge_of" and parent in options and options[parent].is_derived:
                yield Problem(f"{key}.{name}", f"names {parent!r}, which has no devices of its own.", "Name its whole.")
            elif name == "split_of" and parent in options and options[parent].split_of is not None:
                yield Problem(f"{key}.{name}", f"names {parent!r}, which is a part itself.", "Name its whole.")
        if name == "merge_of" and parents and all(each in sizes for each in (pool, *parents)):
            yield from _not_to_be_merged(pool, own, sizes, options)
        if parents and (
            set_here := sorted(name for name in _OF_DEVICES if getattr(own, name) != getattr(_PLAIN, name))
        ):
            what = f"belongs to the pool whose devices it takes, {', '.join(parents)}."
            yield Problem(f"{key}.{set_here[0]}", what, f"Write it at trainer.pool_options.{parents[0]}.")
        if len(own.nodes) > 1 and pool in sizes and len(own.nodes) != len(sizes[pool]):
            what = f"names {len(own.nodes)} nodes, and the pool has processes on {len(sizes[pool])} machine(s)."
            yield Problem(
                f"{key}.nodes", what, "Name one for all, or one for each.", (f"trainer.resource_pools.{pool}",)
            )


def _parents(own: PoolOptions) -> list[str]:
    return own.merge_of if own.split_of is None else [own.split_of, *own.merge_of]


def _all_above(pool: str, options: _Options) -> set[str]:
    """Return the pools whose devices a pool takes, directly or through others."""
    above: set[str] = set()
    waiting = [pool]
    while waiting:
        own = options.get(waiting.pop())
        more = set() if own is None else {*_parents(own)} - above
        above |= more
        waiting += more
    return above


_OF_DEVICES = frozenset({"max_colocate_count", "use_gpu", "accelerator_type", "nodes"})
_PLAIN = PoolOptions()


def _not_to_be_merged(pool: str, own: PoolOptions, sizes: _Sizes, options: _Options) -> Iterator[Problem]:
    key, parts = f"trainer.pool_options.{pool}.merge_of", own.merge_of
    if len(parts) < 2 or len(set(parts)) < len(parts):
        yield Problem(key, f"is [{', '.join(parts)}].", "Name two different pools, or more.")
        return
    for name in ("use_gpu", "max_colocate_count"):
        values = {part: getattr(options.get(part) or PoolOptions(), name) for part in parts}
        if len(set(values.values())) > 1:
            said = ", ".join(
                f"{value} in {part}".lower() if name == "use_gpu" else f"{value} in {part}"
                for part, value in values.items()
            )
            yield Problem(key, f"joins pools whose {name} differs: {said}.", "Make them equal.")
    if sum(sizes[pool]) != sum(sum(sizes[part]) for part in parts):
        what = (
            f"has {sum(sizes[pool])} processes, and the pools it is merged of have {sum(sum(sizes[p]) for p in parts)}."
        )
        yield Problem(f"trainer.resource_pools.{pool}", what, "Leave it out: it follows from them.", (key,))


def _full_devices(
    wanted: Mapping[str, str], places: Mapping[str, Sequence[Device]], options: _Options
) -> Iterator[Problem]:
    """Yield a problem for each pool with more processes on a device than share it."""
    on_device: dict[Device, list[str]] = {}
    for pool in dict.fromkeys(wanted.values()):
        for device in places[pool]:
            on_device.setdefault(device, []).append(pool)
    said = set()
    for device, there in on_device.items():
        most = (options.get(device.pool) or PoolOptions()).max_colocate_count
        if len(there) > most and device.pool not in said:
            said.add(device.pool)
            of = ", ".join(there)
            what = f"is {most}, and {len(there)} processes are on its device {device.number}, of the pools {of}."
            hint = f"Set it to {len(there)}: each process then has 1/{len(there)} of a GPU."
            key = f"trainer.pool_options.{device.pool}.max_colocate_count"
            yield Problem(key, what, hint, ("trainer.role_pools", "trainer.pool_options"))


def _served_badly(
    config: PPOTrainerConfig, wanted: Mapping[str, str], places: Mapping[str, Sequence[Device]]
) -> Iterator[Problem]:
    """Yield a problem for a served reward model whose devices are another role's, or make no server."""
    pool, key = wanted["rm"], "trainer.role_pools.rm"
    sharing = [role for role, other in wanted.items() if role != "rm" and not {*places[other]}.isdisjoint(places[pool])]
    serves = ("reward.reward_model.serve",)
    if sharing:
        what = f"is {pool!r}, whose devices {' and '.join(sharing)} has too, and a server has its devices to itself."
        hint = "Name a pool of its own, e.g. trainer.resource_pools.judge=[1] trainer.role_pools.rm=judge."
        yield Problem(key, what, hint, serves)
    sizes = config.trainer.resource_pools[pool]
    if len(sizes) > 1:
        what = f"is {pool!r}, which has processes on {len(sizes)} machines, and a server is on one."
        yield Problem(key, what, "Start servers yourself, and name their addresses: docs/reward-models.md.", serves)
    degree = config.reward.reward_model.server_kwargs.get("tensor_parallel_size", 1)
    if not isinstance(degree, int) or degree < 1 or len(places[pool]) % degree:
        what = f"has tensor_parallel_size={degree}, which does not divide the {len(places[pool])} devices of {pool!r}."
        yield Problem("reward.reward_model.server_kwargs", what, "Change one of the two.", serves)


def _misplaced_roles(
    wanted: Mapping[str, str], places: Mapping[str, Sequence[Device]], options: _Options
) -> Iterator[Problem]:
    for role, pool in wanted.items():
        whole = places[pool][0].pool
        if role in ("actor_rollout", "actor", "rollout") and not (options.get(whole) or PoolOptions()).use_gpu:
            what = f"is {pool!r}, whose processes have no GPU (trainer.pool_options.{whole}.use_gpu)."
            yield Problem(f"trainer.role_pools.{role}", what, "Only ref, critic and rm can be on CPUs beside GPUs.")
    actor, rollout = wanted.get("actor"), wanted.get("rollout")
    if actor is not None and rollout is not None and not {*places[actor]}.isdisjoint(places[rollout]):
        what = f"and trainer.role_pools.rollout are pools with the same devices, {actor!r} and {rollout!r}."
        hint = "Name one pool for both: they share a process, and weights go by memory handles, not by broadcast."
        yield Problem("trainer.role_pools.actor", what, hint, ("trainer.role_pools.rollout",))
