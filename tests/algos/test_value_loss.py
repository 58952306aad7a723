import math

import pytest
import torch

from hrl.algos.value_loss import value_loss


def test_by_hand() -> None:
    """Within the range the plain error; gaining by leaving it is not rewarded; what got worse counts in full."""
    vpreds = torch.tensor([[1.1, 2.0, -1.0, math.nan]], requires_grad=True)
    values = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    returns = torch.tensor([[2.0, 2.0, 2.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    loss_mat, metrics = value_loss(vpreds, values, returns, mask, cliprange_value=0.5)
    assert loss_mat[0].tolist() == pytest.approx([0.5 * 0.9**2, 0.5 * 0.5**2, 0.5 * 9.0, 0.0])
    assert [number.item() for number in metrics["critic/vf_clipfrac"]] == [1.0, 3]
    assert [number.item() for number in metrics["critic/vpred_mean"]] == pytest.approx([2.1, 3])
    loss_mat.sum().backward()
    assert vpreds.grad is not None
    assert vpreds.grad[0].tolist() == pytest.approx([-0.9, 0.0, -3.0, 0.0])


def test_without_a_clip_leaving_the_range_pays() -> None:
    vpreds = torch.tensor([[1.1, 2.0]], requires_grad=True)
    values, returns, mask = torch.ones(1, 2), torch.full((1, 2), 2.0), torch.ones(1, 2)
    loss_mat, metrics = value_loss(vpreds, values, returns, mask, cliprange_value=0.5, name="squared")
    assert loss_mat[0].tolist() == pytest.approx([0.5 * 0.9**2, 0.0])
    assert metrics["critic/vf_clipfrac"][0].item() == 0.0
    assert torch.equal(value_loss(vpreds, values, returns, mask, cliprange_value=None)[0], loss_mat)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'huber'.*clipped"):
        value_loss(*[torch.ones(1, 1)] * 4, 0.2, name="huber")


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="returns has shape"):
        value_loss(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 2), torch.ones(2, 3), 0.2)
