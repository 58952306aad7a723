"""Packing loses nothing and costs what the tokens cost."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from hrl.columns import object_column
from hrl.protocol import DataProto
from hrl.single_controller.packing import (
    RaggedColumn,
    join_batches,
    pack_batch,
    pack_column,
    pack_result,
    unpack_batch,
    unpack_result,
)

DTYPES = [
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float64, torch.float32,
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).clone().view(torch.uint8)


def assert_identical(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


def all_rows(tensor: torch.Tensor) -> np.ndarray:
    return np.arange(tensor.shape[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (4,), (3, 2, 4), (0, 6), (3, 0)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 3).to(dtype)
    assert_identical(pack_column(tensor).take(all_rows(tensor)), tensor)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(-(2**40), 2**40) | st.just(0), max_size=4)), min_size=1
    ),
    pick=st.data(),
)
@settings(deadline=None, max_examples=200)
def test_margins_are_restored_whatever_stands_between_them(
    rows: list[tuple[int, list[int]]], pick: st.DataObject
) -> None:
    width = 10
    tensor = torch.zeros(len(rows), width, dtype=torch.int64)
    for row, (start, values) in enumerate(rows):
        tensor[row, start : start + len(values)] = torch.tensor(values, dtype=torch.int64)
    packed = pack_column(tensor)
    assert_identical(packed.take(all_rows(tensor)), tensor)
    some = pick.draw(st.lists(st.integers(0, len(rows) - 1)))
    assert_identical(packed.take(np.array(some, dtype=np.int64)), tensor[some])


def test_only_what_lies_between_the_margins_is_sent() -> None:
    tensor = torch.tensor([[9, 9, 1, 2, 0, 0], [9, 4, 0, 6, 7, 0], [9, 9, 9, 9, 0, 0]])
    packed = pack_column(tensor)
    assert isinstance(packed, RaggedColumn)
    assert packed.values.tolist() == [1, 2, 4, 0, 6, 7]
    assert packed.values.dtype == np.int8
    assert packed.spans.tolist() == [[2, 1, 4], [4, 5, 4]]


def test_of_a_mask_only_the_margins_travel() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]])
    packed = pack_column(mask)
    assert isinstance(packed, RaggedColumn)
    assert packed.values.tolist() == [1]
    assert_identical(packed.take(np.array([2, 1, 0, 0])), mask[[2, 1, 0, 0]])
    signed_zeros = torch.tensor([[1.0, 0.0, -0.0, 1.0]])
    assert_identical(pack_column(signed_zeros).take(np.array([0])), signed_zeros)


def test_nan_and_negative_zero_are_values_like_others() -> None:
    nan = float("nan")
    tensor = torch.tensor([[nan, -0.0, 0.0, nan], [nan, nan, nan, nan], [0.0, nan, -0.0, 0.0]])
    assert_identical(pack_column(tensor).take(all_rows(tensor)), tensor)


def test_a_padded_batch_costs_its_tokens_not_its_padding() -> None:
    num_rows, width, length = 64, 1024, 16
    responses = torch.zeros(num_rows, width, dtype=torch.int64)
    responses[:, :length] = torch.randint(1, 50_000, (num_rows, length))
    batch = DataProto.from_dict({"responses": responses, "mask": (responses > 0).long()})
    size_bytes = len(pickle.dumps(pack_batch(batch), protocol=5))
    tokens = num_rows * length
    assert size_bytes < tokens * 4 + 4096  # int32 ids, and a constant for the mask and the rest
    assert size_bytes < batch.batch.bytes() / 100


def test_received_arrays_may_be_read_only_and_tensors_are_still_writable() -> None:
    batch = DataProto.from_dict({"a": torch.arange(6).view(3, 2), "b": torch.ones(3), "c": torch.ones(3, 2, 2)})
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(pack_batch(batch), protocol=5, buffer_callback=buffers.append)
    packed = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])  # noqa: S301  (this process wrote it)
    assert buffers, "the arrays must leave the pickle out of band"
    received = unpack_batch(packed)
    for name, column in received.batch.items():
        column.add_(1)
        assert torch.equal(column, batch.batch[name] + 1)


def test_a_whole_batch_comes_back_with_its_objects_and_meta() -> None:
    nested = torch.nested.nested_tensor([torch.arange(2), torch.arange(3), torch.arange(1)], layout=torch.jagged)
    lists = np.empty(3, dtype=object)
    lists[:] = [[1, 2], [3, 4], [5, 6]]
    batch = DataProto(
        TensorDict({"ids": torch.arange(12).view(3, 4), "nested": nested}, batch_size=[3]),
        {"uid": np.array(["a", "b", None], dtype=object), "lists": lists, "grid": np.arange(6).reshape(3, 2)},
        {"temperature": 0.7},
    )
    rows = np.array([2, 0, 2])
    for received, expected in (
        (unpack_batch(pack_batch(batch)), batch),
        (unpack_batch(pack_batch(batch), rows), batch.select_idxs(rows)),
    ):
        assert received.meta_info == {"temperature": 0.7}
        assert torch.equal(received.batch["ids"], expected.batch["ids"])
        for ours, theirs in zip(received.batch["nested"].unbind(), expected.batch["nested"].unbind(), strict=True):
            assert torch.equal(ours, theirs)
        assert received.non_tensor_batch["uid"].tolist() == expected.non_tensor_batch["uid"].tolist()
        assert received.non_tensor_batch["lists"].shape == (3,)
        assert received.non_tensor_batch["lists"].tolist() == expected.non_tensor_batch["lists"].tolist()
        assert np.array_equal(received.non_tensor_batch["grid"], expected.non_tensor_batch["grid"])


def test_only_the_named_columns_travel() -> None:
    batch = DataProto.from_dict(
        {"a": torch.ones(2, 1), "b": torch.ones(2, 1)}, {"uid": ["x", "y"], "text": ["long", "longer"]}
    )
    received = unpack_batch(pack_batch(batch, ["b", "uid", "not there"]))
    assert set(received.batch.keys()) == {"b"} and set(received.non_tensor_batch) == {"uid"}
    assert len(unpack_batch(pack_batch(batch, []))) == 2, "a batch of no column still has its rows"


def test_a_batch_of_meta_info_alone_travels() -> None:
    received = unpack_batch(pack_batch(DataProto(meta_info={"metrics": {"loss": 1.0}})))
    assert len(received) == 0 and received.batch is None and received.meta_info == {"metrics": {"loss": 1.0}}


def test_batches_inside_plain_results_are_packed_too() -> None:
    batch = DataProto.from_dict({"a": torch.ones(2, 1)})
    result = unpack_result(pack_result({"batch": batch, "pair": (1, [batch])}))
    assert torch.equal(result["batch"].batch["a"], torch.ones(2, 1))
    assert result["pair"][0] == 1 and torch.equal(result["pair"][1][0].batch["a"], torch.ones(2, 1))


def parts_of_a_batch() -> tuple[DataProto, list[np.ndarray]]:
    """A batch, and the rows of it that each of three ranks has: one of them with equal numbers alone."""
    mask = (torch.arange(6) < torch.tensor([[3], [0], [6], [2], [1]])).long()
    ids = torch.arange(30).view(5, 6) * 1000 * mask
    tensors = {"ids": ids, "mask": mask, "scores": torch.randn(5, 6).bfloat16(), "value": torch.arange(5.0)}
    objects = {"uid": list("abcde"), "lists": object_column([[n] * n for n in range(5)])}
    return DataProto.from_dict(tensors, objects, {"metrics": {}}), [np.array(r) for r in ([3, 0], [1], [4, 2])]


def assert_same_batch(actual: DataProto, expected: DataProto) -> None:
    assert set(actual.batch.keys()) == set(expected.batch.keys())
    for name, column in expected.batch.items():
        assert_identical(actual.batch[name], column)
    assert set(actual.non_tensor_batch) == set(expected.non_tensor_batch)
    for name, array in expected.non_tensor_batch.items():
        assert actual.non_tensor_batch[name].tolist() == array.tolist()


@pytest.mark.parametrize("packed", [True, False])
def test_parts_are_joined_in_their_places(packed: bool) -> None:
    batch, rows = parts_of_a_batch()
    parts = [batch.select_idxs(of_part) for of_part in rows]
    joined = join_batches([pack_batch(part) if packed else part for part in parts], rows)
    assert_same_batch(joined, batch)
    joined.batch["ids"].add_(1)  # it is a copy


def test_parts_with_other_kinds_of_columns_are_joined_too() -> None:
    batch, rows = parts_of_a_batch()
    batch.non_tensor_batch["grid"] = np.arange(10).reshape(5, 2)
    joined = join_batches([pack_batch(batch.select_idxs(of_part)) for of_part in rows], rows)
    assert_same_batch(joined, batch)


def test_parts_with_different_columns_are_refused() -> None:
    batch, rows = parts_of_a_batch()
    parts = [batch.select_idxs(of_part) for of_part in rows]
    parts[1].batch["more"] = torch.ones(1)
    with pytest.raises(ValueError, match="more"):
        join_batches([pack_batch(part) for part in parts], rows)
