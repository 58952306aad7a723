import logging
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import hrl
from hrl.protocol import (
    DataProto,
    DataProtoFuture,
    DataProtoItem,
    collate_fn,
    deserialize_tensordict,
    pad_dataproto_to_divisor,
    serialize_tensordict,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
    unpad_dataproto,
)


def numbered(n, **meta_info):
    """Rows 1..n as a tensor, and as letters."""
    letters = [chr(ord("a") + i) for i in range(n)]
    return DataProto.from_dict({"obs": torch.arange(1, n + 1)}, {"labels": letters}, meta_info or {"name": "abc"})


def rows_of(data):
    numbers = data.batch["obs"].tolist()
    assert data.non_tensor_batch["labels"].tolist() == [chr(ord("a") + i - 1) for i in numbers]
    return numbers


def assert_same(a, b):
    """Everything is equal, dtypes included; what `union` accepts as equal is equal."""
    assert len(a) == len(b) and (a.batch is None) == (b.batch is None)
    if a.batch is not None:
        assert set(a.batch.keys(True, True)) == set(b.batch.keys(True, True))
        union_tensor_dict(a.batch.copy(), b.batch)
    assert a.non_tensor_batch.keys() == b.non_tensor_batch.keys() and a.meta_info.keys() == b.meta_info.keys()
    union_numpy_dict(dict(a.non_tensor_batch), b.non_tensor_batch)
    union_two_dict(dict(a.meta_info), b.meta_info)


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divisor", "padded"), [(2, [1, 2, 3, 1]), (3, [1, 2, 3]), (7, [1, 2, 3, 1, 2, 3, 1]), (1, [1, 2, 3])]
)
def test_padding_to_a_divisor_is_cyclic_and_unpadding_restores(divisor, padded):
    data, pad_size = pad_dataproto_to_divisor(numbered(3), divisor)
    assert rows_of(data) == padded and pad_size == len(padded) - 3
    assert_same(unpad_dataproto(data, pad_size), numbered(3))


def test_padding_a_batch_without_rows_says_that_it_stays_empty(caplog):
    with caplog.at_level(logging.WARNING):
        data, pad_size = pad_dataproto_to_divisor(numbered(0), 4)
    assert (len(data), pad_size) == (0, 0) and "stays empty" in caplog.text


def test_repeat_interleaves_or_tiles():
    assert rows_of(numbered(2).repeat(2, interleave=True)) == [1, 1, 2, 2]
    assert rows_of(numbered(2).repeat(2, interleave=False)) == [1, 2, 1, 2]
    assert numbered(2).repeat(3).meta_info == {"name": "abc"}


INDICES = {
    "list of int": [0, 2, -1],
    "array of int": np.array([0, 2, 4], dtype=np.int32),
    "tensor of int": torch.tensor([0, 2, 4]),
    "list of bool": [True, False, True, False, True],
    "list of numpy bool": [np.bool_(b) for b in (True, False, True, False, True)],
    "array of bool": np.array([True, False, True, False, True]),
    "tensor of bool": torch.tensor([True, False, True, False, True]),
    "slice": slice(None, None, 2),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_an_index_of_several_rows_gives_a_batch(index):
    part = numbered(5)[index]
    assert type(part) is DataProto and rows_of(part) == [1, 3, 5]
    assert part.batch.batch_size == torch.Size([3]) and all(type(size) is int for size in part.batch.batch_size)


@pytest.mark.parametrize("index", [1, np.int64(1), -2])
def test_an_integer_gives_one_row(index):
    row = numbered(3)[index]
    assert isinstance(row, DataProtoItem)
    assert (row.batch["obs"].item(), row.non_tensor_batch["labels"], row.meta_info) == (2, "b", {"name": "abc"})


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (3, IndexError),
        ([0, 3], IndexError),
        ([True], IndexError),
        (torch.zeros(1, 1, dtype=torch.long), IndexError),
        ([0.5], TypeError),
        ("obs", TypeError),
        (None, TypeError),
    ],
)
def test_an_index_that_names_no_rows_is_refused(index, error):
    with pytest.raises(error):
        numbered(3)[index]


def test_an_empty_index_gives_no_rows():
    assert len(numbered(3)[[]]) == 0 and rows_of(numbered(3)[3:]) == []
    assert rows_of(numbered(3)[::-1]) == [3, 2, 1]


