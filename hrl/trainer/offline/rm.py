"""A reward model: a scalar head over a language model learns to score chosen answers above rejected ones.

With the scores `s` that the head gives at the last tokens, the loss of a pair is `-log sigmoid(s_c - s_r - margin)`
(Bradley and Terry; Ouyang et al. 2022, arXiv:2203.02155, equation 1; with a margin Touvron et al. 2023,
arXiv:2307.09288, equation 2). What it saves as `hf` is what `reward.reward_model.model_path` takes.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hrl.algos.preference import reward_model_loss
from hrl.cluster.roles import Role
from hrl.metrics import Metric
from hrl.pictures import has_pictures
from hrl.protocol import DataProto
from hrl.trainer.offline.trainer import OfflineTrainer, pair_scores
from hrl.workers.requests import RewardModelUpdate, ScalarRequest


class RMTrainer(OfflineTrainer):
    """Learns scores from pairs.

    Attributes:
        loss_type: A key of `hrl.algos.preference.REWARD_MODEL_LOSSES`; a subclass may name another.
    """

    learners = (Role.RewardModel,)
    loss_type: ClassVar[str] = "bradley_terry"

    def update(self, batch: DataProto) -> list[dict[str, Metric]]:
        """Make the model score the chosen answers of a batch above the rejected ones."""
        request = RewardModelUpdate(
            plan=self.pair_plan(batch),
            step=self.global_steps,
            loss_type=self.loss_type,
            with_pictures=has_pictures(batch.non_tensor_batch),
        )
        return self.workers.model.update_reward_model(batch, request)

    def score(self, batch: DataProto) -> dict[str, Tensor]:
        """Return loss and scores of every pair; see `pair_scores`."""
        request = ScalarRequest(plan=self.forward_plan(batch), with_pictures=has_pictures(batch.non_tensor_batch))
        scores = self.workers.model.compute_rm_score(batch, request).batch["rm_scores"].double()
        chosen, rejected = scores[0::2], scores[1::2]
        losses, _ = reward_model_loss(chosen, rejected, batch.batch["margin"][0::2], name=self.loss_type)
        return pair_scores(losses, chosen, rejected)
