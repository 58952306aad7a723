"""What a request reads, what a rank gets of it, and which requests cannot be."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from hrl.batching.plan import BatchPlan, MiniBatchPlan, RankPlan
from hrl.config import compose_cli
from hrl.config.algorithm import RolloutCorrectionConfig
from hrl.workers.requests import (
    ROW_COLUMNS,
    LogProbRequest,
    OldLogProbs,
    PolicyUpdate,
    PreferenceUpdate,
    RewardModelUpdate,
    SampleRequest,
    SamplingParams,
    ScalarRequest,
    ValueUpdate,
    temperature_of,
)

CONFIG = compose_cli([])
ACTOR = CONFIG.actor_rollout_ref.actor
BYPASS = RolloutCorrectionConfig(bypass_mode=True)


def plan(steps: int = 1) -> BatchPlan:
    """Two ranks, two rows each."""
    ranks = tuple(RankPlan((MiniBatchPlan(cut, 4, 2, 2),) * steps) for cut in (((0,), (1,)), ((0, 1), ())))
    return BatchPlan(rows=((1, 2), (0, 3)), ranks=ranks)


def test_each_rank_of_a_sequence_group_is_asked_for_the_same() -> None:
    request = ScalarRequest(plan=replace(plan(), ranks_each=2))
    assert (request.rows, request.ranks_each) == (((1, 2), (1, 2), (0, 3), (0, 3)), 2)
    assert [request.for_rank(rank).plan for rank in range(4)] == [plan().ranks[rank // 2] for rank in range(4)]


def update(steps: int = 1, **changes: Any) -> PolicyUpdate[BatchPlan]:
    asked: dict[str, Any] = {
        "temperature": 1.0,
        "loss": ACTOR,
        "old_log_probs": OldLogProbs.COLUMN,
        "correction": None,
        "measures_mismatch": False,
        "is_weighted": False,
        "selects_tokens": False,
    }
    return PolicyUpdate(plan=plan(steps), step=3, **asked | changes)


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, {"old_log_probs"}),
        ({"old_log_probs": OldLogProbs.OWN}, set()),
        ({"old_log_probs": OldLogProbs.SAMPLER}, {"rollout_log_probs"}),
        ({"old_log_probs": OldLogProbs.OWN, "measures_mismatch": True}, {"rollout_log_probs"}),
        ({"old_log_probs": OldLogProbs.COLUMN, "correction": BYPASS}, {"old_log_probs", "rollout_log_probs"}),
        (
            {"loss": CONFIG.actor_rollout_ref.actor.model_copy(update={"use_kl_loss": True})},
            {"old_log_probs", "ref_log_prob"},
        ),
        ({"is_weighted": True, "selects_tokens": True}, {"old_log_probs", "rollout_is_weights", "selected_tokens"}),
    ],
)
def test_an_update_reads_what_its_loss_is_made_of_and_nothing_else(changes: dict[str, Any], read: set[str]) -> None:
    assert update(**changes).columns == ROW_COLUMNS | {"advantages"} | read


def test_the_columns_of_the_other_requests() -> None:
    pairs = {"temperature": 1.0, "loss_type": "sigmoid", "options": None}
    pair_update = PreferenceUpdate(plan=plan(), step=1, has_reference=True, measures_mismatch=True, **pairs)
    assert pair_update.columns == ROW_COLUMNS | {"is_chosen", "ref_sequence_log_prob", "rollout_log_probs"}
    without = PreferenceUpdate(plan=plan(), step=1, has_reference=False, measures_mismatch=False, **pairs)
    assert without.columns == ROW_COLUMNS | {"is_chosen"}
    scores = RewardModelUpdate(plan=plan(), step=1, loss_type="bradley_terry")
    assert scores.columns == ROW_COLUMNS | {"is_chosen", "margin"}
    assert ValueUpdate(plan=plan(), step=1, loss=CONFIG.critic).columns == ROW_COLUMNS | {"values", "returns"}
    assert LogProbRequest(plan=plan(), temperature=1.0).columns == ScalarRequest(plan=plan()).columns == ROW_COLUMNS
    prompts = {"prompts", "attention_mask", "uid", "sample_index"}
    draw: dict[str, Any] = {"plan": plan(), "sampling": SamplingParams(), "seed": 0, "step": 1, "reward_round": None}
    assert SampleRequest(with_greedy=False, **draw).columns == prompts
    assert SampleRequest(with_greedy=True, **draw).columns == prompts | {"greedy"}


def test_a_rank_gets_its_part_of_the_plan_and_the_rest_as_it_is() -> None:
    whole = update()
    mine = whole.for_rank(1)
    assert whole.rows == ((1, 2), (0, 3))
    assert mine.plan is whole.plan.ranks[1]
    assert (mine.step, mine.loss, mine.old_log_probs) == (3, whole.loss, OldLogProbs.COLUMN)


def test_own_log_probs_are_the_old_ones_for_one_step_only() -> None:
    assert update(old_log_probs=OldLogProbs.OWN).for_rank(0).old_log_probs is OldLogProbs.OWN
    with pytest.raises(ValueError, match="the plan has 2 steps: run compute_log_prob first"):
        update(steps=2, old_log_probs=OldLogProbs.OWN)
    update(steps=2, old_log_probs=OldLogProbs.SAMPLER)


def test_a_missing_temperature_is_an_error() -> None:
    assert temperature_of({"temperature": 0.7}) == 0.7
    with pytest.raises(ValueError, match="temperature"):
        temperature_of({})


def test_requests_are_imported_without_torch() -> None:
    check = "import sys, hrl.workers.requests; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=600)
