"""A run whose two ranks share their rows, or the weights, is the run of one rank: real Ray, real FSDP2, every role."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.in_process import in_process, run_in_process
from tests.runs.runner import FinishedRun, Runner

pytestmark = pytest.mark.cluster

#: Products in float32, so that what differs is the order of sums alone.
ROLES = (
    "recipe=ppo",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    *(
        f"{section}.fsdp_config.dtype=float32"
        for section in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model", "reward.reward_model.model")
    ),
    "actor_rollout_ref.rollout.dtype=float32",
)
#: In verl's spelling of the keys; the reference follows the actor.
SHARED = {
    "tokens": (
        "actor_rollout_ref.model.probe=false",  # which starts two processes more, and the other does
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2",
        "reward_model.ulysses_sequence_parallel_size=2",
    ),
    "weights": (
        "actor_rollout_ref.actor.tensor_parallel_size=2",
        "critic.tensor_parallel_size=2",
        "reward_model.tensor_parallel_size=2",
    ),
}
#: What measures time, memory and the machine, or has the last bits of weights.
ELSEWHERE = (
    "actor/weights_checksum",
    "critic/weights_checksum",
    "perf/",
    "reward/call_s_",
    "timing_",
    "weight_sync/seconds",
)


@pytest.fixture(scope="module")
def alone(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The run of one rank."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with in_process():
        run_in_process(*runner.arguments(folder, *ROLES, *runner.with_reward_model)[1:])
    return FinishedRun(folder, 0, "")


@pytest.mark.parametrize("what", SHARED)
def test_two_ranks_that_run_their_rows_together_learn_what_one_learns(
    runner: Runner, tmp_path: Path, alone: FinishedRun, what: str
) -> None:
    shared = runner(tmp_path / "shared", *ROLES, *runner.with_reward_model, "trainer.n_gpus_per_node=2", *SHARED[what])
    assert [record["step"] for record in shared.metrics] == [1, 2]
    for mine, theirs in zip(shared.metrics, alone.metrics, strict=True):
        names = {name for name in theirs if not name.startswith(ELSEWHERE)}
        assert names == {name for name in mine if not name.startswith(ELSEWHERE)}
        assert {"actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "critic/vf_loss", "critic/grad_norm"} < names
        for name in names:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=2e-6), (mine["step"], name)
    for step in (1, 2):
        texts = [[sample["response"] for sample in run.samples(step)] for run in (shared, alone)]
        assert texts[0] == texts[1]
