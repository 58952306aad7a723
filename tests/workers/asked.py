"""Models that are asked what a driver would ask of them, with the loss that they were given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hrl.batching.plan import MiniBatchPlan, RankPlan
from hrl.metrics import Metric
from hrl.protocol import DataProto
from hrl.workers.policy import Policy
from hrl.workers.requests import (
    LabelledUpdate,
    LogProbRequest,
    OldLogProbs,
    PolicyUpdate,
    PreferenceUpdate,
    RewardModelUpdate,
    ScalarRequest,
    SupervisedUpdate,
    Training,
    ValueUpdate,
)
from hrl.workers.value_model import ValueModel
from tests.models.tiny import RESPONSE_WIDTH

STEP = 7


def training(
    learner: Any | None, total_steps: int | None, seed: int = 0, folder: Path | None = None
) -> Training | None:
    """How a model learns whose ``actor`` or ``critic`` section this is; None for a frozen one."""
    if learner is None:
        return None
    return Training(
        optim=learner.optim, grad_clip=learner.grad_clip, total_steps=total_steps or 1, seed=seed, run_folder=folder
    )


def all_at_once(batch: DataProto) -> RankPlan:
    """Every row in one micro-batch, for a forward pass."""
    return RankPlan((MiniBatchPlan((tuple(range(len(batch))),), 0, 0, 0),))


def policy_update(batch: DataProto, plan: RankPlan, loss: Any, **changes: Any) -> PolicyUpdate[RankPlan]:
    """Of old log-probs in a column, with what else the batch has."""
    names = set(batch.batch.keys())
    asked: dict[str, Any] = {
        "plan": plan,
        "step": STEP,
        "temperature": batch.meta_info["temperature"],
        "loss": loss,
        "old_log_probs": OldLogProbs.COLUMN,
        "correction": None,
        "measures_mismatch": "rollout_log_probs" in names,
        "is_weighted": "rollout_is_weights" in names,
        "selects_tokens": "selected_tokens" in names,
    }
    return PolicyUpdate(**asked | changes)


class Actor(Policy):
    """A policy with an ``actor`` section; a frozen one without."""

    def __init__(
        self,
        model: Any,
        loss: Any | None,
        fsdp: Any,
        *,
        device: torch.device,
        total_steps: int | None,
        run_folder: Path | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, training(loss, total_steps, seed, run_folder), fsdp, device=device)
        self.loss = loss

    def learn(self, batch: DataProto, plan: RankPlan, **changes: Any) -> dict[str, Metric]:
        return self.update(batch, policy_update(batch, plan, self.loss, **changes))

    def log_probs(self, batch: DataProto, plan: RankPlan | None = None, **asked: Any) -> DataProto:
        temperature = batch.meta_info["temperature"]
        request = LogProbRequest(plan=plan or all_at_once(batch), temperature=temperature, **asked)
        return self.compute_log_prob(batch, request)


class Critic(ValueModel):
    """A value model with a ``critic`` section; a frozen one without."""

    def __init__(
        self, model: Any, loss: Any | None, fsdp: Any, *, device: torch.device, total_steps: int | None
    ) -> None:
        super().__init__(model, training(loss, total_steps), fsdp, device=device)
        self.loss = loss

    def learn(self, batch: DataProto, plan: RankPlan, **changes: Any) -> dict[str, Metric]:
        return self.update(batch, ValueUpdate(plan=plan, step=STEP, loss=self.loss, **changes))

    def values(self, batch: DataProto, plan: RankPlan | None = None) -> DataProto:
        return self.compute_values(batch, ScalarRequest(plan=plan or all_at_once(batch)))

    def scores(self, batch: DataProto, plan: RankPlan | None = None) -> DataProto:
        return self.compute_scores(batch, ScalarRequest(plan=plan or all_at_once(batch)))


def learn_pairs(policy: Policy, batch: DataProto, plan: RankPlan, **changes: Any) -> dict[str, Metric]:
    """One update on pairs."""
    names = set(batch.batch.keys())
    asked: dict[str, Any] = {
        "temperature": batch.meta_info["temperature"],
        "loss_type": "sigmoid",
        "has_reference": "ref_sequence_log_prob" in names,
        "measures_mismatch": "rollout_log_probs" in names,
    }
    return policy.update(batch, PreferenceUpdate(plan=plan, step=STEP, **asked | changes))


def learn_labelled(policy: Policy, batch: DataProto, plan: RankPlan, **asked: Any) -> dict[str, Metric]:
    """One update on labelled answers."""
    temperature = batch.meta_info["temperature"]
    return policy.update(batch, LabelledUpdate(plan=plan, step=STEP, temperature=temperature, **asked))


def learn_answers(policy: Policy, batch: DataProto, plan: RankPlan, **changes: Any) -> dict[str, Metric]:
    """One update on answers to imitate."""
    asked: dict[str, Any] = {
        "temperature": batch.meta_info["temperature"],
        "loss_type": "nll",
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": RESPONSE_WIDTH,
    }
    return policy.update(batch, SupervisedUpdate(plan=plan, step=STEP, **asked | changes))


def learn_scores(model: ValueModel, batch: DataProto, plan: RankPlan, **changes: Any) -> dict[str, Metric]:
    """One update of a reward model."""
    asked: dict[str, Any] = {"loss_type": "bradley_terry"}
    return model.update(batch, RewardModelUpdate(plan=plan, step=STEP, **asked | changes))
