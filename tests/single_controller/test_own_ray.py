"""What a run says of a Ray of its own: who of its processes ended first, and that `/dev/shm` lacks room for a batch."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from hrl.processes import guard
from hrl.single_controller import own_ray
from hrl.single_controller.own_ray import OwnRay, require_shared_memory
from hrl.single_controller.worker_errors import SharedMemoryError

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """An object store of 64 MiB that has written to one of them, open in the raylet, which is this process."""
    monkeypatch.setattr(own_ray, "_STORE_FILE", f"{tmp_path}/plasma")
    monkeypatch.setattr(OwnRay, "raylet_pid", os.getpid())
    monkeypatch.setattr(own_ray, "_own", object.__new__(OwnRay))
    file = os.open(tmp_path / "plasmaX1", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 64 * MIB)
    os.pwrite(file, b"x" * MIB, 0)
    os.fsync(file)
    yield file
    os.close(file)


def test_a_batch_that_may_not_fit_into_shared_memory_is_refused(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_ray, "free_shared_memory", lambda: 8 * MIB)
    with pytest.raises(SharedMemoryError, match="/dev/shm has only 8 MiB free, .* may take 63 MiB more.*--shm-size"):
        require_shared_memory()


@pytest.mark.parametrize("free", [63 * MIB, None])
def test_a_batch_that_fits_is_not_refused(store: int, free: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_ray, "free_shared_memory", lambda: free)
    require_shared_memory()


def test_a_store_that_has_its_memory_needs_none_that_is_free(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.posix_fallocate(store, 0, 64 * MIB)
    monkeypatch.setattr(own_ray, "free_shared_memory", lambda: 0)
    require_shared_memory()


def test_a_store_elsewhere_or_of_a_cluster_that_was_joined_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_ray, "free_shared_memory", lambda: 0)
    require_shared_memory()  # no Ray of its own
    monkeypatch.setattr(OwnRay, "raylet_pid", os.getpid())
    monkeypatch.setattr(own_ray, "_own", object.__new__(OwnRay))
    require_shared_memory()  # one whose store is a file in /tmp


@pytest.fixture
def raylet_and_agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[OwnRay, list[subprocess.Popen[bytes]]]]:
    """A Ray of two processes that sleep."""
    node = SimpleNamespace(get_logs_dir_path=lambda: "logs")
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    (entry,) = (each for each in guard.process_table() if each.pid == processes[1].pid)
    found = object.__new__(OwnRay)
    found.__dict__ |= {"_lost": None, "_vital": {"Ray's raylet": processes[0]}, "_agents": {entry: "agent"}}
    yield found, processes
    for process in processes:
        process.kill()
        process.wait()


def test_a_raylet_that_is_killed_is_named_though_its_agent_has_ended_with_it(
    raylet_and_agent: tuple[OwnRay, list[subprocess.Popen[bytes]]],
) -> None:
    found, processes = raylet_and_agent
    assert found.lost() is None
    for process in processes:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert f"Ray's raylet on this machine (pid {processes[0].pid}) was killed by SIGKILL" in str(found.lost())


def test_an_agent_that_is_killed_stays_the_one_that_is_named_when_the_rest_was_killed_after_it(
    raylet_and_agent: tuple[OwnRay, list[subprocess.Popen[bytes]]],
) -> None:
    found, (raylet, agent) = raylet_and_agent
    agent.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
    named = f"Ray's agent on this machine (pid {agent.pid}) has ended, and the raylet ends with it"
    assert named in str(found.lost())
    raylet.kill()
    raylet.wait()
    assert named in str(found.lost())
