"""A language model that judges steps by a word: the probability of the one that it says behind a right step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hrl.models.loading import load_causal_lm
from hrl.models.packed_model import PackedCausalLM, PackedMicroBatch, TokenRows
from hrl.protocol import DataProto
from hrl.workers.engine.engine import Engine
from hrl.workers.requests import ScalarRequest

if TYPE_CHECKING:
    from hrl.batching.plan import RankPlan
    from hrl.config.model import ForwardShardingConfig, FsdpConfig
    from hrl.models.loading import ModelSource


class StepModel:
    """A sharded language model that learns nothing.

    Args:
        model: Which model, and how it is loaded.
        fsdp: The sharding's configuration.
        device: Of this rank.
    """

    def __init__(self, model: ModelSource, fsdp: FsdpConfig | ForwardShardingConfig, *, device: torch.device) -> None:
        self.engine = Engine(load_causal_lm, PackedCausalLM, model, None, fsdp, device=device)

    def compute_step_scores(self, batch: DataProto, request: ScalarRequest[RankPlan]) -> DataProto:
        """Compute `rm_step_scores (B, R)` float32, read at the token *before* each that the mask marks.

        A score is the softmax over the logits of the request's two words, of the first: Math-Shepherd
        (arXiv:2312.08935, section 3.4), which trains a language model to say one of two words behind each step.
        """
        assert request.reward_ids is not None, "a language model judges by two words"
        words = torch.tensor(request.reward_ids)

        def run(packed: PackedMicroBatch) -> tuple[Tensor]:
            at = words.to(packed.labels.device).expand(len(packed.labels), -1)
            found = self.engine.module(packed, 1.0, False, at=at).log_prob_at
            return ((found[:, 0] - found[:, 1]).sigmoid(),)

        (scores,) = self.engine.forward(TokenRows.of(batch), request.plan, run, num_outputs=1)
        return DataProto.from_dict(tensors={"rm_step_scores": scores})
