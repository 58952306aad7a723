"""DPO: the policy learns to prefer the chosen answers, without a reward model and without sampling.

The implicit reward of an answer ``y`` to the prompt ``x`` is ``beta (log pi(y|x) - log ref(y|x))``, and the loss of a
pair is ``-log sigmoid`` of the chosen answer's reward less the rejected one's (Rafailov et al. 2023, arXiv:2305.18290,
equation 7). The reference is the model that the run starts from: its log-probs are computed once, by the same engine,
before a checkpoint is loaded or a step is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hrl.algos.preference import PairOptions, pairs_of_sums, preference_loss
from hrl.batching import BatchPlan
from hrl.protocol import DataProto
from hrl.trainer.offline.trainer import FORWARD_ITEMS, OfflineTrainer


class DPOTrainer(OfflineTrainer):
    """Learns from pairs by any loss of ``hrl.algos.preference.PAIR_LOSSES``."""

    @property
    def preference(self) -> dict[str, Any]:
        """The loss and its constants, as workers take them."""
        algorithm = self.config.algorithm
        names = ("loss_type", "beta", "label_smoothing", "target_margin")
        return {name: getattr(algorithm, name) for name in names}

    def restore(self) -> None:
        """The reference is the model before its first step, so it is asked before a checkpoint is loaded."""
        if self.config.needs_reference:
            with self.phase("ref"):
                for dataset in (self.train_dataset, self.val_dataset):
                    if dataset is not None:
                        batches = dataset.in_order(FORWARD_ITEMS)
                        dataset.set_reference(torch.cat([self.log_probs(batch).sum(-1) for batch in batches]))
        super().restore()

    def plan(self, batch: DataProto) -> BatchPlan:
        world_size = self.workers.model.world_size
        return self.planner.pairs(batch, world_size, self.limits, mini_batch_pairs=len(batch) // 2)

    def update(self, batch: DataProto, plan: BatchPlan) -> DataProto:
        batch.meta_info["preference"] = self.preference
        return self.workers.model.update_preference(batch, plan)

    def score(self, batch: DataProto) -> dict[str, Tensor]:
        """Loss and implicit rewards of every pair."""
        settings = self.preference
        name, options = settings.pop("loss_type"), PairOptions(**settings)
        columns, slots = batch.batch, range(0, len(batch), 2)
        pairs = pairs_of_sums(
            name,
            self.log_probs(batch).sum(-1),
            columns["response_mask"].sum(-1),
            [*slots],
            [slot + 1 for slot in slots],
            columns["ref_sequence_log_prob"] if "ref_sequence_log_prob" in columns.keys() else None,
        )
        chosen, rejected = (options.beta * margin for margin in pairs.margins())
        return {
            "loss": preference_loss(name, pairs, options)[0],
            "rewards_chosen": chosen,
            "rewards_rejected": rejected,
            "rewards_margins": chosen - rejected,
            "rewards_accuracies": (chosen > rejected).double(),
        }
