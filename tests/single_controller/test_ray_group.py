"""Worker groups on a real Ray cluster."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from hrl.protocol import DataProto, DataProtoFuture
from hrl.single_controller import ray_cluster
from hrl.single_controller.dispatch import Dispatch, Execute, register
from hrl.single_controller.pulse import Pulses
from hrl.single_controller.resource_pool import RayResourcePool, merge_resource_pool, split_resource_pool
from hrl.single_controller.worker import (
    RayClassWithInitArgs,
    Worker,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,
)
from hrl.single_controller.worker_errors import (
    PlacementError,
    WorkerDiedError,
    WorkerError,
    WorkerStuckError,
    WorkerTimeoutError,
    phase,
)
from hrl.single_controller.worker_group import RayWorkerGroup
from tests.processes.process_table import still_alive

pytestmark = pytest.mark.usefixtures("ray_session")


class Adder(Worker):
    def __init__(self, offset: int) -> None:
        self.offset = offset

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        data.batch["x"] += self.offset + self.rank  # in place: what arrives must be writable
        return data

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, data: DataProto) -> DataProto:
        return self.add(data)

    @register(Dispatch.DP_COMPUTE_PROTO, columns=["x"])
    def names_of_columns(self, data: DataProto) -> DataProto:
        names = [*data.batch.keys(), *data.non_tensor_batch]
        return DataProto.from_dict(non_tensors={"names": [names] * len(data)})

    @register(Dispatch.DP_COMPUTE_PLAN)
    def planned(self, batch: DataProto, request: Any) -> DataProto:
        return DataProto.from_dict({"out": batch.batch["x"] * request})

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @register(Dispatch.ALL_TO_ALL)
    def plus_rank(self, value: int) -> int:
        return value + self.rank

    @register(Dispatch.RANK_ZERO)
    def whoami(self) -> int:
        return self.rank

    @register(Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def whoami_too(self) -> int:
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def environ(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    @register(Dispatch.ONE_TO_ALL)
    def collects_garbage(self) -> tuple[bool, bool]:
        return gc.isenabled(), gc.get_freeze_count() > 0

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds_by_rank: dict[int, float]) -> None:
        time.sleep(seconds_by_rank.get(self.rank, 0.0))

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, rank: int, others_sleep_s: float = 0.0) -> None:
        if self.rank == rank:
            self.deeper()
        time.sleep(others_sleep_s)

    def deeper(self) -> None:
        raise ValueError("the model\nhas no head")

    @register(Dispatch.ONE_TO_ALL)
    def leave(self, rank: int) -> None:
        """One rank's process ends without a word; the others see a broken connection, as in a collective."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("connection closed by peer")


class Failing(Worker):
    def __init__(self) -> None:
        if self.rank == 0:
            raise FileNotFoundError("no weights here")


class Named(Worker):
    """A role that keeps its own state and leaves a note when it is closed."""

    def __init__(self, name: str, note: str | None = None) -> None:
        self.name, self.note = name, note

    @register(Dispatch.ONE_TO_ALL)
    def who(self) -> tuple[str, int, int]:
        return self.name, self.rank, os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise RuntimeError(f"{self.name} is tired")

    def close(self) -> None:
        if self.note is not None:
            with open(f"{self.note}.{self.name}.{self.rank}", "w") as file:
                file.write("closed")


@pytest.fixture(scope="module")
def pool(ray_session: None) -> Iterator[RayResourcePool]:
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=4)
    yield pool
    pool.release()


@pytest.fixture(scope="module")
def adders(pool: RayResourcePool) -> Iterator[RayWorkerGroup]:
    group = RayWorkerGroup(
        pool, RayClassWithInitArgs(Adder, offset=10), worker_env={"GREETING": "hi", "OMP_NUM_THREADS": "3"}
    )
    yield group
    group.shutdown()


def batch_of(num_rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(num_rows)}, {"uid": [str(i) for i in range(num_rows)]})


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_rows_go_to_ranks_and_come_back_in_order(adders: RayWorkerGroup) -> None:
    assert adders.add(batch_of(4)).batch["x"].tolist() == [10, 11, 13, 14]


