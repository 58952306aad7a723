"""How much memory the processes of a run have held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hrl.metrics import reduce_metrics


def peak_memory(processes: Sequence[Any]) -> dict[str, float]:
    """`perf/max_memory_gib` and its like: the largest of any rank of any pool, see `hrl.workers.memory`.

    Args:
        processes: One group per pool; any role of a process speaks for all of them.
    """
    asked = [getattr(group, f"{group.roles[0]}_peak_memory")() for group in processes]
    ranks = [metrics for answer in asked for metrics in answer.get()]
    names = sorted({name for metrics in ranks for name in metrics})
    return reduce_metrics({name: [metrics[name] for metrics in ranks if name in metrics] for name in names})
