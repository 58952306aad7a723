"""Which roles run in which processes."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hrl.config.ppo import PPOTrainerConfig
from hrl.errors import Problem
from hrl.nearest import did_you_mean

ROLES = ("actor_rollout", "actor", "rollout", "ref", "critic", "rm")


class Placement(NamedTuple):
    """Pools of processes and the roles on them.

    Attributes:
        pools: Pool name → processes on each machine, for pools that have a role.
        roles: Role → pool name, for roles that the run builds. Either `actor_rollout`, or `actor` and `rollout`, or
            `rollout` without a policy that learns.
    """

    pools: dict[str, tuple[int, ...]]
    roles: dict[str, str]

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
    used = set(roles.values())
    return Placement({pool: tuple(sizes) for pool, sizes in pools.items() if pool in used}, roles)


def _optional_roles(config: PPOTrainerConfig) -> Mapping[str, bool]:
    has_ref = config.needs_reference and not config.reference_is_actor
    return {"ref": has_ref, "critic": config.needs_critic, "rm": config.needs_reward_model}


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
        elif pool is not None and pool not in pools:
            known = ", ".join(pools)
            yield Problem(key, f"names the pool {pool!r}, which trainer.resource_pools lacks.", f"Pools are {known}.")
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
