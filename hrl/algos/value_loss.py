"""Losses of the critic: one number per token from what it predicts, predicted and should have predicted."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hrl.algos.masked import check_shapes, keep, sum_and_count
from hrl.algos.registry import Registry, Traits

Metrics = dict[str, tuple[Tensor, Tensor]]
ValueLoss = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _clipped(vpreds: Tensor, values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """`0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)`: leaving the range can only cost.

    The critic of PPO's first implementation; written down in arXiv:2005.12729, "value function clipping".
    """
    plain = (vpreds - returns).square()
    clipped = (torch.clamp(vpreds, values - cliprange, values + cliprange) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def _squared(vpreds: Tensor, values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """`0.5 (v - R)^2`, without a clip (arXiv:1707.06347, equation 9, the term L^VF)."""
    return 0.5 * (vpreds - returns).square(), torch.zeros_like(returns, dtype=torch.bool)


VALUE_LOSSES: Registry[ValueLoss, Traits] = Registry("value loss", {"clipped": _clipped, "squared": _squared})
"""From predictions now, predictions then, targets `(B, R)` and the clip range to the loss of every token and to the
tokens that the clip holds. :mod:`hrl.algos.aggregation` makes one number of them."""


def value_loss(
    vpreds: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    cliprange_value: float | None,
    *,
    name: str | None = None,
) -> tuple[Tensor, Metrics]:
    """Run the value loss of that name.

    Args:
        vpreds: Values predicted now `(B, R)`; has the gradient.
        values: Values predicted when the batch was made `(B, R)`.
        returns: Their targets `(B, R)`.
        response_mask: `(B, R)`; outside it the other columns are ignored.
        cliprange_value: How far a prediction may gain by moving from its old value; None for no clip.
        name: A key of :data:`VALUE_LOSSES`; None is `clipped` where there is a clip range and `squared` without.

    Returns:
        The loss per token `(B, R)`, 0 outside the mask, and metrics as (sum, count): `critic/vf_clipfrac` and
        `critic/vpred_mean`.

    Raises:
        ValueError: Unknown name; shapes that differ.
    """
    clip = math.inf if cliprange_value is None else cliprange_value
    name = name or ("squared" if cliprange_value is None else "clipped")
    loss = VALUE_LOSSES.find(name)
    check_shapes(response_mask, vpreds=vpreds, values=values, returns=returns)
    vpreds, values, returns = (keep(column, response_mask) for column in (vpreds, values, returns))
    loss_mat, held = loss(vpreds, values, returns, clip)
    metrics = {
        "critic/vf_clipfrac": sum_and_count(held.to(vpreds.dtype), response_mask),
        "critic/vpred_mean": sum_and_count(vpreds, response_mask),
    }
    return keep(loss_mat, response_mask), metrics
