"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from .masked import check_shapes, keep, sum_and_count


def value_loss(
    vpreds: Tensor, values: Tensor, returns: Tensor, response_mask: Tensor, cliprange_value: float
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Clipped squared error of PPO2's critic: ``0.5 * max((v - R)^2, (clip(v, v_old ± c) - R)^2)``.

    Args:
        vpreds: Values predicted now ``(B, R)``.
        values: Values predicted when the batch was made ``(B, R)``.
        returns: Their targets ``(B, R)``.
        response_mask: ``(B, R)``.
        cliprange_value: How far a prediction may gain by moving from its old value.

    Returns:
        The loss per token ``(B, R)``, and metrics as (sum, count): ``vf_clipfrac``, ``vpred_mean``.
    """
    check_shapes(response_mask, vpreds=vpreds, values=values, returns=returns)
    vpreds, values, returns = (keep(column, response_mask) for column in (vpreds, values, returns))
    clipped_vpreds = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain = (vpreds - returns).square()
    clipped = (clipped_vpreds - returns).square()
    metrics = {
        "vf_clipfrac": sum_and_count((clipped > plain).to(vpreds.dtype), response_mask),
        "vpred_mean": sum_and_count(vpreds, response_mask),
    }
    return 0.5 * torch.maximum(plain, clipped), metrics