def test_len_takes_what_there_is():
    labels = np.array(["a", "b"], dtype=object)
    assert len(DataProto(non_tensor_batch={"labels": labels})) == 2
    assert len(DataProto(meta_info={"metrics": {}})) == 0
    assert len(DataProto(batch=None, non_tensor_batch=None, meta_info=None)) == 0
    assert len(DataProto(batch=TensorDict({}, batch_size=(4,)))) == 4


def test_a_part_does_not_write_into_the_whole():
    data = numbered(4)
    for part in (data[:2], data.select(), data.chunk(2)[0], data.repeat(1), data[[0]]):
        part.meta_info["new"] = 1
        part.batch["new"] = torch.zeros(len(part))
    assert set(data.batch.keys()) == {"obs"} and data.meta_info == {"name": "abc"}


@settings(deadline=None)
@given(st.lists(st.integers(-6, 5), max_size=12))
def test_selecting_rows_is_what_numpy_does(rows):
    data = DataProto.from_dict({"x": torch.randn(6, 2)}, {"y": list(range(6))})
    part = data[rows]
    index = np.array(rows, dtype=np.int64)
    assert np.array_equal(part.batch["x"].numpy(), data.batch["x"].numpy()[index])
    assert part.non_tensor_batch["y"].tolist() == np.arange(6)[index].tolist()


# -- joining -----------------------------------------------------------------------------------------------------------


def test_concat_gathers_metrics_of_all_workers():
    parts = [
        DataProto.from_dict({"obs": torch.zeros(1)}, meta_info={"metrics": [{"loss": 0.5}, {"loss": 0.6}]}),
        DataProto.from_dict({"obs": torch.zeros(1)}, meta_info={"metrics": [{"loss": 0.55}]}),
    ]
    assert DataProto.concat(parts).meta_info == {"metrics": {"loss": [0.5, 0.6, 0.55]}}


def test_concat_gathers_the_same_metrics_however_it_is_nested():
    parts = [DataProto(meta_info={"metrics": {"loss": float(i), f"only_{i}": i}}) for i in range(3)]
    nested = DataProto.concat([DataProto.concat(parts[:2]), parts[2]])
    expected = {"loss": [0.0, 1.0, 2.0], "only_0": [0], "only_1": [1], "only_2": [2]}
    assert nested.meta_info["metrics"] == DataProto.concat(parts).meta_info["metrics"] == expected
    assert DataProto.concat([DataProto(meta_info={"metrics": None})] * 2).meta_info == {}


def test_concat_merges_meta_that_agrees_and_names_what_does_not():
    parts = [numbered(1, config={"lr": 1}, a=1), numbered(1, config={"lr": 1}, b=np.array([1.0, np.nan]))]
    merged = DataProto.concat(parts).meta_info
    assert (merged["config"], merged["a"]) == ({"lr": 1}, 1) and "b" in merged
    parts[1].meta_info["config"] = {"lr": 2}
    with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'config'"):
        DataProto.concat(parts)


def test_concat_of_different_columns_names_them():
    with pytest.raises(ValueError, match="columns \\['act'\\].*part 0 and part 1"):
        DataProto.concat(
            [numbered(1), DataProto.from_dict({"obs": torch.ones(1), "act": torch.ones(1)}, {"labels": [1]})]
        )
    with pytest.raises(ValueError, match="part 1 has no tensors"):
        DataProto.concat([numbered(1), DataProto.from_dict(non_tensors={"labels": ["a"]})])
    with pytest.raises(ValueError, match="empty"):
        DataProto.concat([])


def test_union_takes_equal_values_and_refuses_different_ones():
    obs = torch.tensor([1.0, float("nan")])
    data = DataProto.from_dict({"obs": obs}, {"who": ["x", float("nan")]}, {"t": float("nan")})
    other = DataProto.from_dict({"obs": obs.clone(), "act": obs}, {"who": ["x", float("nan")]}, {"t": float("nan")})
    assert data.union(other) is data and set(data.batch.keys()) == {"obs", "act"}
    for changed in (
        DataProto.from_dict({"new": obs, "obs": obs + 1}),
        DataProto.from_dict({"new": obs, "obs": obs.double()}),
        DataProto.from_dict({"new": obs}, {"who": ["x", "nan"]}),
        DataProto.from_dict({"new": obs}, meta_info={"t": 1.0}),
        DataProto.from_dict({"new": torch.ones(3)}),
        DataProto.from_dict(non_tensors={"new": [1, 2, 3]}),
    ):
        with pytest.raises(AssertionError, match="cannot unite"):
            data.union(changed)
        assert set(data.batch.keys()) == {"obs", "act"}, "a refused union changes nothing"


