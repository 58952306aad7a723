"""The limits of micro-batches, read from a section's three keys."""

from __future__ import annotations

from hrl.batching.planner import MicroBatchLimits
from hrl.config import compose_cli
from hrl.trainer.ppo.limits import AllLimits


def test_a_pass_has_a_token_budget_or_a_number_of_rows_and_names_its_key() -> None:
    actor, critic = "actor_rollout_ref.actor", "critic"
    limits = AllLimits.of(
        compose_cli(
            [
                f"{actor}.ppo_micro_batch_size_per_gpu=4",
                f"{critic}.use_dynamic_bsz=true",
                f"{critic}.ppo_max_token_len_per_gpu=900",
                f"{critic}.forward_max_token_len_per_gpu=1800",
            ]
        )
    )
    assert limits.update_actor == MicroBatchLimits(None, 4, f"{actor}.ppo_max_token_len_per_gpu")
    assert limits.update_critic == MicroBatchLimits(900, None, f"{critic}.ppo_max_token_len_per_gpu")
    assert limits.values == MicroBatchLimits(1800, None, f"{critic}.forward_max_token_len_per_gpu")
