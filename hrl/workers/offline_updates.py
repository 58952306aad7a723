"""What a model learns from a data set: to prefer one answer of a pair, to imitate answers, to score them.

The data set may as well have been sampled a moment ago, as online DPO does. Every loss is a share of the mini-batch's
loss, divided by counts over all ranks, so that no cut into micro-batches or ranks changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hrl.algos.preference import (
    mean_over_pairs,
    pair_margins,
    preference_loss,
    reward_model_loss,
    sequence_log_prob,
    sft_loss,
)
from hrl.metrics import Metric
from hrl.models.ops.layout import to_device
from hrl.models.packed_model import PackedMicroBatch
from hrl.protocol import DataProto
from hrl.workers.engine.engine import Engine, ForwardedMicroBatch, UpdateNames
from hrl.workers.mismatch import measure_difference
from hrl.workers.requests import PreferenceUpdate, RewardModelUpdate, SupervisedUpdate

if TYPE_CHECKING:
    from hrl.batching.plan import RankPlan
    from hrl.workers.policy import Policy
    from hrl.workers.value_model import ValueModel

NAMES = UpdateNames("train", "train/grad_norm", "train/lr", "train/skipped_steps", "perf/mfu/train")


def _slots_of_pairs(piece: ForwardedMicroBatch) -> tuple[Tensor, Tensor]:
    """Where in the micro-batch the chosen and the rejected row of each pair stand, `(N,)` each, on the device.

    Raises:
        ValueError: A pair is not whole in its micro-batch.
    """
    rows = list(piece.picked)
    is_chosen = piece.batch.batch["is_chosen"][rows].tolist()
    uids = piece.batch.non_tensor_batch["uid"][rows].tolist()
    chosen = {uid: slot for slot, uid in enumerate(uids) if is_chosen[slot]}
    rejected = {uid: slot for slot, uid in enumerate(uids) if not is_chosen[slot]}
    if chosen.keys() != rejected.keys() or 2 * len(chosen) != len(uids):
        odd = next((uid for uid in uids if (uid in chosen) != (uid in rejected)), uids[0])
        raise ValueError(f"pair {odd} is not whole in its micro-batch: plan pairs by hrl.batching.plan_pairs")
    slots = torch.tensor([list(chosen.values()), [rejected[uid] for uid in chosen]], dtype=torch.int64)
    here, there = to_device([slots], piece.mask.device)[0].unbind()
    return here, there


def _log_probs(engine: Engine, temperature: float) -> Callable[[PackedMicroBatch], tuple[Tensor, ...]]:
    return lambda packed: (engine.module(packed, temperature, False).log_prob,)


def update_preference(policy: Policy, batch: DataProto, request: PreferenceUpdate[RankPlan]) -> dict[str, Metric]:
    """Move a policy towards the chosen and away from the rejected answers.

    Args:
        policy: The one that learns.
        batch: The columns that the request names; `uid (B,)` is the pair.
        request: Mini-batches of whole pairs, whose `num_groups` counts pairs, and what the loss is made of.

    Returns:
        `train/...`, `rewards/{chosen,rejected,margins,accuracies}` and `logps/{chosen,rejected}`.

    Raises:
        ValueError: A pair is torn apart, or a constant is set that the loss does not read.
        NonFiniteStepError: Several steps in a row were not finite.
    """

    def loss_of(piece: ForwardedMicroBatch) -> Tensor:
        (chosen, rejected), log_prob, meter = _slots_of_pairs(piece), piece.result(), piece.meter
        if request.measures_mismatch and not piece.moved:
            sampler = piece.tokens("rollout_log_probs")["rollout_log_probs"]
            measure_difference(meter, log_prob, sampler, piece.packed.of_tokens)
        sums = sequence_log_prob(log_prob, piece.mask)
        reference = piece.rows("ref_sequence_log_prob") if request.has_reference else None
        margins = pair_margins(request.loss_type, sums, piece.mask.sum(-1), chosen, rejected, reference)
        losses, metrics = preference_loss(request.loss_type, *margins, request.options)
        meter.add_all(metrics)
        meter.add("logps/chosen", sums[chosen].sum(), len(chosen))
        meter.add("logps/rejected", sums[rejected].sum(), len(rejected))
        loss = mean_over_pairs(losses, piece.mini_batch.num_groups)
        meter.add_share("train/loss", loss)
        return loss

    run = _log_probs(policy.engine, request.temperature)
    return policy.engine.learn(batch, request, run, loss_of, NAMES, with_head=True)


def update_supervised(policy: Policy, batch: DataProto, request: SupervisedUpdate[RankPlan]) -> dict[str, Metric]:
    """Make a policy more likely to say what the rows say.

    Args:
        policy: The one that learns.
        batch: The rows' columns.
        request: Mini-batches with the counts of all ranks, and what the loss is made of.

    Returns:
        `train/...` and `train/nll`, the mean negative log-likelihood of a trained token.

    Raises:
        ValueError: An unknown loss or aggregation.
        NonFiniteStepError: Several steps in a row were not finite.
    """

    def loss_of(piece: ForwardedMicroBatch) -> Tensor:
        log_prob, mask = piece.result(), piece.mask
        losses = sft_loss(log_prob, mask, name=request.loss_type)
        piece.meter.add("train/nll", -log_prob.sum(), mask.sum())
        loss = piece.aggregate(losses, request.loss_agg_mode, request.loss_scale_factor)
        piece.meter.add_share("train/loss", loss)
        return loss

    run = _log_probs(policy.engine, request.temperature)
    return policy.engine.learn(batch, request, run, loss_of, NAMES, with_head=True)


def update_reward_model(model: ValueModel, batch: DataProto, request: RewardModelUpdate[RankPlan]) -> dict[str, Metric]:
    """Make a classifier score the chosen answer of every pair above the rejected one.

    Args:
        model: The one that learns.
        batch: The columns that the request names; `uid (B,)` is the pair.
        request: Mini-batches of whole pairs, whose `num_groups` counts pairs, and what the loss is made of.

    Returns:
        `train/...` and `rewards/{chosen,rejected,margins,accuracies}`, rewards being scores.

    Raises:
        ValueError: An unknown loss, or a pair is torn apart.
        NonFiniteStepError: Several steps in a row were not finite.
    """

    def loss_of(piece: ForwardedMicroBatch) -> Tensor:
        (chosen, rejected), scores, meter = _slots_of_pairs(piece), piece.result()[:, 0], piece.meter
        margin = piece.rows("margin")[chosen].to(scores.dtype)
        losses, metrics = reward_model_loss(scores[chosen], scores[rejected], margin, name=request.loss_type)
        meter.add_all(metrics)
        meter.add("rewards/chosen", scores[chosen].sum(), len(chosen))
        meter.add("rewards/rejected", scores[rejected].sum(), len(rejected))
        loss = mean_over_pairs(losses, piece.mini_batch.num_groups)
        meter.add_share("train/loss", loss)
        return loss

    return model.engine.learn(batch, request, model.run, loss_of, NAMES, with_head=False, wanted="last")