def test_non_blocking_call_gives_a_future_with_the_same_result(adders: RayWorkerGroup) -> None:
    future = adders.add_later(batch_of(4))
    assert isinstance(future, DataProtoFuture)
    assert future.get().batch["x"].tolist() == [10, 11, 13, 14]
    assert future.get().batch["x"].tolist() == [10, 11, 13, 14], "a second get gives the same"


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_odd_sizes_keep_their_length_and_their_objects(adders: RayWorkerGroup, num_rows: int) -> None:
    result = adders.add(batch_of(num_rows))
    assert len(result) == num_rows
    assert result.non_tensor_batch["uid"].tolist() == [str(i) for i in range(num_rows)]


def test_the_drivers_batch_is_not_written_to(adders: RayWorkerGroup) -> None:
    batch = batch_of(4)
    adders.add(batch)
    assert batch.batch["x"].tolist() == [0, 1, 2, 3]


def test_only_registered_columns_travel(adders: RayWorkerGroup) -> None:
    batch = batch_of(2)
    batch.batch["heavy"] = torch.zeros(2, 1000)
    assert adders.names_of_columns(batch).non_tensor_batch["names"].tolist() == [["x"], ["x"]]


def test_a_plan_places_rows_on_ranks(adders: RayWorkerGroup) -> None:
    class Plan:
        rows = ((3, 0), (1, 2, 4))
        columns = ("x",)
        ranks_each = 1

        def for_rank(self, rank: int) -> int:
            return (10, 100)[rank]

    assert adders.planned(batch_of(5), Plan()).batch["out"].tolist() == [0, 100, 200, 30, 400]


def test_a_rank_that_has_its_worker_collects_garbage_but_for_what_its_imports_made(adders: RayWorkerGroup) -> None:
    assert adders.collects_garbage() == [(True, True)] * 2


def test_modes_without_a_batch(adders: RayWorkerGroup) -> None:
    assert adders.echo({"a": [1, 2]}) == [{"a": [1, 2]}] * 2
    assert adders.plus_rank([1, 2]) == [1, 3]
    assert adders.plus_rank(5) == [5, 6]
    assert adders.whoami() == adders.whoami_too() == 0


def test_a_whole_batch_can_go_to_every_rank_and_back(adders: RayWorkerGroup) -> None:
    first, second = adders.echo(batch_of(3))
    assert first.batch["x"].tolist() == second.batch["x"].tolist() == [0, 1, 2]


def test_any_function_runs_on_the_ranks(adders: RayWorkerGroup) -> None:
    assert adders.execute_all_sync(lambda worker, x: (worker.rank, worker.world_size, worker.offset + x), 1) == [
        (0, 2, 11),
        (1, 2, 11),
    ]
    assert adders.execute_rank_zero_sync("whoami") == 0
    out = adders.execute_with_func_generator(lambda worker, data: worker.add(data), batch_of(4))
    assert out.batch["x"].tolist() == [10, 11, 13, 14]


def test_ranks_know_their_place_and_their_environment(adders: RayWorkerGroup) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "GREETING"]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "3"}
    assert adders.environ(names) == [
        {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "GREETING": "hi"} for rank in range(2)
    ]
    ports = {environ["MASTER_PORT"] for environ in adders.environ(["MASTER_PORT"])}
    assert len(ports) == 1 and 1024 < int(ports.pop()) < 65536
    assert len(set(adders.pids)) == 2 and adders.get_pid() == adders.pids
    assert [name.rpartition("_")[2] for name in adders.worker_names] == ["0", "1"]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "MASTER_PORT"])
