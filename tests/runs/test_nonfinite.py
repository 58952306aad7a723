"""A run whose losses turn into NaN stops, names what it kept, and has learnt nothing from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.report.run_folder import read_jsonl
from hrl.trainer.ppo import ray_trainer
from hrl.workers.engine.nonfinite import NonFiniteStepError
from tests.runs.in_process import in_process, run_in_process
from tests.runs.runner import Runner

pytestmark = [pytest.mark.engine]


def test_three_poisoned_steps_end_a_run_that_has_kept_their_batches(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = ray_trainer.compute_advantage

    def poisoned(batch, *args, **kwargs):
        batch = good(batch, *args, **kwargs)
        batch.batch["advantages"][0, 0] = float("nan")
        return batch

    monkeypatch.setattr(ray_trainer, "compute_advantage", poisoned)
    with in_process(), pytest.raises(NonFiniteStepError, match="3 optimizer steps in a row"):
        run_in_process(
            f"trainer.default_local_dir={tmp_path}",
            f"actor_rollout_ref.model.path={runner.model}",
            f"reward.custom_reward_function.path={runner.reward}",
            "data.train_batch_size=2",
            "data.max_response_length=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=2",
            "trainer.total_training_steps=9",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
        )
    kept = {file.name for file in (tmp_path / "nonfinite").glob("*.json")}
    assert kept == {f"step_{step}_rank_0.actor-0.json" for step in (1, 2, 3)}
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [record["actor/skipped_steps"] for record in records] == [1, 1]
    assert all(record["perf/max_memory_gib"] > 0.1 for record in records)
    said = "".join(capsys.readouterr().out.split())  # the terminal breaks lines anywhere
    assert f"Therowsarein{tmp_path}/nonfinite/step_2_rank_*" in said
