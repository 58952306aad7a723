"""Seconds of a weight sync: cast, gather, copy into the engines."""

from __future__ import annotations

from math import ceil

from hrl.plan.assumptions import Assumptions
from hrl.plan.collectives import gather_s
from hrl.plan.cost import added
from hrl.plan.hardware import Hardware
from hrl.plan.shapes import ModelShape

GATHER = "gathering the weights"
NETWORK = "broadcast to the engines' machines"
MEMORY = "casts, checksums and copies in memory"
MESSAGES = "messages of tensors and buckets"
SLEEP = "engines go to sleep and wake up"


def sync_s(
    shape: ModelShape,
    shards: int,
    hardware: Hardware,
    assumed: Assumptions,
    *,
    shares: bool,
    sleeps: bool,
    sends_adapter: bool = False,
) -> dict[str, float]:
    """Return what a weight sync is spent on.

    Args:
        shape: The policy.
        shards: Processes that share one copy of it.
        hardware: A device.
        assumed: Constants.
        shares: Whether engines share the trainer's devices; otherwise they get a broadcast.
        sleeps: Whether engines sleep while the trainer works.
        sends_adapter: Whether an adapter is sent alone.
    """
    weights = shape.size.trained if sends_adapter else shape.size.parameters
    sent = 2.0 * weights
    calls = ceil(sent / (1 << 28))
    network = 0.0 if shares else sent / (hardware.network_rate / hardware.per_machine * assumed.collective_share)
    return added(
        [
            (GATHER, gather_s(sent, calls, shards, hardware, assumed)),
            (NETWORK, network),
            (MEMORY, assumed.sync_bytes * weights / (hardware.memory_rate * assumed.memory_share)),
            (MESSAGES, assumed.sync_s + shape.tensors * assumed.sync_tensor_s),
            (SLEEP, assumed.sleep_s * (sleeps and shares)),
        ]
    )
