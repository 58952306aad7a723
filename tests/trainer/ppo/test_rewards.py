"""What the reward service gives the driver, with a loop that is no Ray actor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hrl.columns import object_column
from hrl.config import compose_cli
from hrl.config.reward import RewardConfig
from hrl.metrics import StepMetrics
from hrl.protocol import DataProto
from hrl.reward.actor import RewardError
from hrl.reward.function import PickledFunction, RewardFunctionError, UserFile
from hrl.reward.pool import RewardOutcome, RewardRow
from hrl.reward.spec import RewardSpec
from hrl.trainer.ppo.rewards import RewardService


class Loop:
    """Gives every announced batch the same scores, and notes how it was called."""

    handle = "the actor"

    def __init__(self, spec: RewardSpec, reward: RewardConfig) -> None:
        self.spec, self.reward = spec, reward
        self.announced: list[tuple[int, Sequence[RewardRow], str | None]] = []
        self.collected: list[int] = []

    def begin(self, step: int, rows: Sequence[RewardRow], title: str | None = None) -> None:
        self.announced.append((step, rows, title))

    def collect(self, step: int, deadline_s: float) -> list[RewardOutcome]:
        self.collected.append(step)
        return [RewardOutcome("skip" if score is None else "ok", score) for score in (1.0, None, 0.0)]


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[Loop]:
    """The loops that services start."""
    made: list[Loop] = []

    def make(*args: Any) -> Loop:
        made.append(Loop(*args))
        return made[-1]

    monkeypatch.setattr("hrl.trainer.ppo.rewards.RewardActor", make)
    return made


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


def test_the_processes_are_as_the_configuration_says(loops: list[Loop]) -> None:
    config = compose_cli(["reward.memory_limit_gib=0.5", "reward.num_workers=3"])
    RewardService(config, ())
    assert loops[0].reward == config.reward


def test_a_reward_model_alone_gives_both_scores() -> None:
    service = RewardService(
        compose_cli(
            [
                "reward.reward_model.enable=true",
                "reward.reward_model.model_path=some/model",
                "reward.reward_model.weight=0.5",
            ]
        ),
        (),
    )
    assert service.sink is None
    batch = sampled(rm_scores=torch.tensor([1.0, 2.0, 4.0]))
    combined = service.collect(batch, StepMetrics())
    assert combined.scores.tolist() == [0.5, 1.0, 2.0]
    assert combined.plain.tolist() == [1.0, 2.0, 4.0]
    assert [part["reward_model"] for part in batch.non_tensor_batch["reward_parts"]] == [1.0, 2.0, 4.0]


def test_a_left_out_row_trains_nothing_and_the_plain_score_has_no_penalty(loops: list[Loop]) -> None:
    overlong = ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=2", "data.max_response_length=2"]
    service = RewardService(compose_cli(overlong), ())
    batch = sampled()
    combined = service.collect(batch, StepMetrics())
    assert combined.scores.tolist() == [0.0, 0.0, -1.0]
    assert combined.plain.tolist() == [1.0, 0.0, 0.0]
    assert combined.kept.tolist() == [True, False, True]
    assert batch.batch["response_mask"].tolist() == [[1, 1], [0, 0], [1, 1]]


def test_what_is_learnt_from_is_shaped_by_the_spread_of_training_rewards_alone(loops: list[Loop]) -> None:
    service = RewardService(compose_cli(["reward.shaping={standardise: null}"]), ())
    names = ("uid", "sample_index", "data_source", "reward_model", "extra_info", "columns", "raw_prompt")
    nothing = DataProto.from_dict(non_tensors={name: np.empty(0, dtype=object) for name in names})
    for step in (0, 1):
        service.begin(nothing, step, validate=step == 0)
        combined = service.collect(sampled(), StepMetrics(), validate=step == 0)
        assert service.shaping.state_dict()["standardise"]["count"] == 2 * step
    assert combined.scores.tolist() == pytest.approx([0.5**0.5, 0.0, -(0.5**0.5)])  # of 1, left out, 0
    assert combined.plain.tolist() == [1.0, 0.0, 0.0]


def test_samples_are_announced_by_their_keys_and_called_by_the_step_they_belong_to(loops: list[Loop]) -> None:
    service = RewardService(compose_cli([]), ("sums",))
    prompts = [[{"role": "user", "content": question}] for question in ("1 + 2?", "3 + 4?")]
    rows = DataProto.from_dict(
        non_tensors={
            "uid": np.array(["a", "b"], dtype=object),
            "sample_index": np.array([0, 1], dtype=object),
            "data_source": np.array(["sums", "sums"], dtype=object),
            "reward_model": np.array([{"ground_truth": "3"}, {"style": "rule"}], dtype=object),
            "extra_info": np.array([{"level": 1}, None], dtype=object),
            "raw_prompt": object_column(prompts),
            "columns": np.array([{"answer": "3"}, {}], dtype=object),
        },
    )
    rounds = [service.begin(rows, 4, validate=validate) for validate in (True, False)]
    (_, announced, validation), (_, _, training) = loops[0].announced
    assert list(announced) == [
        RewardRow(("a", 0), "sums", "3", {"level": 1}, {"answer": "3"}, prompts[0]),
        RewardRow(("b", 1), "sums", None, {}, {}, prompts[1]),
    ]
    assert (validation, training) == ("the validation after step 4", "step 4")
    assert rounds == [1, 2], "rounds count on, so that a late sample of the first is told apart"
    assert service.sink == "the actor"
    for validate in (True, False):
        service.collect(sampled(), StepMetrics(), validate=validate)
    assert loops[0].collected == rounds, "those of a validation and of the step beside it are not mixed up"


def test_the_function_is_named_by_where_it_lies_not_from_where_the_run_was_started(
    loops: list[Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    RewardService(compose_cli(["reward.custom_reward_function.path=mine.py"]), ())
    assert loops[0].spec.source == UserFile(str(tmp_path / "mine.py"))


def test_a_function_given_as_an_object_takes_the_place_of_the_file_and_gets_its_arguments(loops: list[Loop]) -> None:
    keys = "reward.custom_reward_function"
    RewardService(compose_cli([f"{keys}.reward_kwargs={{base: 2}}"]), ("sums",), pow_of_length)
    spec = loops[0].spec
    assert isinstance(spec.source, PickledFunction) and spec.kwargs == {"base": 2}
    with pytest.raises(RewardFunctionError, match=f"mine.py by {keys}.path; leave one of the two out"):
        RewardService(compose_cli([f"{keys}.path=mine.py"]), (), pow_of_length)


def pow_of_length(solution_str: str, base: float, **_: Any) -> float:
    return base ** len(solution_str)


def test_a_reward_model_that_gives_no_number_is_named_with_the_sample() -> None:
    model = ["reward.reward_model.enable=true", "reward.reward_model.model_path=some/model"]
    service = RewardService(compose_cli(model), ())
    batch = sampled(rm_scores=torch.tensor([1.0, 2.0, float("nan")]))
    batch.non_tensor_batch["sample_index"] = np.array([0, 1, 2], dtype=object)
    assert service.begin(batch, 7, validate=False) is None, "no sample is sent to a function that nobody has"
    with pytest.raises(RewardError, match="score of the reward model some/model is nan in step 7: uid a, sample 2"):
        service.collect(batch, StepMetrics())


def test_a_sum_that_float32_cannot_hold_is_named_with_the_sample(loops: list[Loop]) -> None:
    model = ["reward.reward_model.enable=true", "reward.reward_model.model_path=m", "reward.reward_model.weight=1e39"]
    service = RewardService(compose_cli(["reward.functions=[data_source]", *model]), ())
    batch = sampled(rm_scores=torch.tensor([1.0, 0.0, 0.0]))
    batch.non_tensor_batch["sample_index"] = np.array([0, 1, 2], dtype=object)
    service._rounds[False] = service._rounds[False]._replace(title="step 7")
    with pytest.raises(RewardError, match="sum of weighted and shaped scores is inf in step 7: uid a, sample 0"):
        service.collect(batch, StepMetrics())
