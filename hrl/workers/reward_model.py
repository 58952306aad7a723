"""The reward model's worker: one score per sequence, and the update that teaches it which answers are preferred."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hrl.protocol import DataProto
from hrl.single_controller.dispatch import Dispatch, register
from hrl.workers.runtime import Runtime
from hrl.workers.scalar_worker import ScalarModelWorker

if TYPE_CHECKING:
    from hrl.batching.plan import RankPlan
    from hrl.config.model import CheckpointConfig
    from hrl.metrics import Metric
    from hrl.workers.requests import RewardModelUpdate, ScalarRequest, Training
    from hrl.workers.scalar_worker import ScalarModelSection


class RewardModelWorker(ScalarModelWorker):
    """One rank of the reward model, a sequence classifier with one label that reads the policy's own tokens.

    One that learns may start from a causal language model. Its tokenizer must be the policy's, which the preflight
    checks.

    Args:
        model: Its section.
        training: How it learns; `None` for a frozen one.
        checkpoint: What is saved and loaded of one that learns.
        runtime: Device, threads, widths and deadlines of this process.
        model_path: Folder of the classifier on the driver's node.
    """

    def __init__(
        self,
        model: ScalarModelSection,
        training: Training | None = None,
        checkpoint: CheckpointConfig | None = None,
        *,
        runtime: Runtime,
        model_path: str,
    ) -> None:
        super().__init__(model, training, runtime=runtime, model_path=model_path)
        self.checkpoint = checkpoint

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def compute_rm_score(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `rm_scores (B,)`: the classifier's score of prompt and response at the last token."""
        return self.value_model.compute_scores(batch, request)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def update_reward_model(self, batch: DataProto, request: RewardModelUpdate[RankPlan]) -> dict[str, Metric]:
        """Take every optimizer step of the plan on pairs; returns its metrics."""
        from hrl.workers.offline_updates import update_reward_model

        return update_reward_model(self.value_model, batch, request)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Write the sharded state to `folder`."""
        self.value_model.engine.save(Path(folder), self._contents.save_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, folder: str) -> None:
        """Write the classifier for transformers to `folder`."""
        self.value_model.export_classifier(Path(folder), pad_token_id=self.runtime.pad_token_id)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Load what `save_checkpoint` wrote."""
        self.value_model.engine.load(Path(folder), self._contents.load_contents)

    @property
    def _contents(self) -> CheckpointConfig:
        if self.checkpoint is None:
            raise RuntimeError("a frozen reward model has no state of its own to save or load")
        return self.checkpoint
