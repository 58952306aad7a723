"""A group of workers that is called like one object: `group.method(...)` runs on all of its ranks."""

from __future__ import annotations

import copy
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any, Self

import ray

from hrl.protocol import DataProtoFuture
from hrl.single_controller.dispatch import Dispatch, Execute, MethodSpec, RankCall, dispatch
from hrl.single_controller.rank_processes import PendingCalls, RankProcesses
from hrl.single_controller.resource_pool import RayResourcePool
from hrl.single_controller.worker import RANK_ENV_NAMES, ColocatedClasses, RayClassWithInitArgs, RoleMethod
from hrl.single_controller.worker_errors import WorkerError

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_ON_ALL = MethodSpec(Dispatch.ALL_TO_ALL, Execute.ALL, blocking=False, materialize_futures=False, columns=None)
_ON_RANK_ZERO = replace(_ON_ALL, dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)


# ---- futures ---------------------------------------------------------------------------------------------------


class GroupFuture(DataProtoFuture):
    """The result of a non-blocking call: `get()` waits for the ranks and returns the same as a blocking call."""

    def __init__(self, pending: PendingCalls, collect: Callable[[list[Any]], Any]) -> None:
        super().__init__(collect_fn=collect, futures=[pending], resolve_fn=_results_of)

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for the result, at most `timeout_s` from now; None waits until the call's own deadline."""
        return self.collect_fn(_results_of(self.futures, timeout_s))

    def done(self) -> bool:
        """Return whether `get` would return at once; raise what `get` would raise at once."""
        return all(pending.done() for pending in self.futures)


def wait_for_all(futures: Sequence[GroupFuture], on_done: Callable[[GroupFuture], None] | None = None) -> list[Any]:
    """Return the results of concurrent calls, each within its own deadline.

    Args:
        futures: The calls.
        on_done: Called with each one as it ends.

    Raises:
        WorkerError: A call failed; raised at once for the first failure. Other calls that failed by then are logged.
    """
    waiting = list(futures)
    while waiting:
        for future in list(waiting):
            try:
                if future.done():
                    waiting.remove(future)
                    if on_done is not None:
                        on_done(future)
            except WorkerError:
                _log_failures(other for other in waiting if other is not future)
                raise
        if waiting:
            time.sleep(_POLL_S)
    return [future.get() for future in futures]


def _log_failures(futures: Iterable[GroupFuture]) -> None:
    for future in futures:
        try:
            future.done()
        except WorkerError as error:
            logger.error("failed too: %s", error.summary)


def _results_of(pending: list[PendingCalls], timeout_s: float | None) -> list[Any]:
    return pending[0].get(timeout_s)


def _materialized(arg: Any) -> Any:
    return arg.get() if isinstance(arg, DataProtoFuture) else arg


# ---- groups ----------------------------------------------------------------------------------------------------


