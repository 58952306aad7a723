"""Pure planning from lengths: balance over ranks, packing under a token budget. No torch, no communication."""

from hrl.batching.balance import balance, pack
from hrl.batching.plan import BatchPlan, MiniBatchPlan, RankPlan
from hrl.batching.planner import MicroBatchLimits, plan_forward, plan_pairs, plan_update

__all__ = [
    "BatchPlan",
    "MicroBatchLimits",
    "MiniBatchPlan",
    "RankPlan",
    "balance",
    "pack",
    "plan_forward",
    "plan_pairs",
    "plan_update",
]
