"""The order in which a rank's trainer and engine take turns with the memory of a GPU during a weight sync."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hrl.workers import actor_rollout_ref
from hrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hrl.workers.rollout.base import RolloutError
from hrl.workers.weight_sync.sender import SyncReport
from hrl.workers.weight_sync.wire import ReceiverReport, WeightSyncError
from tests.workers.rollout.settings import rollout_config

NAMES = ["a", "b"]


class Engine:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def iter_full_params(
        self, dtype: torch.dtype, *, cast_by_reader: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name in NAMES:
            self._events.append(f"gather {name}")
            yield name, torch.zeros(1, dtype=dtype)

    def offload(self) -> None:
        self._events.append("offload")

    def frozen_names(self) -> list[str]:
        return []

    def param_specs(self, dtype: torch.dtype) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, dtype, (1,)) for name in NAMES]


class Sender:
    """An engine's host, or a rank that sends to another one's engine."""

    def __init__(self, events: list[str], fails_at: str | None = None) -> None:
        self._events = events
        self._fails_at = fails_at

    def wake(self, tags: tuple[str, ...]) -> None:
        self._events.append(f"wake {' '.join(tags)}")
        if self._fails_at == "wake":
            raise RolloutError("the engine does not wake up")

    def refuse_weights(self, reason: str) -> None:
        self._events.append(f"refuse: {reason}")

    def take_counts(self) -> dict[str, float]:
        return {"rollout/split_waves": 1.0}

    def push_weights(self, version: int, specs: Any, weights: Any, kept: Any) -> SyncReport:
        for _ in weights:
            pass
        if self._fails_at == "push":
            raise WeightSyncError("a tensor was refused")
        self._events.append(f"served {version}")
        return SyncReport(version, 2, 4, 0.1, (ReceiverReport("worker", version, 2, 4, 1),))


@pytest.fixture
def events(monkeypatch) -> list[str]:
    events: list[str] = []
    monkeypatch.setattr(actor_rollout_ref, "release_cached_memory", lambda device: events.append("release"))
    return events


def worker(events: list[str], **parts: Any) -> ActorRolloutRefWorker:
    worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    worker._rollout = rollout_config("vllm")
    worker.device = torch.device("cpu")
    worker.policy, worker._host, worker._fellow = SimpleNamespace(engine=Engine(events)), None, None
    for name, part in parts.items():
        setattr(worker, name, part)
    return worker


def test_the_cache_wakes_when_the_trainer_has_given_back_what_the_sync_took(events):
    metrics = worker(events, _host=Sender(events)).sync_weights(3)

    assert events == [
        *("offload", "release", "wake weights", "gather a", "gather b", "served 3", "release", "wake kv_cache"),
    ]
    assert metrics["weight_sync/tensors"] == 2


def test_a_rank_that_sends_to_the_engine_of_another_drives_none(events):
    assert worker(events, _fellow=Sender(events)).sync_weights(3) == {}
    assert events == ["offload", "release", "gather a", "gather b", "served 3", "release"]


def test_a_rank_whose_lead_sends_for_it_takes_part_in_gathering(events):
    assert worker(events).sync_weights(3) == {}
    assert events == ["offload", "release", "gather a", "gather b", "release"]


def test_an_engine_that_does_not_wake_up_leaves_no_rank_waiting(events):
    with pytest.raises(RolloutError, match="does not wake up"):
        worker(events, _host=Sender(events, "wake")).sync_weights(3)

    refused = "refuse: the engine does not wake up"
    assert events == ["offload", "release", "wake weights", refused, "gather a", "gather b", "release"]


def test_a_sync_that_fails_gives_memory_back_on_every_rank_and_wakes_no_cache(events):
    with pytest.raises(WeightSyncError):
        worker(events, _host=Sender(events, "push")).sync_weights(3)

    assert events == ["offload", "release", "wake weights", "gather a", "gather b", "release"]
