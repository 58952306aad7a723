"""Policy losses: one pure function each, from log-probs and advantages to a loss per token.

A loss is a function `(PolicyLossInput, config) -> PolicyLossOutput`, registered under the name that
`actor.policy_loss.loss_mode` takes. It returns the loss of every token. `hrl.algos.aggregation` reduces these to one
number, so every loss works with every aggregation and every split into micro-batches. Metrics are (sum, count) pairs.

In the formulas `p` is the new probability of a token, `r` its ratio to the old one and `A` the token's advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hrl.algos.masked import MAX_LOG_RATIO, Metrics, broadcast_rows, check_shapes, keep, sum_and_count
from hrl.algos.registry import POLICY_LOSS_TRAITS, PolicyLossTraits, Registry


@dataclass(frozen=True)
class PolicyLossInput:
    """Columns of one micro-batch, all `(B, R)`.

    Attributes:
        log_prob: Log-probs of the sampled tokens under the policy in training; has the gradient.
        old_log_prob: The same under the policy the batch was sampled from.
        advantages: Advantage of each token.
        response_mask: 1 on trained tokens. Elsewhere the other columns are ignored, NaN included; a loss sees 0 there.
        rollout_is_weights: Weight of each token's loss, which corrects for the sampler.
        selected_tokens: For the losses in `hrl.algos.token_selection.TOKEN_SELECTORS`: the tokens they treat
            differently, chosen over the whole batch before it was cut.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    rollout_is_weights: Tensor | None = None
    selected_tokens: Tensor | None = None

    def trained(self) -> PolicyLossInput:
        """Return the same columns with 0 at every token that is not trained.

        Raises:
            ValueError: Shapes differ; names the column.
        """
        mask, weights, selected = self.response_mask, self.rollout_is_weights, self.selected_tokens
        columns = {name: getattr(self, name) for name in ("log_prob", "old_log_prob", "advantages")}
        check_shapes(mask, **columns, rollout_is_weights=weights, selected_tokens=selected)
        return replace(
            self,
            **{name: keep(column, mask) for name, column in columns.items()},
            rollout_is_weights=None if weights is None else keep(weights, mask),
            selected_tokens=None if selected is None else selected.bool() & mask.bool(),
        )

    def log_ratio(self) -> Tensor:
        """Return the log of new over old probability, `(B, R)`."""
        return self.log_prob - self.old_log_prob

    def ratio(self) -> Tensor:
        """Return new over old probability, `(B, R)`, within e^±20."""
        return self.log_ratio().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True)
class PolicyLossOutput:
    """A loss per token `(B, R)`, 0 outside the mask, and metrics as (sum, count) over trained tokens.

    Metrics have their full names, `actor/...`. A registered loss may also give a number per token `(B, R)`, of which
    `policy_loss` takes sum and count.
    """

    loss_mat: Tensor
    metrics: Metrics


class PolicyLossConstants(Protocol):
    """The settings of `actor.policy_loss` that some losses read."""

    @property
    def clip_cov_ratio(self) -> float:
        """`clip_cov`: share of the tokens that are clipped."""

    @property
    def clip_cov_lb(self) -> float:
        """`clip_cov`: lower bound of the covariance of a clipped token."""

    @property
    def clip_cov_ub(self) -> float:
        """`clip_cov`: upper bound of the covariance of a clipped token."""

    @property
    def kl_cov_ratio(self) -> float:
        """`kl_cov`: share of the tokens that are penalised."""

    @property
    def ppo_kl_coef(self) -> float:
        """`kl_cov`: weight of the penalty."""

    @property
    def dro_beta(self) -> float | None:
        """`dro`: weight of the squared log-ratio."""


class PolicyLossSettings(Protocol):
    """The settings of the section `actor` that losses read."""

    @property
    def clip_ratio(self) -> float:
        """PPO's clip range."""

    @property
    def clip_ratio_low(self) -> float | None:
        """Clip range below 1; None is `clip_ratio`."""

    @property
    def clip_ratio_high(self) -> float | None:
        """Clip range above 1; None is `clip_ratio`."""

    @property
    def clip_ratio_c(self) -> float:
        """Dual clip: largest ratio for negative advantages. DPPO: largest weight of a token."""

    @property
    def tau_pos(self) -> float:
        """`sapo`: temperature of the gate for positive advantages."""

    @property
    def tau_neg(self) -> float:
        """`sapo`: temperature of the gate for other advantages."""

    @property
    def policy_loss(self) -> PolicyLossConstants:
        """The constants of the less common losses."""


