"""Which Ray a run uses, and on how many cores."""

import os

import pytest

from hrl.trainer import cluster


@pytest.fixture
def settings_of(monkeypatch):
    """What `run_cluster` would hand to Ray."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "ray_cluster", lambda **settings: settings)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6})
    return lambda num_processes=1, **ray_kwargs: cluster.run_cluster(ray_kwargs, num_processes)


def test_a_run_starts_its_own_ray_on_the_cores_it_was_given(settings_of):
    own = {"address": "local", "num_cpus": 3, "object_store_bytes": cluster.LOCAL_OBJECT_STORE_BYTES}
    assert settings_of() == own
    assert settings_of(num_processes=8) == own | {"num_cpus": 8}
    assert settings_of(num_cpus=2, log_to_driver=True) == own | {"num_cpus": 2, "log_to_driver": True}


def test_the_environment_names_a_cluster_to_join(settings_of, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert settings_of() == {"address": "10.0.0.1:6379"}


def test_the_configuration_wins_over_the_environment(settings_of, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert settings_of(address="auto") == {"address": "auto"}
    assert settings_of(address="local")["num_cpus"] == 3


@pytest.mark.parametrize(
    "wanted, device, processes, warns",
    [("auto", "cpu", 4, True), ("auto", "cpu", 3, False), ("cpu", "cpu", 4, False), ("auto", "cuda", 4, False)],
)
def test_more_ranks_than_cores_without_a_gpu_are_pointed_out(settings_of, wanted, device, processes, warns):
    said = cluster.scarcity(wanted, device, processes)
    assert (said is not None) == warns
    assert not warns or "no GPU was found, and 4 ranks take turns on 3 cores" in said
