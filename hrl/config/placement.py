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
        roles: Role → pool name, for roles that the run builds. Either `actor_rollout`, or `actor` and `rollout`.
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
    home = wanted.get("actor" if apart else "actor_rollout", next(iter(pools)))
    built = ["actor", "rollout"] if apart else ["actor_rollout"]
    built += [role for role, needed in _optional_roles(config).items() if needed]
    roles = {role: wanted.get(role, home) for role in built}
    if apart and roles["actor"] == roles["rollout"]:
        del roles["actor"], roles["rollout"]
        roles = {"actor_rollout": home, **roles}
    used = set(roles.values())
    return Placement({pool: tuple(sizes) for pool, sizes in pools.items() if pool in used}, roles)


def _optional_roles(config: PPOTrainerConfig) -> Mapping[str, bool]:
    return {"ref": config.needs_reference, "critic": config.needs_critic, "rm": config.needs_reward_model}


def placement_problems(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Yield a problem for unknown roles and pools, and for `actor_rollout` beside `actor` or `rollout`."""
    pools, wanted = config.trainer.resource_pools, config.trainer.role_pools
    if not pools:
        yield Problem("trainer.resource_pools", "has no pool.", "Name one, e.g. {global: [1]}.")
    for role, pool in wanted.items():
        key = f"trainer.role_pools.{role}"
        if role not in ROLES:
            yield Problem(key, "is not a role.", did_you_mean(role, ROLES, f"Roles are {', '.join(ROLES)}."))
        elif pool not in pools:
            known = ", ".join(pools)
            yield Problem(key, f"names the pool {pool!r}, which trainer.resource_pools lacks.", f"Pools are {known}.")
    if "actor_rollout" in wanted and ("actor" in wanted or "rollout" in wanted):
        yield Problem(
            "trainer.role_pools", "has actor_rollout beside actor or rollout.", "Write either one role or two."
        )
