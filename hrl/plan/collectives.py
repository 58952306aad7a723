"""How long ranks take to gather, reduce and broadcast."""

from __future__ import annotations

from hrl.plan.assumptions import Assumptions
from hrl.plan.hardware import Hardware


def group_rate(hardware: Hardware, assumed: Assumptions, ranks: int) -> float:
    """Return the bytes/s at which every rank of a group receives what the group gathers.

    Inside a machine the links carry it. Over several, every machine has to receive everything once, through the
    network of all its devices, and passes it on over the links at the same time.
    """
    rate = hardware.link_rate
    if ranks > hardware.per_machine and not hardware.is_cpu:
        rate = min(rate, hardware.network_rate)
    return rate * assumed.collective_share


def gather_s(num_bytes: float, calls: int, ranks: int, hardware: Hardware, assumed: Assumptions) -> float:
    """Return the seconds in which all ranks get a tensor that is sharded over them; a reduce-scatter takes as long.

    Args:
        num_bytes: Of the whole.
        calls: Collectives that it is cut into.
        ranks: Of the group.
        hardware: The devices.
        assumed: Constants.
    """
    if ranks == 1:
        return 0.0
    return num_bytes * (ranks - 1) / ranks / group_rate(hardware, assumed, ranks) + calls * (ranks - 1) * assumed.hop_s


def replicate_s(num_bytes: float, shards: int, replicas: int, hardware: Hardware, assumed: Assumptions) -> float:
    """Return the seconds in which replicas add up their gradients, each rank its own shard.

    An all-reduce moves a tensor twice. On one machine the links carry it. Between machines, the shards of a machine
    pass through its network; those that several of its ranks have are added up over the links first.

    Args:
        num_bytes: Of all shards.
        shards: Ranks that share a copy.
        replicas: Copies.
        hardware: The devices.
        assumed: Constants.
    """
    if replicas == 1:
        return 0.0
    moved, share = 2 * num_bytes * (replicas - 1) / replicas, assumed.collective_share
    if shards * replicas <= hardware.per_machine or hardware.is_cpu:
        return moved / shards / (hardware.link_rate * share)
    return moved * min(shards, hardware.per_machine) / shards / (hardware.network_rate * share)
