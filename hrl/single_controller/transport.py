"""How calls reach the ranks: batches once through the object store, and each rank's arguments as one small message.

The driver puts a batch into the object store once, packed (`packing`). A rank gets its reference, which Ray resolves to
shared memory before the call begins, and its row indices in the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray import cloudpickle

from hrl.protocol import DataProto
from hrl.single_controller.dispatch import BatchRows, RankCall
from hrl.single_controller.packing import PackedBatch, pack_batch, unpack_batch


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


def send(role: str, method: str, calls: Sequence[RankCall]) -> list[tuple[Message, *tuple[ray.ObjectRef, ...]]]:
    """Return the message to each rank and references to its batches; every batch is put into the object store once."""
    stored: dict[tuple[int, tuple[str, ...] | None], ray.ObjectRef] = {}

    def store(batch: DataProto, columns: tuple[str, ...] | None) -> ray.ObjectRef:
        key = (id(batch), columns)  # `calls` keeps the batch alive, and with it its id
        if key not in stored:
            stored[key] = ray.put(pack_batch(batch, columns))
        return stored[key]

    def sent(call: RankCall) -> tuple[Message, *tuple[ray.ObjectRef, ...]]:
        batches: list[ray.ObjectRef] = []

        def beside(batch: DataProto, columns: tuple[str, ...] | None, rows: np.ndarray | None) -> SentRows:
            batches.append(store(batch, columns))
            return SentRows(len(batches) - 1, rows)

        def as_sent(arg: Any) -> Any:
            if isinstance(arg, BatchRows):
                return beside(arg.batch, arg.columns, arg.rows)
            return beside(arg, None, None) if isinstance(arg, DataProto) else arg

        message = (role, method, call.mapped(as_sent))
        return (cloudpickle.dumps(message) if batches else message, *batches)

    return [sent(call) for call in calls]


def receive(message: Message, batches: Sequence[PackedBatch]) -> tuple[str, str, RankCall]:
    """Return role, method and arguments of a call, the batches among them restored; runs on a rank."""
    role, method, call = cloudpickle.loads(message) if isinstance(message, bytes) else message

    def received(arg: Any) -> Any:
        return unpack_batch(batches[arg.number], arg.rows) if isinstance(arg, SentRows) else arg

    return role, method, call.mapped(received)
