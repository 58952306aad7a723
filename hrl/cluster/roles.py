"""Which roles a run has, and on which pool of processes each of them lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from hrl.config.placement import Placement

if TYPE_CHECKING:
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
        placement: Where the processes of pools are that share devices, or are on certain nodes or on CPUs; None where
            each has a device of its own, wherever there is one.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    use_gpu: bool = True
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)
    placement: Placement | None = None
    _reserved: list[RayResourcePool] = field(default_factory=list)

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                known = ", ".join(self.resource_pool_spec)
                raise ValueError(f"role {role.value!r} is mapped to pool {pool!r}, but the pools are: {known}")

    def create_resource_pool(self) -> None:
        """Make the pools that some role uses, and reserve their devices, or none if one of them has no room.

        Raises:
            PlacementError: The cluster lacks what a pool needs.
        """
        from hrl.single_controller.resource_pool import RayResourcePool, SubRayResourcePool, reserve

        placement = self.placement
        if placement is None:
            used = {name: tuple(self.resource_pool_spec[name]) for name in self.mapping.values()}
            placement = Placement(used, {role.value: pool for role, pool in self.mapping.items()})
        own: dict[str, RayResourcePool] = {}
        for name, process_on_nodes in placement.reservations.items():
            options = placement.options_of(name)
            own[name] = RayResourcePool(
                process_on_nodes=list(process_on_nodes),
                use_gpu=self.use_gpu and options.use_gpu,
                name_prefix=name,
                max_colocate_count=options.max_colocate_count,
                accelerator_type=options.accelerator_type,
                nodes=options.nodes,
            )
        reserve(list(own.values()))
        self._reserved = list(own.values())
        for name in dict.fromkeys(self.mapping.values()):
            devices = placement.devices(name)
            self.resource_pool_dict[name] = (
                SubRayResourcePool(
                    name, [own[device.pool].slots()[device.number] for device in devices], like=own[devices[0].pool]
                )
                if name in placement.places
                else own[name]
            )

    def release(self) -> None:
        """Give the devices of all pools back to the cluster, which may serve another run of this process."""
        from hrl.single_controller.resource_pool import give_back

        give_back(self._reserved)
        self._reserved = []

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """Return the pool of a role; `KeyError` where the role is not mapped."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of processes (one per GPU) over all pools in use."""
        return sum(sum(self.resource_pool_spec[name]) for name in set(self.mapping.values()))


def pool_manager_of(placement: Placement, *, use_gpu: bool) -> ResourcePoolManager:
    """Return the pool manager of a run's placement."""
    pools = {name: list(counts) for name, counts in placement.pools.items()}
    mapping = {Role(role): pool for role, pool in placement.roles.items()}
    return ResourcePoolManager(pools, mapping, use_gpu=use_gpu, placement=placement)
