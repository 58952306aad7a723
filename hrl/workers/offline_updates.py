"""What a model learns from a data set: to prefer one answer of a pair, to imitate answers, to score them.

The data set may as well have been sampled a moment ago, as online DPO does. Every loss is a share of the mini-batch's
loss, divided by counts over all ranks, so that no cut into micro-batches or ranks changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hrl.algos.aggregation import Counts, aggregate
from hrl.algos.preference import (
    PairOptions,
    mean_over_pairs,
    pairs_of_sums,
    preference_loss,
    reward_model_loss,
    sequence_log_prob,
    sft_loss,
)
from hrl.batching import MiniBatchPlan, RankPlan
from hrl.metrics import Metric
from hrl.models.micro_batch import PackedMicroBatch, TokenRows, Wanted, take_columns
from hrl.models.ops.layout import to_device
from hrl.protocol import DataProto
from hrl.workers.engine.engine import Engine, Meter, require_plan

#: From the names of `hrl.algos.preference` to those that TRL's users know.
_METRICS = {
    "rewards_chosen": "rewards/chosen",
    "rewards_rejected": "rewards/rejected",
    "rewards_margin": "rewards/margins",
    "score_margin": "rewards/margins",
    "accuracy": "rewards/accuracies",
}


@dataclass(frozen=True)
class Piece:
    """One micro-batch after its forward pass.

    Attributes:
        batch: All rows of the rank.
        picked: Those of the micro-batch, b of them.
        packed: How they were run.
        result: `(b, r)`, the model's numbers at the rows' trained tokens; `(b, 1)` for one number per row.
        mini_batch: Its counts are the divisors.
        meter: Takes metrics.
        moved: A step of this update has moved the weights already.
    """

    batch: DataProto
    picked: list[int]
    packed: PackedMicroBatch
    result: Tensor
    mini_batch: MiniBatchPlan
    meter: Meter
    moved: bool

    def rows(self, name: str) -> Tensor:
        """Return a column `(B,)`, as `(b,)` on the result's device."""
        return to_device([self.batch.batch[name][self.picked]], self.result.device)[0]

    def tokens(self, name: str) -> Tensor:
        """Return a column `(B, R)`, as `(b, r)` on the result's device."""
        return take_columns(self.batch, (name,), self.picked, self.packed)[name]

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Where in the micro-batch the chosen and the rejected row of each pair stand, `(N,)` each, on the device.

        Raises:
            ValueError: A pair is not whole in its micro-batch.
        """
        is_chosen = self.batch.batch["is_chosen"][self.picked].tolist()
        uids = self.batch.non_tensor_batch["uid"][self.picked].tolist()
        chosen = {uid: slot for slot, uid in enumerate(uids) if is_chosen[slot]}
        rejected = {uid: slot for slot, uid in enumerate(uids) if not is_chosen[slot]}
        if chosen.keys() != rejected.keys() or 2 * len(chosen) != len(uids):
            odd = next((uid for uid in uids if (uid in chosen) != (uid in rejected)), uids[0])
            raise ValueError(f"pair {odd} is not whole in its micro-batch: plan pairs by hrl.batching.plan_pairs")
        slots = torch.tensor([list(chosen.values()), [rejected[uid] for uid in chosen]], dtype=torch.int64)
        here, there = to_device([slots], self.result.device)[0].unbind()
        return here, there

    def note(self, metrics: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Add metrics of `hrl.algos.preference`."""
        for name, (total, count) in metrics.items():
            self.meter.add(_METRICS[name], total, count)


def _learn(
    engine: Engine,
    batch: DataProto,
    plan: RankPlan | None,
    run: Callable[[PackedMicroBatch], Tensor],
    loss_of: Callable[[Piece], Tensor],
    *,
    wanted: Wanted,
) -> dict[str, Metric]:
    """Every optimizer step of the plan; metrics under `train/...`."""
    plan = require_plan(plan)
    rows, meter = TokenRows.of(batch), Meter(engine, dist.get_world_size())
    optimizer, num_mini_batches = engine.optimizer, len(plan.mini_batches)
    assert optimizer is not None, "this engine was built without a training configuration"
    steps_before = optimizer.steps_taken

    def share_of(mini_batch: MiniBatchPlan, picked: tuple[int, ...]) -> Tensor:
        packed = engine.pack(rows, picked, wanted)
        flat = run(packed)
        if packed.is_empty:
            return flat.sum() * 0.0
        meter.add_work(packed, with_head=wanted == "next")
        moved = optimizer.steps_taken != steps_before
        loss = loss_of(Piece(batch, list(picked), packed, packed.unpack(flat), mini_batch, meter, moved))
        meter.add_share("train/loss", loss, num_mini_batches)
        return loss

    return engine.update(plan, share_of, name="train", batch=batch, meter=meter)


def _log_probs(engine: Engine, batch: DataProto) -> Callable[[PackedMicroBatch], Tensor]:
    temperature = float(batch.meta_info["temperature"])
    return lambda packed: engine.module(packed, temperature, False).log_prob


