"""The names of `verl.single_controller.ray`, and `ray_cluster`. Nothing in hrl imports from here."""

from hrl.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    SubRayResourcePool,
    create_colocated_worker_cls,
)
from hrl.single_controller.ray_cluster import ray_cluster

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "SubRayResourcePool",
    "create_colocated_worker_cls",
    "ray_cluster",
]
