import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.algos.masked import WHITEN_EPSILON, TrainedTokens, keep, pad_segments, sum_and_count, whiten
from tests.algos.batches import MASK_WITH_EVERYTHING, Batch


def test_whitened_entries_have_mean_zero_and_unbiased_variance_one() -> None:
    batch = Batch.random()
    white = whiten(1e6 + batch.values, batch.mask)
    inside = white[batch.mask.bool()]
    assert inside.mean().item() == pytest.approx(0.0, abs=1e-8)
    assert inside.var().item() == pytest.approx(1.0, rel=1e-6)
    assert (white[~batch.mask.bool()] == 0).all()


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 5), width=st.integers(1, 5), seed=st.integers(0, 1 << 16), shift=st.floats(-1e3, 1e3))
def test_whitening_sees_trained_tokens_only(rows: int, width: int, seed: int, shift: float) -> None:
    """Whatever stands outside the mask, wherever masked tokens are inserted, whatever is added to all of them."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    matrix = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    white, count = whiten(matrix, mask), int(mask.sum())
    assert (white[~mask] == 0).all()
    if count < 2:
        assert (white == 0).all()
    else:
        assert white[mask].mean().item() == pytest.approx(0.0, abs=1e-9)
        variance = matrix[mask].var().item()
        assert white[mask].var().item() == pytest.approx(variance / (variance + WHITEN_EPSILON), rel=1e-9)
    dirty = torch.where(mask, matrix, math.nan)
    torch.testing.assert_close(whiten(dirty, mask), white, rtol=0, atol=0)
    wide = torch.cat([torch.full((rows, 1), 1e9), matrix + shift], dim=1)
    wide_mask = torch.cat([torch.zeros(rows, 1, dtype=torch.bool), mask], dim=1)
    torch.testing.assert_close(whiten(wide, wide_mask)[:, 1:], white, rtol=1e-6, atol=1e-7)


def test_whitening_without_spread() -> None:
    assert (whiten(torch.full((2, 2), 7.0), torch.zeros(2, 2)) == 0).all()
    assert (whiten(torch.full((2, 2), 7.0), torch.tensor([[1, 0], [0, 0]])) == 0).all()
    assert (whiten(torch.full((2, 2), 7.0), torch.ones(2, 2)) == 0).all()


def test_packing_draws_the_docstring() -> None:
    tokens = TrainedTokens.of(torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0]]))
    packed = tokens.pack(torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]))
    assert packed.tolist() == [[1.0, 3.0, 4.0], [6.0, 0.0, 0.0]]
    assert tokens.unpack(packed).tolist() == [[1.0, 0.0, 3.0, 4.0], [0.0, 6.0, 0.0, 0.0]]


@pytest.mark.parametrize("mask", [MASK_WITH_EVERYTHING, torch.arange(6) < torch.tensor([[3], [0], [5]])])
def test_packing_there_and_back_keeps_trained_tokens(mask: torch.Tensor) -> None:
    matrix = torch.arange(mask.numel(), dtype=torch.float64).view(mask.shape) + 1.0
    tokens = TrainedTokens.of(mask)
    assert tokens.pack(matrix).shape == (len(mask), int(mask.sum(dim=1).max()))
    assert torch.equal(tokens.unpack(tokens.pack(matrix)), matrix * mask)


def test_packed_columns_become_rows() -> None:
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    matrix, mask = pad_segments(flat, torch.tensor([3, 0, 1]))
    assert matrix.tolist() == [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [4.0, 0.0, 0.0]]
    assert mask.long().tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    (matrix * torch.arange(9.0).view(3, 3)).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [0.0, 1.0, 2.0, 6.0]
    assert pad_segments(torch.zeros(0), torch.zeros(0, dtype=torch.int64))[0].shape == (0, 0)
    with pytest.raises(ValueError, match="add up to 3 tokens, the packed column has 4"):
        pad_segments(flat, torch.tensor([3, 0]))


def test_nothing_outside_the_mask_is_read() -> None:
    matrix = torch.tensor([[1.0, math.nan], [math.inf, 2.0]])
    mask = torch.tensor([[1, 0], [0, 1]])
    assert keep(matrix, mask).tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert [number.item() for number in sum_and_count(matrix, mask)] == [3.0, 2]