def test_union_with_a_batch_that_has_only_part_of_it():
    rows = DataProto.from_dict({"obs": torch.ones(2)})
    assert len(DataProto(meta_info={"step": 1}).union(rows)) == 2
    assert rows.union(DataProto(meta_info={"step": 1})).meta_info == {"step": 1}
    assert rows.union(DataProto.from_dict(non_tensors={"uid": ["a", "b"]})).non_tensor_batch["uid"].tolist() == [
        "a",
        "b",
    ]
    assert "uid" not in rows.select(non_tensor_batch_keys=[]).non_tensor_batch


def test_union_tensor_dict_changes_the_first_and_names_the_conflict():
    first, second = (TensorDict({"obs": torch.ones(2), key: torch.ones(2)}, batch_size=[2]) for key in "ab")
    assert union_tensor_dict(first, second) is first and set(first.keys()) == {"obs", "a", "b"}
    with pytest.raises(AssertionError, match="column 'obs'"):
        union_tensor_dict(first, TensorDict({"obs": torch.zeros(2)}, batch_size=[2]))
    with pytest.raises(AssertionError, match="batch size"):
        union_tensor_dict(first, TensorDict({}, batch_size=[3]))


def nest(*values, shape):
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array.reshape(shape)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (np.arange(8).reshape(2, 2, 2), np.arange(8).reshape(2, 2, 2), True),
        (np.arange(8).reshape(2, 2, 2), np.arange(8).reshape(2, 4), False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([1.0, np.nan]), np.array([np.nan, 1.0]), False),
        (np.array([1, 2]), np.array([1.0, 2.0]), False),
        (nest(np.array([1, 2]), "x", shape=(1, 2)), nest(np.array([1, 2]), "x", shape=(1, 2)), True),
        (nest(np.array([1, 2]), "x", shape=(1, 2)), nest(np.array([1, 3]), "x", shape=(1, 2)), False),
        (nest({"a": [float("nan")]}, shape=1), nest({"a": [float("nan")]}, shape=1), True),
        (nest({"a": [float("nan")]}, shape=1), nest({"a": ["nan"]}, shape=1), False),
        (nest({"a": torch.ones(2)}, shape=1), nest({"a": torch.ones(2)}, shape=1), True),
    ],
)
def test_union_numpy_dict_compares_whatever_is_nested(a, b, equal):
    if equal:
        union_numpy_dict({"x": a}, {"x": b})
    else:
        with pytest.raises(AssertionError, match="'x'"):
            union_numpy_dict({"x": a}, {"x": b})


def test_union_numpy_dict_ends_on_cycles():
    def cycle():
        array = np.array([None], dtype=object)
        array[0] = array
        return array

    union_numpy_dict({"x": cycle()}, {"x": cycle()})
    with pytest.raises(AssertionError):
        union_numpy_dict({"x": cycle()}, {"x": np.array([None], dtype=object)})


# -- columns -----------------------------------------------------------------------------------------------------------


def test_from_single_dict_sorts_by_type_and_keeps_the_subclass():
    class Custom(DataProto):
        pass

    data = Custom.from_single_dict({"x": torch.zeros(1), "y": np.array(["a"], dtype=object)}, meta_info={"m": 1})
    assert type(data) is Custom and set(data.batch.keys()) == {"x"} and set(data.non_tensor_batch) == {"y"}
    assert {type(part) for part in (data[:1], data.repeat(2), DataProto.concat([data]), data.select())} == {Custom}
    with pytest.raises(ValueError, match="column 'z' is a list"):
        Custom.from_single_dict({"z": [1]})


