"""Members and functions of `verl.protocol` that hrl has for those who come from there."""

import itertools
import json
import logging

import numpy as np
import pytest
import torch

from hrl.protocol import (
    DataProto,
    DataProtoConfig,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    unfold_batch_dim,
)
from tests.test_protocol import assert_same, everything, numbered, rows_of


def test_reorder_is_in_place_and_moves_tensors_and_labels():
    data = numbered(6)
    data.reorder(torch.tensor([3, 4, 2, 0, 1, 5]))
    assert rows_of(data) == [4, 5, 3, 1, 2, 6]
    assert data.meta_info == {"name": "abc"}


def test_chunk_needs_equal_parts_and_keeps_meta():
    data = numbered(6)
    with pytest.raises(AssertionError, match="6 rows don't divide into 5"):
        data.chunk(5)
    parts = data.chunk(2)
    assert [rows_of(part) for part in parts] == [[1, 2, 3], [4, 5, 6]]
    assert all(part.meta_info == {"name": "abc"} for part in parts)
    assert_same(DataProto.concat(parts), data)


def test_chunk_with_padding_enabled_gives_every_rank_a_part():
    data = DataProto.from_dict({"obs": torch.arange(5)}, auto_padding=True)
    assert data.is_padding_enabled() and not numbered(1).is_padding_enabled()
    assert [len(part) for part in data.chunk(4)] == [2, 2, 1, 0]


def test_split_leaves_the_rest_to_the_last():
    assert [rows_of(part) for part in numbered(10).split(3)] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10]]


@pytest.mark.parametrize(("candidate", "copies"), [("first", [1, 1]), ("last", [3, 3]), ("", [3, 3])])
def test_padding_appends_copies_of_one_row_in_place(candidate, copies):
    data = numbered(3)
    data.padding(2, candidate)
    assert rows_of(data) == [1, 2, 3, *copies]
    with pytest.raises(ValueError, match="'first' or 'last'"):
        data.padding(1, "middle")
    with pytest.raises(ValueError, match="without rows"):
        numbered(0).padding(1)


@pytest.mark.parametrize("times", [[3, 1, 0], (3, 1, 0), np.array([3, 1, 0]), torch.tensor([3, 1, 0])])
def test_sample_level_repeat_repeats_each_row_its_own_number_of_times(times):
    assert rows_of(numbered(3).sample_level_repeat(times)) == [1, 1, 1, 2]
    with pytest.raises(ValueError, match="one number for each of 2 rows"):
        numbered(2).sample_level_repeat(times)


def test_make_iterator_gives_the_same_order_for_the_same_seed():
    def order(seed, **kwargs):
        batches = list(numbered(8).make_iterator(mini_batch_size=2, epochs=2, seed=seed, dataloader_kwargs=kwargs))
        assert all(type(batch) is DataProto and batch.meta_info == {"name": "abc"} for batch in batches)
        return [rows_of(batch) for batch in batches]

    assert order(1) == order(1) == [[1, 2], [3, 4], [5, 6], [7, 8]] * 2
    shuffled = order(1, shuffle=True)
    assert shuffled == order(1, shuffle=True) != order(2, shuffle=True)
    assert sorted(itertools.chain(*shuffled[:4])) == list(range(1, 9)) and shuffled[:4] != shuffled[4:]
    with pytest.raises(AssertionError, match="8 rows don't divide into mini-batches of 3"):
        numbered(8).make_iterator(mini_batch_size=3, epochs=1)


def test_list_of_dict_to_dict_of_list_needs_the_same_keys():
    assert list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2}]) == {"a": [1, 2]}
    assert list_of_dict_to_dict_of_list([]) == {}
    with pytest.raises(AssertionError, match="dict 1"):
        list_of_dict_to_dict_of_list([{"a": 1}, {"b": 2}])


