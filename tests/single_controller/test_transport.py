"""Where rows of a batch lie for ranks on one node and on several, and that every rank gets its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hrl.protocol import DataProto
from hrl.single_controller import transport
from hrl.single_controller.dispatch import BatchRows, RankCall
from hrl.single_controller.packing import PackedBatch
from hrl.single_controller.worker_errors import SharedMemoryError

ROWS = [[0, 5, 2], [7], [], [1, 1, 3], [4, 6]]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[PackedBatch]:
    """What was put into the object store; a reference is a place in it."""
    objects: list[PackedBatch] = []
    monkeypatch.setattr(transport.ray, "put", lambda packed: (objects.append(packed), len(objects) - 1)[1])
    return objects


def batch_of(rows: int) -> DataProto:
    responses = torch.zeros(rows, 9, dtype=torch.int64)
    for row in range(rows):
        responses[row, 1 : row + 2] = row + 10
    return DataProto.from_dict(
        tensors={"responses": responses, "scores": torch.arange(rows) / 2, "never_asked": torch.ones(rows, 3)},
        non_tensors={
            "uid": np.array([f"row {row}" for row in range(rows)], dtype=object),
            "numbers": np.arange(2 * rows).reshape(rows, 2),
        },
        meta_info={"temperature": 0.5},
    )


def received(batch: DataProto, nodes: Sequence[str], stored: list[PackedBatch]) -> list[DataProto]:
    columns = ("numbers", "responses", "scores", "uid")
    calls = [RankCall((BatchRows(batch, np.array(rows, dtype=np.int64), columns), 3), {}) for rows in ROWS]
    got = []
    for message, *refs in transport.send("actor", "update", calls, nodes):
        role, method, call = transport.receive(message, [stored[ref] for ref in refs])
        assert (role, method, call.args[1]) == ("actor", "update", 3)
        got.append(call.args[0])
    return got


@pytest.mark.parametrize(
    ("nodes", "num_rows"),
    [("aaaaa", [8]), ("aabbb", [4, 4]), ("abcab", [5, 3, 0]), ("abcde", [3, 1, 0, 2, 2])],
)
def test_a_node_has_one_object_with_the_rows_of_its_ranks(
    nodes: str, num_rows: list[int], stored: list[PackedBatch]
) -> None:
    batch = batch_of(8)
    got = received(batch, nodes, stored)
    assert [packed.num_rows for packed in stored] == num_rows
    assert all("never_asked" not in packed.tensors for packed in stored)
    for rows, part in zip(ROWS, got, strict=True):
        wanted = batch.select_idxs(np.array(rows, dtype=np.int64))
        assert torch.equal(part.batch["responses"], wanted.batch["responses"])
        assert torch.equal(part.batch["scores"], wanted.batch["scores"])
        assert part.non_tensor_batch["uid"].tolist() == wanted.non_tensor_batch["uid"].tolist()
        assert np.array_equal(part.non_tensor_batch["numbers"], wanted.non_tensor_batch["numbers"])
        assert part.meta_info == {"temperature": 0.5}


def test_only_a_nodes_own_tokens_travel_to_it(stored: list[PackedBatch]) -> None:
    received(batch_of(8), "aabbb", stored)
    # rows 0, 2, 5, 7 with 1, 3, 6, 8 tokens, and rows 1, 3, 4, 6 with 2, 4, 5, 7
    assert [len(packed.tensors["responses"].values) for packed in stored] == [18, 18]


def test_a_whole_batch_is_stored_once_for_all_nodes(stored: list[PackedBatch]) -> None:
    batch = batch_of(4)
    sent = transport.send("actor", "look", [RankCall((), {"batch": batch})] * 3, "abc")
    assert len(stored) == 1
    for message, *refs in sent:
        call = transport.receive(message, [stored[ref] for ref in refs])[2]
        assert torch.equal(call.kwargs["batch"].batch["responses"], batch.batch["responses"])


def test_two_batches_of_one_call_do_not_mix(stored: list[PackedBatch]) -> None:
    one, other, rows = batch_of(4), batch_of(6), np.array([3, 1])
    calls = [RankCall((BatchRows(one, rows), BatchRows(other, rows)), {})] * 2
    message, *refs = transport.send("actor", "both", calls, "ab")[1]
    call = transport.receive(message, [stored[ref] for ref in refs])[2]
    assert [len(arg) for arg in call.args] == [2, 2]
    assert call.args[1].batch["scores"].tolist() == [1.5, 0.5]
    assert len(stored) == 4


def test_a_column_that_another_group_was_sent_is_not_packed_again(
    stored: list[PackedBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(8)
    received(batch, "aaaaa", stored)
    received(batch, "aaaaa", stored)
    first, second = stored
    assert first.tensors["responses"] is second.tensors["responses"]
    batch.batch["responses"].numpy()[2, 0] = 99
    got = received(batch, "aaaaa", stored)
    assert got[0].batch["responses"][2, 0] == 99
    assert stored[2].tensors["scores"] is first.tensors["scores"]


def test_no_batch_no_object(stored: list[PackedBatch]) -> None:
    (message,), _ = transport.send("actor", "save", [RankCall(("folder",), {})] * 2, "ab")
    assert transport.receive(message, []) == ("actor", "save", RankCall(("folder",), {}))
    assert not stored


@pytest.mark.parametrize("nodes", ["aaaaa", "aabbb"])
def test_nothing_is_put_where_shared_memory_lacks_room(
    nodes: str, stored: list[PackedBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise SharedMemoryError("/dev/shm has only 0 MiB free")

    monkeypatch.setattr(transport, "require_shared_memory", full)
    with pytest.raises(SharedMemoryError):
        received(batch_of(8), nodes, stored)
    with pytest.raises(SharedMemoryError):
        transport.send("actor", "look", [RankCall((), {"batch": batch_of(4)})], "a")
    assert not stored
