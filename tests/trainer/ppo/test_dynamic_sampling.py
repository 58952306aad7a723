"""Groups without spread are dropped and others sampled, within a bound; by a trainer on stand-ins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hrl.algos.groups import GROUP_FILTERS, group_sum
from hrl.metrics import StepMetrics
from hrl.protocol import DataProto
from hrl.reward.combine import CombinedScores
from hrl.trainer.ppo.dynamic_sampling import DynamicSamplingError, GroupFilter
from hrl.trainer.ppo.reward_parts import RewardPartError
from tests.trainer.ppo.driver import Driver, Rewards

FILTER = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "algorithm.filter_groups.enable=true",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
)


class BySolvability(Rewards):
    """Of the prompts in `solvable` one sample of two is right; all samples of the others are worth the same."""

    def __init__(self, *solvable: int, left_out: int | None = None) -> None:
        super().__init__(None)
        self.solvable = solvable
        self.left_out = left_out

    def scores_of(self, batch: DataProto) -> list[float | None]:
        columns = batch.non_tensor_batch
        scores: list[float | None] = []
        for index, sample in zip(columns["index"], columns["sample_index"], strict=True):
            is_right = sample == 0 or index not in self.solvable
            scores.append(None if index == self.left_out and sample == 0 else float(is_right))
        return scores

    def parts_of(self, batch: DataProto) -> list[dict[str, Any]]:
        return [{"acc": score} for score in self.scores_of(batch)]


def drawn(driver: Driver) -> list[list[int]]:
    """The prompts of each batch that was sampled."""
    return [list(dict.fromkeys(batch.non_tensor_batch["index"].tolist())) for batch in driver.workers.sampled]


def test_a_batch_is_filled_with_the_first_groups_that_differ(tmp_path: Path) -> None:
    order = Driver(tmp_path / "a", prompts=8).trainer.train_dataset.order.epoch(0).tolist()
    rewards = BySolvability(order[1], order[4], order[5])  # of the batches 0-1, 2-3, 4-5: one, none, two
    driver = Driver(tmp_path / "run", *FILTER, prompts=8, rewards=rewards, steps=1)
    metrics = StepMetrics()
    driver.trainer.sync_weights()
    driver.trainer.global_steps = 1
    batch = driver.trainer.train_step(driver.trainer.next_batch(), metrics)

    assert drawn(driver) == [order[0:2], order[2:4], order[4:6]]
    assert batch.non_tensor_batch["index"].tolist() == [order[1]] * 2 + [order[4]] * 2
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [10.0, 0.0, 10.0, 0.0]
    assert metrics["rollout/filter_groups/gen_batches"] == 3
    assert metrics["rollout/filter_groups/dropped"] == 3
    assert metrics["rollout/filter_groups/surplus"] == 1  # order[5]; not kept for a later policy
    assert metrics["rollout/truncated_responses"] == 3  # counted in every batch, one each
    # The engine sleeps once, when nothing more is to be sampled.
    assert driver.workers.done == ["generate", "generate", "generate", "sleep", "update"]
    assert driver.trainer.data_position.offset == 6


def test_a_prompt_that_comes_again_within_a_step_is_another_group_with_other_samples(tmp_path: Path) -> None:
    driver = Driver(tmp_path, *FILTER, prompts=2, rewards=BySolvability(1), steps=1)
    driver.fit()
    first, second = driver.workers.sampled
    assert sorted(first.non_tensor_batch["index"]) == sorted(second.non_tensor_batch["index"])
    assert not set(first.non_tensor_batch["uid"]) & set(second.non_tensor_batch["uid"])
    (learnt,) = driver.workers.learnt
    assert learnt.non_tensor_batch["index"].tolist() == [1, 1, 1, 1]
    assert len(set(learnt.non_tensor_batch["uid"])) == 2


def test_the_bound_stops_the_run_and_says_what_was_found(tmp_path: Path) -> None:
    bound = "algorithm.filter_groups.max_num_gen_batches=3"
    driver = Driver(tmp_path, *FILTER, bound, prompts=9, rewards=BySolvability(0), steps=1)
    with pytest.raises(DynamicSamplingError) as caught:
        driver.fit()
    text = str(caught.value)
    assert "step 1: 3 batches of prompts were sampled" in text
    assert "of the 2 groups that a batch needs differ in 'reward'" in text
    assert "groups with 10 everywhere" in text and "max_num_gen_batches" in text
    assert len(driver.workers.sampled) == 3 and "update" not in driver.workers.done


@pytest.mark.parametrize(
    ("solvable", "found", "way_out"),
    [
        (1, "1 of the 2 groups that a batch needs differ in 'reward' (5 groups with 10 everywhere)",
         "At this rate it takes 6 batches: raise algorithm.filter_groups.max_num_gen_batches above that, lower data."),
        (0, "0 of the 2 groups that a batch needs differ in 'reward' (6 groups with 10 everywhere)",
         "With none found, more batches promise little: instead of raising algorithm.filter_groups.max_num_gen_"),
    ],
)  # fmt: skip
def test_the_way_out_depends_on_what_was_found(tmp_path: Path, solvable: int, found: str, way_out: str) -> None:
    order = Driver(tmp_path / "order", prompts=9).trainer.train_dataset.order.epoch(0).tolist()
    bound = "algorithm.filter_groups.max_num_gen_batches=3"
    rewards = BySolvability(*order[:solvable])
    with pytest.raises(DynamicSamplingError) as caught:
        Driver(tmp_path / "run", *FILTER, bound, prompts=9, rewards=rewards, steps=1).fit()
    text = str(caught.value)
    assert found in text and way_out in text
    assert "enable=false, which trains on the groups that differ among those that do not" in text


def test_a_filter_from_outside_decides_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of which nothing is wrong, in the place of those whose samples differ."""
    monkeypatch.setitem(GROUP_FILTERS, "solved", lambda scores, ids, _: group_sum((scores < 1).double(), ids) == 0)

    class Solved(GroupFilter):
        rule = "solved"

    order = Driver(tmp_path / "order", prompts=8).trainer.train_dataset.order.epoch(0).tolist()
    driver = Driver(tmp_path / "run", *FILTER, prompts=8, rewards=BySolvability(*order[:3]), steps=1)
    monkeypatch.setattr(type(driver.trainer), "group_filter", Solved)
    driver.fit()
    assert driver.workers.learnt[0].non_tensor_batch["index"].tolist() == [order[3]] * 2 + [order[4]] * 2

    monkeypatch.setattr(Solved, "rule", "slved")
    with pytest.raises(ValueError, match=r"unknown group filter 'slved'; choose one of \['solved', 'spread'\]"):
        Driver(tmp_path / "typo", *FILTER, rewards=BySolvability(), steps=1).fit()


