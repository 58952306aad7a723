"""Estimators of KL(policy || reference) from the log-probs of sampled tokens, and controllers of its weight.

Names follow J. Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html), with
`d = log policy - log reference` at a token sampled from the policy:

====== =================== ============= =======================================================================
kind   also called         value         expected gradient of the value, on policy
====== =================== ============= =======================================================================
k1     kl                  d             0: useless in a loss, right as a penalty inside the reward
abs                        |d|           that of sum |p - p_ref| over the vocabulary, not of a KL
k2     mse                 d^2 / 2       that of KL(policy || reference), exactly
k3     low_var_kl          e^-d + d - 1  that of KL(reference || policy)
X+                         that of X     that of k2
====== =================== ============= =======================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hrl.algos.masked import check_shapes, keep
from hrl.algos.registry import KL_NAMES, Registry, Traits

MAX_EXPONENT = 20.0
"""Beyond e^20 an exponential continues as its tangent: it stays finite, and its gradient never vanishes."""


def _exp(exponent: Tensor) -> Tensor:
    inside = exponent.clamp(max=MAX_EXPONENT)
    return torch.exp(inside) * (1.0 + exponent - inside)


def _k1(difference: Tensor) -> Tensor:
    """`d`: unbiased, of high variance (http://joschu.net/blog/kl-approx.html, k1)."""
    return difference


def _abs(difference: Tensor) -> Tensor:
    """`|d|`: the distance in either direction; not an estimate of a KL (verl's `abs`)."""
    return difference.abs()


def _k2(difference: Tensor) -> Tensor:
    """`d^2 / 2`: a biased value with the right gradient (http://joschu.net/blog/kl-approx.html, k2)."""
    return 0.5 * difference.square()


def _k3(difference: Tensor) -> Tensor:
    """`e^-d + d - 1`: unbiased, never negative (http://joschu.net/blog/kl-approx.html, k3; GRPO's equation 4)."""
    return _exp(-difference) + difference - 1.0


KL_ESTIMATORS: Registry[Callable[[Tensor], Tensor], Traits] = Registry(
    "KL estimator",
    {"k1": _k1, "kl": _k1, "abs": _abs, "k2": _k2, "mse": _k2, "k3": _k3, "low_var_kl": _k3},
    table=KL_NAMES,
)
"""From `log policy - log reference` to an estimate per token. Any name with `+` appended has k2's gradient."""


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at each token. Shapes are kept.

    Nothing is clamped: where the policy has moved furthest the gradient is largest.

    Args:
        logprob: Log-probs of the sampled tokens under the policy.
        ref_logprob: The same under the reference.
        kind: A key of `KL_ESTIMATORS`, or one with `+` appended for its value with k2's gradient.

    Raises:
        ValueError: Unknown kind.
    """
    estimator = KL_ESTIMATORS.get(kind.removesuffix("+"))
    if estimator is None:
        raise ValueError(f"unknown KL estimator {kind!r}; choose one of {sorted(KL_ESTIMATORS)}, or one with '+'")
    difference = logprob - ref_logprob
    if not kind.endswith("+"):
        return estimator(difference)
    surrogate = _k2(difference)
    return estimator(difference).detach() + surrogate - surrogate.detach()


def check_kl_loss_type(kind: str) -> None:
    """Refuse a KL estimator whose expected gradient is zero.

    Raises:
        ValueError: It is `k1` without `+`, which would only add noise to a loss.
    """
    if KL_ESTIMATORS.get(kind) is _k1:
        raise ValueError(
            f"kl_loss_type={kind!r} has an expected gradient of zero and would not hold the policy back; "
            "use 'k2', 'k3' or 'k1+'"
        )


def penalise_rewards(
    scores: Tensor,
    logprob: Tensor,
    ref_logprob: Tensor,
    mask: Tensor,
    coefficient: float,
    kind: str,
    episode_ids: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Subtract a KL penalty from the reward of every trained token.

    Args:
        scores: Token-level scores `(B, R)`.
        logprob: Log-probs of the sampled tokens under the policy that sampled them `(B, R)`.
        ref_logprob: The same under the reference `(B, R)`.
        mask: Response mask `(B, R)`.
        coefficient: Weight of the penalty.
        kind: Estimator, as in `kl_penalty`.
        episode_ids: `(B,)` int64 codes from 0 up of the episode that each row is a branch of; None makes every row one.

    Returns:
        Token-level rewards `(B, R)`, 0 outside the mask, and the mean over sequences of their mean KL per token, which
        a controller's `update` takes.
    """
    check_shapes(mask, scores=scores, logprob=logprob, ref_logprob=ref_logprob)
    penalty = keep(kl_penalty(logprob, ref_logprob, kind).detach(), mask)
    totals, tokens = penalty.double().sum(dim=-1), mask.bool().sum(dim=-1)
    if episode_ids is not None:
        totals, tokens = (torch.bincount(episode_ids, weights=column) for column in (totals, tokens))
    counted = tokens > 0
    if not counted.any():
        return torch.zeros_like(scores), 0.0
    return keep(scores - coefficient * penalty, mask), float((totals[counted] / tokens[counted]).mean())


class FixedKLController:
    """A constant weight."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""


class AdaptiveKLController:
    """Adjusts the weight until the KL meets a target (Ziegler et al., arXiv:1909.08593, section 2.2).

    Raises:
        ValueError: `target_kl` or `horizon` is not positive.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0:
            raise ValueError(f"algorithm.kl_ctrl.target_kl must be positive, got {target_kl}")
        if horizon <= 0:
            raise ValueError(f"algorithm.kl_ctrl.horizon must be positive, got {horizon}")
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Apply `value *= 1 + clip(current / target - 1, -0.2, 0.2) * n_steps / horizon`.

        Raises:
            ValueError: `current_kl` is not finite, which would make the weight so for good.
        """
        if not math.isfinite(current_kl):
            raise ValueError(f"the measured KL is {current_kl}; look at the log-probs of policy and reference")
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon


KLController = FixedKLController | AdaptiveKLController
"""Holds the weight of a KL penalty in `value` and adjusts it after each step."""


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """Build the controller that `algorithm.kl_ctrl` describes.

    Args:
        kl_ctrl: Has `type` ('fixed' or 'adaptive'), `kl_coef`, and for 'adaptive' `target_kl` and `horizon`.

    Raises:
        ValueError: Unknown type.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_coef=kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ValueError(f"unknown algorithm.kl_ctrl.type {kl_ctrl.type!r}; choose 'fixed' or 'adaptive'")
