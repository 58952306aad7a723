"""The critic's worker: a value per response token, and the update that teaches it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.protocol import DataProto
from hrl.single_controller.dispatch import Dispatch, register
from hrl.workers.actor_rollout_ref import ROW_COLUMNS
from hrl.workers.runtime import Runtime
from hrl.workers.scalar_worker import ScalarModelWorker

if TYPE_CHECKING:
    from hrl.batching import RankPlan


class CriticWorker(ScalarModelWorker):
    """One rank of the critic.

    Args:
        config: The `critic` part of the configuration.
        runtime: Device, threads, widths and deadlines of this process.
        model_path: Folder of the model the critic starts from, on the driver's node.
        total_optimizer_steps: Length of the run, over which learning rate schedules are stretched.
    """

    def __init__(
        self, config: Any, total_optimizer_steps: int | None = None, *, runtime: Runtime, model_path: str
    ) -> None:
        super().__init__(config, config, total_optimizer_steps, runtime=runtime, model_path=model_path)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN, columns=ROW_COLUMNS)
    def compute_values(self, batch: DataProto, plan: RankPlan | None) -> DataProto:
        """`values (B, R)`: the value of the state before each response token."""
        return self.value_model.compute_values(batch, plan)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN, columns=(*ROW_COLUMNS, "values", "returns"))
    def update_critic(self, batch: DataProto, plan: RankPlan | None) -> DataProto:
        """Run every optimizer step of the plan and return its metrics."""
        return DataProto(meta_info={"metrics": self.value_model.update(batch, plan)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Write the sharded state below `folder`."""
        self.value_model.save(Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Load what `save_checkpoint` wrote."""
        self.value_model.load(Path(folder))
