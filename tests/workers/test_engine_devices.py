"""Which GPUs a rank's engine sees."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hrl.single_controller.worker import RankEnv
from hrl.workers.actor_rollout_ref import ActorRolloutRefWorker, engine_devices, own_device
from hrl.workers.rollout.base import RolloutError
from hrl.workers.weight_sync.wire import Deadline
from tests.workers.rollout.settings import rollout_config


@pytest.mark.parametrize(
    ("visible", "index", "device"),
    [
        (None, 3, "3"),
        ("5", 0, "5"),
        ("4,5,6,7", 2, "6"),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES: every rank sees them all
        ("GPU-aa, GPU-bb", 1, "GPU-bb"),
    ],
)
def test_a_rank_names_its_own_device(visible, index, device):
    assert own_device(visible, index) == device


def test_an_engine_sees_the_devices_of_its_ranks_and_no_others():
    places = [("a", own_device("4,5,6,7", index)) for index in range(4)]

    assert [engine_devices(places, rank, 1) for rank in range(4)] == ["4", "5", "6", "7"]
    assert [engine_devices(places, rank, 2) for rank in range(4)] == ["4,5", "4,5", "6,7", "6,7"]
    assert engine_devices(places, 3, 4) == "4,5,6,7"


def test_an_engine_over_two_nodes_is_refused_and_one_beside_it_is_not():
    places = [("a", "0"), ("a", "1"), ("a", "2"), ("b", "0")]

    assert engine_devices(places, 1, 2) == "0,1"
    with pytest.raises(RolloutError, match=r"ranks 2 to 3 form one engine .* nodes \['a', 'b'\]"):
        engine_devices(places, 2, 2)


class Meeting:
    """`all_gather_object` of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._objects: dict[int, Any] = {}
        self._barrier = threading.Barrier(size)
        self._rank = threading.local()

    def enter(self, rank: int) -> None:
        self._rank.value = rank

    def all_gather_object(self, places: list[Any], own: Any) -> None:
        self._objects[self._rank.value] = own
        self._barrier.wait(10)
        places[:] = [self._objects[rank] for rank in range(len(places))]


@pytest.mark.parametrize(("role", "together"), [("actor_rollout", True), ("rollout", False)])
def test_the_ranks_of_an_engine_on_gpus_find_their_lead_if_they_send_to_it(role, together, monkeypatch):
    meeting = Meeting(4)
    monkeypatch.setattr(dist, "all_gather_object", meeting.all_gather_object)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")

    def start(rank: int) -> tuple[ActorRolloutRefWorker, str]:
        meeting.enter(rank)
        worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
        worker.rank_env = RankEnv(rank, 4, rank, 4, "127.0.0.1", 1)
        worker._rollout = rollout_config("vllm", tensor_model_parallel_size=2)
        worker.role, worker.device = role, torch.device("cuda", rank)
        worker._lead = worker._fellow = None
        return worker, worker._engine_devices()

    with ThreadPoolExecutor(4) as pool:
        workers, devices = zip(*pool.map(start, range(4)), strict=True)

    assert devices == ("4,5", "4,5", "6,7", "6,7")
    assert [worker._lead is not None for worker in workers] == [together, False, together, False]
    assert [worker._fellow is not None for worker in workers] == [False, together, False, together]
    for lead, fellow in ((0, 1), (2, 3)) if together else ():
        workers[lead]._lead._await_others(Deadline(10, "test"))
        assert set(workers[lead]._lead._links) == {fellow}
        workers[fellow]._fellow.close()
        workers[lead]._lead.close()