def test_a_resumed_run_goes_on_with_the_prompts_behind_those_of_the_refill(tmp_path: Path) -> None:
    def run(folder: str, steps: int) -> list[list[int]]:
        rewards = BySolvability(0, 2, 4, 5, 7, 8)
        driver = Driver(tmp_path / folder, *FILTER, "trainer.save_freq=1", prompts=9, rewards=rewards, steps=steps)
        driver.fit()
        return drawn(driver)

    whole = run("whole", 4)
    assert len(whole) > 4
    assert run("cut", 2) + run("cut", 4) == whole


def test_a_group_of_which_one_sample_is_left_over_teaches_nothing(tmp_path: Path) -> None:
    rewards = BySolvability(*range(6), left_out=3)
    driver = Driver(tmp_path, *FILTER, prompts=6, rewards=rewards, steps=3)
    driver.fit()
    assert 3 not in {index for batch in driver.workers.learnt for index in batch.non_tensor_batch["index"]}


def test_a_part_of_the_reward_may_decide(tmp_path: Path) -> None:
    metric = "algorithm.filter_groups.metric=acc"
    driver = Driver(tmp_path / "acc", *FILTER, metric, prompts=4, rewards=BySolvability(0, 1, 2, 3), steps=1)
    driver.fit()
    assert len(driver.workers.sampled) == 1
    driver = Driver(tmp_path / "f1", *FILTER, "algorithm.filter_groups.metric=f1", rewards=BySolvability(), steps=1)
    with pytest.raises(RewardPartError, match=r"algorithm.filter_groups.metric names 'f1'.*its parts are acc"):
        driver.fit()


class Overlong(BySolvability):
    """The first sample of every prompt is too long, which costs it all it can cost; the second is right."""

    def collect(self, batch: DataProto, metrics: StepMetrics, *, validate: bool = False) -> CombinedScores:
        combined = super().collect(batch, metrics)
        penalty = torch.tensor([float(sample == 0) for sample in batch.non_tensor_batch["sample_index"]])
        return replace(combined, scores=combined.scores - penalty)


def test_the_recipe_of_dapo_keeps_groups_by_correctness_and_not_by_length(tmp_path: Path) -> None:
    def learnt(folder: str, *overrides: str) -> set[int]:
        driver = Driver(tmp_path / folder, *FILTER, *overrides, prompts=8, rewards=Overlong(3, 6), steps=1)
        driver.fit()
        return set(driver.workers.learnt[0].non_tensor_batch["index"])

    order = Driver(tmp_path / "order", prompts=8).trainer.train_dataset.order.epoch(0).tolist()
    assert learnt("by_score", "recipe=dapo") == {3, 6}  # eq. 11: some samples right, some wrong
    assert learnt("by_reward", "recipe=dapo", "algorithm.filter_groups.metric=reward") == set(order[:2])


def test_the_hook_sees_every_batch_before_groups_are_dropped(tmp_path: Path) -> None:
    driver = Driver(tmp_path, *FILTER, prompts=4, rewards=BySolvability(), steps=1)

    def spread(batch: DataProto, metrics: dict[str, float]) -> DataProto:
        is_first = np.array([sample == 0 for sample in batch.non_tensor_batch["sample_index"]])
        batch.batch["token_level_scores"][is_first] += 1.0
        return batch

    driver.trainer.on_batch_scored = spread
    driver.fit()
    assert len(driver.workers.sampled) == 1
