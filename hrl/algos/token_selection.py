"""Choose the tokens that covariance-based losses treat differently, over a whole batch before it is cut.

Both methods of "The Entropy Mechanism of Reinforcement Learning" (arXiv:2505.22617) choose tokens by
`(log p - mean log p) (A - mean A)`. Within a micro-batch, means and ranks would depend on how the batch is cut, and so
would the gradient. So the choice is made once, over the whole batch, and becomes a column of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hrl.algos.masked import check_shapes
from hrl.algos.policy_losses import PolicyLossSettings
from hrl.algos.registry import Registry, Traits

TokenSelector = Callable[[Tensor, Tensor, Tensor, PolicyLossSettings, torch.Generator | None], Tensor]


def _covariance(log_probs: Tensor, advantages: Tensor, trained: Tensor) -> Tensor:
    """Return each trained token's part of the covariance, `(N,)` in the order of the mask."""
    log_probs, advantages = log_probs.detach()[trained].double(), advantages[trained].double()
    if not len(log_probs):
        return log_probs
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def _mark(trained: Tensor, chosen: Tensor) -> Tensor:
    flat = torch.zeros(int(trained.sum()), dtype=torch.bool, device=trained.device)
    flat[chosen] = True
    selected = torch.zeros_like(trained)
    selected[trained] = flat
    return selected


def _select_clip_cov(
    log_probs: Tensor,
    advantages: Tensor,
    trained: Tensor,
    config: PolicyLossSettings,
    generator: torch.Generator | None,
) -> Tensor:
    """Choose tokens at random among those with a covariance within the bounds (Clip-Cov).

    Their number is `clip_cov_ratio` of all tokens, at least one.
    """
    ratio = config.policy_loss.clip_cov_ratio
    lower = config.policy_loss.clip_cov_lb
    upper = config.policy_loss.clip_cov_ub
    if ratio <= 0:
        raise ValueError(f"actor.policy_loss.clip_cov_ratio must be positive, got {ratio}")
    covariance = _covariance(log_probs, advantages, trained)
    candidates = ((covariance > lower) & (covariance < upper)).nonzero(as_tuple=True)[0]
    wanted = max(int(ratio * len(covariance)), 1)
    shuffled = torch.randperm(len(candidates), generator=generator)[:wanted].to(candidates.device)
    return _mark(trained, candidates[shuffled])


def _select_kl_cov(
    log_probs: Tensor,
    advantages: Tensor,
    trained: Tensor,
    config: PolicyLossSettings,
    generator: torch.Generator | None,
) -> Tensor:
    """Choose the `kl_cov_ratio` of all tokens with the highest covariance, at least one (KL-Cov)."""
    ratio = config.policy_loss.kl_cov_ratio
    if not 0 < ratio <= 1:
        raise ValueError(f"actor.policy_loss.kl_cov_ratio must be above 0 and at most 1, got {ratio}")
    covariance = _covariance(log_probs, advantages, trained)
    wanted = min(max(int(ratio * len(covariance)), 1), len(covariance))
    return _mark(trained, torch.topk(covariance, wanted).indices)


TOKEN_SELECTORS: Registry[TokenSelector, Traits] = Registry(
    "token selector", {"clip_cov": _select_clip_cov, "kl_cov": _select_kl_cov}
)
"""How the tokens are chosen, by the name of the policy loss that needs `selected_tokens`."""


def select_tokens(
    loss_name: str,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: PolicyLossSettings,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose the tokens that a policy loss treats differently.

    Args:
        loss_name: A key of `TOKEN_SELECTORS`.
        log_probs: Log-probs of the sampled tokens under the policy that the update starts from `(B, R)`.
        advantages: `(B, R)`.
        response_mask: `(B, R)`.
        config: The `actor` part of the configuration.
        generator: Source of randomness, if the choice is random; None is torch's own.

    Returns:
        `(B, R)` bool.
    """
    check_shapes(response_mask, log_probs=log_probs, advantages=advantages)
    return TOKEN_SELECTORS.find(loss_name)(log_probs, advantages, response_mask.bool(), config, generator)
