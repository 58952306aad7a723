"""A Ray of one's own that does not come up ends with one sentence, and soon."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hrl.processes.watch import ProcessWatch
from hrl.single_controller import ray_start
from hrl.single_controller.ray_start import coming_up
from hrl.single_controller.worker_errors import ClusterLostError

PATIENCE_S = 20
NOT_READY = "The current node timed out during startup. This could happen because of many things."


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Begins a process that is called as one of Ray's and sleeps; those that watch it look often."""
    monkeypatch.setattr(ray_start, "LOOK_S", 0.02)
    monkeypatch.setattr(ray_start, "NEEDED", ProcessWatch(stopped_s=0.1, look_s=0.02))
    begun: list[subprocess.Popen[bytes]] = []

    def begin(program: str) -> subprocess.Popen[bytes]:
        (tmp_path / program).symlink_to(str(shutil.which("sleep")))
        begun.append(subprocess.Popen([tmp_path / program, "60"]))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.wait()


def test_a_control_service_that_is_never_ready_is_killed_at_the_deadline(begin: Callable) -> None:
    said = r"did not come up on this machine: it was not ready after 0.1 s\. Start the run again"
    with pytest.raises(ClusterLostError, match=said), coming_up(limit_s=0.1):
        assert begin("gcs_server").wait(PATIENCE_S) == -signal.SIGKILL
        raise RuntimeError("Failed to start GCS.")


def test_a_raylet_that_somebody_has_stopped_is_killed_and_named(begin: Callable) -> None:
    with pytest.raises(ClusterLostError, match=r"Somebody had stopped Ray's raylet \(pid \d+, SIGSTOP\)"), coming_up():
        raylet = begin("raylet")
        raylet.send_signal(signal.SIGSTOP)
        assert raylet.wait(PATIENCE_S) == -signal.SIGKILL
        raise Exception(NOT_READY)


def test_one_that_is_stopped_is_named_also_where_ray_has_kept_all_threads_from_looking(begin: Callable) -> None:
    said = r"somebody has stopped Ray's control service \(GCS\) \(pid \d+, SIGSTOP\)"
    with pytest.raises(ClusterLostError, match=said), coming_up():
        service = begin("gcs_server")
        service.send_signal(signal.SIGSTOP)
        os.waitpid(service.pid, os.WUNTRACED)
        raise TimeoutError("Timed out waiting for file")
    assert service.wait(PATIENCE_S) == -signal.SIGKILL


def test_what_ray_says_of_a_part_that_was_late_becomes_one_error_and_nothing_is_left(begin: Callable) -> None:
    said = "come up on this machine: The current node timed out during startup"
    with pytest.raises(ClusterLostError, match=said), coming_up():
        process = begin("gcs_server")
        raise Exception(NOT_READY)
    assert process.wait(PATIENCE_S)


def test_a_ray_that_was_there_before_is_left_alone(begin: Callable) -> None:
    before = begin("raylet")
    with pytest.raises(ClusterLostError), coming_up():
        service = begin("gcs_server")
        raise Exception(NOT_READY)
    assert service.wait(PATIENCE_S) == -signal.SIGKILL
    assert before.poll() is None


def test_another_error_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="no such argument"), coming_up():
        raise ValueError("no such argument")
