"""Memory of the driver over many batches.

A step's batch goes to every rank and log-probs come back, as in a log-prob stage; then once more, as to a second group.
There are as many calls, messages, parts and answers as ranks; a few processes run the calls of all of them. The ranks
compute nothing: what is there is packing, the object store, the messages, unpacking on the ranks, and joining. Every
hop has new columns. There is no peer: what is looked at is by how much the driver's resident memory grows with each
hop, over the second half of them, and the limit is a quarter of what a batch takes when it is packed.
`python -m bench.data_plane` does the same with 16,384 rows of up to 8,192 tokens and 1,024 ranks, and prints for each
hop the seconds of both calls, the MiB through the driver, and what driver and object store hold then.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import ray
import torch

from bench.harness import Comparison
from hrl.protocol import DataProto
from hrl.single_controller.dispatch import Dispatch, RankCall, register
from hrl.single_controller.object_store import StoreUse, store_use
from hrl.single_controller.rank_processes import PendingCalls
from hrl.single_controller.ray_cluster import ray_cluster
from hrl.single_controller.resource_pool import RayResourcePool
from hrl.single_controller.worker import RayClassWithInitArgs, Worker
from hrl.single_controller.worker_group import RayWorkerGroup, WorkerGroup

SECONDS = 31
THREADS = 1
MIB, GIB = 1 << 20, 1 << 30
COLUMNS = ("attention_mask", "prompts", "response_mask", "responses")


@dataclass(frozen=True)
class Request:
    """What the ranks are asked: which rows each of them has."""

    rows: Sequence[Sequence[int]]
    columns: Sequence[str] = COLUMNS

    def for_rank(self, rank: int) -> None:
        """Return nothing: a rank knows its rows."""


class Scorer(Worker):
    """A rank that answers at once."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def score(self, batch: DataProto, request: None) -> DataProto:
        """Return a column like log-probs `(n, R)`, zero outside of the responses."""
        columns = batch.batch
        return DataProto.from_dict({"old_log_probs": columns["response_mask"] * -1e-3 * columns["responses"]})


