"""Correcting for a sampler whose probabilities differ from the trainer's.

The same weights give different log-probs in an inference engine and in a trainer: other kernels, other precision,
weights a version behind. Everything here starts from ``log_ratio = log p_trainer - log p_sampler`` of the sampled
tokens, ``(B, R)``, and runs once over the whole batch:

* *weights* (truncated importance sampling, IcePop) multiply the loss of a token;
* *rejection* takes tokens or whole sequences out of the response mask;
* *metrics* say how large the mismatch is and how much of the batch is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .masked import check_shapes, keep, rows_with_tokens

MAX_LOG_RATIO = 20.0
"""Log-ratios are taken within ±20 before exponentiation."""


@dataclass(frozen=True)
class Interval:
    """Which ratios are accepted. ``lower`` None means no lower bound.

    Raises:
        ValueError: The bounds are not ``0 < lower <= upper``.
    """

    upper: float
    lower: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.upper < math.inf or (self.lower is not None and not 0 < self.lower <= self.upper):
            raise ValueError(
                f"bounds of a probability ratio must be 0 < lower <= upper, got {self.lower}, {self.upper}"
            )

    @classmethod
    def parse(cls, text: str | float) -> Interval:
        """From ``2.0``, ``"2.0"`` (an upper bound) or ``"0.5_5.0"`` (lower and upper).

        Raises:
            ValueError: Not of these forms.
        """
        parts = str(text).split("_")
        try:
            bounds = [float(part) for part in parts]
        except ValueError:
            bounds = []
        if len(bounds) not in (1, 2):
            raise ValueError(f"{text!r} is no interval of ratios; write an upper bound '2.0' or both as '0.5_5.0'")
        return cls(upper=bounds[-1], lower=bounds[0] if len(bounds) == 2 else None)


def _clamped(log_ratio: Tensor, mask: Tensor) -> Tensor:
    check_shapes(mask, log_ratio=log_ratio)
    return keep(log_ratio.detach(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _of_sequence(per_row: Tensor, mask: Tensor) -> Tensor:
    return per_row.unsqueeze(-1).expand(mask.shape)


def _token_ratio(log_ratio: Tensor) -> Tensor:
    """``p_trainer / p_sampler`` of each token."""
    return log_ratio.exp()


def _sequence_ratio(log_ratio: Tensor) -> Tensor:
    """The product of the row's token ratios, at each of its tokens."""
    whole = log_ratio.sum(dim=-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return whole.exp().expand(log_ratio.shape)


def _mean_over_tokens(weights: Tensor, mask: Tensor) -> Tensor:
    return weights[mask.bool()].mean()


def _mean_over_sequences(weights: Tensor, mask: Tensor) -> Tensor:
    return weights.amax(dim=-1)[rows_with_tokens(mask)].mean()


IMPORTANCE_LEVELS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "token": (_token_ratio, _mean_over_tokens),
    "sequence": (_sequence_ratio, _mean_over_sequences),
}
"""Where ratios are taken: from log-ratios ``(B, R)``, 0 outside the mask, to ratios ``(B, R)``; and, from weights
``(B, R)`` and the mask, the mean weight over what a ratio belongs to."""


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    level: str,
    accepted: Interval,
    *,
    normalise: bool = False,
) -> Tensor:
    """Weights ``p_trainer / p_sampler`` for the loss of each token.

    With an upper bound alone ``w = min(ratio, upper)`` (truncated importance sampling, Ionides 2008, "Truncated
    Importance Sampling", equation 1; between sampler and trainer: Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training"). With both bounds ``w = ratio`` inside and 0 outside (IcePop, "Every
    Step Evolves", arXiv:2510.18855).

    Args:
        log_ratio: ``(B, R)``.
        mask: Response mask ``(B, R)``.
        level: A key of :data:`IMPORTANCE_LEVELS`. ``token``: each token's own ratio. ``sequence``: the product over the
            row at each of its tokens.
        accepted: Bounds of the ratio.
        normalise: Divide by the mean weight (over tokens, or over sequences), so that the batch keeps its size.

    Returns:
        ``(B, R)``, 0 outside the mask, without gradient.

    Raises:
        ValueError: Unknown level.
    """
    if level not in IMPORTANCE_LEVELS:
        raise ValueError(f"unknown level {level!r} of importance weights; choose one of {sorted(IMPORTANCE_LEVELS)}")
    ratio_of, mean_of = IMPORTANCE_LEVELS[level]
    ratios = ratio_of(_clamped(log_ratio, mask))
    if accepted.lower is None:
        weights = ratios.clamp(max=accepted.upper)
    else:
        weights = torch.where((ratios >= accepted.lower) & (ratios <= accepted.upper), ratios, 0.0)
    weights = keep(weights, mask)
    if not normalise or not weights.any():
        return weights
    return weights / mean_of(weights, mask)


