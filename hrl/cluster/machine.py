"""What a run computes on: the cores and devices that it may take, and the Ray that it starts or joins."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ray

from hrl.single_controller.ray_cluster import most_object_store_bytes, ray_cluster

#: The least that the object store of a run's own Ray has. Its memory is taken when it is written to.
LEAST_OBJECT_STORE_BYTES = 1 << 30
#: What a token has in all columns of a batch, of 4 bytes each: ids, masks, log-probs, values, rewards, advantages.
BYTES_PER_TOKEN = 16 * 4
#: Batches that are in the store at once: that of a step goes when the next one has come.
BATCHES_IN_STORE = 2


#: So many ranks for each core are refused: they would wait for each other's turns in every collective.
MOST_RANKS_PER_CORE = 4


def bytes_of_batches(batch_tokens: int) -> int:
    """Return the most that the batches of a run take in the object store at once; arguments are as below."""
    return BATCHES_IN_STORE * BYTES_PER_TOKEN * batch_tokens


def object_store_bytes(batch_tokens: int) -> int:
    """Return the size of the object store of a run's own Ray; what doesn't fit goes to disk.

    Args:
        batch_tokens: Tokens of the largest batch, with all rows at their full length.
    """
    return max(LEAST_OBJECT_STORE_BYTES, min(bytes_of_batches(batch_tokens), most_object_store_bytes()))


def run_cluster(ray_kwargs: dict[str, Any], num_cpus: int, batch_tokens: int) -> AbstractContextManager[None]:
    """Return a context in which Ray runs: a cluster that is joined, or one that is started and ended with the block.

    A Ray that this process is connected to already is used, and left as it is.

    Args:
        ray_kwargs: Further arguments of `ray.init`; `address` names a running cluster to join, before the
            environment's `RAY_ADDRESS`; `local` starts one in any case.
        num_cpus: CPUs that the pools of the run reserve, one for each process. A machine with fewer cores is given as
            many on paper: ranks take turns there, which is slow and correct.
        batch_tokens: See `object_store_bytes`.
    """
    if ray.is_initialized():
        return nullcontext()
    address = ray_kwargs.get("address") or os.environ.get("RAY_ADDRESS") or "local"
    settings = ray_kwargs | {"address": address}
    if address == "local":
        own = {
            "num_cpus": max(available_cores(), num_cpus),
            "object_store_bytes": object_store_bytes(batch_tokens),
        }
        settings = own | settings
    return ray_cluster(**settings)


def available_cores() -> int:
    """Return how many cores this process may run on; containers often grant fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def crowding(num_processes: int, cores: int) -> str | None:
    """Return what is to be said of a run without GPUs that has more ranks than the machine has cores; else None.

    Args:
        num_processes: Ranks of the run, on all pools.
        cores: Those that it may use.
    """
    if num_processes <= cores:
        return None
    return (
        f"{num_processes} ranks take turns on {cores} cores: a step takes at least {num_processes / cores:.1f} times "
        "as long as with a core for each, and each rank holds libraries and an engine of its own"
    )


def choose_device(wanted: str) -> str:
    """Return `cpu` or `cuda`, from `trainer.device` and what the running cluster has."""
    if wanted != "auto":
        return wanted
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