def test_from_dict_refuses_tensors_of_different_rows():
    tensors = {"obs": torch.zeros(4, 10), "act": torch.zeros(4, 10, 3)}
    assert DataProto.from_dict(tensors).batch.batch_size == torch.Size([4])
    with pytest.raises(AssertionError, match="first 3 dimensions"):
        DataProto.from_dict(tensors, num_batch_dims=3)
    with pytest.raises(AssertionError, match="'labels' has shape \\(3,\\), the batch has 4 rows"):
        DataProto.from_dict(tensors, {"labels": [1, 2, 3]})
    with pytest.raises(AssertionError, match="'labels' is a list"):
        DataProto(non_tensor_batch={"labels": [1]})


def test_lists_become_arrays_of_objects():
    data = DataProto.from_dict(non_tensors={"ragged": [[1], [2, 3]], "odd": [np.zeros((2, 3)), np.zeros((2, 4))]})
    assert data.non_tensor_batch["ragged"].tolist() == [[1], [2, 3]]
    assert data.non_tensor_batch["odd"].shape == (2,) and data.non_tensor_batch["odd"][1].shape == (2, 4)


def test_select_takes_the_columns_asked_for():
    data = DataProto.from_dict({"a": torch.ones(1), "b": torch.ones(1)}, {"c": [[1]], "d": [2]}, {"e": [1], "f": 2})
    part = data.select(batch_keys=["a"], non_tensor_batch_keys=["c"], meta_info_keys=["e", "absent"])
    assert (set(part.batch.keys()), set(part.non_tensor_batch), set(part.meta_info)) == ({"a"}, {"c"}, {"e"})
    assert part.batch["a"].data_ptr() == data.batch["a"].data_ptr()
    copied = data.select(deepcopy=True)
    copied.batch["a"].zero_()
    copied.meta_info["e"].append(2)
    assert data.batch["a"].item() == 1 and data.meta_info["e"] == [1]
    with pytest.raises(KeyError, match="no \\['x'\\]; it has \\['a', 'b'\\]"):
        data.select(batch_keys=["x"])


def test_pop_takes_out_all_or_nothing():
    data = DataProto.from_dict({"obs": torch.ones(2), "act": torch.ones(2)}, {"n": [1, 2]}, {"1": 1, "2": 2})
    with pytest.raises(KeyError, match="non_tensor_batch has no \\['x'\\]"):
        data.pop(batch_keys=["obs"], non_tensor_batch_keys=["x"])
    popped = data.pop(batch_keys=["obs"], non_tensor_batch_keys=["n"], meta_info_keys=["2"])
    assert (set(popped.batch.keys()), set(popped.non_tensor_batch), popped.meta_info) == ({"obs"}, {"n"}, {"2": 2})
    assert (set(data.batch.keys()), data.non_tensor_batch, data.meta_info) == ({"act"}, {}, {"1": 1})
    data.pop(batch_keys=["act"])
    assert len(data) == 2


def test_rename_renames_tensors_only():
    data = DataProto.from_dict({"a": torch.ones(1), "b": torch.zeros(1)})
    assert data.rename("a", "c") is data and set(data.batch.keys()) == {"b", "c"}
    data.rename(["b", "c"], ["c", "b"])
    assert (data.batch["b"].item(), data.batch["c"].item()) == (1, 0)
    with pytest.raises(ValueError, match="as many"):
        data.rename(["b"], ["x", "y"])
    with pytest.raises(TypeError):
        data.rename(("b",), "x")
    with pytest.raises(KeyError, match="x"):
        data.rename("x", "y")


def test_collate_is_the_inverse_of_indexing():
    data = numbered(3)
    again = collate_fn([data[i] for i in range(3)])
    assert rows_of(again) == [1, 2, 3]
    with pytest.raises(ValueError, match="empty"):
        collate_fn([])


# -- sending and storing -----------------------------------------------------------------------------------------------