def test_the_groups_own_variables_cannot_be_set(pool: RayResourcePool, name: str) -> None:
    with pytest.raises(ValueError, match=f"worker_env sets {name}"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 0), worker_env={name: "1"})


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_an_exception_arrives_with_rank_phase_and_traceback(adders: RayWorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught, phase("update_actor"):
        adders.fail(1)
    error = caught.value
    assert (error.rank, error.method, error.phase) == (1, "Adder.fail", "update_actor")
    assert "in deeper" in error.traceback_text and "has no head" in error.traceback_text
    assert isinstance(error.__cause__, ValueError)
    assert error.summary == "rank 1: Adder.fail (phase update_actor) raised ValueError: the model\nhas no head"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301  (this process wrote it)


def test_the_next_cluster_of_this_process_does_not_spill_where_this_one_does(ray_session: None) -> None:
    assert "object_spilling_config" in ray._private.worker._global_node._config, "Ray keeps it there"
    assert "object_spilling_config" not in ray_cluster._SYSTEM_CONFIG


def test_the_first_failure_wins_at_once_and_blocks_no_later_call(adders: RayWorkerGroup) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1"):
        adders.fail(1, others_sleep_s=12.0)
    assert time.monotonic() - start < 11.5, "rank 0 was still asleep"
    assert adders.whoami() == 0, "a peer that comes to its end leaves the group usable"


def test_a_deadline_names_the_ranks_that_are_late(adders: RayWorkerGroup) -> None:
    with pytest.raises(WorkerTimeoutError) as caught:
        adders.with_timeout(0.5).sleep({1: 3.0})
    assert caught.value.ranks == (1,) and isinstance(caught.value, TimeoutError)
    assert "Adder.sleep was not finished after 0.5 s; still running on rank(s) 1" in str(caught.value)
    adders.sleep({})


def test_a_deadline_tells_where_the_late_ranks_are(adders: RayWorkerGroup) -> None:
    with pytest.raises(WorkerTimeoutError) as caught:
        adders.with_timeout(4.0).sleep({0: 4.5})  # longer than the interval of a pulse
    assert re.search(r"rank\(s\) 0: rank 0 in sleep \(single_controller/test_ray_group.py:\d+\)", str(caught.value))
    adders.sleep({})


def test_a_rank_whose_pulse_has_stopped_ends_the_call_and_not_the_one_that_waits_for_it(
    adders: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adders._processes, "_next_pulse", 0.0)
    monkeypatch.setattr(Pulses, "silent", lambda _, ranks: [1] if 1 in ranks else [])
    with pytest.raises(WorkerStuckError) as caught, phase("update_actor"):
        adders.sleep({0: 3.0, 1: 3.0})
    assert (caught.value.rank, caught.value.pid) == (1, adders.pids[1])
    assert (
        f"rank 1: its process (pid {adders.pids[1]}) has stood still for 180 s in Adder.sleep (phase update_actor)"
        in (str(caught.value))
    )
    assert pickle.loads(pickle.dumps(caught.value)).pid == caught.value.pid  # noqa: S301  (this process wrote it)
    monkeypatch.undo()
    adders.sleep({})


def test_looking_at_a_future_early_costs_nothing(adders: RayWorkerGroup) -> None:
    future = adders.execute_all_async("sleep", {0: 1.0, 1: 1.0})
    with pytest.raises(WorkerTimeoutError):
        future.get(timeout_s=0.1)
    assert future.get() == [None, None]


def test_a_dead_process_is_the_cause_and_not_its_peers_complaint(pool: RayResourcePool) -> None:
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 0))
    try:
        pids = group.pids
        with pytest.raises(WorkerDiedError) as caught:
            group.leave(1)
        assert (caught.value.rank, caught.value.pid, caught.value.method) == (1, pids[1], "Adder.leave")
        with pytest.raises(WorkerDiedError, match=f"rank 1: its process \\(pid {pids[1]}\\) died in Adder.echo"):
            group.echo(1)
    finally:
        group.shutdown()


def test_a_group_with_a_stuck_rank_refuses_calls_until_it_is_free(
    adders: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hrl.single_controller.rank_processes._STUCK_GRACE_S", 0.1)
    with pytest.raises(WorkerError):
        adders.fail(1, others_sleep_s=4.0)
    with pytest.raises(WorkerTimeoutError, match=r"Adder.fail, which failed and blocks Adder.echo,.*rank\(s\) 0"):
        adders.echo(1)
    monkeypatch.undo()
    assert adders.echo(1) == [1, 1]


def test_a_failing_constructor_names_its_class_and_frees_its_place(ray_session: None) -> None:
    pool = RayResourcePool([1], use_gpu=False)
    try:
        with pytest.raises(WorkerError) as caught:
            RayWorkerGroup(pool, RayClassWithInitArgs(Failing))
        assert caught.value.rank == 0 and caught.value.method == "Failing.__init__"
        assert isinstance(caught.value.__cause__, FileNotFoundError)
        pool.take_place()
    finally:
        pool.release()


def test_shutdown_closes_the_worker_ends_the_process_and_frees_the_place(ray_session: None, tmp_path: Path) -> None:
    pool = RayResourcePool([1], use_gpu=False)
    try:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Named, "n", note=str(tmp_path / "note")))
        with pytest.raises(PlacementError, match="already has 1 worker group"):
            RayWorkerGroup(pool, RayClassWithInitArgs(Named, "n"))
        pids = group.pids
        group.shutdown()
        group.shutdown()
        assert not still_alive(pids, within_s=10)
        assert (tmp_path / "note.n.0").read_text() == "closed"
        with pytest.raises(RuntimeError, match="was shut down"):
            group.who()
        pool.take_place()
    finally:
        pool.release()


