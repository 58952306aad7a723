"""Every layout of the roles, by YAML alone, through real Ray, real FSDP2 and a real engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.runs.runner import Runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

PPO = (
    "recipe=ppo",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
)
EVERY_ROLE_METRICS = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/reward_kl_penalty",
    "critic/vf_loss",
    "critic/values/mean",
    "critic/score/mean",
    "rollout/logprob_diff_mean",
    "timing_s/gen",
    "timing_s/ref",
    "timing_s/values",
    "timing_s/update_critic",
    "timing_s/update_actor",
    "timing_s/weight_sync",
    "perf/throughput",
)


def test_all_colocated_on_two_ranks_with_one_tensor_parallel_engine(runner: Runner, tmp_path: Path) -> None:
    """The actor and its reference are cut over the two ranks as well, and the critic is sharded."""
    run = runner(
        tmp_path / "run",
        *PPO,
        *runner.with_reward_model,
        "placement=colocated",
        "trainer.total_training_steps=2",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.tensor_parallel_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",  # by which weights move, whose sync the second step samples from
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    assert [record["step"] for record in run.metrics] == [1, 2]
    for record in run.metrics:
        assert set(EVERY_ROLE_METRICS) <= record.keys(), set(EVERY_ROLE_METRICS) - record.keys()
        # Random weights in bf16: sampler and trainer agree, which they only do if each sync arrived.
        assert record["rollout/logprob_diff_mean"] < 0.02
    assert all("reward_model" in sample["reward_parts"] for sample in run.samples(1))


def test_every_role_apart_with_weights_by_broadcast_until_ctrl_c_ends_the_run_and_its_engine(
    runner: Runner, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    metrics = folder / "metrics.jsonl"
    process = runner.start_and_wait(
        folder,
        lambda: metrics.exists() and metrics.read_text().count("\n") >= 2,
        *PPO,
        *runner.with_reward_model,
        "placement=separate",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    os.kill(process.pid, signal.SIGINT)
    run = runner.finish(process, folder, timeout_s=60)
    assert run.returncode == 75, run.output
    assert [record["step"] for record in run.metrics[:2]] == [1, 2]
    for record in run.metrics:
        assert set(EVERY_ROLE_METRICS) <= record.keys()
        assert record["rollout/logprob_diff_mean"] < 0.02  # also after a large step: the broadcast arrived
