"""Losses of preference learning, of reward models and of supervised learning.

Pairwise losses take one number per response and give one loss per pair `(N,)`. The caller divides their sum by the
number of pairs in the whole mini-batch (`mean_over_pairs`), so that the split into micro-batches changes nothing.

In the formulas `c` and `r` stand for the chosen and the rejected response of a pair (`pair_margins`): the log-ratio of
policy to reference, or the plain log-prob where there is no reference. For losses with the trait `mean_log_prob`
log-probs are means over a response's tokens; for the others they are sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hrl.algos.masked import Metrics, check_shapes, keep
from hrl.algos.registry import (
    LABELLED_LOSS_TRAITS,
    PAIR_LOSS_TRAITS,
    LabelledLossTraits,
    PairLossTraits,
    Registry,
    Traits,
    pair_loss_traits,
)


@dataclass(frozen=True)
class PairOptions:
    """Constants of the pairwise losses.

    Attributes:
        beta: How strongly the policy is kept close to the reference; IPO's tau, SimPO's scale.
        label_smoothing: Probability that a pair's label is wrong (conservative DPO), in [0, 0.5).
        target_margin: SimPO's gamma, the lead that the chosen response should have.

    Raises:
        ValueError: A constant is out of its range.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    target_margin: float = 0.0

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta must be positive, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5), got {self.label_smoothing}")


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    return -(1.0 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def _sigmoid(chosen: Tensor, rejected: Tensor, options: PairOptions) -> Tensor:
    """`-log sigmoid(beta (c - r))` (DPO, arXiv:2305.18290 equation 7); smoothed labels give conservative DPO."""
    return _smoothed(options.beta * (chosen - rejected), options.label_smoothing)


def _ipo(chosen: Tensor, rejected: Tensor, options: PairOptions) -> Tensor:
    """`(c - r - 1 / (2 beta))^2` (IPO, arXiv:2310.12036 equation 17)."""
    return (chosen - rejected - 0.5 / options.beta).square()


def _hinge(chosen: Tensor, rejected: Tensor, options: PairOptions) -> Tensor:
    """`max(0, 1 - beta (c - r))` (SLiC-HF, arXiv:2305.10425, section 2.2, with the reference of DPO)."""
    return torch.relu(1.0 - options.beta * (chosen - rejected))


def _simpo(chosen: Tensor, rejected: Tensor, options: PairOptions) -> Tensor:
    """`-log sigmoid(beta (c - r) - gamma)` (SimPO, arXiv:2405.14734 equation 6)."""
    return _smoothed(options.beta * (chosen - rejected) - options.target_margin, options.label_smoothing)


def _log_odds(mean_log_prob: Tensor) -> Tensor:
    """`log p - log(1 - p)` of a response's mean token probability; capped where p rounds to 1."""
    below_zero = mean_log_prob.clamp(max=-torch.finfo(mean_log_prob.dtype).eps)
    return mean_log_prob - torch.log(-torch.expm1(below_zero))


def _orpo(chosen: Tensor, rejected: Tensor, options: PairOptions) -> Tensor:
    """`-c - beta log sigmoid(log odds(c) - log odds(r))` (ORPO, arXiv:2403.07691 equations 6 and 7)."""
    return -chosen + options.beta * _smoothed(_log_odds(chosen) - _log_odds(rejected), options.label_smoothing)


PairLoss = Callable[[Tensor, Tensor, PairOptions], Tensor]

PAIR_LOSSES: Registry[PairLoss, PairLossTraits] = Registry(
    "preference loss",
    {"sigmoid": _sigmoid, "ipo": _ipo, "hinge": _hinge, "simpo": _simpo, "orpo": _orpo},
    table=PAIR_LOSS_TRAITS,
    traits=PairLossTraits,
)
"""From `c` and `r` `(N,)` to a loss per pair `(N,)`. If a loss of your own has no reference, or takes means, say so:
`PAIR_LOSSES.register("mine", reference=False, mean_log_prob=True)`."""


def sequence_log_prob(log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return the log-prob of each whole response, the sum over its trained tokens. `(B, R) -> (B,)` float64.

    Losses read differences of these, which are small beside them: float32 would round a sum of -1,500 to 1e-4.
    """
    check_shapes(mask, log_prob=log_prob)
    return keep(log_prob, mask).double().sum(dim=-1)


def pair_margins(
    name: str,
    sums: Tensor,
    lengths: Tensor,
    chosen: Sequence[int] | Tensor,
    rejected: Sequence[int] | Tensor,
    reference: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `c` and `r` of pairs among B responses, `(N,)` each.

    Args:
        name: A key of `PAIR_LOSSES`. Its traits say whether it takes sums or means, and whether it has a reference.
        sums: Log-probs of the responses under the policy, summed over their trained tokens `(B,)`.
        lengths: Numbers of trained tokens `(B,)`.
        chosen: Index of the chosen response of every pair `(N,)`.
        rejected: Index of the rejected response of every pair `(N,)`.
        reference: As `sums`, under the reference; None for a reference that finds all responses equally likely. Not
            read for a loss without a reference.
    """
    traits = pair_loss_traits(name)
    if reference is not None and traits.reference:
        sums = sums - reference.to(sums.dtype)
    values = sums / lengths.clamp(min=1) if traits.mean_log_prob else sums
    return values[chosen], values[rejected]


def _per_pair(values: dict[str, Tensor]) -> Metrics:
    return {name: (value.detach().sum(), value.new_full((), len(value))) for name, value in values.items()}


def preference_loss(name: str, chosen: Tensor, rejected: Tensor, options: PairOptions) -> tuple[Tensor, Metrics]:
    """Return the loss of every pair.

    Args:
        name: A key of `PAIR_LOSSES`.
        chosen: `c` of every pair `(N,)`, as `pair_margins` gives it. Plain log-probs give a loss's reference-free
            variant.
        rejected: `r` of every pair `(N,)`.
        options: Constants.

    Returns:
        Losses `(N,)`, and metrics as (sum, count): `rewards/chosen`, `rewards/rejected`,
        `rewards/margins`, `rewards/accuracies`.

    Raises:
        ValueError: Unknown name; a constant that the loss does not read.
    """
    loss, traits = PAIR_LOSSES.find(name), pair_loss_traits(name)
    for constant in ("label_smoothing", "target_margin"):
        if getattr(options, constant) != 0 and not getattr(traits, constant):
            raise ValueError(f"preference loss {name!r} does not read {constant}; leave it at 0")
    losses = loss(chosen, rejected, options)
    return losses, _per_pair(
        {
            "rewards/chosen": options.beta * chosen,
            "rewards/rejected": options.beta * rejected,
            "rewards/margins": options.beta * (chosen - rejected),
            "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
        }
    )


# ---- single answers with a label -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelledOptions:
    """Constants of the losses of single answers.

    Attributes:
        beta: How strongly the policy is kept close to the reference.
        desirable_weight: Of the losses of good answers.
        undesirable_weight: Of the losses of bad answers.

    Raises:
        ValueError: A constant is out of its range.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


def _kto(lead: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """`1 - sigmoid(s beta (r - z))`, s being the label's sign (KTO, arXiv:2402.01306 equation 8)."""
    return 1.0 - torch.sigmoid(beta * (lead - baseline))


def _apo_zero(lead: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """`1 - sigmoid(beta lead)` (APO-zero, arXiv:2408.06266 section 3, of single answers as in TRL)."""
    return 1.0 - torch.sigmoid(beta * lead)


LABELLED_LOSSES: Registry[Callable[[Tensor, Tensor, float], Tensor], LabelledLossTraits] = Registry(
    "loss of labelled answers",
    {"kto": _kto, "apo_zero_unpaired": _apo_zero},
    table=LABELLED_LOSS_TRAITS,
    traits=LabelledLossTraits,
)
"""From log-ratio and baseline `(N,)`, the sign of both turned for a bad answer, and beta to losses `(N,)`."""


def kto_baseline(log_ratios: Tensor) -> float:
    """Return KTO's reference point z: how far the policy has moved from the reference, an estimate of their KL.

    It has no gradient, and is one number for the whole mini-batch, so that no cut of it changes a loss.

    Args:
        log_ratios: `log pi(y'|x) - log ref(y'|x)` of each prompt with the answer to another one `(N,)`.

    Returns:
        Their mean, at least 0 (arXiv:2402.01306, section 4.1).
    """
    return max(float(log_ratios.double().mean()), 0.0)


def labelled_loss(
    name: str, log_ratios: Tensor, is_desirable: Tensor, baseline: float, options: LabelledOptions
) -> tuple[Tensor, Metrics]:
    """Return the loss of every answer, with its weight.

    Args:
        name: A key of `LABELLED_LOSSES`.
        log_ratios: Log-ratio of policy to reference of each answer, summed over its trained tokens `(N,)`.
        is_desirable: Whether it is a good one `(N,)` bool.
        baseline: Of `kto_baseline`; not read by a loss without.
        options: Constants.

    Returns:
        Losses `(N,)`, and metrics as (sum, count): `rewards/chosen` of good answers and `rewards/rejected` of bad ones
        where there are any, and `rewards/accuracies`, whether an answer's log-ratio is on its label's side of the
        baseline.

    Raises:
        ValueError: Unknown name.
    """
    loss = LABELLED_LOSSES.find(name)
    good = is_desirable.to(log_ratios.dtype)
    bad, sign = 1.0 - good, 2.0 * good - 1.0
    weight = options.desirable_weight * good + options.undesirable_weight * bad
    losses = weight * loss(sign * log_ratios, sign * baseline, options.beta)
    point = baseline if LABELLED_LOSS_TRAITS[name].baseline else 0.0
    rewards, right = (options.beta * log_ratios).detach(), (sign * (log_ratios.detach() - point) > 0).to(losses.dtype)
    return losses, {
        "rewards/chosen": ((rewards * good).sum(), good.sum()),
        "rewards/rejected": ((rewards * bad).sum(), bad.sum()),
        "rewards/accuracies": (right.sum(), right.new_full((), len(right))),
    }


def _bradley_terry(lead: Tensor) -> Tensor:
    """`-log sigmoid(s_c - s_r)` (arXiv:2203.02155 equation 1; with a margin, arXiv:2307.09288 equation 2)."""
    return -logsigmoid(lead)


REWARD_MODEL_LOSSES: Registry[Callable[[Tensor], Tensor], Traits] = Registry(
    "reward model loss", {"bradley_terry": _bradley_terry}
)
"""From the chosen score less the rejected score (less a margin), `(N,)`, to a loss per pair `(N,)`."""


def reward_model_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    target_margin: Tensor | None = None,
    *,
    name: str = "bradley_terry",
) -> tuple[Tensor, Metrics]:
    """Return a reward model's loss for every pair.

    Args:
        chosen_scores: Scores of the chosen responses `(N,)`.
        rejected_scores: Scores of the rejected responses `(N,)`.
        target_margin: Lead that each chosen response should have `(N,)`; None is 0.
        name: A key of `REWARD_MODEL_LOSSES`.

    Returns:
        Losses `(N,)`, and metrics as (sum, count): `rewards/accuracies`, `rewards/margins`.

    Raises:
        ValueError: Unknown name.
    """
    loss = REWARD_MODEL_LOSSES.find(name)
    lead = chosen_scores - rejected_scores
    losses = loss(lead if target_margin is None else lead - target_margin)
    return losses, _per_pair({"rewards/accuracies": (lead > 0).to(lead.dtype), "rewards/margins": lead})


def _nll(log_prob: Tensor) -> Tensor:
    """`-log p`, the negative log-likelihood: cross entropy with the data."""
    return -log_prob


SFT_LOSSES: Registry[Callable[[Tensor], Tensor], Traits] = Registry("supervised loss", {"nll": _nll})
"""From log-probs of the data's tokens to a loss per token, same shape."""


def sft_loss(log_prob: Tensor, mask: Tensor, *, name: str = "nll") -> Tensor:
    """Return the loss per token of supervised learning, for `hrl.algos.aggregation.aggregate`.

    Args:
        log_prob: Log-probs of the data's tokens `(B, R)`; has the gradient.
        mask: `(B, R)`, 1 on trained tokens.
        name: A key of `SFT_LOSSES`.

    Returns:
        `(B, R)`, 0 outside the mask.

    Raises:
        ValueError: Unknown name; shapes that differ.
    """
    loss = SFT_LOSSES.find(name)
    check_shapes(mask, log_prob=log_prob)
    return keep(loss(keep(log_prob, mask)), mask)


def mean_over_pairs(losses: Tensor, num_pairs: int) -> Tensor:
    """Return this piece's share of the mini-batch's loss; `num_pairs` counts the pairs of all pieces on all ranks."""
    return losses.sum() / max(num_pairs, 1)
