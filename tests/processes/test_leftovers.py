"""What the children of a rank had in shared memory goes with the rank, also when they are not asked to leave."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from hrl.single_controller.dispatch import Dispatch, register
from hrl.single_controller.resource_pool import RayResourcePool
from hrl.single_controller.worker import RayClassWithInitArgs, Worker
from hrl.single_controller.worker_group import RayWorkerGroup
from tests.processes.process_table import still_alive

pytestmark = pytest.mark.usefixtures("ray_session")


def engine(said: Connection) -> None:
    """A process with a named semaphore, as an engine's has for its progress bars."""
    lock = multiprocessing.get_context("spawn").Lock()
    said.send((os.getpid(), lock._semlock.name))  # type: ignore[attr-defined]
    time.sleep(600)


class Owner(Worker):
    child: SpawnProcess

    @register(Dispatch.ONE_TO_ALL)
    def start(self) -> tuple[int, str]:
        context = multiprocessing.get_context("spawn")
        listen, said = context.Pipe(duplex=False)
        self.child = context.Process(target=engine, args=(said,))
        self.child.start()
        return listen.recv()


def test_a_semaphore_does_not_outlive_the_group_whose_child_made_it() -> None:
    pool = RayResourcePool([1], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Owner))
    try:
        pid, name = group.start()[0]
        semaphore = Path("/dev/shm", f"sem.{name.removeprefix('/')}")
        assert semaphore.exists()
    finally:
        group.shutdown()
        pool.release()

    assert not still_alive([pid], within_s=15)
    deadline = time.monotonic() + 15
    while semaphore.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not semaphore.exists()
