"""The single controller on a Ray cluster: where processes are placed, and how calls and rows reach them."""

from hrl.single_controller.ray.cluster import ray_cluster
from hrl.single_controller.ray.colocated import RayClassWithInitArgs, create_colocated_worker_cls
from hrl.single_controller.ray.resource_pool import RayResourcePool
from hrl.single_controller.ray.worker_group import RayWorkerGroup

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "create_colocated_worker_cls",
    "ray_cluster",
]
