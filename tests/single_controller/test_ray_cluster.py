"""A cluster that does not answer, and one of one's own that nobody else reaches."""

import os
import socket
from types import SimpleNamespace

import psutil
import pytest
from ray._private import ray_constants
from ray._private.node import Node

from hrl.single_controller import ray_cluster as module
from hrl.single_controller.ray_cluster import ray_cluster, reaching
from hrl.single_controller.worker_errors import PlacementError


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_told_with_its_keys(scheme):
    with socket.socket() as taken:  # bound and not listening: nobody else can answer there meanwhile
        taken.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        said = f"cluster at {address}: .*trainer.ray_kwargs.address or RAY_ADDRESS"
        with pytest.raises(PlacementError, match=said), ray_cluster(address):
            pass


def test_a_cluster_that_ray_does_not_find_is_told_too():
    with pytest.raises(PlacementError, match="cluster at auto: none here"), reaching("auto"):
        raise ConnectionError("none here")


def test_what_fails_in_a_cluster_of_ones_own_stays_as_it_is():
    with pytest.raises(OSError, match="no room"), reaching("local"):
        raise OSError("no room")


def test_a_cluster_of_ones_own_has_all_libraries_on_loopback_and_leaves_no_trace_of_that_here(monkeypatch):
    started = []

    def init(**settings):
        node = Node.__new__(Node)
        node.start_monitor()
        if not settings["include_dashboard"]:
            node.start_api_server(include_dashboard=False, raise_on_failure=False)
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        started.append({entry.address for entry in psutil.net_if_addrs()[interface]})
        assert os.environ["NCCL_SOCKET_IFNAME"] == interface
        assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
        assert not ray_constants.ENABLE_RAY_CLUSTER
        assert (Node.start_api_server is services[1]) == settings["include_dashboard"]
        raise RuntimeError("seen enough")

    services = Node.start_monitor, Node.start_api_server
    monkeypatch.setattr(module.ray, "init", init)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "of several machines")
    for ray_kwargs in ({}, {"include_dashboard": True}):
        with pytest.raises(RuntimeError, match="seen enough"), ray_cluster("local", **ray_kwargs):
            pass
    assert len(started) == 2 and all("127.0.0.1" in addresses for addresses in started)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "of several machines"
    assert (Node.start_monitor, Node.start_api_server) == services
    assert ray_constants.ENABLE_RAY_CLUSTER


def test_a_machine_without_loopback_is_told_how_to_get_one(monkeypatch):
    elsewhere = SimpleNamespace(address="192.0.2.1")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [elsewhere]})
    with pytest.raises(PlacementError, match="no interface .* 127.0.0.1.*ip link set lo up"), ray_cluster("local"):
        pass
    monkeypatch.setattr(module, "get_localhost_ip", lambda: "192.0.2.1")
    with pytest.raises(PlacementError, match="`localhost` is 192.0.2.1.*/etc/hosts"), ray_cluster("local"):
        pass