def everything():
    """A batch of every kind of column and meta_info."""
    tensors = {
        "float": torch.tensor([[1.5, float("nan")], [float("inf"), -0.0]]),
        "bfloat16": torch.tensor([0.1, 0.2]).bfloat16(),
        "int": torch.tensor([2**62, -1]),
        "bool": torch.tensor([[True], [False]]),
        "view": torch.arange(12).view(2, 6)[:, ::2],
        "jagged": torch.nested.as_nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged),
        "strided": torch.nested.as_nested_tensor([torch.ones(2, 3), torch.zeros(1, 4)]),
        "inner": TensorDict({"x": torch.ones(2, 2)}, batch_size=[2]),
    }
    objects = {
        "mixed": [{"turns": [("user", 1)], 3: None}, np.float32(0.1)],
        "text": ["ü\n", float("-inf")],
        "array": [np.arange(3, dtype=np.int16), np.array(["a", None], dtype=object)],
    }
    data = DataProto.from_dict(tensors, objects, {"temperature": 1.0, "$tuple": (1, "a"), "ids": torch.arange(2)})
    data.non_tensor_batch["numbers"] = np.array([[1.0, np.nan], [2.0, 3.0]], dtype=np.float32)
    data.non_tensor_batch["strings"] = np.array(["ab", "c"])
    return data


def pickled(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301  # what this test wrote itself


BATCHES = {
    "everything": everything,
    "no rows": lambda: everything()[:0],
    "only objects": lambda: DataProto.from_dict(non_tensors={"a": [1, 2]}),
    "only meta_info": lambda: DataProto(meta_info={"step": 1}),
    "nothing": DataProto,
    "rows without columns": lambda: DataProto(batch=TensorDict({}, batch_size=(3,))),
}


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_pickle_and_disk_bring_back_what_was_there(make, tmp_path):
    data = make()
    assert_same(pickled(data), data)
    data.save_to_disk(tmp_path / "batch")
    assert_same(DataProto.load_from_disk(tmp_path / "batch"), data)
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_columns_are_cut_and_joined_like_others():
    data = everything()
    joined = DataProto.concat([data[1:], data[:0], data[[0]]])
    assert [row.tolist() for row in joined.batch["jagged"].unbind()] == [[0], [0, 1, 2]]
    assert [tuple(row.shape) for row in joined.batch["strided"].unbind()] == [(1, 4), (2, 3)]
    joined.reorder([1, 0])
    assert_same(joined, data)


def test_a_subclass_keeps_its_type_and_its_fields_in_a_pickle():
    data = Tagged.from_dict({"x": torch.ones(2)})
    data.tag = "kept"
    again = pickled(data)
    assert type(again) is Tagged and again.tag == "kept"


class Tagged(DataProto):
    tag = ""


def test_tensors_leave_the_pickle_out_of_band_and_come_back_writable():
    buffers = []
    data = DataProto.from_dict({"x": torch.ones(1000, 100)})
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(payload) < 5_000 and sum(len(buffer.raw()) for buffer in buffers) == 400_000
    read_only = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    again = pickle.loads(payload, buffers=read_only)  # noqa: S301
    again.batch["x"] += 1
    assert again.batch["x"].sum() == 200_000 and data.batch["x"].sum() == 100_000


def test_a_plain_tensordict_keeps_batch_size_and_device():
    batch = TensorDict({"x": torch.randn(2, 3, 4).bfloat16()}, batch_size=(2, 3), device="cpu")
    again = deserialize_tensordict(serialize_tensordict(batch))
    assert again.batch_size == batch.batch_size and again.device == batch.device
    assert torch.equal(again["x"], batch["x"])
    with pytest.raises(TypeError, match="'text' holds"):
        serialize_tensordict(TensorDict({"text": "no tensor"}, batch_size=()))


# -- futures -----------------------------------------------------------------------------------------------------------


def arrived(futures, timeout_s):
    assert timeout_s > 0
    return futures


def test_a_future_joins_what_arrives_and_its_chunks_cut_the_same():
    future = DataProtoFuture(DataProto.concat, [numbered(6)[:4], numbered(6)[4:]], resolve_fn=arrived)
    assert rows_of(future.get()) == [1, 2, 3, 4, 5, 6]
    chunks = pickled(future.chunk(3))
    assert [rows_of(chunk.get(timeout_s=1)) for chunk in chunks] == [[1, 2], [3, 4], [5, 6]]


# -- the package -------------------------------------------------------------------------------------------------------


def test_importing_hrl_loads_nothing_heavy():
    code = "import sys, hrl; print(sorted({'torch', 'ray', 'numpy', 'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_hrl_offers_dataproto_on_first_use():
    assert hrl.DataProto is DataProto and "DataProto" in dir(hrl) and hrl.__version__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = hrl.Nothing