# ---- colocated roles -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def merged(pool: RayResourcePool) -> Iterator[RayWorkerGroup]:
    roles = {
        "actor": RayClassWithInitArgs(Named, "a"),
        "critic": RayClassWithInitArgs(cls=ray.remote(Named), name="c"),
        "points": RayClassWithInitArgs(KMeans),
        "reducer": RayClassWithInitArgs(Reducer),
    }
    roles["points"].prelude = partial(exec, "import os, sys; os.environ['HAD_TORCH'] = str('torch' in sys.modules)")
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles), name_prefix="step")
    yield group
    group.shutdown()


def test_colocated_roles_share_a_process_and_keep_their_own_objects(
    merged: RayWorkerGroup, adders: RayWorkerGroup
) -> None:
    roles = merged.spawn(prefix_set={"actor", "critic"})
    actor, critic = roles["actor"], roles["critic"]
    assert actor.who() == [("a", rank, merged.pids[rank]) for rank in range(2)]
    assert critic.who() == [("c", rank, merged.pids[rank]) for rank in range(2)]
    assert merged.actor_who() == actor.who() and merged.critic_who() == critic.who()
    assert actor.pids == critic.pids
    assert not set(merged.pids) & set(adders.pids), "groups of their own have processes of their own"
    assert merged.worker_names == [f"step_actor+critic+points+reducer_{rank}" for rank in range(2)]


def test_fused_roles_are_attributes_with_their_groups_deadline_and_know_each_other(
    merged: RayWorkerGroup,
) -> None:
    group = merged.with_timeout(70)  # a view, so that the group of other tests stays as it is
    group.fuse({"actor", "critic"})
    assert group.actor.who() == merged.actor_who() and group.critic.who() == merged.critic_who()
    assert group.actor.execute_all_sync(lambda actor: actor.fused_worker_dict["critic"].name) == ["c", "c"]
    assert (group.actor.call_timeout_s, group.with_timeout(80).actor.call_timeout_s) == (70, 80)
    with pytest.raises(ValueError, match=r"no role \['rm'\]"):
        group.fuse(["rm"])
    with pytest.raises(AttributeError):
        merged.critic.who()


def test_errors_of_a_colocated_role_carry_its_name(merged: RayWorkerGroup) -> None:
    critic = merged.spawn(["critic"])["critic"]
    with pytest.raises(WorkerError, match=r"rank \d: critic.fail raised RuntimeError: c is tired"):
        critic.fail()


def test_only_roles_that_exist_are_spawned(merged: RayWorkerGroup) -> None:
    with pytest.raises(ValueError, match="spawn"):
        merged.execute_all_sync("who")
    with pytest.raises(ValueError, match=r"no role \['rm'\]"):
        merged.spawn(["rm"])
    with pytest.raises(ValueError, match="one role"):
        merged.spawn(["actor"])["actor"].spawn(["actor"])


# ---- placement -------------------------------------------------------------------------------------------------------


def test_a_cluster_without_the_devices_is_refused_at_once_by_name(ray_session: None) -> None:
    start = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        RayWorkerGroup(RayResourcePool([8], use_gpu=True, name_prefix="train"), RayClassWithInitArgs(Adder, 0))
    assert "'train': one node must have 8 GPU and the best of 1 node(s) has 0" in str(caught.value)
    assert "needs, node by node: CPU 8, GPU 8" in str(caught.value)
    with pytest.raises(PlacementError, match="needs 40 CPU in all and the cluster has 16"):
        RayResourcePool([10] * 4, use_gpu=False).get_placement_groups()
    assert time.monotonic() - start < 30


