"""The names of `verl.single_controller.base.worker_group`."""

from hrl.single_controller.resource_pool import RayResourcePool as ResourcePool
from hrl.single_controller.worker import RayClassWithInitArgs as ClassWithInitArgs
from hrl.single_controller.worker_group import WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "WorkerGroup"]
