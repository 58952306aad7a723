"""A /dev/shm that is too full for a batch is an error before the batch is written: writing would kill the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

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
