"""Correct for a sampler whose probabilities differ from the trainer's.

The same weights give different log-probs in an inference engine and in a trainer, because of different kernels and
precision or of older weights. Everything here starts from `log_ratio = log p_trainer - log p_sampler` of the sampled
tokens, `(B, R)`, and runs once over the whole batch:

* *weights* (truncated importance sampling, IcePop) multiply the loss of a token;
* *rejection* takes tokens or whole sequences out of the response mask;
* *metrics* say how large the mismatch is and how much of the batch is left. They are (sum, count) pairs, so that they
  are the same for every cut of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hrl.algos.masked import MAX_LOG_RATIO, Metrics, check_shapes, keep, rows_with_tokens, sum_and_count
from hrl.algos.ratio_bounds import REJECTION_RULES, Divergence, Interval, parse_rejections, rejection_bounds
from hrl.algos.registry import IMPORTANCE_LEVEL_NAMES, Registry, Traits


class CorrectionSettings(Protocol):
    """The settings of `algorithm.rollout_correction`."""

    @property
    def rollout_is(self) -> str | None:
        """A key of `IMPORTANCE_LEVELS`; None for no weights."""

    @property
    def rollout_is_threshold(self) -> float | str:
        """Accepted ratios, as `Interval.parse` takes them."""

    @property
    def rollout_is_batch_normalize(self) -> bool:
        """Whether weights are divided by their mean."""

    @property
    def rollout_rs(self) -> str | None:
        """Rejection rules, as `parse_rejections` takes them; None for none."""

    @property
    def rollout_rs_threshold(self) -> float | str | None:
        """Their thresholds."""

    @property
    def loss_type(self) -> str:
        """The loss in bypass mode, one of `hrl.algos.bypass.LOSS_TYPES`."""


def _clamped(log_ratio: Tensor, mask: Tensor) -> Tensor:
    check_shapes(mask, log_ratio=log_ratio)
    return keep(log_ratio.detach(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _token_ratio(log_ratio: Tensor) -> Tensor:
    """Return `p_trainer / p_sampler` of each token."""
    return log_ratio.exp()


def _sequence_ratio(log_ratio: Tensor) -> Tensor:
    """Return the product of the row's token ratios, at each of its tokens."""
    whole = log_ratio.sum(dim=-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return whole.exp().expand(log_ratio.shape)


def _mean_over_tokens(weights: Tensor, mask: Tensor) -> Tensor:
    return weights[mask.bool()].mean()


def _mean_over_sequences(weights: Tensor, mask: Tensor) -> Tensor:
    return weights.amax(dim=-1)[rows_with_tokens(mask)].mean()


ImportanceLevel = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]

IMPORTANCE_LEVELS: Registry[ImportanceLevel, Traits] = Registry(
    "level of importance weights",
    {
        "token": (_token_ratio, _mean_over_tokens),
        "sequence": (_sequence_ratio, _mean_over_sequences),
    },
    table=IMPORTANCE_LEVEL_NAMES,
)
"""What a ratio belongs to, a token or a sequence. The first function makes ratios `(B, R)` of log-ratios `(B, R)`,
which are 0 outside the mask; the second makes the mean over tokens or sequences of weights `(B, R)` and the mask."""


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    level: str,
    accepted: Interval,
    *,
    normalise: bool = False,
) -> Tensor:
    """Return weights `p_trainer / p_sampler` for the loss of each token.

    With only an upper bound `w = min(ratio, upper)` (truncated importance sampling, Ionides 2008, "Truncated
    Importance Sampling", equation 1; between sampler and trainer: Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training"). With both bounds `w = ratio` inside and 0 outside (IcePop, "Every
    Step Evolves", arXiv:2510.18855).

    Args:
        log_ratio: `(B, R)`.
        mask: Response mask `(B, R)`.
        level: A key of `IMPORTANCE_LEVELS`. `token`: each token's own ratio. `sequence`: the product over the
            row at each of its tokens.
        accepted: Bounds of the ratio.
        normalise: Divide by the mean weight (over tokens, or over sequences), so that the batch keeps its size.

    Returns:
        `(B, R)`, 0 outside the mask, without gradient.

    Raises:
        ValueError: Unknown level.
    """
    ratio_of, mean_of = IMPORTANCE_LEVELS.find(level)
    ratios = ratio_of(_clamped(log_ratio, mask))
    if accepted.lower is None:
        weights = ratios.clamp(max=accepted.upper)
    else:
        weights = torch.where((ratios >= accepted.lower) & (ratios <= accepted.upper), ratios, 0.0)
    weights = keep(weights, mask)
    if not normalise or not weights.any():
        return weights
    return weights / mean_of(weights, mask)


