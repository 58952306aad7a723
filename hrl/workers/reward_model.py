"""The reward model's worker: one score per sequence, and the update that teaches it which answers are preferred."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.protocol import DataProto
from hrl.single_controller.dispatch import Dispatch, register
from hrl.workers.actor_rollout_ref import PAIR_COLUMNS, ROW_COLUMNS
from hrl.workers.runtime import Runtime
from hrl.workers.scalar_worker import ScalarModelWorker

if TYPE_CHECKING:
    from hrl.batching import RankPlan


class RewardModelWorker(ScalarModelWorker):
    """One rank of the reward model, a sequence classifier with one label that reads the policy's own tokens.

    Args:
        config: The `reward.reward_model` part of the configuration; of it the section `model` is read.
        train: `optim`, `grad_clip` and `checkpoint` of a reward model that learns; `None` for a frozen one.
        total_optimizer_steps: Length of the run, over which learning rate schedules are stretched.
        runtime: Device, threads, widths and deadlines of this process.
        model_path: Folder of the classifier on the driver's node; one that learns may start from a causal language
            model. Its tokenizer must be the policy's, which the preflight checks.
    """

    def __init__(
        self,
        config: Any,
        train: Any | None = None,
        total_optimizer_steps: int | None = None,
        *,
        runtime: Runtime,
        model_path: str,
    ) -> None:
        super().__init__(config, train, total_optimizer_steps, runtime=runtime, model_path=model_path)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN, columns=ROW_COLUMNS)
    def compute_rm_score(self, batch: DataProto, plan: RankPlan | None) -> DataProto:
        """`rm_scores (B,)`: the classifier's score of prompt and response at the last token."""
        return self.value_model.compute_scores(batch, plan)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN, columns=(*ROW_COLUMNS, *PAIR_COLUMNS))
    def update_reward_model(self, batch: DataProto, plan: RankPlan | None) -> DataProto:
        """Run every optimizer step of the plan on pairs and return its metrics; see `offline_updates`."""
        from hrl.workers.offline_updates import update_reward_model

        return DataProto(meta_info={"metrics": update_reward_model(self.value_model.engine, batch, plan)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Write the sharded state to `folder`."""
        self.value_model.save(Path(folder), self._trained.checkpoint.save_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, folder: str) -> None:
        """Write the classifier for transformers to `folder`."""
        self.value_model.export_classifier(Path(folder), pad_token_id=self.runtime.pad_token_id)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Load what `save_checkpoint` wrote."""
        self.value_model.load(Path(folder), self._trained.checkpoint.load_contents)

    @property
    def _trained(self) -> Any:
        if self.train is None:
            raise RuntimeError("a frozen reward model has no state of its own to save or load")
        return self.train
