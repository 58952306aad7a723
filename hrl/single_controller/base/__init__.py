"""Workers, worker groups and the decorator that ties a method to a way of cutting its arguments."""

from hrl.processes.lifetime import die_with_parent, popen_that_dies_with_parent
from hrl.single_controller.decorator import Dispatch, Execute, register
from hrl.single_controller.errors import (
    PlacementError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    phase,
)
from hrl.single_controller.worker import Worker
from hrl.single_controller.worker_group import ClassWithInitArgs, ResourcePool, WorkerGroup

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "PlacementError",
    "ResourcePool",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroup",
    "WorkerTimeoutError",
    "die_with_parent",
    "phase",
    "popen_that_dies_with_parent",
    "register",
]
