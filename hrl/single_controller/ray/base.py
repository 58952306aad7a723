"""The names of `verl.single_controller.ray.base`."""

from hrl.single_controller.resource_pool import RayResourcePool
from hrl.single_controller.worker import RayClassWithInitArgs, create_colocated_worker_cls
from hrl.single_controller.worker_group import RayWorkerGroup

__all__ = ["RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup", "create_colocated_worker_cls"]
