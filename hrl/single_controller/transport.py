"""How calls reach the ranks: batches once through the object store, and each rank's arguments as one small message.

The driver puts a batch into the object store once for every node, packed (`packing`); a column that an earlier call has
sent, to whichever group, is not packed again (`packed_columns`). A rank gets a reference, which Ray resolves to shared
memory before the call begins, and its row indices in the message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray import cloudpickle

from hrl.protocol import DataProto
from hrl.single_controller.dispatch import BatchRows, RankCall
from hrl.single_controller.own_ray import require_shared_memory
from hrl.single_controller.packed_columns import PackedColumns
from hrl.single_controller.packing import PackedBatch, pack_batch, unpack_batch

#: Those of the batches that this process has sent.
_columns = PackedColumns()


@dataclass(frozen=True)
class SentRows:
    """Rows of a batch that travels beside the message.

    Attributes:
        number: Which of those batches.
        rows: (n,) row indices; None for all.
    """

    number: int
    rows: np.ndarray | None


Message = bytes | tuple[str, str, RankCall]
"""Role, method and arguments, with `SentRows` in place of batches; pickled if there are any. Ray would lay out each
array in it by itself, and look for references, which takes several times as long."""


def send(
    role: str, method: str, calls: Sequence[RankCall], nodes: Sequence[str]
) -> list[tuple[Message, *tuple[ray.ObjectRef, ...]]]:
    """Return the message to each rank, and references to its batches.

    Args:
        role: Of the workers.
        method: Of the workers.
        calls: The call of each rank.
        nodes: The node of each rank.
    """
    parcels = _Parcels(calls, nodes)

    def sent(rank: int, call: RankCall) -> tuple[Message, *tuple[ray.ObjectRef, ...]]:
        batches: list[ray.ObjectRef] = []

        def as_sent(arg: Any) -> Any:
            if not isinstance(arg, BatchRows | DataProto):
                return arg
            ref, rows = parcels.of(arg, nodes[rank])
            batches.append(ref)
            return SentRows(len(batches) - 1, rows)

        message = (role, method, call.mapped(as_sent))
        return (cloudpickle.dumps(message) if batches else message, *batches)

    return [sent(rank, call) for rank, call in enumerate(calls)]


class _Parcels:
    """The batches of a call, in the object store.

    On one node every rank picks its rows from one object, which the node maps once. Over several nodes a whole batch
    would travel to each of them: there a node has an object with the rows of its own ranks.
    """

    def __init__(self, calls: Sequence[RankCall], nodes: Sequence[str]) -> None:
        self._rows: dict[_Key, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
        self._packed: dict[_Key, PackedBatch] = {}
        self._whole: dict[_Key, ray.ObjectRef] = {}
        self._parts: dict[tuple[_Key, str], tuple[ray.ObjectRef, np.ndarray]] = {}
        for node, call in zip(nodes, calls, strict=True):
            for arg in (*call.args, *call.kwargs.values()):
                if isinstance(arg, BatchRows):
                    self._rows[_key(arg)][node].append(arg.rows)

    def of(self, arg: BatchRows | DataProto, node: str) -> tuple[ray.ObjectRef, np.ndarray | None]:
        """Return the object that holds a rank's rows, and which of its rows they are; None for all."""
        key = _key(arg)
        if not isinstance(arg, BatchRows):
            return self._put_whole(key, arg), None
        if len(self._rows[key]) == 1:
            return self._put_whole(key, arg.batch), arg.rows
        ref, stored = self._put_part(key, arg.batch, node)
        return ref, np.searchsorted(stored, arg.rows)

    def _put_whole(self, key: _Key, batch: DataProto) -> ray.ObjectRef:
        if key not in self._whole:
            require_shared_memory()
            self._whole[key] = ray.put(self._pack(key, batch))
        return self._whole[key]

    def _put_part(self, key: _Key, batch: DataProto, node: str) -> tuple[ray.ObjectRef, np.ndarray]:
        """Return the object with the rows of a node's ranks, and which rows these are, in order."""
        if (key, node) not in self._parts:
            rows = np.unique(np.concatenate(self._rows[key][node]))
            require_shared_memory()
            self._parts[key, node] = ray.put(self._pack(key, batch).pick(rows)), rows
        return self._parts[key, node]

    def _pack(self, key: _Key, batch: DataProto) -> PackedBatch:
        if key not in self._packed:
            self._packed[key] = pack_batch(batch, key[1], _columns.pack)
        return self._packed[key]


_Key = tuple[int, tuple[str, ...] | None]


def _key(arg: BatchRows | DataProto) -> _Key:
    """Return what tells the batches of a call apart; the call keeps them alive, and with them their ids."""
    return (id(arg.batch), arg.columns) if isinstance(arg, BatchRows) else (id(arg), None)


def receive(message: Message, batches: Sequence[PackedBatch]) -> tuple[str, str, RankCall]:
    """Return role, method and arguments of a call, the batches among them restored; runs on a rank."""
    role, method, call = cloudpickle.loads(message) if isinstance(message, bytes) else message

    def received(arg: Any) -> Any:
        return unpack_batch(batches[arg.number], arg.rows) if isinstance(arg, SentRows) else arg

    return role, method, call.mapped(received)
