"""Ranks over several nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hrl.single_controller import ray_cluster
from hrl.single_controller.rank_processes import ProcessInfo, _rank_environs
from hrl.single_controller.resource_pool import _certainly_missing
from hrl.single_controller.worker import RankEnv

ROOT = Path(__file__).parents[2]

TWO_NODES = """
import json, os, ray, torch
from ray.cluster_utils import Cluster
from hrl.cluster.roles import Role, pool_manager_of
from hrl.config.placement import Device, Placement
from hrl.config.trainer import PoolOptions
from hrl.protocol import DataProto
from hrl.single_controller.dispatch import Dispatch, register
from hrl.single_controller.worker_errors import PlacementError
from hrl.single_controller.worker import Worker
from hrl.single_controller.ray_cluster import assigned_gpu, ray_cluster
from hrl.single_controller.resource_pool import RayResourcePool
from hrl.single_controller.worker import RayClassWithInitArgs
from hrl.single_controller.worker_group import RayWorkerGroup

class Place(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        node = ray.get_runtime_context().get_node_id()
        return node, self.rank_env.as_environ(), dict(os.environ), assigned_gpu()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def doubled(self, batch):
        return DataProto.from_dict({"number": 2 * batch.batch["number"]})

def refused(name, *arguments, **named):
    try:
        make(*arguments, **named).create_resource_pool()
    except PlacementError as error:
        print(name, error, flush=True)

def make(sizes, options, mapping, use_gpu=False):
    given = {pool: PoolOptions(**option) for pool, option in options.items()}
    places = {
        part: tuple(Device(given[part].split_of, number) for number in range(size[0]))
        for part, size in sizes.items() if part in given and given[part].split_of
    }
    own = {pool: tuple(size) for pool, size in sizes.items() if pool not in places}
    roles = {role.value: pool for role, pool in mapping.items()}
    pools = {pool: tuple(sizes[pool]) for pool in roles.values()}
    return pool_manager_of(Placement(pools, roles, own, places, given), use_gpu=use_gpu)

head = {"num_cpus": 1, "include_dashboard": False, "resources": {"small": 1}}
cluster = Cluster(initialize_head=True, head_node_args=head)
try:
    cluster.add_node(num_cpus=2, num_gpus=1, resources={"big": 1}, labels={"rack": "b"})
    with ray_cluster(cluster.address):
        names = {node["NodeID"]: "big" if "big" in node["Resources"] else "small" for node in ray.nodes()}
        actor = {Role.Actor: "a"}
        refused("resource", {"a": [1]}, {"a": {"nodes": ["bigger"]}}, actor)
        refused("label", {"a": [1]}, {"a": {"nodes": ["rack=c"]}}, actor)
        refused("together", {"a": [1, 1], "b": [2]}, {}, {Role.Actor: "a", Role.Critic: "b"})
        for pin in ("big", "rack=b"):
            manager = make({"a": [1]}, {"a": {"nodes": [pin]}}, actor)
            manager.create_resource_pool()
            print("pinned", names[manager.get_resource_pool(Role.Actor).slots()[0].node_id], flush=True)
            manager.release()
        manager = make(
            {"cards": [1], "a": [1], "b": [1]},
            {"cards": {"max_colocate_count": 2}, "a": {"split_of": "cards"}, "b": {"split_of": "cards"}},
            {Role.Actor: "a", Role.Critic: "b"},
            use_gpu=True,
        )
        manager.create_resource_pool()
        groups = [
            RayWorkerGroup(manager.get_resource_pool(role), RayClassWithInitArgs(Place)) for role in manager.mapping
        ]
        told = [[names[group.place()[0][0]], group.place()[0][3], group.pids[0]] for group in groups]
        free = ray.available_resources().get("GPU", 0.0)
        shares = [group.resource_pool.gpus_per_process for group in groups]
        print("shared", json.dumps([told, shares, free]), flush=True)
        for group in groups:
            group.shutdown()
        manager.release()
        try:
            RayResourcePool([3], use_gpu=False).get_placement_groups()
        except PlacementError as error:
            print("refused", error, flush=True)
        pool = RayResourcePool([1, 1], use_gpu=False, nodes=["small", "big"])
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Place))
        slots = [[slot.node_ip, slot.node_id] for slot in pool.slots()]
        print("placed", json.dumps([slots, group.place()]), flush=True)
        answer = group.doubled(DataProto.from_dict({"number": torch.arange(5)}))
        print("doubled", json.dumps(answer.batch["number"].tolist()), flush=True)
        group.shutdown()
