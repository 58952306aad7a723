"""Which Ray a run uses, and on how many cores."""

import os

import pytest

from hrl.cluster import machine as cluster


@pytest.fixture
def settings_of(monkeypatch):
    """What `run_cluster` would hand to Ray."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests of this process have one
    monkeypatch.setattr(cluster, "ray_cluster", lambda **settings: settings)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6})
    return lambda num_processes=1, **ray_kwargs: cluster.run_cluster(ray_kwargs, num_processes, 0)


def test_a_run_starts_its_own_ray_on_the_cores_it_was_given(settings_of):
    own = {"address": "local", "num_cpus": 3, "object_store_bytes": 1 << 30}
    assert settings_of() == own
    assert settings_of(num_processes=8) == own | {"num_cpus": 8}
    assert settings_of(num_cpus=2, log_to_driver=True) == own | {"num_cpus": 2, "log_to_driver": True}


@pytest.mark.parametrize(
    ("rows", "row_tokens", "machine_gib", "expected_gib"),
    [
        (64, 96, 4, 1),  # the quickstart: the least there is
        (8192, 9216, 600, 9),  # 1024 prompts × 8 samples: 2 batches × 64 bytes × 75 million tokens
        (8192, 9216, 7, 7),  # as much as a smaller machine has
        (8192, 9216, 0.25, 1),
    ],
)
def test_the_object_store_holds_two_batches_where_the_machine_has_the_memory(
    rows, row_tokens, machine_gib, expected_gib, settings_of, monkeypatch
):
    monkeypatch.setattr(cluster, "most_object_store_bytes", lambda: int(machine_gib * 2**30))

    assert cluster.run_cluster({}, 1, rows * row_tokens)["object_store_bytes"] == expected_gib * 2**30


def test_a_machine_gives_the_object_store_a_share_of_its_memory_and_no_more_than_dev_shm_has(monkeypatch):
    from hrl.single_controller import ray_cluster

    monkeypatch.setattr(ray_cluster, "get_system_memory", lambda: 1000 << 30)
    monkeypatch.setattr(ray_cluster, "get_shared_memory_bytes", lambda: 500 << 30)
    assert ray_cluster.most_object_store_bytes() == int(0.3 * (1000 << 30))
    monkeypatch.setattr(ray_cluster, "get_shared_memory_bytes", lambda: 64 << 20)
    assert ray_cluster.most_object_store_bytes() == int(0.95 * (64 << 20))


def test_the_environment_names_a_cluster_to_join(settings_of, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert settings_of() == {"address": "10.0.0.1:6379"}


def test_the_configuration_wins_over_the_environment(settings_of, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert settings_of(address="auto") == {"address": "auto"}
    assert settings_of(address="local")["num_cpus"] == 3


def test_more_ranks_than_cores_are_pointed_out_with_how_slow_that_is():
    assert cluster.crowding(3, 3) is None
    said = cluster.crowding(4, 3)
    assert said is not None and "4 ranks take turns on 3 cores: a step takes at least 1.3 times as long" in said


def test_a_ray_of_the_caller_is_used_and_left_running(monkeypatch):
    ended = []
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.init", lambda **_: ended.append("a second Ray was started"))
    monkeypatch.setattr("ray.shutdown", lambda: ended.append("the caller's Ray was ended"))
    with cluster.run_cluster({}, 1, 0), cluster.run_cluster({"address": "auto"}, 1, 0):
        pass
    assert ended == []