def update_preference(engine: Engine, batch: DataProto, plan: RankPlan | None) -> dict[str, Metric]:
    """Move a policy towards the chosen and away from the rejected answers.

    Args:
        engine: Of a causal language model.
        batch: The rows' columns, non-tensor `uid (B,)` (the pair), `is_chosen (B,)` and, for a loss with a
            reference, `ref_sequence_log_prob (B,)`: its log-probs summed over each answer's trained tokens.
            `meta_info` has `temperature`, of the distribution whose log-probs these are, and `preference`:
            `loss_type` and the fields of `PairOptions`. With `rollout_log_probs (B, R)` of answers that the
            policy sampled, the update measures how far sampler and trainer are apart, until a step moves the weights.
        plan: Mini-batches of whole pairs, whose `num_groups` counts pairs.

    Returns:
        `train/...`, `rewards/{chosen,rejected,margins,accuracies}` and `logps/{chosen,rejected}`.

    Raises:
        ValueError: No plan, a pair is torn apart, or a constant is out of its range.
        NonFiniteStepError: Several steps in a row were not finite.
    """
    settings = dict(batch.meta_info["preference"])
    loss_type = settings.pop("loss_type")
    options = PairOptions(**settings)
    with_reference = "ref_sequence_log_prob" in batch.batch.keys()

    def loss_of(piece: Piece) -> Tensor:
        chosen, rejected = piece.pairs()
        if "rollout_log_probs" in batch.batch.keys() and not piece.moved:
            apart = piece.packed.of_tokens(piece.result.detach() - piece.tokens("rollout_log_probs"))
            piece.meter.add_distances("rollout/logprob_diff", apart.abs())
        sums = sequence_log_prob(piece.result, piece.packed.mask)
        reference = piece.rows("ref_sequence_log_prob") if with_reference else None
        pairs = pairs_of_sums(loss_type, sums, piece.packed.mask.sum(-1), chosen, rejected, reference)
        losses, metrics = preference_loss(loss_type, pairs, options)
        piece.note(metrics)
        for name, slots in (("chosen", chosen), ("rejected", rejected)):
            piece.meter.add(f"logps/{name}", sums[slots].sum(), len(slots))
        return mean_over_pairs(losses, piece.mini_batch.num_groups)

    return _learn(engine, batch, plan, _log_probs(engine, batch), loss_of, wanted="next")


def update_supervised(engine: Engine, batch: DataProto, plan: RankPlan | None) -> dict[str, Metric]:
    """Make a policy more likely to say what the rows say.

    Args:
        engine: Of a causal language model.
        batch: The rows' columns; `meta_info` has `temperature`, `loss_type` (a key of `SFT_LOSSES`),
            `loss_agg_mode`, the aggregation, and for `seq-mean-token-sum-norm` its constant divisor in tokens,
            `loss_scale_factor`.
        plan: Mini-batches with the counts of all ranks.

    Returns:
        `train/...` and `train/nll`, the mean negative log-likelihood of a trained token.

    Raises:
        ValueError: No plan, an unknown loss or aggregation, or a divisor that is missing.
        NonFiniteStepError: Several steps in a row were not finite.
    """
    loss_type, mode = batch.meta_info["loss_type"], batch.meta_info["loss_agg_mode"]
    norm = batch.meta_info.get("loss_scale_factor")

    def loss_of(piece: Piece) -> Tensor:
        mask, step = piece.packed.mask, piece.mini_batch
        losses = sft_loss(piece.result, mask, name=loss_type)
        piece.meter.add("train/nll", -piece.result.sum(), mask.sum())
        return aggregate(losses, mask, mode, Counts(step.num_tokens, step.num_sequences, step.num_groups), norm)

    return _learn(engine, batch, plan, _log_probs(engine, batch), loss_of, wanted="next")


def update_reward_model(engine: Engine, batch: DataProto, plan: RankPlan | None) -> dict[str, Metric]:
    """Make a classifier score the chosen answer of every pair above the rejected one.

    Args:
        engine: Of a model with a scalar head.
        batch: The rows' columns, non-tensor `uid (B,)` (the pair), `is_chosen (B,)` and optionally `margin (B,)`,
            of which the chosen row's counts: the lead that its score must have. `meta_info` has `loss_type`, a key
            of `REWARD_MODEL_LOSSES`.
        plan: Mini-batches of whole pairs, whose `num_groups` counts pairs.

    Returns:
        `train/...` and `rewards/{chosen,rejected,margins,accuracies}`, rewards being scores.

    Raises:
        ValueError: No plan, an unknown loss, or a pair is torn apart.
        NonFiniteStepError: Several steps in a row were not finite.
    """
    loss_type = batch.meta_info["loss_type"]

    def loss_of(piece: Piece) -> Tensor:
        chosen, rejected = piece.pairs()
        scores = piece.result[:, 0]
        margin = piece.rows("margin")[chosen].to(scores.dtype) if "margin" in batch.batch.keys() else None
        losses, metrics = reward_model_loss(scores[chosen], scores[rejected], margin, name=loss_type)
        piece.note(metrics)
        for name, slots in (("chosen", chosen), ("rejected", rejected)):
            piece.meter.add(f"rewards/{name}", scores[slots].sum(), len(slots))
        return mean_over_pairs(losses, piece.mini_batch.num_groups)

    return _learn(engine, batch, plan, engine.module, loss_of, wanted="last")
