"""What the trainers that learn from pairs have in common."""

from __future__ import annotations

from hrl.batching import BatchPlan, plan_pairs
from hrl.protocol import DataProto
from hrl.trainer.ppo.lengths import lengths_of
from hrl.trainer.ppo.planning import MicroBatchLimits


def plan_of_pairs(
    batch: DataProto,
    world_size: int,
    limits: MicroBatchLimits,
    share_prefix: bool,
    *,
    mini_batch_pairs: int | None = None,
    epochs: int = 1,
) -> BatchPlan:
    """The optimizer steps of a batch whose rows 2i and 2i + 1 are a pair.

    Args:
        batch: ``attention_mask``, ``responses`` and ``response_mask`` of 2N rows.
        world_size: ranks.
        limits: of a micro-batch; ``max_rows`` counts pairs.
        share_prefix: both answers of a pair compute their prompt once.
        mini_batch_pairs: pairs per optimizer step; all of them by default.
        epochs: passes over the batch.
    """
    prompt, response = (lengths.numpy() for lengths in lengths_of(batch))
    return plan_pairs(
        prompt,
        response,
        batch.batch["response_mask"].sum(-1).numpy(),
        world_size=world_size,
        mini_batch_pairs=mini_batch_pairs or len(batch) // 2,
        epochs=epochs,
        max_tokens=limits.max_tokens,
        max_pairs=limits.max_rows,
        share_prefix=share_prefix,
        budget_key=limits.budget_key,
    )
