"""A scalar head over the same backbone: the critic of PPO, or a reward model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hrl.algos.preference import mean_over_pairs, reward_model_loss
from hrl.algos.value_loss import value_loss
from hrl.metrics import Metric
from hrl.models.loading import load_scalar_model
from hrl.models.packed_model import PackedMicroBatch, PackedScalarModel, TokenRows, Wanted
from hrl.protocol import DataProto
from hrl.workers.engine.engine import FROM_DATA, Engine, ForwardedMicroBatch, UpdateNames
from hrl.workers.engine.weights import describe_classifier
from hrl.workers.requests import RewardModelUpdate, ScalarRequest, Training, ValueUpdate

if TYPE_CHECKING:
    from hrl.batching.plan import RankPlan
    from hrl.config.model import ForwardShardingConfig, FsdpConfig
    from hrl.models.loading import ModelSource

NAMES = UpdateNames(
    "critic", "critic/grad_norm", "critic/lr", "critic/skipped_steps", "critic/weights_checksum", "perf/mfu/critic"
)


class ValueModel:
    """A sharded model with one number per token.

    A critic may start from a causal language model; its head then starts at zero, so that the first values are 0
    everywhere. A frozen reward model must bring its own head.

    Args:
        model: Which model, and how it is loaded.
        training: How it learns; `None` for a frozen reward model.
        fsdp: The sharding's configuration.
        device: Of this rank.
    """

    def __init__(
        self,
        model: ModelSource,
        training: Training | None,
        fsdp: FsdpConfig | ForwardShardingConfig,
        *,
        device: torch.device,
    ) -> None:
        load = partial(load_scalar_model, head_required=training is None)
        self.engine = Engine(load, PackedScalarModel, model, training, fsdp, device=device)

    def begin_export(self, folder: Path, record: Path | None, *, pad_token_id: int) -> None:
        """Have a folder written that transformers loads as a sequence classifier with one label; see the engine's.

        Args:
            folder: Created if missing.
            record: Says when it is written.
            pad_token_id: For transformers, which takes the last token that is not this one for the sequence's last. It
                must not be a token that ends answers.
        """
        describe_classifier(self.engine.source_config, self.engine.module.model, pad_token_id)
        self.engine.begin_export(folder, record)

    def compute_values(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `values (B, R)` float32: of the state *before* each trained response token, zero elsewhere.

        So `values[:, 0]` is read from the prompt's last token, before anything was sampled.
        """
        (values,) = self._forward(batch, request)
        return DataProto.from_dict(tensors={"values": values})

    def compute_scores(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `rm_scores (B,)` float32: the head's number at the last token of prompt and response."""
        (scores,) = self._forward(batch, request, "last")
        return DataProto.from_dict(tensors={"rm_scores": scores})

    def compute_step_scores(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `rm_step_scores (B, R)` float32: the head's number at the token *before* each that the mask marks."""
        (scores,) = self._forward(batch, request)
        return DataProto.from_dict(tensors={"rm_step_scores": scores})

    def _forward(self, batch: DataProto, request: ScalarRequest[RankPlan], wanted: Wanted = "next") -> list[Tensor]:
        rows = TokenRows.of(batch, pictures=request.with_pictures)
        return self.engine.forward(rows, request.plan, self.run, num_outputs=1, wanted=wanted)

    def run(self, packed: PackedMicroBatch) -> tuple[Tensor]:
        """Return the head's numbers `(N,)`."""
        return (self.engine.module(packed),)

    def update(
        self, batch: DataProto, request: ValueUpdate[RankPlan] | RewardModelUpdate[RankPlan]
    ) -> dict[str, Metric]:
        """Take every optimizer step of the plan: on values of tokens, or on scores of pairs of answers.

        Args:
            batch: The columns that the request names; `uid (B,)` is the pair of a `RewardModelUpdate`.
            request: Mini-batches with the counts of all ranks, and what the loss is made of. Those of a
                `RewardModelUpdate` hold whole pairs, and their `num_groups` counts pairs.

        Returns:
            Metrics under verl's names: of a critic `critic/...`, of a reward model `train/...` and
            `rewards/{chosen,rejected,margins,accuracies}`, rewards being scores.

        Raises:
            ValueError: The loss is unknown, or a pair is torn apart.
            NonFiniteStepError: Several steps in a row were not finite.
        """
        if isinstance(request, ValueUpdate):
            return self.engine.learn(batch, request, self.run, partial(_value_loss, request), NAMES, with_head=False)
        loss_of = partial(_score_loss, request)
        return self.engine.learn(batch, request, self.run, loss_of, FROM_DATA, with_head=False, wanted="last")


def _value_loss(request: ValueUpdate[RankPlan], piece: ForwardedMicroBatch) -> Tensor:
    """Return one micro-batch's share of the mini-batch's loss."""
    columns, clip = piece.tokens("values", "returns"), request.loss.cliprange_value
    loss_mat, metrics = value_loss(
        piece.result(), columns["values"], columns["returns"], piece.mask, clip, name=request.loss_name
    )
    mode = request.loss.loss_agg_mode
    loss = piece.aggregate(loss_mat, mode, norm=piece.width, has_branches=request.has_branches)
    piece.meter.add_share("critic/vf_loss", loss)
    piece.meter.add_all(metrics)
    return loss


def _score_loss(request: RewardModelUpdate[RankPlan], piece: ForwardedMicroBatch) -> Tensor:
    """Return one micro-batch's share of the loss that scores chosen answers above rejected ones."""
    (chosen, rejected), scores, meter = piece.pairs(), piece.result()[:, 0], piece.meter
    margin = piece.rows("margin")[chosen].to(scores.dtype)
    losses, metrics = reward_model_loss(scores[chosen], scores[rejected], margin, name=request.loss_type)
    meter.add_all(metrics)
    meter.add("rewards/chosen", scores[chosen].sum(), len(chosen))
    meter.add("rewards/rejected", scores[rejected].sum(), len(rejected))
    loss = mean_over_pairs(losses, piece.mini_batch.num_groups)
    meter.add_share("train/loss", loss)
    return loss
