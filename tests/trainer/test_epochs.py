"""Epochs across the ends of runs: wherever a run stops, the next one goes on in the epoch's true order."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.data.order import EpochOrder
from hrl.report.run_folder import read_metrics
from tests.trainer.ppo.driver import Driver

#: Five prompts in batches of two: two batches an epoch, and one prompt of each epoch is left over.
PROMPTS, BATCH, STEPS = 5, 2, 6
SIZES = (f"data.train_batch_size={BATCH}", f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}")


def drawn(folder: Path, *ends: int) -> list[list[int]]:
    """The prompts of each step of a run that stops after these steps, and goes on."""
    found: list[list[int]] = []
    for end in ends:
        driver = Driver(
            folder, *SIZES, "trainer.save_freq=1", "trainer.val_before_train=false", "trainer.test_freq=-1",
            steps=end, prompts=PROMPTS, scores=[1.0, 0.0],
        )  # fmt: skip
        driver.fit()
        found += [rows.non_tensor_batch["index"].tolist() for rows in driver.workers.sampled if len(rows) == BATCH]
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], list[float]]:
    folder = tmp_path_factory.mktemp("straight")
    return drawn(folder, STEPS), epochs(folder)


def epochs(folder: Path) -> list[float]:
    return [record["data/epoch"] for record in read_metrics(folder) if "data/epoch" in record]


def test_each_epoch_has_its_own_order_and_leaves_out_what_fills_no_batch(
    straight: tuple[list[list[int]], list[float]],
) -> None:
    rows, log = straight
    for epoch in range(3):
        order = EpochOrder(PROMPTS, seed=0).epoch(epoch).tolist()
        assert rows[2 * epoch : 2 * epoch + 2] == [order[:2], order[2:4]]
    assert log == pytest.approx([0.4, 0.8, 1.4, 1.8, 2.4, 2.8])


@pytest.mark.parametrize("ends", [(1,), (2,), (1, 2, 3, 4, 5)], ids=str)
def test_a_run_that_stops_at_step_1_or_at_an_epoch_s_end_goes_on_with_the_prompts_of_the_straight_one(
    ends: tuple[int, ...], straight: tuple[list[list[int]], list[float]], tmp_path: Path
) -> None:
    assert drawn(tmp_path, *ends, STEPS) == straight[0]
    assert epochs(tmp_path) == straight[1], "one record a step, over all stops"
