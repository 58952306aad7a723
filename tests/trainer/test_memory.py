"""The peak of a run is that of its largest process, on whichever pool."""

from __future__ import annotations

from types import SimpleNamespace

from hrl.metrics import Metric
from hrl.trainer.memory import peak_memory


class Pool:
    """Answers for its first role, one dictionary per rank."""

    def __init__(self, roles: tuple[str, ...], *ranks: dict[str, float]) -> None:
        self.roles = roles
        answer = [{name: Metric.max(value) for name, value in rank.items()} for rank in ranks]
        setattr(self, f"{roles[0]}_peak_memory", lambda: SimpleNamespace(get=lambda: answer))


def test_every_rank_of_every_pool_is_asked_once() -> None:
    trainers = Pool(("actor", "ref"), {"perf/max_memory_gib": 2.0}, {"perf/max_memory_gib": 5.0})
    critics = Pool(("critic",), {"perf/max_memory_gib": 3.0})
    engines = Pool(("rollout",), {"perf/max_memory_gib": 1.0, "perf/max_child_memory_gib": 4.0})
    assert peak_memory([trainers, critics, engines]) == {
        "perf/max_memory_gib": 5.0,
        "perf/max_child_memory_gib": 4.0,
    }
