"""Resource pools for worker groups: one placement group per node, each confined to its node."""

from __future__ import annotations

import ipaddress
import math
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from hrl.single_controller.own_ray import end_lost_ray
from hrl.single_controller.worker_errors import PlacementError

_FRACTION = 10_000  # Ray counts resources in ten-thousandths


@dataclass
class Slot:
    """The place of one rank: a bundle of a placement group and its node.

    Pools that are parts or unions of others share their slots, including the count of worker groups.

    Attributes:
        num_groups: Number of worker groups with a process here.
        released: Whether the devices were given back to the cluster.
    """

    placement_group: PlacementGroup
    bundle_index: int
    node_id: str
    node_ip: str
    num_groups: int = 0
    released: bool = False


class RayResourcePool:
    """Devices of a Ray cluster, reserved for worker groups.

    Node i of the pool is a placement group of `process_on_nodes[i]` bundles with strategy STRICT_PACK, which puts all
    its processes on one machine. The reservation is made for the first worker group.

    Args:
        process_on_nodes: Number of processes, node by node: `[8, 8]` is two nodes of eight.
        use_gpu: Reserve a whole GPU per process; otherwise processes use only CPUs.
        name_prefix: Name of the pool in errors and in Ray.
        max_colocate_count: Number of worker groups that share each device. A process takes one CPU and this fraction of
            the GPU. Roles that should share one *process* are merged by `create_colocated_worker_cls` instead.
        detached: Refused when True: hrl's workers die with their driver.
        accelerator_type: A Ray accelerator type (`H100`) that the nodes must have.
        nodes: Resources (`big`) or labels (`rack=a`) that the nodes must have, as they were given to `ray start`: one
            for all, or one for each.
        placement_timeout_s: Seconds to wait for free resources in the cluster.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 1,
        detached: bool = False,
        accelerator_type: str | None = None,
        placement_timeout_s: float = 30.0,
        nodes: Sequence[str] = (),
    ) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ValueError(f"process_on_nodes must name at least one process per node, got {list(process_on_nodes)}")
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        if detached:
            raise ValueError("detached pools are not supported: the processes of a group die with their driver")
        if nodes and len(nodes) not in (1, len(process_on_nodes)):
            raise ValueError(
                f"nodes must name one for all or one for each of {len(process_on_nodes)}, got {list(nodes)}"
            )
        self.process_on_nodes = list(process_on_nodes)
        self.nodes = list(nodes) * len(self.process_on_nodes) if len(nodes) == 1 else list(nodes)
        self.max_colocate_count = max_colocate_count
        self.use_gpu = use_gpu
        self.name = name_prefix or f"pool_{uuid.uuid4().hex[:6]}"
        self.accelerator_type = accelerator_type
        self.placement_timeout_s = placement_timeout_s
        self._slots: list[Slot] = []

    @property
    def world_size(self) -> int:
        """Number of processes of a group on this pool."""
        return sum(self.process_on_nodes)

    @property
    def gpus_per_process(self) -> float:
        """The share of a GPU that each process takes."""
        return _FRACTION // self.max_colocate_count / _FRACTION if self.use_gpu else 0.0

    @property
    def bundle(self) -> dict[str, float]:
        """The resources that one device of the pool reserves."""
        bundle: dict[str, float] = {"CPU": self.max_colocate_count}
        if self.use_gpu:
            bundle["GPU"] = 1
        if self.accelerator_type is not None:
            bundle[f"accelerator_type:{self.accelerator_type}"] = 1 / _FRACTION
        return bundle

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Return the pool's reservation, making it if needed.

        Raises:
            PlacementError: The cluster lacks the pool's resources, even after `placement_timeout_s`.
        """
        return list({slot.placement_group.id: slot.placement_group for slot in self.slots()}.values())

    def slots(self) -> list[Slot]:
        """Return the place of every rank, in rank order, so that a node's ranks are consecutive.

        Nodes come by address; in their own order where they are named.

        Raises:
            PlacementError: As `get_placement_groups`.
        """
        if not self._slots:
            reserve([self])
        return self._slots

    def take_place(self) -> list[Slot]:
        """Return the slots, for one more worker group.

        Raises:
            PlacementError: The reservation fails as in `get_placement_groups`, a slot already has `max_colocate_count`
                groups, or it belongs to a pool that was released.
        """
        slots = self.slots()
        if any(slot.released for slot in slots):
            raise PlacementError(f"resource pool {self.name!r} was made from a pool that has since been released")
        taken = max(slot.num_groups for slot in slots)
        if taken >= self.max_colocate_count:
            raise PlacementError(
                f"resource pool {self.name!r} already has {taken} worker group(s), its max_colocate_count: "
                "shut one down, raise max_colocate_count, or merge roles with create_colocated_worker_cls"
            )
        for slot in slots:
            slot.num_groups += 1
        return slots

    @staticmethod
    def give_back_place(slots: Sequence[Slot]) -> None:
        """Free the slots that `take_place` returned."""
        for slot in slots:
            slot.num_groups -= 1

    def release(self) -> None:
        """Give the devices back to the cluster; Ray ends any process that still runs on them."""
        for group in self.get_placement_groups() if self._slots else ():
            remove_placement_group(group)
        for slot in self._slots:
            slot.released = True
        self._slots = []

    def _wanted(self) -> list[tuple[dict[str, float], int]]:
        """Return, node by node, what a device reserves and how many there are."""
        named = [node if "=" not in node else "" for node in self.nodes] or [""] * len(self.process_on_nodes)
        bundles = [self.bundle | ({name: 1 / _FRACTION} if name else {}) for name in named]
        return list(zip(bundles, self.process_on_nodes, strict=True))

    def _begin(self) -> list[PlacementGroup]:
        """Ask for the devices."""
        labels = [dict([node.split("=", 1)]) if "=" in node else None for node in self.nodes]
        return [
            placement_group(
                [bundle] * count,
                strategy="STRICT_PACK",
                name=f"{self.name}_{node}",
                bundle_label_selector=[labels[node]] * count if labels and labels[node] else None,
            )
            for node, (bundle, count) in enumerate(self._wanted())
        ]

    def _take_slots(self, groups: Sequence[PlacementGroup]) -> None:
        ips = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = {group.id: placement_group_table(group)["bundles_to_node_id"] for group in groups}
        slots = [
            Slot(group, index, nodes[group.id][index], ips[nodes[group.id][index]])
            for group in groups
            for index in range(group.bundle_count)
        ]
        self._slots = slots if self.nodes else _by_node(slots)

    def _require_nodes(self) -> None:
        """Refuse names of nodes that no node of the cluster has."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        resources = sorted({name for node in nodes for name in node["Resources"] if _is_named(name)})
        labels = sorted({f"{key}={value}" for node in nodes for key, value in node.get("Labels", {}).items()})
        for wanted in self.nodes:
            if wanted not in (labels if "=" in wanted else resources):
                there = [label for label in labels if not label.startswith("ray.io/")] if "=" in wanted else resources
                what = "label" if "=" in wanted else "resource"
                raise PlacementError(
                    f"resource pool {self.name!r}: no node of the cluster has the {what} {wanted!r} "
                    f"(trainer.pool_options.{self.name}.nodes). Those that nodes have: {', '.join(there) or 'none'}. "
                    + (
                        f"Start a node with `ray start --labels={wanted}`."
                        if "=" in wanted
                        else f"""Start a node with `ray start --resources='{{"{wanted}": 1}}'`."""
                    )
                )

    def _lacks(self, reason: str) -> str:
        needs = "; ".join(_text(_total([bundle] * count)) for bundle, count in self._wanted())
        free = available_resources_per_node()
        nodes = "; ".join(
            f"{node_id[:8]}: {_text(total)}, of which free {_text(free.get(node_id, {}), like=total)}"
            for node_id, total in _alive_nodes().items()
        )
        return (
            f"resource pool {self.name!r}: {reason}. It needs, node by node: {needs}. The cluster has: {nodes}. "
            f"Ask for fewer processes per node (trainer.resource_pools.{self.name}), give back other pools, or start "
            "Ray with more."
        )


def reserve(pools: Sequence[RayResourcePool]) -> None:
    """Reserve the devices of several pools, of all or of none.

    Raises:
        PlacementError: The cluster lacks a pool's resources, even after its `placement_timeout_s`.
    """
    pools = [pool for pool in pools if not pool._slots]
    for pool in pools:
        pool._require_nodes()
    nodes, before = list(_alive_nodes().values()), list[dict[str, float]]()
    for pool in pools:
        wanted = [_total([bundle] * count) for bundle, count in pool._wanted()]
        missing = _certainly_missing(wanted, nodes)
        if missing is None and before and (missing := _certainly_missing([*before, *wanted], nodes)) is not None:
            missing = f"beside the pools before it, {missing}"
        if missing is not None:
            raise PlacementError(pool._lacks(missing))
        before += wanted
    deadline = time.monotonic() + max((pool.placement_timeout_s for pool in pools), default=0.0)
    asked = [(pool, pool._begin()) for pool in pools]
    for pool, groups in asked:
        pending = [group for group in groups if not group.wait(max(math.ceil(deadline - time.monotonic()), 0))]
        if pending:
            for _, others in asked:
                for group in others:
                    remove_placement_group(group)
            raise PlacementError(
                pool._lacks(f"no room for {len(pending)} of {len(groups)} node(s) in {pool.placement_timeout_s:g} s")
            )
    for pool, groups in asked:
        pool._take_slots(groups)


def give_back(pools: Sequence[RayResourcePool]) -> None:
    """Give the devices of several pools back to the cluster, if it is still there."""
    if ray.is_initialized() and not end_lost_ray():
        for pool in pools:
            pool.release()


class SubRayResourcePool(RayResourcePool):
    """A pool of slots that other pools have reserved; made by `split_resource_pool` and `merge_resource_pool`."""

    def __init__(self, name: str, slots: Sequence[Slot], like: RayResourcePool) -> None:
        counts = Counter(slot.node_id for slot in slots)
        super().__init__(list(counts.values()), like.use_gpu, name, like.max_colocate_count)
        self._slots = list(slots)

    def release(self) -> None:
        """Refuse, because the devices belong to the pools that this one was made from.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"resource pool {self.name!r} was split off or merged: release the pools it was made of")


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Split a pool into pools of consecutive ranks, which share its reservation.

    Args:
        resource_pool: The pool, which may itself be a part of another. Its reservation is made if needed.
        split_size: Ranks of each part: one number for all of them, or a list.

    Raises:
        ValueError: The sizes do not add up to the pool's ranks.
        PlacementError: The cluster lacks what the pool needs.
    """
    world_size = resource_pool.world_size
    sizes = [split_size] * (world_size // max(split_size, 1)) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != world_size or any(size < 1 for size in sizes):
        raise ValueError(f"split_size {split_size} does not cut the {world_size} ranks of pool {resource_pool.name!r}")
    slots = iter(resource_pool.slots())
    return [
        SubRayResourcePool(f"{resource_pool.name}_split_{part}", list(islice(slots, size)), like=resource_pool)
        for part, size in enumerate(sizes)
    ]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> SubRayResourcePool:
    """Merge the slots of two pools into one pool, which shares their reservations.

    Raises:
        ValueError: Only one has GPUs, their `max_colocate_count` differ, or they share a slot.
        PlacementError: The cluster lacks a pool's resources.
    """
    for what in ("use_gpu", "max_colocate_count"):
        one, other = getattr(rp1, what), getattr(rp2, what)
        if one != other:
            raise ValueError(f"pools {rp1.name!r} and {rp2.name!r} can't be merged: {what} is {one} and {other}")
    if any(slot is other for slot in rp1.slots() for other in rp2.slots()):
        raise ValueError(f"pools {rp1.name!r} and {rp2.name!r} can't be merged: they share devices")
    return SubRayResourcePool(f"{rp1.name}_{rp2.name}", _by_node([*rp1.slots(), *rp2.slots()]), like=rp1)


def _by_node(slots: Iterable[Slot]) -> list[Slot]:
    return sorted(slots, key=lambda slot: (int(ipaddress.ip_address(slot.node_ip)), slot.node_id))


def _alive_nodes() -> dict[str, dict[str, float]]:
    """Return the total resources of the cluster's nodes, by node id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _total(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}


