import pytest
import torch

from hrl.data.collate import collate_fn


def test_tensors_are_stacked_and_lists_stay_lists():
    batch = collate_fn([{"x": torch.tensor([1, 2]), "y": [1, 2]}, {"x": torch.tensor([3, 4]), "y": [3, 4]}])
    assert batch["x"].tolist() == [[1, 2], [3, 4]]
    assert batch["y"].shape == (2,)
    assert list(batch["y"]) == [[1, 2], [3, 4]]


def test_items_with_other_keys_are_refused():
    with pytest.raises(ValueError, match=r"item 1 has other keys than item 0: \['y'\]"):
        collate_fn([{"x": 1}, {"x": 1, "y": 2}])
