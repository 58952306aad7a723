"""Every layout of the roles, by YAML alone, through real Ray, real FSDP2 and a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.runner import Runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

PPO = (
    "recipe=ppo",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.val_after_train=false",
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


def with_reward_model(runner: Runner) -> tuple[str, ...]:
    return (
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={runner.reward_model}",
        f"critic.model.path={runner.model}",
    )


def test_all_colocated_on_two_ranks_with_one_tensor_parallel_engine(runner: Runner, tmp_path: Path) -> None:
    run = runner(
        tmp_path / "run",
        *PPO,
        *with_reward_model(runner),
        "placement=colocated",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    assert [record["step"] for record in run.metrics] == [1, 2]
    for record in run.metrics:
        assert set(EVERY_ROLE_METRICS) <= record.keys(), set(EVERY_ROLE_METRICS) - record.keys()
        # Random weights in bf16: sampler and trainer agree, which they only do if each sync arrived.
        assert record["rollout/logprob_diff_mean"] < 0.02
    assert all("reward_model" in sample["reward_parts"] for sample in run.samples(1))


def test_every_role_apart_with_weights_by_broadcast(runner: Runner, tmp_path: Path) -> None:
    run = runner(
        tmp_path / "run",
        *PPO,
        *with_reward_model(runner),
        "placement=separate",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    assert [record["step"] for record in run.metrics] == [1, 2]
    for record in run.metrics:
        assert set(EVERY_ROLE_METRICS) <= record.keys()
        assert record["rollout/logprob_diff_mean"] < 0.02  # also after a large step: the broadcast arrived


def test_pairs_of_roles_and_an_engine_pool_of_two_engines(runner: Runner, tmp_path: Path) -> None:
    run = runner(
        tmp_path / "run",
        *PPO,
        *with_reward_model(runner),
        "placement=pairs",
        "trainer.resource_pools.rollout=[2]",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    assert [record["step"] for record in run.metrics] == [1, 2]
    assert all(record["rollout/logprob_diff_mean"] < 0.02 for record in run.metrics)