def _divergence(log_ratio: Tensor, kind: Divergence) -> Tensor:
    """Estimate KL(sampler || trainer) at tokens drawn from the sampler."""
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return log_ratio.exp() - 1.0 - log_ratio


def rejection_mask(log_ratio: Tensor, mask: Tensor, rule: str, threshold: str | float) -> Tensor:
    """Return the response mask without the tokens or sequences that sampler and trainer disagree on.

    Args:
        log_ratio: `(B, R)`.
        mask: Response mask `(B, R)`.
        rule: A key of `REJECTION_RULES`: where the divergence is measured (at each token; or as sum, mean or maximum
            over the row, which is then kept or rejected as a whole), and by which estimate.
        threshold: As `hrl.algos.ratio_bounds.rejection_bounds` takes it.

    Returns:
        `(B, R)` in the mask's dtype.

    Raises:
        ValueError: Unknown rule, or a threshold that does not fit it.
    """
    bounds = rejection_bounds(rule, threshold)
    scope, kind = REJECTION_RULES[rule]
    statistic = keep(_divergence(_clamped(log_ratio, mask), kind), mask)
    if scope == "seq_sum":
        statistic = statistic.sum(dim=-1, keepdim=True)
    elif scope == "seq_mean":
        statistic = statistic.sum(dim=-1, keepdim=True) / mask.bool().sum(dim=-1, keepdim=True).clamp(min=1)
    elif scope == "seq_max":
        statistic = statistic.amax(dim=-1, keepdim=True)
    if bounds.lower is not None:
        accepted = (statistic >= math.log(bounds.lower)) & (statistic <= math.log(bounds.upper))
    else:
        accepted = statistic <= bounds.upper
    return (mask.bool() & accepted).to(mask.dtype)


def correct(log_ratio: Tensor, mask: Tensor, settings: CorrectionSettings) -> tuple[Tensor | None, Tensor, Metrics]:
    """Compute weights and rejections as configured in `algorithm.rollout_correction`.

    Args:
        log_ratio: `(B, R)`.
        mask: Response mask `(B, R)`.
        settings: `algorithm.rollout_correction`.

    Returns:
        Weights `(B, R)` or None; the mask without rejected tokens; and metrics under `rollout_corr/`. With weights:
        `rollout_is_mean` and `rollout_is_mean_square` (`effective_share` computes the effective sample size from
        these), and `rollout_is_ratio_fraction_high` and `_low`, the tokens whose ratio is out of bounds. With
        rejection: `rollout_rs_masked_fraction` of the tokens and `rollout_rs_seq_masked_fraction`, the sequences that
        lost tokens; where there are several rules, also for each.
    """
    weights: Tensor | None = None
    metrics: Metrics = {}
    if settings.rollout_is is not None:
        accepted = Interval.parse(settings.rollout_is_threshold)
        normalise = settings.rollout_is_batch_normalize
        weights = importance_weights(log_ratio, mask, settings.rollout_is, accepted, normalise=normalise)
        ratios = IMPORTANCE_LEVELS[settings.rollout_is][0](_clamped(log_ratio, mask))
        low = 1.0 / accepted.upper if accepted.lower is None else accepted.lower
        metrics |= {
            "rollout_corr/rollout_is_mean": sum_and_count(weights, mask),
            "rollout_corr/rollout_is_mean_square": sum_and_count(weights.square(), mask),
            "rollout_corr/rollout_is_ratio_fraction_high": _share(ratios > accepted.upper, mask),
            "rollout_corr/rollout_is_ratio_fraction_low": _share(ratios < low, mask),
        }
    kept = mask
    rules = parse_rejections(settings.rollout_rs, settings.rollout_rs_threshold)
    for rule, threshold in rules:
        kept_by_rule = rejection_mask(log_ratio, mask, rule, threshold)
        kept = kept * kept_by_rule
        if len(rules) > 1:
            metrics |= _rejected(f"rollout_corr/rollout_rs_{rule}_", kept_by_rule, mask)
    if rules:
        metrics |= _rejected("rollout_corr/rollout_rs_", kept, mask)
    return weights, kept, metrics


