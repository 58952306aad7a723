import numpy as np

from hrl.protocol import DataProto
from hrl.workers.rollout.columns import sample_keys


def test_samples_are_told_apart_by_group_and_number_whatever_their_order():
    columns = {"uid": ["b", "a", "b"], "sample_index": np.array([1, 0, 0])}
    rows = DataProto.from_dict(
        non_tensors={name: np.fromiter(values, dtype=object) for name, values in columns.items()}
    )
    assert sample_keys(rows) == [("b", 1), ("a", 0), ("b", 0)]
    assert all(type(number) is int for _, number in sample_keys(rows)), "plain data: it travels to another process"
