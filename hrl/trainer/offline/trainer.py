"""The driver of a run that learns from a data set: one model, one optimizer step per batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hrl.batching.plan import BatchPlan
from hrl.batching.planner import lengths_of
from hrl.cluster.roles import Role
from hrl.config.offline import OfflineConfig
from hrl.errors import NonFiniteError
from hrl.metrics import Metric, StepMetrics, validation_of
from hrl.pictures import has_pictures
from hrl.protocol import DataProto
from hrl.report import health
from hrl.trainer.loop import TrainingLoop
from hrl.workers.requests import LogProbRequest, temperature_of

#: Items of one forward pass over a data set: enough to fill every rank, few enough for a call's deadline.
FORWARD_ITEMS = 512


class OfflineTrainer(TrainingLoop):
    """What the offline trainers share. Each says how it learns (`update`) and how it is validated (`score`)."""

    config: OfflineConfig
    learners = (Role.Actor,)

    # ------------------------------------------------------------------ what a trainer is

    @abstractmethod
    def update(self, batch: DataProto) -> list[dict[str, Metric]]:
        """Take the one optimizer step of a batch; returns the metrics of every rank."""

    @abstractmethod
    def score(self, batch: DataProto) -> dict[str, Tensor]:
        """Return the metrics of every item of a validation batch, `(N,)` each, and its `weight` in their means."""

    # ------------------------------------------------------------------ the loop's parts

    def train_step(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        """Learn from one batch, in the phase `update`."""
        with self.phase("update"):
            metrics.observe(*self.update(batch))
        return batch

    def validate(self) -> dict[str, float]:
        """Return the mean of every metric over the validation items of every source, `val/<source>/<metric>`."""
        if self.val_dataset is None:
            return {}
        with self.phase("testing"):
            scores = [self.score(batch) for batch in self.val_dataset.in_order(FORWARD_ITEMS)]
        columns = {name: torch.cat([score[name] for score in scores]) for name in scores[0]}
        weights = columns.pop("weight")
        return metrics_by_source(self.val_dataset.sources, columns, weights)

    def describe(self, batch: DataProto) -> dict[str, float]:
        """Return lengths of prompts and answers, and how many tokens of the batch are trained on."""
        prompt_lens, response_lens = lengths_of(batch)
        return {
            "prompt_length/mean": float(prompt_lens.float().mean()),
            "response_length/mean": float(response_lens.float().mean()),
            "prompt_length/max": float(prompt_lens.max()),
            "response_length/max": float(response_lens.max()),
            "train/tokens": float(batch.batch["response_mask"].sum()),
        }

    def validation_score(self, metrics: Mapping[str, float]) -> float | None:
        """Return the loss of the validation, over its sources, with the other sign."""
        loss = health.validation_loss(metrics)
        return None if loss is None else -loss

    @property
    def save_contents(self) -> Sequence[str]:
        """What a checkpoint holds: `checkpoint.save_contents`."""
        return self.config.checkpoint.save_contents

    # ------------------------------------------------------------------ plans and passes

    def pair_plan(self, batch: DataProto) -> BatchPlan:
        """Return one step over a batch of pairs."""
        world_size = self.workers.model.world_size
        return self.planner.pairs(batch, world_size, self.limits["model"], mini_batch_pairs=len(batch) // 2)

    def forward_plan(self, batch: DataProto) -> BatchPlan:
        """Return a pass over every row, without gradients."""
        return self.planner.forward(batch, self.workers.model.world_size, self.limits["model"])

    def log_probs(self, batch: DataProto) -> Tensor:
        """Return log-probs `(B, R)` of the trained tokens under the present weights, float64, zero elsewhere."""
        request = LogProbRequest(
            plan=self.forward_plan(batch),
            temperature=temperature_of(batch.meta_info),
            with_pictures=has_pictures(batch.non_tensor_batch),
        )
        return self.workers.model.compute_log_prob(batch, request).batch["old_log_probs"].double()


def pair_scores(losses: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return the metrics of N pairs, from their losses and the rewards of both answers, `(N,)` each."""
    return {
        "loss": losses,
        "rewards_chosen": chosen,
        "rewards_rejected": rejected,
        "rewards_margins": chosen - rejected,
        "rewards_accuracies": (chosen > rejected).double(),
        "weight": torch.ones(len(losses)),
    }


def metrics_by_source(sources: Sequence[str], columns: Mapping[str, Tensor], weights: Tensor) -> dict[str, float]:
    """Return weighted means over the items of every source.

    Args:
        sources: Source of each item (N,).
        columns: Per metric a number for each item (N,).
        weights: Of the items in their source's mean (N,).

    Returns:
        `val/<source>/<metric>`, and `val/<source>/n`, the number of items.

    Raises:
        NonFiniteError: A number is not finite; names metric, item and source.
    """
    for name, values in columns.items():
        bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
        if bad:
            raise NonFiniteError(
                f"the {name} of validation item {bad[0]} (source {sources[bad[0]]!r}) is {values[bad[0]]}: look at "
                "this row, which may be too long for the model's dtype, and at train/grad_norm of the last steps"
            )
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        mine = torch.tensor([other == source for other in sources])
        weight = weights[mine].double()
        for name, values in columns.items():
            metrics[f"{validation_of(source)}/{name}"] = float(values[mine].double() @ weight / weight.sum())
        metrics[f"{validation_of(source)}/n"] = float(mine.sum())
    return metrics
