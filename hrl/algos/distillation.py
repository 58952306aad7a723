"""Divergences of a policy from a teacher at each token, by which it learns the teacher's distribution.

The policy `s` (the student) samples, and the teacher `t` scores the same tokens, so that states are those that the
policy meets (on-policy distillation: Agarwal et al. 2023, arXiv:2306.13649; Gu et al. 2023, arXiv:2306.08543). The
divergence at a token is between the two distributions of that token.

=============== =================================================== ================================================
name            value                                               gradient of the value
=============== =================================================== ================================================
reverse_kl_topk `KL(s || t) = sum_v s(v) log(s(v) / t(v))`, where   that of a lower bound of `KL(s || t)`, no noise of
                all but the teacher's k most likely tokens are one  sampling
forward_kl_topk `sum_top t(v) log(t(v) / s(v))`, at least 0         that of `KL(t || s)` without the teacher's tail
reverse_kl      `KL(s || t)` over all tokens                        its own
forward_kl      `KL(t || s)` over all tokens                        its own
k1, k2, k3, …   estimates from the sampled token alone              see `hrl.algos.kl`: of k2, that of `KL(s || t)`
                                                                    on average
=============== =================================================== ================================================

`reverse_kl_topk` is 0 only where the policy gives each of the k tokens the teacher's probability. By the data
processing inequality it is never more than `KL(s || t)`, and grows with k until it is that. The two over all tokens
are here as arithmetic on the log-probs of every token; ranks make them tile by tile (`hrl.models.ops.divergence`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hrl.algos.kl import KL_ESTIMATORS, kl_penalty
from hrl.algos.masked import check_shapes, keep
from hrl.algos.registry import DISTILLATION_TRAITS, DistillationTraits, Registry


def _log_rest(log_probs: Tensor) -> Tensor:
    """Return the log of what `(N, K)` log-probs leave of 1, `(N,)`; of the smallest step below 1 where it is less."""
    mass = torch.logsumexp(log_probs, dim=-1)
    return torch.log(-torch.expm1(mass.clamp(max=-torch.finfo(mass.dtype).eps)))


def _reverse_kl_topk(student: Tensor, teacher: Tensor) -> Tensor:
    """`sum_top s log(s / t) + s_rest log(s_rest / t_rest)` (arXiv:2306.08543 equation 1, coarsened)."""
    rest, rest_of_teacher = _log_rest(student), _log_rest(teacher)
    return (student.exp() * (student - teacher)).sum(-1) + rest.exp() * (rest - rest_of_teacher)


def _forward_kl_topk(student: Tensor, teacher: Tensor) -> Tensor:
    """`max(0, sum_top t log(t / s))` (arXiv:2306.13649, section 2, over the top alone, as verl has it).

    Without the rest the sum can be negative.
    """
    return (teacher.exp() * (teacher - student)).sum(-1).clamp(min=0.0)


def _kl(mean_over: Tensor, other: Tensor) -> Tensor:
    """`sum_v q log(q / p)` over the last dimension, `q` being what the mean is over."""
    return (mean_over.exp() * (mean_over - other)).sum(-1)


def _reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """`KL(s || t)` (arXiv:2306.08543 equation 1)."""
    return _kl(student, teacher)


def _forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """`KL(t || s)` (arXiv:2306.13649, section 2)."""
    return _kl(teacher, student)


Divergence = Callable[[Tensor, Tensor], Tensor]


def _sampled(name: str) -> Divergence:
    """Return an estimator of `hrl.algos.kl` as a divergence from the teacher, `d = log s - log t`."""

    def estimate(student: Tensor, teacher: Tensor) -> Tensor:
        return kl_penalty(student, teacher, name)

    estimate.__doc__ = KL_ESTIMATORS[name].__doc__
    return estimate


DISTILLATION_LOSSES: Registry[Divergence, DistillationTraits] = Registry(
    "distillation loss",
    {
        **{name: _sampled(name) for name, traits in DISTILLATION_TRAITS.items() if traits.is_sampled},
        "reverse_kl_topk": _reverse_kl_topk,
        "forward_kl_topk": _forward_kl_topk,
        "reverse_kl": _reverse_kl,
        "forward_kl": _forward_kl,
    },
    table=DISTILLATION_TRAITS,
    traits=DistillationTraits,
)


def clamped(divergence: Tensor, limit: float | None) -> Tensor:
    """Return divergences no further from 0 than `limit`; estimates such as k1's can be negative."""
    return divergence if limit is None else divergence.clamp(-limit, limit)


def distillation_loss(
    name: str, student: Tensor, teacher: Tensor, *, limit: float | None = None, floor: float | None = None
) -> Tensor:
    """Return the divergence at each token.

    Args:
        name: A key of `DISTILLATION_LOSSES`.
        student: Log-probs under the policy: of the sampled tokens, any shape; or `(N, K)`, of the tokens that the loss
            reads. They have the gradient.
        teacher: The same under the teacher.
        limit: Of a divergence, see `clamped`.
        floor: What lower log-probs of the tokens that the loss reads are raised to, as in verl; sampled tokens keep
            theirs.

    Returns:
        One number per token: of that shape, or `(N,)`.

    Raises:
        ValueError: Unknown name; shapes that differ.
    """
    if student.shape != teacher.shape:
        raise ValueError(f"student has shape {tuple(student.shape)}, teacher has {tuple(teacher.shape)}")
    found = DISTILLATION_LOSSES.find(name)
    if floor is not None and DISTILLATION_TRAITS[name].reads_top:
        student, teacher = student.clamp(min=floor), teacher.clamp(min=floor)
    return clamped(found(student, teacher), limit)


def sampled_divergence(
    name: str, student: Tensor, teacher: Tensor, mask: Tensor, *, limit: float | None = None
) -> Tensor:
    """Return an estimate of the divergence at each sampled token, `(B, R)`, 0 outside the mask.

    Args:
        name: A key of `DISTILLATION_LOSSES` that reads sampled tokens alone.
        student: Log-probs of the sampled tokens under the policy `(B, R)`.
        teacher: The same under the teacher `(B, R)`.
        mask: Response mask `(B, R)`.
        limit: Of a divergence, see `clamped`.

    Raises:
        ValueError: Unknown name, or it reads more; shapes that differ.
    """
    if name in DISTILLATION_LOSSES and not DISTILLATION_TRAITS[name].is_sampled:
        raise ValueError(f"distillation loss {name!r} reads more of the teacher than log-probs of the sampled tokens")
    check_shapes(mask, student=student, teacher=teacher)
    return keep(distillation_loss(name, keep(student, mask), keep(teacher, mask), limit=limit), mask)


def with_teacher_advantages(
    advantages: Tensor | None,
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    name: str,
    weight: float,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Subtract the divergence from every token's advantage, so that a policy gradient lowers it.

    With k1 the expected gradient is that of the reverse KL at each token, its effect on later tokens left out, as if
    each token's reward were `log t - log s` with a discount of 0.

    Args:
        advantages: Of the rewards `(B, R)`; None learns from the teacher alone.
        student: Log-probs of the sampled tokens under the policy that sampled `(B, R)`.
        teacher: The same under the teacher `(B, R)`.
        mask: Response mask `(B, R)`.
        name: An estimator of `hrl.algos.kl`.
        weight: Of the divergence.
        limit: Of a divergence, see `clamped`.

    Returns:
        Advantages and divergences, both `(B, R)`, 0 outside the mask.
    """
    found = sampled_divergence(name, student, teacher, mask, limit=limit).detach()
    own = torch.zeros_like(found) if advantages is None else advantages
    return keep(own - weight * found, mask), found
