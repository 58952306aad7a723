"""The reward model's worker: one score per sequence, and the update that teaches it which answers are preferred."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.protocol import DataProto
from hrl.single_controller.dispatch import Dispatch, register
from hrl.workers.model_worker import ScalarModelWorker

if TYPE_CHECKING:
    import torch

    from hrl.batching.plan import RankPlan
    from hrl.metrics import Metric
    from hrl.workers.engine.engine import Engine
    from hrl.workers.requests import RewardModelUpdate, ScalarRequest
    from hrl.workers.step_model import StepModel


class RewardModelWorker(ScalarModelWorker):
    """One rank of the reward model, a sequence classifier with one label.

    It reads the tokens that it gets: the policy's own, or those that the driver has made of each chat with the model's
    own chat template and tokenizer. One that learns may start from a causal language model.

    Args:
        says_words: The model is a language model that judges steps by a word, and has no scalar head.
        arguments, options: Of `ModelWorker`.
    """

    step_model: StepModel | None = None

    def __init__(self, *arguments: Any, says_words: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.says_words = says_words

    @property
    def engine(self) -> Engine:
        """The sharded model."""
        return super().engine if self.step_model is None else self.step_model.engine

    def load(self, device: torch.device) -> None:
        """Load the model onto this rank's device."""
        if self.says_words:
            from hrl.workers.step_model import StepModel

            self.step_model = StepModel(self.model_source(), self.model.fsdp_config, device=device)
        else:
            super().load(device)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def compute_rm_score(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `rm_scores (B,)`: the classifier's score of prompt and response at the last token."""
        return self.value_model.compute_scores(batch, request)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def compute_step_scores(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `rm_step_scores (B, R)` of a process reward model; see `ValueModel` and `StepModel`."""
        model = self.value_model if self.step_model is None else self.step_model
        return model.compute_step_scores(batch, request)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def update_reward_model(self, batch: DataProto, request: RewardModelUpdate[RankPlan]) -> dict[str, Metric]:
        """Take every optimizer step of the plan on pairs; returns its metrics."""
        return self.value_model.update(batch, request)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, folder: str, record: str | None = None) -> None:
        """Have the classifier for transformers written to `folder`; see `ModelWorker.export_hf`."""
        named = None if record is None else Path(record)
        self.value_model.begin_export(Path(folder), named, pad_token_id=self.runtime.tokens.pad)
