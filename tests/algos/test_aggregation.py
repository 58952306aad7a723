import math

import pytest
import torch

from hrl.algos.aggregation import AGGREGATION_MODES, Counts, aggregate

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, math.nan, math.inf], [7.0, 7.0, 7.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 4),
        ("token-sum", 10.0),
        ("seq-mean-token-sum", (6 + 4) / 2),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", (6 + 4) / 2 / 5),
    ],
)
def test_by_hand(mode: str, expected: float) -> None:
    """Empty rows are no sequences; what stands outside the mask does not count, NaN included."""
    assert aggregate(LOSS, MASK, mode, norm=5).item() == pytest.approx(expected)


def test_every_mode_has_a_number_above() -> None:
    assert len(AGGREGATION_MODES) == 5


@pytest.mark.parametrize("mode", sorted(AGGREGATION_MODES))
def test_nothing_trained_gives_zero_and_no_gradient(mode: str) -> None:
    loss_mat = torch.ones(2, 3, requires_grad=True)
    loss = aggregate(loss_mat, torch.zeros(2, 3), mode, norm=3)
    loss.backward()
    assert loss.item() == 0.0
    assert (loss_mat.grad == 0).all()


def test_counts_are_the_divisor_whatever_is_here() -> None:
    counts = Counts(tokens=20, sequences=5)
    assert aggregate(LOSS, MASK, "token-mean", counts).item() == pytest.approx(10 / 20)
    assert aggregate(LOSS, MASK, "seq-mean-token-mean", counts).item() == pytest.approx(6 / 5)


def test_counts_of_a_batch() -> None:
    assert Counts.of(MASK, torch.tensor([0, 0, 1])) == Counts(tokens=4, sequences=2, groups=1)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*token-mean"):
        aggregate(LOSS, MASK, "mean")
    with pytest.raises(ValueError, match="loss_scale_factor"):
        aggregate(LOSS, MASK, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match=r"loss_mat has shape \(3, 2\)"):
        aggregate(LOSS[:, :2], MASK, "token-mean")
