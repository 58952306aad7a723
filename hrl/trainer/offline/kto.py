"""KTO: the policy learns from single answers, each labelled good or bad (Ethayarajh et al. 2024, arXiv:2402.01306).

With the log-ratio `r = log pi(y|x) - log ref(y|x)`, a good answer's loss is `1 - sigmoid(beta (r - z))` and a bad one's
`1 - sigmoid(beta (z - r))`, each with a weight (equations 7 and 8). The reference point `z` is an estimate of the KL
divergence: the mean of the log-ratios of the batch's prompts, each with the answer to another one, at least 0. It is
computed over the whole batch by the weights before the step, and has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hrl.algos.preference import LabelledOptions, kto_baseline, labelled_loss
from hrl.algos.registry import LABELLED_LOSS_TRAITS
from hrl.metrics import Metric
from hrl.pictures import has_pictures
from hrl.protocol import DataProto
from hrl.trainer.offline.dpo import DPOTrainer, blocks_of, each_once
from hrl.trainer.offline.trainer import FORWARD_ITEMS
from hrl.workers.requests import LabelledUpdate, temperature_of

if TYPE_CHECKING:
    from hrl.data.offline.labelled import LabelledDataset


class KTOTrainer(DPOTrainer):
    """Learns from labelled answers by any loss of `hrl.algos.preference.LABELLED_LOSSES`."""

    train_dataset: LabelledDataset

    @property
    def labelled_options(self) -> LabelledOptions:
        """The constants of the loss."""
        algorithm = self.config.algorithm
        return LabelledOptions(algorithm.beta, algorithm.desirable_weight, algorithm.undesirable_weight)

    def before_load(self) -> None:
        """Choose each prompt's other answer, and compute the reference's log-probs of all rows to come."""
        order, size = self.train_dataset.order, self.config.data.train_batch_size
        self.train_dataset.mismatch(blocks_of(each_once(order), size))
        if self.val_dataset is not None:
            self._mismatch_in_order(self.val_dataset)
        super().before_load()

    def _mismatch_in_order(self, dataset: LabelledDataset) -> None:
        dataset.mismatch(blocks_of(range(len(dataset)), FORWARD_ITEMS))

    def ask_reference(self, dataset: Any, blocks: Sequence[Sequence[int]]) -> None:
        """Store the log-probs of the present weights in a data set, block by block."""
        if not dataset.is_mismatched:
            self._mismatch_in_order(dataset)
        found = [(self.sums(dataset.batch(block)), self.sums(dataset.mismatched(block))) for block in blocks]
        for block, (own, others) in zip(blocks, found, strict=True):
            dataset.set_reference(block, own, others)

    def sums(self, batch: DataProto) -> Tensor:
        """Return the log-probs of whole answers under the present weights `(B,)`."""
        return self.log_probs(batch).sum(-1)

    def baseline(self, dataset: LabelledDataset, indices: Iterable[int]) -> float:
        """Return the reference point of a batch of these rows by the present weights; 0 for a loss without one."""
        if not LABELLED_LOSS_TRAITS[self.config.algorithm.loss_type].baseline:
            return 0.0
        rows = dataset.mismatched(indices)
        return kto_baseline(self.sums(rows) - rows.batch["ref_sequence_log_prob"])

    def update(self, batch: DataProto) -> list[dict[str, Metric]]:
        """Move the policy towards the good and away from the bad answers of a batch."""
        plan = self.planner.update(
            batch, self.workers.model.world_size, self.limits["model"], mini_batch_rows=len(batch), epochs=1
        )
        baseline = self.baseline(self.train_dataset, batch.non_tensor_batch["index"])
        request = LabelledUpdate(
            plan=plan,
            step=self.global_steps,
            router_aux_loss_coef=self.config.algorithm.router_aux_loss_coef,
            temperature=temperature_of(batch.meta_info),
            loss_type=self.config.algorithm.loss_type,
            options=self.labelled_options,
            baseline=baseline,
            with_pictures=has_pictures(batch.non_tensor_batch),
        )
        return [*self.workers.model.update_actor(batch, request), {"train/kl": Metric.mean(baseline, 1)}]

    def score(self, batch: DataProto) -> dict[str, Tensor]:
        """Return loss and implicit reward of every answer, and whether it is on its label's side of the baseline."""
        dataset, columns = self.val_dataset, batch.batch
        assert dataset is not None, "there is something to validate on"
        baseline = self.baseline(dataset, batch.non_tensor_batch["index"])
        ratios, options = self.sums(batch) - columns["ref_sequence_log_prob"], self.labelled_options
        losses, _ = labelled_loss(self.config.algorithm.loss_type, ratios, columns["is_desirable"], baseline, options)
        right = (ratios > baseline) == columns["is_desirable"]
        return {
            "loss": losses,
            "rewards": options.beta * ratios,
            "rewards_accuracies": right.double(),
            "weight": losses.new_ones(len(losses)),
        }
