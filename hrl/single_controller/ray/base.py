"""The names of `verl.single_controller.ray.base`."""

from hrl.single_controller.resource_pool import (
    RayResourcePool,
    SubRayResourcePool,
    merge_resource_pool,
    split_resource_pool,
)
from hrl.single_controller.worker import (
    RayClassWithInitArgs,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from hrl.single_controller.worker_group import RayWorkerGroup

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "SubRayResourcePool",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "merge_resource_pool",
    "split_resource_pool",
]