class WorkerGroup:
    """Ranks that are called together. A subclass starts the calls in `_submit`.

    Args:
        world_size: Number of ranks.
        classes: The worker classes of each rank; their registered methods become methods of the group.
        call_timeout_s: Deadline of every call in seconds; `with_timeout` changes it.

    Raises:
        ValueError: A registered method has the name of one of the group's own methods.
    """

    def __init__(self, world_size: int, classes: RayClassWithInitArgs, call_timeout_s: float) -> None:
        self.world_size = world_size
        self.call_timeout_s = call_timeout_s
        self._mesh_places: dict[str, list[tuple[int, bool]]] = {}
        self._fused: frozenset[str] = frozenset()
        self._classes = classes
        self._methods = classes.methods()
        taken = sorted(name for name in self._methods if hasattr(type(self), name))
        if taken:
            raise ValueError(f"registered methods {taken} hide methods of {type(self).__name__}: give them other names")

    def _submit(self, role: str, method: str, calls: Sequence[RankCall]) -> PendingCalls:
        """Start `method` of the worker with this role on ranks 0 … len(calls) - 1."""
        raise NotImplementedError(f"{type(self).__name__} has no processes: use a RayWorkerGroup")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        methods = self.__dict__.get("_methods", {})
        if name not in methods:
            raise AttributeError(
                f"no registered method {name!r} in this {type(self).__name__}; there are: {', '.join(sorted(methods))}"
            )
        return partial(self._call, methods[name])

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods})

    def _call(self, method: RoleMethod, /, *args: Any, **kwargs: Any) -> Any:
        if method.spec.materialize_futures:
            args = tuple(_materialized(arg) for arg in args)
            kwargs = {name: _materialized(arg) for name, arg in kwargs.items()}
        call = dispatch(method.spec, self, args, kwargs)
        future = GroupFuture(self._submit(method.role, method.name, call.ranks), call.collect)
        return future.get() if method.spec.blocking else future

    def with_timeout(self, call_timeout_s: float) -> Self:
        """Return the same group with another deadline per call: `group.with_timeout(60).method(...)`."""
        view = copy.copy(self)
        view.call_timeout_s = call_timeout_s
        view._hold(self._fused)
        return view

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """Return one group per role, each with its role's methods under their own names, all on the same processes.

        Shutting down one of them ends the processes of all.

        Raises:
            ValueError: The group was not made by `create_colocated_worker_cls`, or a role is not in it.
        """
        if not isinstance(self._classes, ColocatedClasses):
            raise ValueError("spawn() splits a group made by create_colocated_worker_cls; this one has one role")
        class_dict = self._classes.class_dict
        unknown = sorted(set(prefix_set) - class_dict.keys())
        if unknown:
            raise ValueError(f"no role {unknown} in this group; there are {sorted(class_dict)}")
        groups = {}
        for role in prefix_set:
            groups[role] = copy.copy(self)
            groups[role]._classes, groups[role]._mesh_places = class_dict[role], {}
            groups[role]._fused = frozenset()
            groups[role]._methods = class_dict[role].methods_as(role)
        return groups

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the groups of `spawn` attributes of this one, like verl's method: `group.critic.update(...)`.

        Raises:
            ValueError: As `spawn`, or a role has the name of something that the group has already.
        """
        roles = set(prefix_set)
        taken = sorted(role for role in roles - self._fused if role in dir(self))
        if taken:
            raise ValueError(f"roles {taken} have names of what the group has itself: rename them, or use spawn()")
        self._hold(roles)

    def _hold(self, roles: AbstractSet[str]) -> None:
        self.__dict__.update(self.spawn(roles) if roles else {})
        self._fused = frozenset(self._fused | roles)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of this group."""
        return tuple(dict.fromkeys(method.role for method in self._methods.values()))

    def mesh_places(self, mesh_name: str) -> list[tuple[int, bool]]:
        """Return each rank's place in a mesh, `(dp_rank, is_collect)` of `Worker.mesh_place`, cached."""
        if mesh_name not in self._mesh_places:
            self._mesh_places[mesh_name] = self.execute_all_sync("mesh_place", mesh_name)
        return self._mesh_places[mesh_name]

    # ---- any method or function, without dispatch ---------------------------------------------------------------

    def execute_all_async(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> GroupFuture:
        """Run `method(...)` on every rank; a function gets the rank's worker as its first argument.

        Arguments are cut as by `Dispatch.ALL_TO_ALL`.

        Args:
            method: The name of a method of the worker, registered or not, or a function that can be pickled.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            ValueError: The group has several roles; use `spawn` to choose one.
        """
        return self._execute(_ON_ALL, method, args, kwargs)

    def execute_all_sync(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Do the same as `execute_all_async`, and wait for the list of results in rank order."""
        return self.execute_all_async(method, *args, **kwargs).get()

    def execute_rank_zero_async(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> GroupFuture:
        """Do the same as `execute_all_async` on rank 0 only; every argument is passed unchanged."""
        return self._execute(_ON_RANK_ZERO, method, args, kwargs)

    def execute_rank_zero_sync(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do the same as `execute_rank_zero_async`, and wait for the result."""
        return self.execute_rank_zero_async(method, *args, **kwargs).get()

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def _execute(
        self, spec: MethodSpec, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GroupFuture:
        if len(self.roles) != 1:
            raise ValueError(f"this group plays the roles {self.roles}: call spawn() and use one of its groups")
        call = dispatch(spec, self, args, kwargs)
        if isinstance(method, str):
            return GroupFuture(self._submit(self.roles[0], method, call.ranks), call.collect)
        with_function = [RankCall((method, *rank.args), rank.kwargs) for rank in call.ranks]
        return GroupFuture(self._submit(self.roles[0], "execute_func", with_function), call.collect)


class RayWorkerGroup(WorkerGroup):
    """One process per slot of a resource pool, called as one object.

    Every process knows its RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT before its
    workers are constructed. The processes end with `shutdown()`, and with the driver however it ends.

    Args:
        resource_pool: The pool that the processes run on.
        ray_cls_with_init: The worker class, or the roles merged by `create_colocated_worker_cls`.
        name_prefix: Prefix of the names of the processes.
        device_name: `cuda` or `cpu`; None for the pool's device.
        worker_env: Environment variables of the processes. Without OMP_NUM_THREADS, here or in the driver's
            environment, Ray sets it to 1.
        call_timeout_s: Deadline of every call in seconds; `with_timeout` changes it.
        start_timeout_s: Deadline for the processes to be up, and for each role to be constructed.
        wait: Return when the workers are constructed. Otherwise the processes only begin to start, and `start_together`
            must be called before anything else.

    Raises:
        PlacementError: The cluster lacks the pool's resources.
        ValueError: `worker_env` sets a variable that the group sets, or `device_name` is not the pool's device.
        WorkerError: A worker's constructor raised; names role and rank, with the traceback.
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
        wait: bool = True,
    ) -> None:
        super().__init__(resource_pool.world_size, ray_cls_with_init, call_timeout_s)
        self.device_name = "cuda" if resource_pool.use_gpu else "cpu"
        if device_name not in (None, self.device_name):
            raise ValueError(f"device_name={device_name!r}, but pool {resource_pool.name!r} is for {self.device_name}")
        self.resource_pool = resource_pool
        self._start_timeout_s = start_timeout_s
        environ = {name: str(value) for name, value in (worker_env or {}).items()}
        owned = sorted(environ.keys() & set(RANK_ENV_NAMES))
        if owned:
            raise ValueError(f"worker_env sets {', '.join(owned)}, which the worker group sets itself: leave them out")
        name = f"{name_prefix or uuid.uuid4().hex[:6]}_{'+'.join(ray_cls_with_init.roles())}"
        self._processes = RankProcesses(resource_pool, name, environ, start_timeout_s, ray_cls_with_init.preludes())
        if wait:
            self.start_together([self])

    @classmethod
    def start_together(cls, groups: Sequence[RayWorkerGroup]) -> None:
        """Wait until all workers of several groups are constructed; the groups' processes start concurrently.

        Args:
            groups: Groups made with `wait=False`. If one fails, all are shut down.

        Raises:
            WorkerError: A worker's constructor raised, or processes were not up in time.
        """
        try:
            wait_for_all([call for group in groups for call in group._construct()])
        except BaseException:  # including Ctrl-C: leave no process behind
            for group in groups:
                group.shutdown()
            raise

    def _construct(self) -> list[GroupFuture]:
        self._processes.connect()
        return [
            # A process constructs its workers one after the other, so each deadline includes the time of those before.
            GroupFuture(self._processes.construct(role, spec, place * self._start_timeout_s), list)
            for place, (role, spec) in enumerate(self._classes.roles().items(), 1)
        ]

    def _submit(self, role: str, method: str, calls: Sequence[RankCall]) -> PendingCalls:
        return self._processes.call(role, method, calls, self.call_timeout_s)

    def shutdown(self) -> None:
        """Close the workers (`Worker.close`) within a deadline and end the processes. A second call does nothing."""
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
