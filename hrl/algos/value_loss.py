"""Losses of the critic: one number per token, from its prediction, its earlier prediction and the target."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hrl.algos.masked import Metrics, check_shapes, keep, sum_and_count
from hrl.algos.registry import Registry, Traits

ValueLoss = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _clipped(vpreds: Tensor, values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """`0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)`: nothing is gained outside the range.

    From PPO's first implementation; described in arXiv:2005.12729, "value function clipping".
    """
    plain = (vpreds - returns).square()
    clipped = (torch.clamp(vpreds, values - cliprange, values + cliprange) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def _squared(vpreds: Tensor, values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """`0.5 (v - R)^2`, without a clip (arXiv:1707.06347, equation 9, the term L^VF)."""
    return 0.5 * (vpreds - returns).square(), torch.zeros_like(returns, dtype=torch.bool)


VALUE_LOSSES: Registry[ValueLoss, Traits] = Registry("value loss", {"clipped": _clipped, "squared": _squared})
"""From new predictions, old predictions and targets, `(B, R)` each, and the clip range to the loss of every token and
to the tokens that were clipped, bool. `hrl.algos.aggregation` makes one number of the losses."""


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
        vpreds: New predictions `(B, R)`; has the gradient.
        values: Predictions from before the update `(B, R)`.
        returns: Targets `(B, R)`.
        response_mask: `(B, R)`; outside it the other columns are ignored.
        cliprange_value: Distance from the old prediction beyond which nothing is gained; None for no clip.
        name: A key of `VALUE_LOSSES`; None is `clipped` if there is a clip range, else `squared`.

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
