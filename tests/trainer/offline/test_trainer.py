import math

import pytest
import torch

from hrl.errors import NonFiniteError
from hrl.trainer.offline.trainer import metrics_by_source


def test_means_are_taken_source_by_source_with_their_number():
    columns = {"loss": torch.tensor([1.0, 2.0, 6.0]), "accuracy": torch.tensor([1.0, 0.0, 1.0])}
    assert metrics_by_source(["a", "b", "a"], columns, torch.ones(3)) == {
        "val/a/loss": 3.5,
        "val/a/accuracy": 1.0,
        "val/a/n": 2.0,
        "val/b/loss": 2.0,
        "val/b/accuracy": 0.0,
        "val/b/n": 1.0,
    }


def test_weights_make_a_mean_over_tokens():
    per_row, tokens = torch.tensor([1.0, 4.0]), torch.tensor([3, 1])
    assert metrics_by_source(["a", "a"], {"loss": per_row}, tokens) == {"val/a/loss": 7 / 4, "val/a/n": 2.0}


def test_a_number_that_is_lost_names_item_and_source():
    with pytest.raises(NonFiniteError, match=r"the loss of validation item 1 \(source 'b'\) is nan"):
        metrics_by_source(["a", "b"], {"loss": torch.tensor([0.0, math.nan])}, torch.ones(2))
