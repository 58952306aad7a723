"""What the driver decides of an update: whose log-probs are old, and what is measured, weighed and chosen."""

from __future__ import annotations

import pytest

from hrl.batching.plan import BatchPlan, MiniBatchPlan, RankPlan
from hrl.config import compose_cli
from hrl.config.ppo import PPOTrainerConfig
from hrl.trainer.ppo.old_log_probs import is_on_policy, needs_old_log_prob, policy_update, update_measures_mismatch
from hrl.workers.requests import OldLogProbs

PLAN = BatchPlan(rows=((0,),), ranks=(RankPlan((MiniBatchPlan(((0,),), 1, 1, 1),)),))
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
OFF_POLICY = (f"{ACTOR}.ppo_epochs=2",)
BYPASS = (f"{CORRECTION}.bypass_mode=true",)
TIS = (f"{CORRECTION}.rollout_is=token",)
REJECTION = (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0")


def configured(*overrides: str) -> PPOTrainerConfig:
    return compose_cli(["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", *overrides])


def asked(config: PPOTrainerConfig, *, bypasses: bool = False):
    return policy_update(config, PLAN, step=5, temperature=0.9, bypasses=bypasses)


@pytest.mark.parametrize(
    ("overrides", "bypasses", "old"),
    [
        ((), False, OldLogProbs.OWN),
        (OFF_POLICY, False, OldLogProbs.COLUMN),
        ((f"{ACTOR}.ppo_mini_batch_size=2",), False, OldLogProbs.COLUMN),
        (TIS, False, OldLogProbs.OWN),
        (BYPASS, True, OldLogProbs.SAMPLER),
        (BYPASS + OFF_POLICY, True, OldLogProbs.SAMPLER),
        (BYPASS, False, OldLogProbs.OWN),  # the gate is closed
        (BYPASS + OFF_POLICY, False, OldLogProbs.COLUMN),
    ],
)
def test_whose_log_probs_are_old(overrides: tuple[str, ...], bypasses: bool, old: OldLogProbs) -> None:
    request = asked(configured(*overrides), bypasses=bypasses)
    assert request.old_log_probs is old
    assert (request.correction is not None) == ("bypass" in str(overrides)), "with a closed gate too"


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ((), False),
        (OFF_POLICY, True),
        (BYPASS, True),
        (TIS, True),
        (REJECTION, True),
        (("algorithm.use_kl_in_reward=true",), True),
        (("algorithm.adv_estimator=optimal_token_baseline",), True),
        ((f"{ACTOR}.policy_loss.loss_mode=kl_cov",), True),
        (("recipe=online_dpo",), False),
    ],
)
def test_old_log_probs_are_computed_where_something_reads_them(overrides: tuple[str, ...], needed: bool) -> None:
    config = configured(*overrides)
    assert needs_old_log_prob(config) == needed
    # What the phase has compared, the update does not compare again; nor behind a closed gate.
    assert update_measures_mismatch(config, bypasses=False) == (not needed)
    assert update_measures_mismatch(config, bypasses=True)


def test_one_pass_over_one_mini_batch_is_on_policy() -> None:
    assert is_on_policy(configured())
    assert not is_on_policy(configured(f"{ACTOR}.ppo_mini_batch_size=2"))
    assert not is_on_policy(configured(*OFF_POLICY))


@pytest.mark.parametrize(
    ("overrides", "weighted"), [((), False), (TIS, True), (REJECTION, False), ((*BYPASS, *TIS), False)]
)
def test_weights_are_a_column_where_the_driver_has_made_them(overrides: tuple[str, ...], weighted: bool) -> None:
    if "bypass" in str(overrides):
        overrides = (*overrides, f"{CORRECTION}.loss_type=reinforce")  # the clipped losses have the ratio inside
    assert asked(configured(*overrides)).is_weighted == weighted


@pytest.mark.parametrize("loss", ["vanilla", "clip_cov", "kl_cov"])
def test_selected_tokens_are_a_column_for_the_losses_that_select(loss: str) -> None:
    config = configured(f"{ACTOR}.policy_loss.loss_mode={loss}")
    assert asked(config).selects_tokens == (loss != "vanilla")


def test_the_request_has_the_loss_as_it_was_configured() -> None:
    config = configured(f"{ACTOR}.clip_ratio_high=0.28")
    request = asked(config)
    assert request.loss is config.actor_rollout_ref.actor and request.loss.clip_ratio_high == 0.28
    assert (request.step, request.temperature, request.plan) == (5, 0.9, PLAN)


def test_k1_as_a_loss_is_refused() -> None:
    config = configured()
    actor = config.actor_rollout_ref.actor.model_copy(update={"use_kl_loss": True, "kl_loss_type": "kl"})
    policy = config.actor_rollout_ref.model_copy(update={"actor": actor})
    with pytest.raises(ValueError, match="kl_loss_type='kl' has an expected gradient of zero"):
        asked(config.model_copy(update={"actor_rollout_ref": policy}))
