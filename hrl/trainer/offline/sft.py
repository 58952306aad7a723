"""Supervised fine-tuning: the policy imitates answers, token by token.

The loss is the negative log-likelihood of the assistant's tokens, `-log pi(y_t | x, y_<t)`, of which
`algorithm.loss_agg_mode` makes one number; the prompt's tokens are read and not trained on.
"""

from __future__ import annotations

import math
import sys
from typing import ClassVar

from torch import Tensor

from hrl.config.offline import SFTTrainerConfig
from hrl.metrics import Metric, StepMetrics
from hrl.pictures import has_pictures
from hrl.protocol import DataProto
from hrl.trainer.offline.trainer import OfflineTrainer
from hrl.workers.requests import SupervisedUpdate, temperature_of


class SFTTrainer(OfflineTrainer):
    """Learns from demonstrations.

    Attributes:
        loss_type: A key of `hrl.algos.preference.SFT_LOSSES`; a subclass may name another.
    """

    config: SFTTrainerConfig

    loss_type: ClassVar[str] = "nll"

    def update(self, batch: DataProto) -> list[dict[str, Metric]]:
        """Make the policy more likely to give the answers of a batch."""
        plan = self.planner.update(
            batch, self.workers.model.world_size, self.limits["model"], mini_batch_rows=len(batch), epochs=1
        )
        request = SupervisedUpdate(
            plan=plan,
            step=self.global_steps,
            router_aux_loss_coef=self.config.algorithm.router_aux_loss_coef,
            temperature=temperature_of(batch.meta_info),
            loss_type=self.loss_type,
            loss_agg_mode=self.config.algorithm.loss_agg_mode,
            loss_scale_factor=self.config.data.max_length,  # as long as any answer may be, and the same in all steps
            with_pictures=has_pictures(batch.non_tensor_batch),
        )
        return self.workers.model.update_actor(batch, request)

    def train_step(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        """Learn from one batch; adds `train/perplexity`."""
        batch = super().train_step(batch, metrics)
        metrics["train/perplexity"] = perplexity(metrics["train/nll"])
        return batch

    def score(self, batch: DataProto) -> dict[str, Tensor]:
        """Return the mean negative log-likelihood of every row; its weight is the number of its trained tokens."""
        tokens = batch.batch["response_mask"].sum(-1)
        return {"loss": -self.log_probs(batch).sum(-1) / tokens, "weight": tokens}

    def validate(self) -> dict[str, float]:
        """Return the mean loss and the perplexity of every source, and its number of rows."""
        metrics = super().validate()
        losses = {name: value for name, value in metrics.items() if name.endswith("/loss")}
        return metrics | {f"{name.removesuffix('loss')}perplexity": perplexity(value) for name, value in losses.items()}


def perplexity(nll: float) -> float:
    """Return `exp(nll)`; infinity where it is more than a float holds, as with a model that diverges.

    Args:
        nll: Mean negative log-likelihood of a token, in nats.
    """
    return math.inf if nll > math.log(sys.float_info.max) else math.exp(nll)