def effective_sample_size(weights: Tensor, mask: Tensor) -> float:
    """The share of the batch that the weights leave: ``(sum w)^2 / (n sum w^2)`` over trained tokens; 0 if none."""
    chosen = weights[mask.bool()].double()
    squares = float(chosen.square().sum())
    return float(chosen.sum()) ** 2 / (len(chosen) * squares) if squares > 0 else 0.0


Divergence = Literal["k1", "k2", "k3"]
Scope = Literal["token", "seq_sum", "seq_mean", "seq_max"]

REJECTION_RULES: dict[str, tuple[Scope, Divergence]] = {
    "token_k1": ("token", "k1"),
    "token_k2": ("token", "k2"),
    "token_k3": ("token", "k3"),
    "seq_sum_k1": ("seq_sum", "k1"),
    "seq_sum_k2": ("seq_sum", "k2"),
    "seq_sum_k3": ("seq_sum", "k3"),
    "seq_mean_k1": ("seq_mean", "k1"),
    "seq_mean_k2": ("seq_mean", "k2"),
    "seq_mean_k3": ("seq_mean", "k3"),
    "seq_max_k2": ("seq_max", "k2"),
    "seq_max_k3": ("seq_max", "k3"),
}


def _divergence(log_ratio: Tensor, kind: Divergence) -> Tensor:
    """Estimators of KL(sampler || trainer) at tokens drawn from the sampler."""
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return log_ratio.exp() - 1.0 - log_ratio


def rejection_mask(log_ratio: Tensor, mask: Tensor, rule: str, threshold: str | float) -> Tensor:
    """The response mask without the tokens or sequences that sampler and trainer disagree on.

    Args:
        log_ratio: ``(B, R)``.
        mask: Response mask ``(B, R)``.
        rule: A key of :data:`REJECTION_RULES`: where the divergence is taken (each token; sum, mean or maximum over the
            row, which then stays or goes as a whole) and which estimate of it.
        threshold: For k2 and k3 the largest divergence. For k1, whose sign matters, bounds of the ratio
            ``p_sampler / p_trainer`` as ``"0.5_2.0"``; one number stands for itself and its inverse.

    Returns:
        ``(B, R)`` in the mask's dtype.

    Raises:
        ValueError: Unknown rule, or a threshold that does not fit it.
    """
    if rule not in REJECTION_RULES:
        raise ValueError(f"unknown rejection rule {rule!r}; choose one of {sorted(REJECTION_RULES)}")
    scope, kind = REJECTION_RULES[rule]
    bounds = Interval.parse(threshold)
    if kind != "k1" and bounds.lower is not None:
        raise ValueError(f"{rule} takes one upper bound, got {threshold!r}")
    statistic = _divergence(_clamped(log_ratio, mask), kind)
    if scope == "seq_sum":
        statistic = _of_sequence(keep(statistic, mask).sum(dim=-1), mask)
    elif scope == "seq_mean":
        tokens = mask.bool().sum(dim=-1).clamp(min=1)
        statistic = _of_sequence(keep(statistic, mask).sum(dim=-1) / tokens, mask)
    elif scope == "seq_max":
        statistic = _of_sequence(keep(statistic, mask).amax(dim=-1), mask)
    if kind == "k1":
        lower = bounds.lower if bounds.lower is not None else 1.0 / bounds.upper
        accepted = (statistic >= math.log(lower)) & (statistic <= math.log(bounds.upper))
    else:
        accepted = statistic <= bounds.upper
    return (mask.bool() & accepted).to(mask.dtype)


def mismatch_metrics(trainer_log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the trainer's log-probs are from the sampler's, over the trained tokens of a whole batch.

    Returns:
        Empty without trained tokens, else: mean, 99th percentile and maximum of ``|log p_trainer - log p_sampler|``
        (``logprob_diff_*``), two estimates of KL(sampler || trainer) (``kl_k1``, ``kl_k3``), the chi-squared divergence
        (``chi2``) and the effective sample size of the uncorrected batch (``eff_sample_size``).
    """
    check_shapes(mask, trainer_log_prob=trainer_log_prob, sampler_log_prob=sampler_log_prob)
    trained = mask.bool()
    log_ratio = (trainer_log_prob.detach() - sampler_log_prob.detach())[trained].double()
    if not len(log_ratio):
        return {}
    distance = log_ratio.abs()
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = clamped.exp()
    rank = min(len(distance), math.ceil(0.99 * len(distance)))
    return {
        "logprob_diff_mean": float(distance.mean()),
        "logprob_diff_p99": float(distance.kthvalue(rank).values),
        "logprob_diff_max": float(distance.max()),
        "kl_k1": float(-clamped.mean()),
        "kl_k3": float((ratio - 1.0 - clamped).mean()),
        "chi2": float(ratio.square().mean() - 1.0),
        "eff_sample_size": float(ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())),
    }
