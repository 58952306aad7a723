import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.algos.policy_filtration import REWEIGHT_METHODS, draw_rows, filtration_weights

SCORES = torch.tensor([1.0, -2.0, 9.0, 0.0, 1.0])
COUNTED = torch.tensor([True, True, False, True, True])


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("pow", [1 / 6, 4 / 6, 0.0, 0.0, 1 / 6]),
        ("max_min", [1 / 3, 1 / 3, 0.0, 0.0, 1 / 3]),
        ("max_random", [0.4, 0.1, 0.0, 0.1, 0.4]),
    ],
)
def test_weights_by_hand(method: str, expected: list[float]) -> None:
    """Row 2 has no trained token: its 9 is not the best score of the batch."""
    assert filtration_weights(SCORES, COUNTED, method).tolist() == pytest.approx(expected)


def test_every_method_has_a_number_above() -> None:
    assert len(REWEIGHT_METHODS) == 3


@pytest.mark.parametrize("method", sorted(REWEIGHT_METHODS))
@settings(deadline=None, max_examples=20)
@given(rows=st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_only_counted_rows_are_drawn_and_as_many_as_there_were(
    method: str, rows: list[tuple[int, bool]], seed: int
) -> None:
    scores, counted = torch.tensor([float(s) for s, _ in rows]), torch.tensor([c for _, c in rows])
    drawn = draw_rows(scores, counted, method, generator=torch.Generator().manual_seed(seed))
    assert drawn.shape == (len(rows),)
    if counted.any():
        assert counted[drawn].all()
        assert filtration_weights(scores, counted, method).sum().item() == pytest.approx(1.0)
    else:
        assert drawn.tolist() == list(range(len(rows)))


def test_frequencies_are_the_weights() -> None:
    scores = SCORES.repeat(4000)
    drawn = draw_rows(
        scores, torch.ones(20000, dtype=torch.bool), "pow", 1.0, generator=torch.Generator().manual_seed(0)
    )
    share = (scores[drawn] == 9.0).double().mean().item()
    assert share == pytest.approx(9 / 13, abs=0.015)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'best'.*max_min"):
        filtration_weights(SCORES, COUNTED, "best")
    with pytest.raises(ValueError, match="weight_pow"):
        filtration_weights(SCORES, COUNTED, "pow", -1.0)
    with pytest.raises(ValueError, match="finite"):
        filtration_weights(torch.tensor([math.nan]), torch.tensor([True]), "pow")
