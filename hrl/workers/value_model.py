"""A scalar head over the same backbone: the critic of PPO, or a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hrl.algos.aggregation import Counts, aggregate
from hrl.algos.value_loss import value_loss
from hrl.batching import MiniBatchPlan, RankPlan
from hrl.metrics import Metric
from hrl.models.loading import dtype_of, load_scalar_model
from hrl.models.micro_batch import PackedMicroBatch, TokenRows, take_columns
from hrl.models.packed_model import PackedScalarModel
from hrl.protocol import DataProto
from hrl.workers.engine.engine import Engine, Meter, require_plan
from hrl.workers.engine.model import EngineModel


class ValueModel(EngineModel):
    """A sharded model with one number per token.

    A critic may start from a causal language model; its head then starts at zero, so that the first values are 0
    everywhere. A reward model (`train=None`) must bring its own head.

    Args:
        model: `path` (a local folder), `share_prefix`, `enable_gradient_checkpointing`, `override_config`,
            `trust_remote_code`.
        train: The `critic` configuration; `None` for a frozen reward model.
        fsdp: The sharding's configuration.
        device: Of this rank.
        total_steps: Length of the run in optimizer steps, for schedules that need it.
        run_folder: Where batches are kept whose loss or gradient is not finite; `None` outside of a run.
        seed: Of the run, by which bfloat16 masters are rounded.
    """

    def __init__(
        self,
        model: Any,
        train: Any | None,
        fsdp: Any,
        *,
        device: torch.device,
        total_steps: int | None,
        run_folder: Path | None = None,
        seed: int = 0,
    ) -> None:
        dtype = dtype_of(fsdp.model_dtype)
        self.config: Any = train
        self.engine = Engine(
            lambda meta: load_scalar_model(model, dtype, meta=meta, head_required=train is None),
            PackedScalarModel,
            share_prefix=model.share_prefix,
            train=train,
            fsdp=fsdp,
            device=device,
            total_steps=total_steps,
            run_folder=run_folder,
            seed=seed,
        )

    def export_classifier(self, folder: Path, *, pad_token_id: int) -> None:
        """Write a folder that transformers loads as a sequence classifier with one label; every rank calls it.

        Args:
            folder: Created if missing.
            pad_token_id: For transformers, which takes the last token that is not this one for the sequence's last. It
                must not be a token that ends answers.
        """
        config = self.engine.source_config
        config.architectures = [type(self.engine.module.model).__name__]
        config.num_labels = 1
        config.pad_token_id = pad_token_id
        self.export_hf(folder)

    def compute_values(self, batch: DataProto, plan: RankPlan | None) -> DataProto:
        """`values (B, R)` float32: the value of the state *before* each trained response token, zero elsewhere.

        So `values[:, 0]` is read from the prompt's last token, before anything was sampled.
        """
        (values,) = self.engine.forward(TokenRows.of(batch), plan, self._run, num_outputs=1)
        return DataProto.from_dict(tensors={"values": values})

    def compute_scores(self, batch: DataProto, plan: RankPlan | None) -> DataProto:
        """`rm_scores (B,)` float32: the head's number at the last token of prompt and response."""
        (scores,) = self.engine.forward(TokenRows.of(batch), plan, self._run, num_outputs=1, wanted="last")
        return DataProto.from_dict(tensors={"rm_scores": scores})

    def _run(self, packed: PackedMicroBatch) -> tuple[Tensor]:
        return (self.engine.module(packed),)

    def update(self, batch: DataProto, plan: RankPlan | None) -> dict[str, Metric]:
        """Run every optimizer step of the plan on a value loss.

        Args:
            batch: The rows' columns, `values` and `returns`. `meta_info["value_loss"]` may name the loss, a key
                of `VALUE_LOSSES`; otherwise `cliprange_value` says whether it is the clipped one.
            plan: Mini-batches with the counts of all ranks.

        Returns:
            Metrics under verl's names, `critic/...`.

        Raises:
            ValueError: No plan, an unknown loss, or a column is missing.
            NonFiniteStepError: Several steps in a row were not finite.
        """
        plan = require_plan(plan)
        missing = sorted({"values", "returns"} - set(batch.batch.keys()))
        if missing:
            raise ValueError(f"update_critic lacks the columns {missing}; the batch has {sorted(batch.batch.keys())}")
        rows, meter = TokenRows.of(batch), Meter(self.engine, dist.get_world_size())

        def loss_of(mini_batch: MiniBatchPlan, picked: tuple[int, ...]) -> Tensor:
            return self._loss(batch, rows, picked, mini_batch, meter, len(plan.mini_batches))

        return self.engine.update(plan, loss_of, name="critic", batch=batch, meter=meter)

    def _loss(
        self,
        batch: DataProto,
        rows: TokenRows,
        picked: tuple[int, ...],
        mini_batch: MiniBatchPlan,
        meter: Meter,
        num_mini_batches: int,
    ) -> Tensor:
        """One micro-batch's share of the mini-batch's loss."""
        config = self.config
        packed = self.engine.pack(rows, picked)
        flat = self.engine.module(packed)
        if packed.is_empty:
            return flat.sum() * 0.0
        meter.add_work(packed, with_head=False)
        mask = packed.mask
        columns = take_columns(batch, ("values", "returns"), picked, packed)
        loss_mat, metrics = value_loss(
            packed.unpack(flat),
            columns["values"],
            columns["returns"],
            mask,
            config.cliprange_value,
            name=batch.meta_info.get("value_loss"),
        )
        counts = Counts(mini_batch.num_tokens, mini_batch.num_sequences, mini_batch.num_groups)
        loss = aggregate(loss_mat, mask, config.loss_agg_mode, counts, norm=rows.responses.shape[1])
        meter.add_share("critic/vf_loss", loss, num_mini_batches)
        for name, (total, count) in metrics.items():
            meter.add(f"critic/{name}", total, count)
        return loss