PolicyLoss = Callable[[PolicyLossInput, PolicyLossSettings], PolicyLossOutput]

POLICY_LOSSES: Registry[PolicyLoss, PolicyLossTraits] = Registry(
    "policy loss", table=POLICY_LOSS_TRAITS, traits=PolicyLossTraits
)


def register_policy_loss(name: str, **traits: object) -> Callable[[PolicyLoss], PolicyLoss]:
    """Register a policy loss under the name that `actor.policy_loss.loss_mode` takes.

    Args:
        name: Name of the loss.
        traits: Fields of `hrl.algos.registry.PolicyLossTraits`, e.g. `zero_at_zero_advantage=True`.

    Raises:
        TypeError: There is no such trait.
        ValueError: The name is taken by another function.
    """
    return POLICY_LOSSES.register(name, **traits)


def policy_loss(name: str, inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """Check the columns, clear them outside the mask and run the loss of that name.

    Args:
        name: A key of `POLICY_LOSSES`.
        inp: One micro-batch.
        config: The `actor` part of the configuration.

    Returns:
        The loss per token, and the loss's own metrics with `actor/ppo_kl`, the sum of old minus new log-probs: k1's
        estimate of KL(old || new), which means the same for every loss and may be negative.

    Raises:
        ValueError: Unknown name; a column, or what the loss returned, has another shape than the response mask; a
            setting is out of its range.
    """
    loss = POLICY_LOSSES.find(name)
    trained = inp.trained()
    output = loss(trained, config)
    check_shapes(inp.response_mask, loss_mat=output.loss_mat)
    drift = {"actor/ppo_kl": sum_and_count(-trained.log_ratio(), inp.response_mask)}
    metrics = {name: _counted(name, value, inp.response_mask) for name, value in output.metrics.items()}
    return PolicyLossOutput(keep(output.loss_mat, inp.response_mask), metrics | drift)


def _counted(name: str, value: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (sum, count) of a metric that a loss gives as such, or as a number per token."""
    if not isinstance(value, Tensor):
        return value
    check_shapes(mask, **{name: value})
    return sum_and_count(value.to(torch.float32), mask)


def clip_bounds(config: PolicyLossSettings) -> tuple[float, float]:
    """Return the lower and the upper clip range; `clip_ratio` for one that is not set."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return config.clip_ratio if low is None else low, config.clip_ratio if high is None else high


def _surrogates(inp: PolicyLossInput, ratio: Tensor, config: PolicyLossSettings) -> tuple[Tensor, Tensor]:
    """Return `-A r` and `-A clip(r, 1 - low, 1 + high)`, `(B, R)` each."""
    low, high = clip_bounds(config)
    return -inp.advantages * ratio, -inp.advantages * ratio.clamp(1.0 - low, 1.0 + high)


def _output(inp: PolicyLossInput, loss_mat: Tensor, per_token: dict[str, Tensor] | None = None) -> PolicyLossOutput:
    if inp.rollout_is_weights is not None:
        loss_mat = loss_mat * inp.rollout_is_weights
    metrics = {
        name: sum_and_count(value.to(loss_mat.dtype), inp.response_mask) for name, value in (per_token or {}).items()
    }
    return PolicyLossOutput(loss_mat, metrics)


@register_policy_loss("vanilla")
def vanilla(inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """`max(-A r, -A clip(r, 1 - low, 1 + high))`, and for `A < 0` at most `-A c`, with `c = clip_ratio_c`.

    PPO's clipped surrogate, arXiv:1707.06347 equation 7. Unequal bounds are DAPO's clip-higher, arXiv:2503.14476
    equation 10; the second clip is dual clip, arXiv:1912.09729.

    Raises:
        ValueError: `clip_ratio_c` is not above 1.
    """
    ceiling = config.clip_ratio_c
    if ceiling <= 1.0:
        raise ValueError(f"actor.clip_ratio_c must be above 1, got {ceiling}")
    plain, clipped = _surrogates(inp, inp.ratio(), config)
    surrogate = torch.maximum(plain, clipped)
    worst = -inp.advantages * ceiling
    negative = inp.advantages < 0
    return _output(
        inp,
        torch.where(negative, torch.minimum(surrogate, worst), surrogate),
        {"actor/pg_clipfrac": clipped > plain, "actor/pg_clipfrac_lower": negative & (surrogate > worst)},
    )


@register_policy_loss("gspo")
def gspo(inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """`max(-A s, -A clip(s, 1 - low, 1 + high))`, `s` the geometric mean of the sequence's ratios.

    GSPO, arXiv:2507.18071 equations 5 and 7, in the form GSPO-token (section 4.3): the value of the ratio is the
    sequence's, its gradient goes through each token's own log-prob.
    """
    log_ratio = inp.log_ratio()
    tokens = inp.response_mask.bool().sum(dim=-1).clamp(min=1)
    of_sequence = (log_ratio.detach().sum(dim=-1) / tokens).unsqueeze(-1)
    own = inp.log_prob - inp.log_prob.detach()
    plain, clipped = _surrogates(inp, (of_sequence.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + own).exp(), config)
    return _output(inp, torch.maximum(plain, clipped), {"actor/pg_clipfrac": clipped > plain})


@register_policy_loss("cispo")
def cispo(inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """`-sg(clip(r, 1 - low, 1 + high)) A log p` (CISPO, arXiv:2506.13585 section 3.1).

    `sg` stops the gradient. The clip limits a token's weight, so no token loses its gradient.
    """
    low, high = clip_bounds(config)
    ratio = inp.ratio().detach()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    loss_mat = -weight * inp.advantages * inp.log_prob
    return _output(inp, loss_mat, {"actor/pg_clipfrac": weight != ratio})


@register_policy_loss("gpg")
def gpg(inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """`-A log p`, the plain policy gradient (GPG, arXiv:2504.02546: the objective that equation 8 scales)."""
    return _output(inp, -inp.advantages * inp.log_prob)


@register_policy_loss("sapo")
def sapo(inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """`-A (4 / tau) sigmoid(tau (r - 1))`, a soft gate instead of a clip (SAPO, arXiv:2511.20347 equation 6).

    `tau` is `tau_pos` for positive advantages and `tau_neg` for the others.
    """
    tau = torch.full_like(inp.advantages, config.tau_neg).masked_fill(inp.advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (inp.ratio() - 1.0)) * 4.0 / tau
    return _output(inp, -inp.advantages * gate)


@register_policy_loss("geo_mean")
def geo_mean(inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """`-A (prod_t clipped r_t)^(1 / |y|)`, the geometric mean of a sequence's ratios.

    GMPO, arXiv:2507.20673 equation 4 in the form of its Algorithm 1. Log-ratios are clipped to `[-low, high]`, on the
    side that the advantage pulls to. Every token gets the loss of its sequence, so `seq-mean-token-mean` is the paper's
    mean over sequences. Correction weights enter as their geometric mean too.
    """
    low, high = clip_bounds(config)
    log_ratio, mask = inp.log_ratio(), inp.response_mask
    sign = inp.advantages.sign()
    clipped = log_ratio.clamp(-low, high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    tokens = mask.bool().sum(dim=-1).clamp(min=1)
    ratio = (pessimistic.sum(dim=-1) / tokens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    row_loss = -inp.advantages.sum(dim=-1) / tokens * ratio
    if inp.rollout_is_weights is not None:
        row_loss = row_loss * (keep(inp.rollout_is_weights.log(), mask).sum(dim=-1) / tokens).exp()
    outside = log_ratio != clipped
    return _output(
        replace(inp, rollout_is_weights=None),  # they are in the row's loss
        broadcast_rows(row_loss, mask, row_loss.dtype),
        {
            "actor/pg_clipfrac": outside & (inp.advantages > 0),
            "actor/pg_clipfrac_lower": outside & (inp.advantages < 0),
        },
    )


def _trust_region(inp: PolicyLossInput, config: PolicyLossSettings, inside: Tensor) -> PolicyLossOutput:
    ceiling = config.clip_ratio_c
    ratio = inp.ratio().detach()
    loss_mat = -inp.advantages * ratio.clamp(max=ceiling) * inp.log_prob * inside
    return _output(inp, loss_mat, {"actor/pg_clipfrac": ~inside, "actor/pg_clipfrac_lower": inside & (ratio > ceiling)})


@register_policy_loss("dppo_tv")
def dppo_tv(inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """`-sg(min(r, c)) A log p` where `|p - p_old|` is within bounds, else 0.

    DPPO, arXiv:2602.04879, with its binary total variation, equation 13; `min(r, c)` is from section 5.4. A token is
    dropped only if it has already moved too far in the direction of its advantage: `p - p_old > high` for `A > 0`,
    `p_old - p > low` otherwise. `c` is `clip_ratio_c`.
    """
    low, high = clip_bounds(config)
    moved = inp.log_prob.detach().exp() - inp.old_log_prob.exp()
    inside = torch.where(inp.advantages > 0, moved <= high, moved >= -low)
    return _trust_region(inp, config, inside)


@register_policy_loss("dppo_kl")
def dppo_kl(inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """As `dppo_tv`, with `KL(p_old || p)` of "this token or any other" as the distance.

    DPPO, arXiv:2602.04879, with its binary KL divergence, equation 14.
    """
    low, high = clip_bounds(config)
    log_prob, old_log_prob = inp.log_prob.detach(), inp.old_log_prob
    new, old = log_prob.exp(), old_log_prob.exp()
    epsilon = 1e-8
    others = (1.0 - old) * torch.log((1.0 - old + epsilon) / (1.0 - new + epsilon))
    divergence = old * (old_log_prob - log_prob) + others
    rising = (divergence <= high) | (new <= old)
    falling = (divergence <= low) | (new >= old)
    return _trust_region(inp, config, torch.where(inp.advantages > 0, rising, falling))


@register_policy_loss("dro")
def dro(inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """`-(A log p - beta / 2 (log r)^2)`, `beta = policy_loss.dro_beta`.

    arXiv:2405.19107: the gradient of the policy in "DRO-V", divided by its regularisation `tau` (here `beta`) and taken
    per token. The old policy stands for the reference, and `A` for the reward less its value.
    """
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(f"actor.policy_loss.dro_beta must be a positive number, got {beta}")
    log_ratio = inp.log_ratio()
    loss_mat = -(inp.advantages * inp.log_prob - 0.5 * beta * log_ratio.square())
    return _output(inp, loss_mat)


def _selected(inp: PolicyLossInput) -> Tensor:
    if inp.selected_tokens is None:
        raise ValueError(
            "this policy loss treats some tokens differently, which are chosen over the whole batch: choose them with "
            "hrl.algos.token_selection.select_tokens before the batch is cut, and pass them as selected_tokens"
        )
    return inp.selected_tokens.bool()


@register_policy_loss("clip_cov")
def clip_cov(inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """`max(-A r, -A clip(r, 1 - low, 1 + high))`, but 0 at a few tokens of high covariance.

    Clip-Cov, arXiv:2505.22617 section 4. These tokens are drawn over the whole batch, see `hrl.algos.token_selection`.
    """
    plain, clipped = _surrogates(inp, inp.ratio(), config)
    dropped = _selected(inp) & (clipped <= plain)
    surrogate = torch.maximum(plain, clipped).masked_fill(dropped, 0.0)
    return _output(inp, surrogate, {"actor/pg_clipfrac": dropped})


@register_policy_loss("kl_cov")
def kl_cov(inp: PolicyLossInput, config: PolicyLossSettings) -> PolicyLossOutput:
    """`-A r`, plus `ppo_kl_coef |log r|` on the tokens of highest covariance (KL-Cov, arXiv:2505.22617 section 4).

    These tokens are chosen over the whole batch, see `hrl.algos.token_selection`.
    """
    log_ratio = inp.log_ratio()
    penalty = config.policy_loss.ppo_kl_coef * log_ratio.abs() * _selected(inp)
    return _output(inp, -inp.advantages * inp.ratio() + penalty)
