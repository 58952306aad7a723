"""Workers of the reward model: one score per sequence, and the update that teaches it which answers are preferred."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hrl.models.source import find_on_this_node
from hrl.protocol import DataProto
from hrl.single_controller.dispatch import Dispatch, register
from hrl.workers.model_worker import ModelWorker, ScalarModelWorker
from hrl.workers.runtime import join_world

if TYPE_CHECKING:
    from hrl.batching.plan import RankPlan
    from hrl.config.reward import RewardBackboneConfig
    from hrl.metrics import Metric
    from hrl.workers.engine.engine import Engine
    from hrl.workers.requests import RewardModelUpdate, ScalarRequest
    from hrl.workers.step_model import StepModel


class RewardModelWorker(ScalarModelWorker):
    """One rank of the reward model, a sequence classifier with one label.

    It reads the tokens that it gets: the policy's own, or those that the driver has made of each chat with the model's
    own chat template and tokenizer. One that learns may start from a causal language model.
    """

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def compute_rm_score(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `rm_scores (B,)`: the classifier's score of prompt and response at the last token."""
        return self.value_model.compute_scores(batch, request)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def compute_step_scores(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `rm_step_scores (B, R)` of a process reward model; see `ValueModel`."""
        return self.value_model.compute_step_scores(batch, request)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def update_reward_model(self, batch: DataProto, request: RewardModelUpdate[RankPlan]) -> dict[str, Metric]:
        """Take every optimizer step of the plan on pairs; returns its metrics."""
        return self.value_model.update(batch, request)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, folder: str, record: str | None = None) -> None:
        """Have the classifier for transformers written to `folder`; see `ModelWorker.export_hf`."""
        named = None if record is None else Path(record)
        self.value_model.begin_export(Path(folder), named, pad_token_id=self.runtime.tokens.pad)


class StepModelWorker(ModelWorker):
    """One rank of a process reward model that is a language model, and judges each step by a word."""

    model: RewardBackboneConfig
    step_model: StepModel

    @property
    def engine(self) -> Engine:
        """The sharded model."""
        return self.step_model.engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model, which learns nothing."""
        from hrl.workers.step_model import StepModel

        self.model_path = str(find_on_this_node(self.model_path))
        device = join_world(self.runtime)
        self.step_model = StepModel(self.model_source(), self.model.fsdp_config, device=device)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def compute_step_scores(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `rm_step_scores (B, R)`; see `StepModel`."""
        return self.step_model.compute_step_scores(batch, request)
