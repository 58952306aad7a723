"""What episodes are worth: rewards of turns, of functions, and what does not count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hrl.columns import object_column
from hrl.config.environment import EnvironmentConfig
from hrl.metrics import StepMetrics
from hrl.protocol import DataProto
from hrl.reward.combine import CombinedScores
from hrl.trainer.ppo.episodes import heads_of, score_episodes


class Rewards:
    """Pays every last answer what it is told to; None leaves it out."""

    def __init__(self, *scores: float | None) -> None:
        self._scores = scores

    def collect(self, batch: DataProto, metrics: StepMetrics, *, validate: bool, of_environment) -> CombinedScores:
        assert len(batch) == len(self._scores), "an episode is scored once"
        kept = torch.tensor([score is not None for score in self._scores])
        scores = torch.tensor([score or 0.0 for score in self._scores])
        batch.non_tensor_batch["reward_parts"] = object_column([{"n": place} for place in range(len(batch))])
        return CombinedScores(scores, kept, torch.zeros(len(batch)), scores + of_environment)


def batch_of(ends: tuple[str, str] = ("done", "done")) -> DataProto:
    """An episode of two branches and two turns, and one of a single turn."""
    return DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]]),
            "turn_index": torch.tensor([[0, 0, 0, -1], [0, 0, 0, 1], [0, -1, -1, -1]]),
        },
        non_tensors={
            "uid": object_column(["a", "a", "b"]),
            "sample_index": object_column([0, 0, 0]),
            "branch": object_column([0, 1, 0]),
            "turn_rewards": object_column([[0.25, 1.0], [0.25, 1.0], [None]]),
            "end": object_column([ends[0], ends[0], ends[1]]),
        },
    )


def scored(batch: DataProto, rewards: Rewards, validate: bool = False, **settings: object):
    config = EnvironmentConfig(path="x", **settings)
    return score_episodes(batch, rewards, config, StepMetrics(), validate=validate)


def test_rewards_of_turns_stand_on_their_turns_and_the_functions_on_the_episodes_last_token() -> None:
    batch = batch_of()
    found = scored(batch, Rewards(2.0, 3.0))
    assert found.tokens.tolist() == [[0, 0.25, 0, 0], [0, 0, 0, 3.0], [3.0, 0, 0, 0]]
    assert found.scores.tolist() == [3.25, 3.25, 3.0] == found.plain.tolist()
    assert batch.non_tensor_batch["reward_parts"].tolist() == [{"n": 0}, {"n": 0}, {"n": 1}]
    assert heads_of(batch).tolist() == [1, 2]


def test_an_episode_that_is_left_out_trains_nothing_in_any_of_its_rows() -> None:
    batch = batch_of()
    found = scored(batch, Rewards(None, 3.0))
    assert batch.batch["response_mask"].tolist() == [[0] * 4, [0] * 4, [1, 0, 0, 0]]
    assert found.kept.tolist() == [False, False, True] and found.tokens[:2].abs().sum() == 0


@pytest.mark.parametrize(
    ("end", "settings", "validate", "counts"),
    [
        ("failed", {}, False, False),
        ("failed", {}, True, False),
        ("max_turns", {}, False, True),
        ("max_turns", {"on_truncation": "mask"}, False, False),
        ("max_turns", {"on_truncation": "mask"}, True, True),
        ("done", {"on_truncation": "mask"}, False, True),
    ],
)
def test_which_ends_count(end: str, settings: dict, validate: bool, counts: bool) -> None:
    batch = batch_of(ends=(end, "done"))
    found = scored(batch, Rewards(2.0, 3.0), validate, **settings)
    assert found.kept.tolist() == [counts, counts, True]
    assert bool(batch.batch["response_mask"][:2].any()) is counts


def test_a_group_whose_rows_are_episodes_of_one_row_is_as_it_was() -> None:
    batch = batch_of().select_idxs([2])
    found = scored(batch, Rewards(3.0))
    assert found.tokens.tolist() == [[3.0, 0, 0, 0]] and SimpleNamespace(scores=found.scores.tolist()).scores == [3.0]
