"""Worker groups whose ranks are Ray actors."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterable, Mapping, Sequence

import ray

from hrl.single_controller.base import WorkerGroup
from hrl.single_controller.calls import PendingCalls
from hrl.single_controller.colocated import ColocatedClasses, RayClassWithInitArgs, methods_of_role
from hrl.single_controller.dispatch import RankCall
from hrl.single_controller.rank_processes import RankProcesses
from hrl.single_controller.resource_pool import RayResourcePool
from hrl.single_controller.worker import RANK_ENV_NAMES
from hrl.single_controller.worker_group import GroupFuture, wait_for_all


class RayWorkerGroup(WorkerGroup):
    """One process per slot of a resource pool, called as one object.

    Every process knows its RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT before its
    workers are constructed. The processes end with `shutdown()`, and with the driver however that ends.

    Args:
        resource_pool: Where the processes run.
        ray_cls_with_init: The worker class, or the roles merged by `create_colocated_worker_cls`.
        name_prefix: In front of the names of the processes.
        device_name: `cuda` or `cpu`; None is what the pool has.
        worker_env: Environment variables the processes are started with.
        call_timeout_s: Deadline of every call; `with_timeout` gives another.
        start_timeout_s: Deadline for the processes to be up, and for each role to be constructed.
        num_threads_per_worker: OMP_NUM_THREADS of each process. None leaves it to the driver's environment, and where
            that is silent to Ray, which sets 1.
        wait: Return when the workers are constructed. Otherwise the processes only begin to start, and `start_together`
            must have been called before anything else.

    Raises:
        PlacementError: The cluster lacks what the pool needs.
        ValueError: `worker_env` sets a variable that the group sets; `device_name` is not what the pool has.
        WorkerError: A worker's constructor raised; the role, the rank and the traceback are in it.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        *,
        name_prefix: str | None = None,
        device_name: str | None = None,
        worker_env: Mapping[str, str] | None = None,
        call_timeout_s: float = 1800.0,
        start_timeout_s: float = 300.0,
        num_threads_per_worker: int | None = None,
        wait: bool = True,
    ) -> None:
        super().__init__(resource_pool.world_size, ray_cls_with_init.methods(), call_timeout_s)
        self.device_name = "cuda" if resource_pool.use_gpu else "cpu"
        if device_name not in (None, self.device_name):
            raise ValueError(f"device_name={device_name!r}, but pool {resource_pool.name!r} is for {self.device_name}")
        self.resource_pool = resource_pool
        self._colocated = ray_cls_with_init if isinstance(ray_cls_with_init, ColocatedClasses) else None
        self._classes = ray_cls_with_init.roles()
        self._start_timeout_s = start_timeout_s
        prefix = name_prefix or uuid.uuid4().hex[:6]
        environ = _checked_environ(worker_env or {}, num_threads_per_worker)
        name = f"{prefix}_{'+'.join(self._classes)}"
        self._processes = RankProcesses(resource_pool, name, environ, start_timeout_s)
        if wait:
            self.start_together([self])

    @classmethod
    def start_together(cls, groups: Sequence[RayWorkerGroup]) -> None:
        """Wait until all workers of several groups are constructed; none waits for another's processes.

        Args:
            groups: Made with `wait=False`. If one fails, all are shut down.

        Raises:
            WorkerError: A worker's constructor raised, or processes were not up in time.
        """
        try:
            wait_for_all([call for group in groups for call in group._construct()])
        except BaseException:  # whatever comes, Ctrl-C included: no process stays behind
            for group in groups:
                group.shutdown()
            raise

    def _construct(self) -> list[GroupFuture]:
        self._processes.connect()
        return [
            # A process constructs one worker after the other: each one's deadline holds the time of those before it.
            GroupFuture(self._processes.construct(role, spec, place * self._start_timeout_s), list)
            for place, (role, spec) in enumerate(self._classes.items(), 1)
        ]

    def _submit(self, role: str, method: str, calls: Sequence[RankCall]) -> PendingCalls:
        return self._processes.call(role, method, calls, self.call_timeout_s)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """One group per role, each with its role's methods under their own names, all on this group's processes.

        Shutting one of them down ends the processes of all.

        Raises:
            ValueError: The group was not made by `create_colocated_worker_cls`, or a role is not in it.
        """
        if self._colocated is None:
            raise ValueError("spawn() splits a group made by create_colocated_worker_cls; this one has one role")
        class_dict = self._colocated.class_dict
        unknown = sorted(set(prefix_set) - class_dict.keys())
        if unknown:
            raise ValueError(f"no role {unknown} in this group; there are {sorted(class_dict)}")
        groups = {}
        for role in prefix_set:
            group = copy.copy(self)
            group._methods = methods_of_role(role, class_dict[role].cls, prefix="")
            group._colocated = None
            groups[role] = group
        return groups

    def shutdown(self) -> None:
        """Close the workers (`Worker.close`), at most 10 s, and end the processes. Again does nothing."""
        self._processes.shutdown()

    @property
    def worker_names(self) -> list[str]:
        """The name of each process in Ray, by rank."""
        return list(self._processes.names)

    @property
    def workers(self) -> list[ray.actor.ActorHandle]:
        """The Ray actor of each rank; none after shutdown."""
        return list(self._processes.actors)

    @property
    def node_ips(self) -> list[str]:
        """The address of each rank's node."""
        return [info.node_ip for info in self._processes.infos]

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [info.pid for info in self._processes.infos]


def _checked_environ(worker_env: Mapping[str, str], num_threads: int | None) -> dict[str, str]:
    owned = sorted(set(worker_env) & set(RANK_ENV_NAMES))
    if owned:
        raise ValueError(f"worker_env sets {', '.join(owned)}, which the worker group sets itself: leave them out")
    environ = {name: str(value) for name, value in worker_env.items()}
    if num_threads is not None:
        environ["OMP_NUM_THREADS"] = str(num_threads)
    return environ
