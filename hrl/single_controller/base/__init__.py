"""The names of `verl.single_controller.base`, and hrl's own beside them. Nothing in hrl imports from here."""

from hrl.processes.lifetime import die_with_parent, popen_that_dies_with_parent
from hrl.single_controller.dispatch import Dispatch, Execute, register
from hrl.single_controller.resource_pool import RayResourcePool as ResourcePool
from hrl.single_controller.worker import RayClassWithInitArgs as ClassWithInitArgs
from hrl.single_controller.worker import Worker
from hrl.single_controller.worker_errors import PlacementError, WorkerDiedError, WorkerError, WorkerTimeoutError, phase
from hrl.single_controller.worker_group import WorkerGroup

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
