"""The critic's worker: a value per response token, and the update that teaches it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hrl.protocol import DataProto
from hrl.single_controller.dispatch import Dispatch, register
from hrl.workers.model_worker import ScalarModelWorker

if TYPE_CHECKING:
    from hrl.batching.plan import RankPlan
    from hrl.metrics import Metric
    from hrl.workers.requests import ScalarRequest, ValueUpdate


class CriticWorker(ScalarModelWorker):
    """One rank of the critic."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def compute_values(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `values (B, R)`: of the state before each response token."""
        return self.value_model.compute_values(batch, request)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def compute_last_values(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `last_values (B,)`: of the state behind each row's last token."""
        return self.value_model.compute_scores(batch, request).rename("rm_scores", "last_values")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def update_critic(self, batch: DataProto, request: ValueUpdate[RankPlan]) -> dict[str, Metric]:
        """Take every optimizer step of the plan; returns its metrics."""
        return self.value_model.update(batch, request)
