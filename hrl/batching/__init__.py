"""Pure planning from lengths: balance over ranks, packing under a token budget. No torch, no communication."""

from hrl.batching.balance import balance, pack
from hrl.batching.pairs import plan_pairs
from hrl.batching.plan import BatchPlan, MiniBatchPlan, RankPlan
from hrl.batching.planner import plan_forward, plan_update

__all__ = ["BatchPlan", "MiniBatchPlan", "RankPlan", "balance", "pack", "plan_forward", "plan_pairs", "plan_update"]
