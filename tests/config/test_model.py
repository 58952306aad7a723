"""The micro-batches of a pass, read from a section's keys."""

from __future__ import annotations

from hrl.config import compose_cli
from hrl.config.model import MicroBatches

RM = "reward.reward_model"


def test_a_pass_has_a_token_budget_or_a_number_of_rows_and_names_its_keys() -> None:
    actor, critic = "actor_rollout_ref.actor", "critic"
    passes = compose_cli(
        [
            "algorithm.adv_estimator=gae",
            f"{actor}.ppo_micro_batch_size_per_gpu=4",
            f"{critic}.use_dynamic_bsz=true",
            f"{critic}.ppo_max_token_len_per_gpu=900",
            f"{critic}.forward_max_token_len_per_gpu=1800",
        ]
    ).micro_batches()
    of_rows = (f"{actor}.ppo_micro_batch_size_per_gpu", f"{actor}.use_dynamic_bsz")
    assert passes["actor"] == MicroBatches(None, 4, f"{actor}.ppo_max_token_len_per_gpu", *of_rows, 1, 1)
    of_rows = (f"{critic}.ppo_micro_batch_size_per_gpu", f"{critic}.use_dynamic_bsz")
    assert passes["critic"] == MicroBatches(900, None, f"{critic}.ppo_max_token_len_per_gpu", *of_rows, 1, 1)
    assert passes["values"] == MicroBatches(1800, None, f"{critic}.forward_max_token_len_per_gpu", *of_rows, 1, 1)
    assert (passes["actor"].largest(100), passes["values"].largest(100)) == (400, 1800)


def test_the_budget_of_a_sequence_group_is_that_of_all_its_processes() -> None:
    actor, size = "actor_rollout_ref.actor", "ulysses_sequence_parallel_size"
    line = [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "trainer.n_gpus_per_node=4",
        f"{actor}.{size}=4",
        f"critic.{size}=2",
        f"{actor}.ppo_max_token_len_per_gpu=1000",
        "critic.forward_max_token_len_per_gpu=2000",
    ]
    passes = compose_cli(line).micro_batches()
    found = {name: (each.processes, each.max_tokens, each.budget) for name, each in passes.items()}
    assert found == {
        "actor": (4, 1000, 4000),
        "log_prob": (4, 1000, 4000),
        "ref": (4, 1000, 4000),  # follows the actor, as in verl
        "critic": (2, 1000, 2000),
        "values": (2, 2000, 4000),
    }
    assert (passes["actor"].largest(100), passes["actor"].budget_for(4001)) == (4000, 1001)
    of_rows = compose_cli([*line, f"{actor}.ppo_micro_batch_size_per_gpu=3"]).micro_batches()["actor"]
    assert (of_rows.budget, of_rows.largest(100)) == (None, 300)  # rows are the group's


def test_the_budget_of_a_tensor_group_is_that_of_each_of_its_processes() -> None:
    actor = "actor_rollout_ref.actor"
    line = [f"{actor}.tensor_parallel_size=4", f"{actor}.ppo_max_token_len_per_gpu=1000", "trainer.n_gpus_per_node=4"]
    each = compose_cli([*line, "algorithm.use_kl_in_reward=true"]).micro_batches()["ref"]  # follows the actor
    assert (each.processes, each.slices, each.budget, each.budget_for(1001)) == (4, 1, 1000, 1001)


def test_only_passes_that_the_run_makes_have_micro_batches() -> None:
    assert list(compose_cli(["algorithm.adv_estimator=grpo"]).micro_batches()) == ["actor", "log_prob"]
    scored = compose_cli(["algorithm.use_kl_in_reward=true", f"{RM}.enable=true", f"{RM}.model_path=some/model"])
    assert list(scored.micro_batches()) == ["actor", "log_prob", "ref", "rm"]
