"""What the reward service gives the driver, with a service that is no Ray actor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hrl.protocol import DataProto
from hrl.reward.loop import RewardBatch, RewardResult
from hrl.trainer.config import compose_cli
from hrl.trainer.ppo.rewards import RewardService


class LocalService(RewardService):
    """Calls the sink in this process."""

    def _call(self, method: Any, timeout_s: float, *args: Any) -> Any:
        return method(*args)


def sampled(**columns: torch.Tensor) -> DataProto:
    """Three responses of two tokens."""
    return DataProto.from_dict(
        tensors={
            "attention_mask": torch.ones(3, 4, dtype=torch.int64),
            "responses": torch.zeros(3, 2, dtype=torch.int64),
            "response_mask": torch.ones(3, 2, dtype=torch.int64),
            **columns,
        },
        non_tensors={"uid": np.array(["a", "a", "a"], dtype=object)},
    )


def test_a_reward_model_alone_gives_both_scores() -> None:
    service = LocalService(
        compose_cli(
            [
                "reward.function_weight=0",
                "reward.reward_model.enable=true",
                "reward.reward_model.model_path=some/model",
                "reward.reward_model.weight=0.5",
            ]
        ),
        (),
    )
    batch = sampled(rm_scores=torch.tensor([1.0, 2.0, 4.0]))
    combined = service.collect(batch, {})
    assert combined.scores.tolist() == [0.5, 1.0, 2.0]
    assert combined.plain.tolist() == [1.0, 2.0, 4.0]
    assert [part["reward_model"] for part in batch.non_tensor_batch["reward_parts"]] == [1.0, 2.0, 4.0]


def test_a_left_out_row_trains_nothing_and_the_plain_score_has_no_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = RewardBatch(tuple(RewardResult(score, {}) for score in (1.0, None, 0.0)), {})
    sink = SimpleNamespace(collect=lambda step, deadline_s: scored)
    monkeypatch.setattr(
        "hrl.trainer.ppo.rewards.ray.remote", lambda **_: lambda _: SimpleNamespace(remote=lambda *_: sink)
    )
    overlong = ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=2", "data.max_response_length=2"]
    service = LocalService(compose_cli(["reward.function_weight=2.0", *overlong]), ())
    batch = sampled()
    combined = service.collect(batch, {})
    assert combined.scores.tolist() == [1.0, 0.0, -1.0]
    assert combined.plain.tolist() == [1.0, 0.0, 0.0]
    assert combined.kept.tolist() == [True, False, True]
    assert batch.batch["response_mask"].tolist() == [[1, 1], [0, 0], [1, 1]]
