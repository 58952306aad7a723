"""Policy filtration: train more often on the responses whose reward can be trusted (PF-PPO, arXiv:2409.06957).

A reward model is most reliable where its scores are extreme. So the rows of a batch are drawn again, with replacement
and with weights that depend on their scores; the batch keeps its size. The paper draws among the samples of one prompt;
here, as in verl, the draw is over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hrl.algos.registry import REWEIGHT_METHOD_NAMES, Registry, Traits


def _pow(scores: Tensor, power: float) -> Tensor:
    """`|s|^power`: large rewards of either sign."""
    return scores.abs() ** power


def _max_min(scores: Tensor, power: float) -> Tensor:
    """`1` for the best and the worst score of the batch, `0` for all others (the paper's best-worst)."""
    return ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)


def _max_random(scores: Tensor, power: float) -> Tensor:
    """`0.4` for the best score of the batch, `0.1` for all others (the paper's best-random)."""
    return torch.where(scores == scores.max(), 0.4, 0.1).to(scores.dtype)


REWEIGHT_METHODS: Registry[Callable[[Tensor, float], Tensor], Traits] = Registry(
    "reweight method",
    {"pow": _pow, "max_min": _max_min, "max_random": _max_random},
    table=REWEIGHT_METHOD_NAMES,
)
"""From scores of the counted rows `(n,)` and an exponent to weights `(n,)`, not negative."""


def filtration_weights(scores: Tensor, counted: Tensor, method: str, weight_pow: float = 2.0) -> Tensor:
    """Return the probability of drawing each row.

    Args:
        scores: Total reward of each response `(B,)`.
        counted: `(B,)` bool; other rows (without a trained token) are never drawn.
        method: A key of `REWEIGHT_METHODS`.
        weight_pow: Exponent of `pow`.

    Returns:
        `(B,)` float64, adding up to 1 where any row counts. If the method gives every counted row weight 0 (all
        scores 0 under `pow`), they are equally likely.

    Raises:
        ValueError: Unknown method; a negative exponent; a score that is not finite.
    """
    weigh = REWEIGHT_METHODS.find(method)
    if weight_pow < 0:
        raise ValueError(f"algorithm.pf_ppo.weight_pow must not be negative, got {weight_pow}")
    weights = torch.zeros(scores.shape, dtype=torch.float64)
    chosen = scores[counted].double()
    if not len(chosen):
        return weights
    if not torch.isfinite(chosen).all():
        raise ValueError("policy filtration needs finite scores")
    raw = weigh(chosen, weight_pow).double()
    total = raw.sum()
    weights[counted] = raw / total if total > 0 else torch.full_like(raw, 1.0 / len(raw))
    return weights


def draw_rows(
    scores: Tensor, counted: Tensor, method: str, weight_pow: float = 2.0, *, generator: torch.Generator
) -> Tensor:
    """Draw the rows to train on instead of 0 ... B-1, with `filtration_weights`.

    Args:
        scores: `(B,)`.
        counted: `(B,)` bool.
        method: A key of `REWEIGHT_METHODS`.
        weight_pow: Exponent of `pow`.
        generator: The draw's own source of randomness.

    Returns:
        `(B,)` int64 row numbers, with repetitions. A batch in which no row counts stays as it is.
    """
    weights = filtration_weights(scores, counted, method, weight_pow)
    if not weights.any():
        return torch.arange(len(scores))
    return torch.multinomial(weights, len(scores), replacement=True, generator=generator)
