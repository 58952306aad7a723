"""The reward model's worker: one score per sampled sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hrl.protocol import DataProto
from hrl.single_controller.base import Worker
from hrl.single_controller.base.decorator import Dispatch, register
from hrl.workers.actor_rollout_ref import ROW_COLUMNS
from hrl.workers.runtime import Runtime, join_world

if TYPE_CHECKING:
    from hrl.batching import RankPlan


class RewardModelWorker(Worker):
    """One rank of the reward model, a sequence classifier with one label that reads the policy's own tokens.

    Args:
        config: the ``reward.reward_model`` part of the configuration.
        runtime: device, threads, widths and deadlines of this process.
        model_path: local folder of the classifier. Its tokenizer must be the policy's, which the preflight checks.
    """

    def __init__(self, config: Any, *, runtime: Runtime, model_path: str) -> None:
        super().__init__()
        self.config = config
        self.runtime = runtime
        self.model_path = model_path

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the classifier, frozen."""
        from hrl.workers.engine.loading import ModelSource
        from hrl.workers.value_model import ValueModel

        self.value_model = ValueModel(
            ModelSource.of(self.config.model, self.model_path, self.runtime),
            None,
            self.config.model.fsdp_config,
            device=join_world(self.runtime),
            total_steps=None,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN, columns=ROW_COLUMNS)
    def compute_rm_score(self, batch: DataProto, plan: RankPlan | None) -> DataProto:
        """``rm_scores (B,)``: the classifier's score of prompt and response at the last token."""
        return self.value_model.compute_scores(batch, plan)
