"""Which roles a run has, and on which pool of processes each of them lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hrl.config.placement import Placement
    from hrl.single_controller.resource_pool import RayResourcePool


class Role(Enum):
    """The parts of an RLHF dataflow. The value is the prefix of the role's worker group and its name in YAML."""

    ActorRollout = "actor_rollout"
    Actor = "actor"
    Rollout = "rollout"
    RefPolicy = "ref"
    Critic = "critic"
    RewardModel = "rm"


@dataclass
class ResourcePoolManager:
    """Resource pools by name, and the pool of every role.

    Roles that name the same pool share its processes, one per rank; roles on different pools run apart.

    Attributes:
        resource_pool_spec: Pool name to the number of processes on each node, e.g. `{"global": [8, 8]}`.
        mapping: Role to pool name.
        use_gpu: Whether a process of a pool owns a GPU.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    use_gpu: bool = True
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                known = ", ".join(self.resource_pool_spec)
                raise ValueError(f"role {role.value!r} is mapped to pool {pool!r}, but the pools are: {known}")

    def create_resource_pool(self) -> None:
        """Make the pools that some role uses. Placement happens when the first worker group asks for it."""
        from hrl.single_controller.resource_pool import RayResourcePool

        for name in dict.fromkeys(self.mapping.values()):
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=self.resource_pool_spec[name],
                use_gpu=self.use_gpu,
                name_prefix=name,
                max_colocate_count=1,
            )

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """Return the pool of a role; `KeyError` where the role is not mapped."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of processes (one per GPU) over all pools in use."""
        return sum(sum(self.resource_pool_spec[name]) for name in set(self.mapping.values()))


def pool_manager_of(placement: Placement, *, use_gpu: bool) -> ResourcePoolManager:
    """Return the pool manager of a run's placement."""
    pools = {name: list(counts) for name, counts in placement.pools.items()}
    return ResourcePoolManager(pools, {Role(role): pool for role, pool in placement.roles.items()}, use_gpu=use_gpu)