def _certainly_missing(wanted: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> str | None:
    """Return why the wanted placement groups can never fit on the nodes; None if they may.

    Each group is compared with every node's total, and all groups with the whole cluster. Groups that pass both tests
    may still not fit; then the wait for the reservation times out.
    """
    for name in dict.fromkeys(name for need in wanted for name in need):
        largest = max(need.get(name, 0.0) for need in wanted)
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if largest > most:
            return f"one node must have {largest:g} {name} and the best of {len(nodes)} node(s) has {most:g}"
        everything, available = sum(need.get(name, 0.0) for need in wanted), sum(node.get(name, 0.0) for node in nodes)
        if everything > available:
            return f"it needs {everything:g} {name} in all and the cluster has {available:g}"
    return None


def _is_named(resource: str) -> bool:
    """Return whether a resource is one that somebody gave a name, and not Ray's own."""
    own = ("CPU", "GPU", "memory", "object_store_memory")
    return (
        resource not in own
        and not resource.startswith(("node:", "accelerator_type:", "bundle_"))
        and "_group_" not in resource
    )


def _text(resources: Mapping[str, float], like: Mapping[str, float] | None = None) -> str:
    """Describe countable resources, e.g. `CPU 2, GPU 0`, without Ray's labels for nodes and placement groups."""
    names = dict.fromkeys(["CPU", "GPU", *(like or resources)])
    named = ("CPU", "GPU")
    shown = [name for name in names if name in named or name.startswith("accelerator_type") or _is_named(name)]
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in shown)