class ManyRanks(WorkerGroup):
    """More ranks than processes: each process runs the calls of many.

    Args:
        group: The processes.
        ranks: How many ranks they stand for.
        nodes: How many nodes these ranks are said to be on.
    """

    def __init__(self, group: RayWorkerGroup, ranks: int, nodes: int) -> None:
        super().__init__(ranks, RayClassWithInitArgs(Scorer), 1800.0)
        own = group._processes
        self._processes = copy.copy(own)
        place = [rank * len(own.actors) // ranks for rank in range(ranks)]
        self._processes.actors = [own.actors[each] for each in place]
        self._processes.infos = [
            replace(own.infos[each], node_id=f"node {rank * nodes // ranks}") for rank, each in enumerate(place)
        ]

    def _submit(self, role: str, method: str, calls: Sequence[RankCall]) -> PendingCalls:
        return self._processes.call(role, method, calls, self.call_timeout_s)


def batch_of(rows: int, tokens: int) -> DataProto:
    """Return rows with prompts of up to a quarter of the tokens and responses of up to the rest, of random lengths."""
    generator = torch.Generator().manual_seed(0)
    prompt, response = tokens // 4, tokens - tokens // 4
    lengths = torch.randint(prompt // 8, prompt + 1, (rows, 1), generator=generator)
    answers = torch.randint(response // 8, response + 1, (rows, 1), generator=generator)
    in_prompt, in_response = torch.arange(prompt) >= prompt - lengths, torch.arange(response) < answers
    tensors = {
        "prompts": torch.randint(1, 150_000, (rows, prompt), generator=generator).mul_(in_prompt),
        "responses": torch.randint(1, 150_000, (rows, response), generator=generator).mul_(in_response),
        "attention_mask": torch.cat([in_prompt, in_response], 1).long(),
        "response_mask": in_response.long(),
    }
    return DataProto.from_dict(tensors)


@contextmanager
def pickled(found: list[int]) -> Iterator[None]:
    """Add the bytes of everything that this process pickles for Ray, or unpickles, in the block."""
    context = ray._private.worker.global_worker.get_serialization_context()
    pickle, unpickle = context.serialize, context.deserialize_objects

    def serialize(value: Any) -> Any:
        result = pickle(value)
        found.append(result.total_bytes)
        return result

    def deserialize_objects(received: Any, *rest: Any) -> Any:
        found.extend(one.data.size for one in received if one.data is not None)
        return unpickle(received, *rest)

    context.serialize, context.deserialize_objects = serialize, deserialize_objects
    try:
        yield
    finally:
        del context.serialize, context.deserialize_objects


def hop(group: ManyRanks, batch: DataProto, request: Request) -> float:
    """Have all ranks score the batch, check what comes back, and return the seconds."""
    started = time.perf_counter()
    scored = group.score(batch, request)
    seconds = time.perf_counter() - started
    some = np.linspace(0, len(batch) - 1, 50, dtype=np.int64)
    wanted = batch.batch["response_mask"][some] * -1e-3 * batch.batch["responses"][some]
    assert torch.equal(scored.batch["old_log_probs"][some], wanted), "a rank's rows came back elsewhere"
    return seconds


@dataclass(frozen=True)
class Hop:
    """What was seen of a hop.

    Attributes:
        seconds: Of the first and of the second call.
        moved_bytes: What the driver pickled and unpickled in both.
        resident_bytes: The driver's memory afterwards.
        store: The use of the object store afterwards.
    """

    seconds: tuple[float, float]
    moved_bytes: int
    resident_bytes: int
    store: StoreUse


def hops_of(first: DataProto, ranks: int, nodes: int, processes: int, hops: int) -> Iterator[Hop]:
    """Yield hops, each of which has columns of its own."""
    order = torch.randperm(len(first), generator=torch.Generator().manual_seed(1))
    request = Request([part.tolist() for part in order.tensor_split(ranks)])
    # Two packed batches as in a run, and the answers.
    room = int(2.5 * _padded_bytes(first) / 2) + GIB
    with ray_cluster(num_cpus=processes, object_store_bytes=room):
        group = RayWorkerGroup(RayResourcePool([processes], use_gpu=False), RayClassWithInitArgs(Scorer))
        try:
            many = ManyRanks(group, ranks, nodes)
            for _ in range(hops):
                batch = DataProto.from_dict({name: column.clone() for name, column in first.batch.items()})
                moved: list[int] = []
                with pickled(moved):
                    seconds = hop(many, batch, request), hop(many, batch, request)
                del batch
                gc.collect()
                store = store_use()
                assert store is not None
                yield Hop(seconds, sum(moved), psutil.Process().memory_info().rss, store)
        finally:
            group.shutdown()


def growth_mib(hops: Sequence[Hop]) -> float:
    """Return by how many MiB the driver grew with each hop of the second half."""
    half = hops[len(hops) // 2 :]
    return (half[-1].resident_bytes - half[0].resident_bytes) / max(len(half) - 1, 1) / MIB


def _padded_bytes(batch: DataProto) -> int:
    return sum(column.nbytes for column in batch.batch.values())


def cases() -> Iterator[Comparison]:
    """Yield the growth of the driver's memory."""
    rows, tokens, ranks, hops = 1024, 2048, 64, 60
    first = batch_of(rows, tokens)
    # The ids of the tokens that are there, in four bytes each, are most of it.
    packed_mib = 4 * int(first.batch["attention_mask"].sum()) / MIB
    # Memory comes in pieces, and over few hops one of them would count for much. Less than a page can't be told.
    grown = max(growth_mib(list(hops_of(first, ranks, 1, 2, hops))), 1 / 256)
    label = f"{rows:,} rows of up to {tokens:,} tokens to {ranks} ranks, {hops} hops"
    yield Comparison(label, "the limit", "MiB that the driver grows with a hop", grown, packed_mib / 4, 1.0)


def measure(rows: int, tokens: int, ranks: int, nodes: int, processes: int, hops: int) -> Iterator[str]:
    """Yield a line for each hop, and one that sums up."""
    first = batch_of(rows, tokens)
    padded = _padded_bytes(first)
    held = int(first.batch["attention_mask"].sum())
    yield f"{rows:,} rows of up to {tokens:,} tokens, {held:,} of them; {padded / GIB:.2f} GiB of columns with padding"
    yield f"{ranks:,} ranks on {nodes:,} nodes, run by {processes} processes"
    seen = []
    for number, one in enumerate(hops_of(first, ranks, nodes, processes, hops), 1):
        seen.append(one)
        yield (
            f"hop {number:2}: {one.seconds[0]:6.2f} s, again {one.seconds[1]:6.2f} s, "
            f"{one.moved_bytes / MIB / 2:8,.0f} MiB through the driver, then {one.resident_bytes / GIB:5.2f} GiB of "
            f"driver, {one.store.used_bytes / GIB:5.2f} GiB of {one.store.capacity_bytes / GIB:.2f} in the store, "
            f"{one.store.spilled_bytes / GIB:.2f} spilled"
        )
    medians = np.median([(*one.seconds, one.moved_bytes) for one in seen], axis=0)
    yield (
        f"median: {medians[0]:.2f} s, again {medians[1]:.2f} s, {medians[2] / MIB / 2:,.0f} MiB through the driver of "
        f"{padded / MIB:,.0f} with padding; over the second half of the hops the driver grew by "
        f"{growth_mib(seen):+.1f} MiB a hop"
    )


def main() -> None:
    """Print the lines of a measurement."""
    parser = argparse.ArgumentParser(prog="python -m bench.data_plane", description=__doc__.partition("\n")[0])
    for name, default, what in (
        ("rows", 16384, "of the batch"),
        ("tokens", 8192, "the longest row"),
        ("ranks", 1024, "that get a part each"),
        ("nodes", 1, "that the ranks are said to be on"),
        ("processes", 4, "that run them"),
        ("hops", 10, "with a new batch each"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    for line in measure(**vars(parser.parse_args())):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