def test_a_full_cluster_is_waited_for_within_the_deadline(pool: RayResourcePool) -> None:
    pool.get_placement_groups()  # takes 8 of the session's 16 CPUs
    most = RayResourcePool([6], use_gpu=False)
    late = RayResourcePool([7], use_gpu=False, placement_timeout_s=1.0, name_prefix="late")
    try:
        most.get_placement_groups()
        with pytest.raises(PlacementError, match=r"'late': no room for 1 of 1 node\(s\) in 1 s.*of which free CPU"):
            late.get_placement_groups()
        most.release()
        late.placement_timeout_s = 30.0  # on a busy machine Ray takes a while to notice
        assert len(late.slots()) == 7
    finally:
        most.release()
        late.release()


def test_groups_on_parts_of_a_pool_run_in_their_own_slots(pool: RayResourcePool) -> None:
    parts = split_resource_pool(pool, 1)
    fused = RayClassWithInitArgs(create_colocated_worker_raw_cls({"actor": RayClassWithInitArgs(Named, "a")}))
    groups = [RayWorkerGroup(part, fused) for part in parts]
    try:
        whole = RayWorkerGroup(merge_resource_pool(*parts), RayClassWithInitArgs(Adder, 0))
        groups.append(whole)
        assert [group.execute_all_sync("_fuw_execute", "actor_fwmn_who")[0][:2] for group in groups[:2]] == [
            ("a", 0),
            ("a", 0),
        ]
        assert whole.plus_rank(0) == [0, 1] and len({*groups[0].pids, *groups[1].pids, *whole.pids}) == 4
    finally:
        for group in groups:
            group.shutdown()


# ---- a group that trains no language model ---------------------------------------------------------------------------


class KMeans(Worker):
    """Lloyd's algorithm: the driver holds the centres, the ranks their share of the points."""

    @register(Dispatch.DP_COMPUTE_METRIC)
    def sums(self, points: DataProto) -> tuple[np.ndarray, np.ndarray]:
        centres = torch.as_tensor(points.meta_info["centres"])
        nearest = torch.cdist(points.batch["xy"], centres).argmin(1)
        one_hot = torch.nn.functional.one_hot(nearest, len(centres)).to(centres.dtype)
        return (one_hot.T @ points.batch["xy"]).numpy(), one_hot.sum(0).numpy()


def test_k_means_over_ranks_equals_k_means_alone(merged: RayWorkerGroup) -> None:
    generator = torch.Generator().manual_seed(0)
    means = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    xy = (means[:, None] + torch.randn(3, 40, 2, generator=generator, dtype=torch.float64)).reshape(-1, 2)
    group = merged.spawn(["points"])["points"]
    centres = alone = xy[[0, 50, 100]].numpy()
    for _ in range(5):
        results = group.sums(DataProto.from_dict({"xy": xy}, meta_info={"centres": centres}))
        centres = sum(s for s, _ in results) / sum(n for _, n in results)[:, None]
        nearest = np.linalg.norm(xy.numpy()[:, None] - alone, axis=-1).argmin(1)
        alone = np.stack([xy.numpy()[nearest == k].mean(0) for k in range(3)])
    assert np.allclose(centres, alone, rtol=1e-12)
    assert np.abs(centres - means.numpy()).max() < 0.6


class Reducer(Worker):
    def __init__(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo")

    @register(Dispatch.ALL_TO_ALL)
    def all_reduce(self, value: float) -> float:
        tensor = torch.tensor([value])
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    def close(self) -> None:
        torch.distributed.destroy_process_group()


def test_settings_of_memory_reach_the_ranks_and_do_not_stay_with_the_driver(adders: RayWorkerGroup) -> None:
    settings = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "LRU_CACHE_CAPACITY": "128"}
    for found in adders.execute_all_sync(lambda worker: dict(os.environ)):
        assert settings.items() <= found.items()
    assert not settings.keys() & os.environ.keys()


def test_a_process_does_its_preludes_before_it_imports_torch(merged: RayWorkerGroup) -> None:
    assert merged.spawn(["actor"])["actor"].execute_rank_zero_sync(lambda worker: os.environ["HAD_TORCH"]) == "False"


def test_torch_distributed_starts_from_the_groups_environment(merged: RayWorkerGroup) -> None:
    assert merged.reducer_all_reduce([1.0, 2.5]) == [3.5, 3.5]
