import numpy as np
import torch

from hrl.batching.episodes import episode_numbers
from hrl.protocol import DataProto


def _batch(**columns: list[object]) -> DataProto:
    others = {name: np.array(values, dtype=object) for name, values in columns.items()}
    return DataProto.from_dict(tensors={"x": torch.zeros(5)}, non_tensors=others)


def test_rows_of_one_prompt_and_sample_are_an_episode() -> None:
    """The same sample number of another prompt is another episode."""
    batch = _batch(uid=["a", "a", "a", "b", "b"], sample_index=[0, 1, 1, 1, 0], branch=[0, 0, 1, 0, 0])
    numbers = episode_numbers(batch)
    assert numbers is not None
    assert numbers.tolist() == [0, 1, 1, 2, 3]


def test_without_branches_every_row_is_an_episode() -> None:
    rows: dict[str, list[object]] = {"uid": ["a"] * 5, "sample_index": [0, 1, 2, 3, 4]}
    assert episode_numbers(_batch(**rows)) is None
    assert episode_numbers(_batch(**rows, branch=[0] * 5)) is None
