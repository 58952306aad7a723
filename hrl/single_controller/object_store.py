"""How much the object store of this node holds, and how much it had to write to disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import ray


@dataclass(frozen=True)
class StoreUse:
    """The object store of the driver's node, through which all batches go.

    Attributes:
        capacity_bytes: What it may hold.
        used_bytes: What it holds now.
        spilled_bytes: What it has written to disk since Ray started there, because it was full.
    """

    capacity_bytes: int
    used_bytes: int
    spilled_bytes: int


def store_use() -> StoreUse | None:
    """Return the use of this node's object store, as the node's own Ray process answers.

    None without Ray, through Ray's client, without the package `grpcio`, or if the node is too busy to answer.
    """
    if not ray.is_initialized() or ray.util.client.ray.is_connected() or find_spec("grpc") is None:
        return None
    import grpc  # type: ignore[import-untyped]
    from ray._private.internal_api import node_stats

    address = _address_of(ray.get_runtime_context().get_node_id())
    if address is None:
        return None
    try:
        reply = node_stats(*address, include_memory_info=False)
    except grpc.RpcError:
        return None
    stats = reply.store_stats
    return StoreUse(stats.object_store_bytes_avail, stats.object_store_bytes_used, stats.spilled_bytes_total)


@cache
def _address_of(node_id: str) -> tuple[str, int] | None:
    """Return where a node's Ray process answers. Asked once: a call to Ray's control service has no deadline."""
    node = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    return None if node is None else (node["NodeManagerAddress"], node["NodeManagerPort"])
