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
    assert passes["actor"] == MicroBatches(None, 4, f"{actor}.ppo_max_token_len_per_gpu", *of_rows)
    of_rows = (f"{critic}.ppo_micro_batch_size_per_gpu", f"{critic}.use_dynamic_bsz")
    assert passes["critic"] == MicroBatches(900, None, f"{critic}.ppo_max_token_len_per_gpu", *of_rows)
    assert passes["values"] == MicroBatches(1800, None, f"{critic}.forward_max_token_len_per_gpu", *of_rows)
    assert (passes["actor"].largest(100), passes["values"].largest(100)) == (400, 1800)


def test_only_passes_that_the_run_makes_have_micro_batches() -> None:
    assert list(compose_cli(["algorithm.adv_estimator=grpo"]).micro_batches()) == ["actor", "log_prob"]
    scored = compose_cli(["algorithm.use_kl_in_reward=true", f"{RM}.enable=true", f"{RM}.model_path=some/model"])
    assert list(scored.micro_batches()) == ["actor", "log_prob", "ref", "rm"]
