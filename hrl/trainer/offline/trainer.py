"""The driver of a run that learns from a data set: one model, one optimizer step per batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hrl.batching import BatchPlan
from hrl.cluster.planner import MicroBatchLimits, Planner
from hrl.cluster.roles import Role
from hrl.metrics import reduce_metrics
from hrl.protocol import DataProto
from hrl.trainer.loop import TrainingLoop
from hrl.trainer.offline.metrics import batch_metrics, metrics_by_source
from hrl.trainer.offline.workers import OfflineWorkers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.data.offline.dataset import OfflineDataset
    from hrl.report.reporter import RunReporter

#: Items of one forward pass over a data set: enough to fill every rank, few enough for a call's deadline.
FORWARD_ITEMS = 512


class OfflineTrainer(TrainingLoop[OfflineWorkers]):
    """What the offline trainers share; each says how it plans, learns and scores.

    Args:
        config: The validated configuration.
        tokenizer: The model's.
        start_workers: Starts the processes.
        train_dataset: Rows to train on.
        val_dataset: Rows to validate on, `None` for no validation.
        reporter: Timers, metrics and pictures of the run.
        total_training_steps: Where the run ends.
    """

    role: ClassVar[Role] = Role.Actor

    def __init__(
        self,
        config: Any,
        tokenizer: PreTrainedTokenizerBase,
        start_workers: Callable[[], OfflineWorkers],
        *,
        train_dataset: OfflineDataset[Any],
        val_dataset: OfflineDataset[Any] | None,
        reporter: RunReporter,
        total_training_steps: int,
    ) -> None:
        super().__init__(
            config,
            tokenizer,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            reporter=reporter,
            total_training_steps=total_training_steps,
        )
        self._start_workers = start_workers
        data = config.data
        packed = data.micro_batch_size_per_gpu is None
        self.planner = Planner(share_prefix=config.model.share_prefix)
        self.limits = MicroBatchLimits(
            data.max_token_len_per_gpu if packed else None, data.micro_batch_size_per_gpu, "data.max_token_len_per_gpu"
        )

    def init_workers(self) -> None:
        self._workers = self._start_workers()

    # ------------------------------------------------------------------ what a trainer is

    @abstractmethod
    def plan(self, batch: DataProto) -> BatchPlan:
        """Return the one optimizer step of a batch."""

    @abstractmethod
    def update(self, batch: DataProto, plan: BatchPlan) -> DataProto:
        """Take it; `meta_info["metrics"]` has its metrics."""

    @abstractmethod
    def score(self, batch: DataProto) -> dict[str, Tensor]:
        """Return what a validation wants to know of every item of a batch, (N,) each.

        `weight` is none of the metrics.
        """

    # ------------------------------------------------------------------ the loop's parts

    def train_step(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        batch.meta_info["step"] = self.global_steps
        with self.phase("update"):
            metrics |= reduce_metrics(self.update(batch, self.plan(batch)).meta_info["metrics"])
        return batch

    def validate(self) -> dict[str, float]:
        if self.val_dataset is None:
            return {}
        with self.phase("testing"):
            scores = [self.score(batch) for batch in self.val_dataset.in_order(FORWARD_ITEMS)]
        columns = {name: torch.cat([score[name] for score in scores]) for name in scores[0]}
        weights = columns.pop("weight", None)
        return metrics_by_source(self.val_dataset.sources, columns, weights)

    def describe(self, batch: DataProto) -> dict[str, float]:
        return batch_metrics(batch)

    @property
    def save_contents(self) -> Sequence[str]:
        return self.config.checkpoint.save_contents

    # ------------------------------------------------------------------ forward passes

    def forward_plan(self, batch: DataProto) -> BatchPlan:
        """Every row once, for a pass without gradients."""
        return self.planner.forward(batch, self.workers.model.world_size, self.limits)

    def log_probs(self, batch: DataProto) -> Tensor:
        """Log-probs `(B, R)` of the trained tokens under the present weights, float64, zero elsewhere."""
        found = self.workers.model.compute_log_prob(batch, self.forward_plan(batch))
        return found.batch["old_log_probs"].double()