def test_unfold_column_chunks_cuts_some_columns_and_repeats_the_others():
    tensors = {"pair": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), "other": torch.tensor([[1], [2]])}
    data = DataProto.from_dict(tensors, {"names": [["a1", "a2"], ["b1", "b2"]], "uid": ["a", "b"]})
    unfolded = data.unfold_column_chunks(2, split_keys=["pair", "names"])
    assert unfolded.batch["pair"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert unfolded.batch["other"].tolist() == [[1], [1], [2], [2]]
    assert unfolded.non_tensor_batch["names"].tolist() == [["a1"], ["a2"], ["b1"], ["b2"]]
    assert unfolded.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    with pytest.raises(ValueError, match="'uid' of shape \\(2,\\)"):
        data.unfold_column_chunks(2, split_keys=["uid"])


def test_fold_and_unfold_are_inverse():
    data = numbered(6)
    folded = fold_batch_dim(data, 3)
    assert folded.batch["obs"].tolist() == [[1, 2], [3, 4], [5, 6]] and len(folded) == 3
    folded.reorder(torch.tensor([1, 2, 0]))
    assert rows_of(unfold_batch_dim(folded)) == [3, 4, 5, 6, 1, 2]
    with pytest.raises(AssertionError, match="can't be folded"):
        fold_batch_dim(data, 4)


def test_to_tensordict_and_back():
    data = numbered(3, name="x", step=4)
    tensordict = data.to_tensordict()
    assert list(tensordict["labels"]) == ["a", "b", "c"] and tensordict["name"] == "x"
    assert_same(DataProto.from_tensordict(tensordict), data)
    data.meta_info["obs"] = 1
    with pytest.raises(ValueError, match="obs"):
        data.to_tensordict()


def test_the_file_holds_tensors_and_json_and_no_pickle(tmp_path):
    path = tmp_path / "batch.safetensors"
    everything().save_to_disk(path)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    json.loads(header["__metadata__"]["document"], parse_constant=pytest.fail)
    assert all(entry["dtype"] for name, entry in header.items() if name != "__metadata__")


def test_what_cannot_be_saved_is_named_and_leaves_no_file(tmp_path):
    data = DataProto.from_dict(non_tensors={"tools": [{"call": [1, {2}]}]})
    with pytest.raises(TypeError, match=r"non_tensor_batch\['tools'\]\[0\]\['call'\]\[1\] holds set"):
        data.save_to_disk(tmp_path / "batch")
    assert not list(tmp_path.iterdir())


def test_a_file_of_something_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not a saved DataProto"):
        DataProto.load_from_disk(tmp_path / "model.safetensors")


def test_get_data_info_names_all_columns_and_types():
    data = DataProto.from_dict({"x": torch.ones(2, 3)}, {"y": [1, 2]}, {"m": {"k": [1, "a"]}, "t": (1, 2.0)})
    assert data.get_data_info().splitlines() == [
        "batch",
        "  x: (2, 3) (torch.float32) cpu",
        "non_tensor_batch",
        "  y: ndarray(2,) (object)",
        "meta_info",
        "  m: dict[str: list[int|str]]",
        "  t: tuple(int, float)",
    ]
    assert DataProto().get_data_info() == "batch\nnon_tensor_batch\nmeta_info"


def test_print_size_logs_bytes(caplog):
    with caplog.at_level(logging.INFO):
        DataProto.from_dict({"x": torch.ones(2**23, dtype=torch.uint8)}).print_size("rollout")
    assert "rollout tensors 0.008 GiB, arrays 0.000 GiB" in caplog.text


@pytest.fixture
def auto_padding():
    DataProtoConfig.auto_padding = True
    yield
    DataProtoConfig.auto_padding = False


def test_auto_padding_of_the_process_holds_for_every_batch(auto_padding):
    assert numbered(1).is_padding_enabled()
    assert [len(part) for part in numbered(5).chunk(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize(("value", "enabled"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_auto_padding_can_be_switched_on_by_verls_variable(monkeypatch, value, enabled):
    assert not numbered(1).is_padding_enabled()
    monkeypatch.setenv("VERL_AUTO_PADDING", value)
    assert numbered(1).is_padding_enabled() is DataProtoConfig.auto_padding is enabled


def test_auto_padding_is_true_or_false():
    with pytest.raises(TypeError, match="True or False, got 'yes'"):
        DataProtoConfig.auto_padding = "yes"
    assert DataProtoConfig.auto_padding is False


def test_a_batch_made_with_auto_padding_says_so_under_the_public_key():
    data = DataProto.from_dict({"obs": torch.arange(3)}, auto_padding=True)
    assert data.meta_info == {DataProtoConfig.auto_padding_key: True}
