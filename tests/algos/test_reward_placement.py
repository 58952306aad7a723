import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hrl.algos.reward_placement import overlong_penalty, place_scores


def test_the_score_stands_on_the_last_trained_token() -> None:
    """Tool tokens behind it are not it; a response without trained tokens gets nothing, least of all at column -1."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    placed = place_scores(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 4]]


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6))
def test_nothing_is_lost_and_nothing_is_outside_the_mask(rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows)
    placed = place_scores(torch.arange(1.0, len(rows) + 1.0), mask)
    assert (placed[~mask] == 0).all()
    assert torch.equal(placed.sum(dim=1), torch.arange(1.0, len(rows) + 1.0) * mask.any(dim=1))


def test_dtypes() -> None:
    mask = torch.ones(2, 1)
    assert place_scores(torch.tensor([1, 2]), mask).dtype == torch.float32
    assert place_scores(torch.ones(2, dtype=torch.float64), mask).dtype == torch.float64
    assert place_scores(torch.ones(2), torch.zeros(2, 0)).shape == (2, 0)


def test_bad_scores_are_refused_by_row() -> None:
    with pytest.raises(ValueError, match="row 1 is nan"):
        place_scores(torch.tensor([1.0, math.nan]), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"expected \(2,\)"):
        place_scores(torch.ones(2, 3), torch.ones(2, 3))


def test_overlong_penalty() -> None:
    lengths = torch.tensor([0, 2, 3, 4, 9])
    assert overlong_penalty(lengths, max_length=4, buffer_length=2).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, max_length=4, buffer_length=2, factor=0.5)[3].item() == -0.5
    for buffer_length in (0, 5):
        with pytest.raises(ValueError, match="1 to 4 tokens"):
            overlong_penalty(lengths, max_length=4, buffer_length=buffer_length)
