"""Train with the sampler's log-probs as the old ones, without a forward pass of the trainer (bypass mode).

Then there are two policies instead of three: the sampler's and the one in training. The clipped losses use the ratio to
the sampler, so their clip limits staleness and mismatch together; REINFORCE uses that ratio as a weight (Liu et al.
2025, "When Speed Kills Stability", the bypass modes).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hrl.algos.masked import Metrics
from hrl.algos.policy_losses import PolicyLossInput, PolicyLossOutput, PolicyLossSettings, policy_loss
from hrl.algos.rollout_correction import CorrectionSettings, correct

REINFORCE = "gpg"
"""The policy loss `-A log p`; with importance weights it is REINFORCE for samples of another policy."""

LOSS_TYPES = ("ppo_clip", "reinforce")


def bypass_loss_name(loss_mode: str, correction: CorrectionSettings) -> str:
    """Return the name of the policy loss to run: the configured one, or REINFORCE."""
    return REINFORCE if correction.loss_type == "reinforce" else loss_mode


def bypass_loss(
    loss_mode: str,
    inp: PolicyLossInput,
    config: PolicyLossSettings,
    correction: CorrectionSettings,
    sampler_log_prob: Tensor | None = None,
) -> tuple[PolicyLossOutput, Tensor, Metrics]:
    """Return a policy loss against the sampler's log-probs.

    If the sampler's log-probs are too far from the trainer's to be used as the old ones, the clipped losses use the
    ratio to the trainer's own instead. Nothing else changes: loss, weights, rejection and divisor are the same.

    Weights and rejection depend on the policy in training, so they are computed here and not before the update. A
    rejected token has no loss but still counts in the divisor, which was fixed before the batch was split. Weights are
    normalised over the rows given here, which may be a part of the batch. A row is a sequence, also where it is one of
    several of an episode.

    Args:
        loss_mode: A key of `hrl.algos.policy_losses.POLICY_LOSSES`.
        inp: One micro-batch; the clipped losses use the ratio to its `old_log_prob`.
        config: The `actor` part of the configuration.
        correction: `algorithm.rollout_correction`: `loss_type`, and what `hrl.algos.rollout_correction.correct` reads.
            Only `reinforce` is weighted: the clipped losses contain the ratio already.
        sampler_log_prob: `(B, R)`; None if `inp.old_log_prob` is the sampler's.

    Returns:
        The loss per token and its metrics; the response mask without rejected tokens; metrics of the correction.

    Raises:
        ValueError: Unknown loss type.
    """
    if correction.loss_type not in LOSS_TYPES:
        raise ValueError(f"unknown loss_type {correction.loss_type!r} of bypass mode; choose one of {LOSS_TYPES}")
    sampler = inp.old_log_prob if sampler_log_prob is None else sampler_log_prob
    weights, kept, metrics = correct(inp.log_prob.detach() - sampler, inp.response_mask, correction)
    effective = replace(
        inp, response_mask=kept, rollout_is_weights=weights if correction.loss_type == "reinforce" else None
    )
    return policy_loss(bypass_loss_name(loss_mode, correction), effective, config), kept, metrics