finally:
    cluster.shutdown()
"""


def advised_environ() -> dict[str, str]:
    """Return what the page on clusters sets before `ray start`."""
    page = (ROOT / "docs" / "several-nodes.md").read_text(encoding="utf-8")
    lines = re.findall(r"^all\$  export (MALLOC_.*|ONEDNN_.*)$", page, re.MULTILINE)
    return dict(word.split("=") for line in lines for word in line.split())


def test_the_page_on_clusters_sets_what_a_ray_of_ones_own_has() -> None:
    assert advised_environ() == ray_cluster._WORKER_ENVIRONMENT


@pytest.mark.cluster
def test_a_pool_over_two_nodes_has_one_placement_group_on_each(tmp_path: Path) -> None:
    script = tmp_path / "two_nodes.py"
    script.write_text(TWO_NODES)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"} | advised_environ()
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shown = ("refused", "placed", "doubled", "resource", "label", "together", "pinned", "shared")
    said = [line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(shown)]
    lines = dict(said)
    assert json.loads(lines["doubled"]) == [0, 2, 4, 6, 8], "each node has an object with its own ranks' rows"
    assert "one node must have 3 CPU and the best of 2 node(s) has 2" in lines["refused"]
    _check_options(said, lines)
    slots, places = json.loads(lines["placed"])
    assert [node for node, *_ in places] == [node for _, node in slots], "rank i runs in slot i"
    assert len({node for node, *_ in places}) == 2
    for rank, (_, variables, environ, _) in enumerate(places):
        assert environ.items() >= advised_environ().items(), "a node's processes have what its shell had"
        assert (variables["RANK"], variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == (str(rank), "0", "1")
        assert variables["WORLD_SIZE"] == "2" and variables["MASTER_ADDR"] == slots[0][0]


def _check_options(said: list[list[str]], lines: dict[str, str]) -> None:
    """Pools on named nodes, on one device together, and those that can't be."""
    assert (
        "pool 'a': no node of the cluster has the resource 'bigger' (trainer.pool_options.a.nodes)" in lines["resource"]
    )
    assert "Those that nodes have: big, small." in lines["resource"]
    assert "has the label 'rack=c'" in lines["label"] and "rack=b" in lines["label"]
    assert "pool 'b': beside the pools before it, it needs 4 CPU in all and the cluster has 3" in lines["together"]
    assert [node for name, node in said if name == "pinned"] == ["big", "big"]
    told, shares, free = json.loads(lines["shared"])
    assert [(node, gpu) for node, gpu, _ in told] == [("big", "0")] * 2 and told[0][2] != told[1][2]
    assert shares == [0.5, 0.5] and free == 0, "two processes have one GPU between them"


def test_local_ranks_count_within_a_node() -> None:
    infos = [ProcessInfo(pid, node, f"10.0.0.{node}") for pid, node in enumerate("11122")]
    environs = [RankEnv.from_environ(variables) for variables in _rank_environs(infos, 1234)]
    assert [environ.local_rank for environ in environs] == [0, 1, 2, 0, 1]
    assert [environ.local_world_size for environ in environs] == [3, 3, 3, 2, 2]
    assert [environ.rank for environ in environs] == [0, 1, 2, 3, 4]
    assert {(environ.master_addr, environ.master_port) for environ in environs} == {("10.0.0.1", 1234)}


def test_a_group_on_one_node_stays_on_loopback() -> None:
    infos = [ProcessInfo(1, "a", "10.0.0.1"), ProcessInfo(2, "a", "10.0.0.1")]
    assert {variables["MASTER_ADDR"] for variables in _rank_environs(infos, 1234)} == {"127.0.0.1"}


def test_a_rank_outside_a_group_says_so() -> None:
    with pytest.raises(RuntimeError, match="RANK, WORLD_SIZE.*inside a worker group"):
        RankEnv.from_environ({})


def test_only_what_can_never_fit_is_refused_at_once() -> None:
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0}]
    assert _certainly_missing([{"CPU": 4, "GPU": 4}], nodes) is None
    assert _certainly_missing([{"CPU": 8}, {"CPU": 8}], nodes) is None
    assert "8 GPU in all and the cluster has 4" in str(_certainly_missing([{"CPU": 4, "GPU": 4}] * 2, nodes))
    assert "one node must have 9 CPU" in str(_certainly_missing([{"CPU": 9}], nodes))
