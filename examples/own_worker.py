"""A worker of your own on the single controller, without a language model: two processes estimate π together.

Each rank throws its own points, the driver adds them up. `register` says how a call is cut over the ranks and how what
comes back is joined; the driver calls the group as if it were one object.

Run it with `python examples/own_worker.py`.
"""

import torch

from hrl import DataProto
from hrl.single_controller.base import Worker
from hrl.single_controller.base.decorator import Dispatch, register
from hrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from hrl.single_controller.ray_cluster import ray_cluster


class Thrower(Worker):
    """Throws points into the unit square, with a random stream for each rank."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed + self.rank)

    @register(Dispatch.ONE_TO_ALL)  # the same call to every rank; a list of what they return
    def throw(self, points):
        return int((torch.rand(points, 2, generator=self.generator).norm(dim=1) <= 1).sum())

    @register(Dispatch.DP_COMPUTE_PROTO)  # every rank gets its share of the rows; the rows come back in order
    def distances(self, batch):
        return DataProto.from_dict({"distance": batch.batch["point"].norm(dim=1)})


with ray_cluster():
    group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(Thrower, seed=1))
    inside = thrown = 0
    for _ in range(20):
        inside += sum(group.throw(50_000))  # as many for each of the two ranks
        thrown += 100_000
        print(f"after {thrown:>9,} points π is about {4 * inside / thrown:.4f}")
    corners = DataProto.from_dict({"point": torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]])})
    print("distances:", group.distances(corners).batch["distance"].tolist())
    group.shutdown()
