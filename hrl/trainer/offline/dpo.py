"""DPO: the policy learns to prefer the chosen answers, without a reward model and without sampling.

The implicit reward of an answer `y` to the prompt `x` is `beta (log pi(y|x) - log ref(y|x))`, and the loss of a
pair is `-log sigmoid` of the chosen answer's reward less the rejected one's (Rafailov et al. 2023, arXiv:2305.18290,
equation 7). The reference is the model that the run starts from: the log-probs of the pairs that the run will visit are
computed once, by the same engine, before a checkpoint is loaded or a step is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hrl.algos.preference import PairOptions, pair_margins, preference_loss
from hrl.config.offline import DPOTrainerConfig
from hrl.errors import DatasetError
from hrl.metrics import Metric
from hrl.pictures import has_pictures
from hrl.protocol import DataProto
from hrl.trainer.offline.trainer import FORWARD_ITEMS, OfflineTrainer, pair_scores
from hrl.workers.requests import PreferenceUpdate, temperature_of

if TYPE_CHECKING:
    from hrl.data.offline.pairs import PairDataset
    from hrl.data.order import EpochOrder


class DPOTrainer(OfflineTrainer):
    """Learns from pairs by any loss of `hrl.algos.preference.PAIR_LOSSES`."""

    config: DPOTrainerConfig

    @property
    def options(self) -> PairOptions:
        """The constants of the loss."""
        algorithm = self.config.algorithm
        return PairOptions(algorithm.beta, algorithm.label_smoothing, algorithm.target_margin)

    def before_load(self) -> None:
        """Compute the reference's log-probs of all pairs to come. The reference is the model before its first step."""
        if not self.config.needs_reference:
            return
        with self.phase("ref"):
            self.ask_reference(self.train_dataset, self.blocks_ahead())
            if self.val_dataset is not None:
                self.ask_reference(self.val_dataset, blocks_of(range(len(self.val_dataset)), FORWARD_ITEMS))

    def other_rows(self, rows: Any) -> PairDataset:
        """Return other pairs with the reference's log-probs, which only the model before its first step can give.

        Raises:
            DatasetError: The model has been trained.
        """
        dataset: PairDataset = super().other_rows(rows)
        if self.config.needs_reference:
            if self.global_steps > 0:
                raise DatasetError(
                    "other pairs can't be compared with the reference, which is the model before its first step: name "
                    "them as validation rows (val_data, or data.val_files), or evaluate them before training"
                )
            self.ask_reference(dataset, blocks_of(range(len(dataset)), FORWARD_ITEMS))
        return dataset

    def blocks_ahead(self) -> list[Sequence[int]]:
        """Return the batches of the first epoch and of what it leaves out, of those that the rest of the run visits."""
        # A log-prob's last bits depend on the other rows of its forward pass. These blocks depend on the order alone,
        # not on where the run begins or ends: a resumed run has the numbers of one that was never interrupted.
        order, size = self.train_dataset.order, self.config.data.train_batch_size
        ahead = order.ahead(self.data_position, size, self.total_training_steps - self.global_steps)
        return [block for block in blocks_of(each_once(order), size) if ahead[block].any()]

    def ask_reference(self, dataset: PairDataset, blocks: Sequence[Sequence[int]]) -> None:
        """Store the log-probs of the present weights in a data set, block by block."""
        found = [self.log_probs(dataset.batch(block)).sum(-1) for block in blocks]
        for block, sums in zip(blocks, found, strict=True):
            dataset.set_reference(block, sums)

    def update(self, batch: DataProto) -> list[dict[str, Metric]]:
        """Move the policy towards the chosen and away from the rejected answers of a batch."""
        request = PreferenceUpdate(
            plan=self.pair_plan(batch),
            step=self.global_steps,
            router_aux_loss_coef=self.config.algorithm.router_aux_loss_coef,
            temperature=temperature_of(batch.meta_info),
            loss_type=self.config.algorithm.loss_type,
            options=self.options,
            has_reference=self.config.needs_reference,
            measures_mismatch=False,
            with_pictures=has_pictures(batch.non_tensor_batch),
        )
        return self.workers.model.update_actor(batch, request)

    def score(self, batch: DataProto) -> dict[str, Tensor]:
        """Return loss and implicit rewards of every pair; see `pair_scores`."""
        name, options = self.config.algorithm.loss_type, self.options
        columns, slots = batch.batch, range(0, len(batch), 2)
        margins = pair_margins(
            name,
            self.log_probs(batch).sum(-1),
            columns["response_mask"].sum(-1),
            [*slots],
            [slot + 1 for slot in slots],
            columns["ref_sequence_log_prob"] if self.config.needs_reference else None,
        )
        chosen, rejected = (options.beta * margin for margin in margins)
        return pair_scores(preference_loss(name, *margins, options)[0], chosen, rejected)


def each_once(order: EpochOrder) -> list[int]:
    """Return every row once: those of the first epoch as it has them, then those that only later ones draw.

    Of sources with weights an epoch has some rows several times, and others not at all.
    """
    first = dict.fromkeys(order.epoch(0).tolist())
    return [*first, *(row for row in range(order.num_rows) if row not in first)]


def blocks_of(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    """Return the rows in their order, `size` at a time."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]
