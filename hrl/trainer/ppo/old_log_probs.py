"""The request of a policy update: whose log-probs are the old ones, who computes them, what else the ranks are told.

All of it is decided here, on the driver.
"""

from __future__ import annotations

from hrl.algos.kl import check_kl_loss_type
from hrl.algos.registry import estimator_traits
from hrl.algos.token_selection import TOKEN_SELECTORS
from hrl.batching.plan import BatchPlan
from hrl.config.ppo import PPOTrainerConfig
from hrl.workers.requests import OldLogProbs, PolicyUpdate


def is_on_policy(config: PPOTrainerConfig) -> bool:
    """Return whether a batch is used for one optimizer step only.

    The old log-probs are then the update's own and need no forward pass: the ratio is exactly 1.
    """
    actor = config.actor_rollout_ref.actor
    return actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size


def needs_old_log_prob(config: PPOTrainerConfig) -> bool:
    """Return whether a run has the phase that computes `old_log_probs`, because something reads them."""
    algorithm = config.algorithm
    return algorithm.preference_loss is None and (
        not is_on_policy(config)
        or algorithm.use_kl_in_reward
        or config.distils_by_reward
        or algorithm.rollout_correction.bypass_mode
        or algorithm.rollout_correction.corrects
        or estimator_traits(algorithm.adv_estimator).needs_old_log_probs
        or config.actor_rollout_ref.actor.policy_loss.loss_mode in TOKEN_SELECTORS
    )


def update_replays_experts(config: PPOTrainerConfig, *, bypasses: bool) -> bool:
    """Return whether the update takes experts from the batch: the sampler's, or those of an earlier pass.

    Args:
        config: The whole configuration.
        bypasses: The sampler's log-probs are this step's old ones, so no pass came before.
    """
    mode = config.actor_rollout_ref.actor.router_replay.mode
    return mode == "R3" or (mode == "R2" and needs_old_log_prob(config) and not bypasses)


def update_measures_mismatch(config: PPOTrainerConfig, *, bypasses: bool) -> bool:
    """Return whether the update compares sampler and trainer, because no earlier phase has.

    Args:
        config: The whole configuration.
        bypasses: The sampler's log-probs are this step's old ones.
    """
    return bypasses or not needs_old_log_prob(config)


def old_log_probs_of(config: PPOTrainerConfig, *, bypasses: bool) -> OldLogProbs:
    """Return whose log-probs the update takes for the old ones; for the arguments see `update_measures_mismatch`."""
    if bypasses:
        return OldLogProbs.SAMPLER
    return OldLogProbs.OWN if is_on_policy(config) else OldLogProbs.COLUMN


def policy_update(
    config: PPOTrainerConfig,
    plan: BatchPlan,
    *,
    step: int,
    temperature: float,
    bypasses: bool,
    has_branches: bool = False,
    with_pictures: bool = False,
) -> PolicyUpdate[BatchPlan]:
    """Return the request of a step's update.

    Args:
        config: The whole configuration.
        plan: Its mini-batches.
        step: Of the run.
        temperature: That the batch was sampled at.
        bypasses: The sampler's log-probs are this step's old ones, as in bypass mode unless they drifted too far.
        has_branches: Episodes of the batch have several rows.
        with_pictures: Its prompts show pictures.

    Raises:
        ValueError: The KL term's estimator is unknown, or has no gradient in a loss.
    """
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    distillation = config.distillation.distillation_loss
    if actor.use_kl_loss:
        check_kl_loss_type(actor.kl_loss_type)
    return PolicyUpdate(
        plan=plan,
        step=step,
        has_branches=has_branches,
        with_pictures=with_pictures,
        router_aux_loss_coef=actor.router_aux_loss_coef,
        replays_experts=update_replays_experts(config, bypasses=bypasses),
        temperature=temperature,
        loss=actor,
        old_log_probs=old_log_probs_of(config, bypasses=bypasses),
        correction=correction if correction.bypass_mode else None,
        measures_mismatch=update_measures_mismatch(config, bypasses=bypasses),
        is_weighted=correction.weighs_tokens,
        selects_tokens=actor.policy_loss.loss_mode in TOKEN_SELECTORS,
        distillation=distillation if config.distils_by_loss else None,
    )