def _share(chosen: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return sum_and_count(chosen.double(), mask)


def _rejected(prefix: str, kept: Tensor, mask: Tensor) -> Metrics:
    gone = mask.bool() & ~kept.bool()
    rows = rows_with_tokens(mask)
    return {
        f"{prefix}masked_fraction": _share(gone, mask),
        f"{prefix}seq_masked_fraction": (gone.any(dim=-1).sum().double(), rows.sum()),
    }


def effective_share(mean: float, mean_square: float) -> float:
    """Return the effective share of a batch, `(sum w)^2 / (n sum w^2)`, from its weights' mean and mean square.

    0 if all weights are 0.
    """
    return mean**2 / mean_square if mean_square > 0 else 0.0


def mismatch(trainer_log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor) -> Metrics:
    """Return how far the trainer's log-probs are from the sampler's, over the trained tokens.

    Returns:
        Under `rollout_corr/`, means over tokens: `kl` and `k3_kl`, two estimates of KL(sampler || trainer); `ratio` of
        trainer to sampler; `chi2_token`, the chi-squared divergence, which is the mean squared ratio less 1, so that
        `effective_share(ratio, chi2_token + 1)` is the effective share of the uncorrected batch. Means over
        sequences: `training_ppl` and `rollout_ppl` (perplexity, `exp` of minus the mean log-prob), the ratio of the
        two `ppl_ratio`, its logarithm `log_ppl_diff` and the magnitude of that, `log_ppl_abs_diff`.
    """
    check_shapes(mask, trainer_log_prob=trainer_log_prob, sampler_log_prob=sampler_log_prob)
    trainer, sampler = (keep(column.detach(), mask).double() for column in (trainer_log_prob, sampler_log_prob))
    clamped = (trainer - sampler).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = clamped.exp()
    of_tokens = {
        "rollout_corr/kl": -clamped,
        "rollout_corr/k3_kl": ratio - 1.0 - clamped,
        "rollout_corr/ratio": ratio,
        "rollout_corr/chi2_token": ratio.square() - 1.0,
    }
    rows = rows_with_tokens(mask)
    # Rows without a token are set to 0 at the end: selecting the others would make the host wait for a GPU.
    tokens = mask.bool().sum(dim=-1).clamp(min=1)
    trainer_mean, sampler_mean = (column.sum(dim=-1) / tokens for column in (trainer, sampler))
    difference = (sampler_mean - trainer_mean).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    of_sequences = {
        "rollout_corr/training_ppl": (-trainer_mean).clamp(max=MAX_LOG_RATIO).exp(),
        "rollout_corr/rollout_ppl": (-sampler_mean).clamp(max=MAX_LOG_RATIO).exp(),
        "rollout_corr/ppl_ratio": difference.exp(),
        "rollout_corr/log_ppl_diff": difference,
        "rollout_corr/log_ppl_abs_diff": difference.abs(),
    }
    return {name: sum_and_count(value, mask) for name, value in of_tokens.items()} | {
        name: (torch.where(rows, value, 0.0).sum(), rows.sum()) for name, value in of_sequences.items()
    }
