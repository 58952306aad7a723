"""The single controller on a Ray cluster: where processes are placed, and how calls and rows reach them."""

from hrl.single_controller.colocated import RayClassWithInitArgs, create_colocated_worker_cls
from hrl.single_controller.ray_cluster import ray_cluster
from hrl.single_controller.ray_worker_group import RayWorkerGroup
from hrl.single_controller.resource_pool import RayResourcePool

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "create_colocated_worker_cls",
    "ray_cluster",
]
