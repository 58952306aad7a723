"""The base class of workers, and the classes, one or several merged, that a process constructs workers from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from hrl.single_controller.dispatch import Dispatch, Execute, MethodSpec, register, registered_methods


@dataclass(frozen=True)
class RankEnv:
    """A process's place in its group, as in the environment variables of `torch.distributed`."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> RankEnv:
        """Read the place from environment variables.

        Raises:
            RuntimeError: A variable is missing, because no worker group (nor torchrun) started this process.
        """
        missing = [name for name in RANK_ENV_NAMES if name not in environ]
        if missing:
            raise RuntimeError(
                f"{', '.join(missing)} not set: a Worker knows its rank only inside a worker group (or under torchrun)"
            )
        values = {name.lower(): environ[name] for name in RANK_ENV_NAMES}
        master_addr = values.pop("master_addr")
        return cls(master_addr=master_addr, **{name: int(value) for name, value in values.items()})

    def as_environ(self) -> dict[str, str]:
        """Return the place as environment variables."""
        return {name: str(getattr(self, name.lower())) for name in RANK_ENV_NAMES}


RANK_ENV_NAMES = tuple(name.upper() for name in RankEnv.__dataclass_fields__)


class Worker:
    """One rank of a worker group: subclass it and `register` the methods that the driver may call."""

    fused_worker_dict: dict[str, Worker]
    """Role → worker, for all roles of this worker's process that have been constructed, itself included. It is set once
    the worker is constructed."""

    @cached_property
    def rank_env(self) -> RankEnv:
        """This rank's place in its group."""
        return RankEnv.from_environ()

    @property
    def rank(self) -> int:
        """Position in the group, from 0. The ranks of one node are consecutive."""
        return self.rank_env.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.rank_env.world_size

    @property
    def local_rank(self) -> int:
        """Position among the group's ranks on this node, from 0."""
        return self.rank_env.local_rank

    def close(self) -> None:
        """Release anything that would outlive the process; called on an orderly shutdown."""

    @cached_property
    def _mesh_places(self) -> dict[str, tuple[int, bool]]:
        return {}

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Set this rank's place in a mesh (see `make_nd_compute_dataproto_dispatch_fn`); the name is verl's.

        Args:
            mesh_name: Name of the mesh in the method's `dispatch_mode`.
            dp_rank: The part of a batch that this rank works on.
            is_collect: Whether this rank returns the result for that part; exactly one rank of each part does.

        Raises:
            ValueError: This rank already has a place in that mesh.
        """
        if mesh_name in self._mesh_places:
            raise ValueError(f"this worker already has a place in mesh {mesh_name!r}: {self._mesh_places[mesh_name]}")
        self._mesh_places[mesh_name] = (dp_rank, is_collect)

    def mesh_place(self, mesh_name: str) -> tuple[int, bool]:
        """Return this rank's place in a mesh, `(dp_rank, is_collect)`.

        Raises:
            ValueError: `_register_dispatch_collect_info` was not called for that mesh.
        """
        if mesh_name not in self._mesh_places:
            raise ValueError(
                f"this worker has no place in mesh {mesh_name!r}, only in {sorted(self._mesh_places)}: "
                f"call _register_dispatch_collect_info({mesh_name!r}, dp_rank, is_collect) in the worker first"
            )
        return self._mesh_places[mesh_name]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_pid(self) -> int:
        """Return the id of the process this rank runs in."""
        return os.getpid()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def execute_func(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(self, *args, **kwargs)` on every rank."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(self, *args, **kwargs)` on every rank, with DataProto arguments split over the ranks."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(*args, **kwargs)` on rank 0."""
        return func(*args, **kwargs)


# ---- classes and roles -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoleMethod:
    """A registered method of the worker that plays `role` in each process."""

    role: str
    name: str
    spec: MethodSpec

    def __str__(self) -> str:
        return f"{self.role}.{self.name}"


class RayClassWithInitArgs:
    """A worker class, plain or wrapped by `ray.remote`, and the arguments to construct it with on every rank.

    Attributes:
        prelude: What each process does first, before it imports the class and all that this needs, such as to start
            another process that has much to import too. Its own module should import little.
    """

    prelude: Callable[[], None] | None = None

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        cls = _without_ray(cls)
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise TypeError(f"a worker group runs subclasses of Worker, got {cls!r}")
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def __call__(self) -> Worker:
        """Construct the worker."""
        return self.cls(*self.args, **self.kwargs)

    def roles(self) -> dict[str, RayClassWithInitArgs]:
        """Return role → class for the workers of each process; a single class has the role of its own name."""
        return {self.cls.__name__: self}

    def preludes(self) -> list[Callable[[], None]]:
        """Return the preludes of all roles."""
        return [role.prelude for role in self.roles().values() if role.prelude is not None]

    def methods(self) -> dict[str, RoleMethod]:
        """Return name in the group → registered method."""
        return self.methods_as(self.cls.__name__)

    def methods_as(self, role: str, prefix: str = "") -> dict[str, RoleMethod]:
        """Return the registered methods of a worker with this role, by name with `prefix` in front."""
        return {f"{prefix}{name}": RoleMethod(role, name, spec) for name, spec in registered_methods(self.cls).items()}


class ColocatedClasses(RayClassWithInitArgs):
    """Several roles that live in one process per rank. Made by `create_colocated_worker_cls`."""

    def __init__(self, class_dict: Mapping[str, RayClassWithInitArgs]) -> None:
        self.class_dict = dict(class_dict)
        self.methods()  # refuses names that would clash

    def roles(self) -> dict[str, RayClassWithInitArgs]:
        """Return the class of each role."""
        return self.class_dict

    def methods(self) -> dict[str, RoleMethod]:
        """Return the registered methods of all roles, with the role in front: `critic_update`.

        Raises:
            ValueError: Two combinations of role and method have the same name (`a` with `b_c`, `a_b` with `c`).
        """
        methods: dict[str, RoleMethod] = {}
        for role, spec in self.class_dict.items():
            for name, method in spec.methods_as(role, prefix=f"{role}_").items():
                if name in methods:
                    raise ValueError(f"{method} and {methods[name]} would both be called {name}: rename a role")
                methods[name] = method
        return methods


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Merge roles into one process per rank, which holds one object per role.

    Args:
        class_dict: The class of each role. A group of the result has the roles' methods with the role in front
            (`critic_update`); its `spawn` returns one group per role, all on the same processes, and its `fuse` makes
            them attributes of the group (`group.critic.update`).

    Raises:
        ValueError: There is no role, or a role's name can't prefix a method's name.
        TypeError: A role is not one class.
    """
    if not class_dict:
        raise ValueError("create_colocated_worker_cls needs at least one role")
    for role, spec in class_dict.items():
        if not role.isidentifier():
            raise ValueError(f"role {role!r} is not a Python name, so it can't prefix a method's name")
        if not isinstance(spec, RayClassWithInitArgs) or isinstance(spec, ColocatedClasses):
            raise TypeError(f"role {role!r} must be a RayClassWithInitArgs of one class, got {type(spec).__name__}")
    return ColocatedClasses(class_dict)


#: verl's function of this name: here roles of one process always see each other, in `Worker.fused_worker_dict`.
create_colocated_worker_cls_fused = create_colocated_worker_cls


def create_colocated_worker_raw_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> type[Worker]:
    """Return one worker class that constructs a worker for each role, like verl's function of this name.

    A `FusedWorker_actor_critic` has its workers as attributes `actor` and `critic` and in `fused_worker_dict`, which
    each of them also gets. `_fuw_execute("actor_fwmn_update", ...)` calls `actor.update(...)`.

    Args:
        class_dict: The class of each role and its arguments.

    Raises:
        ValueError: There is no role, or a role's name can't be an attribute.
        TypeError: A role is not one class.
    """
    roles = create_colocated_worker_cls(class_dict).roles()

    class FusedWorker(Worker):
        is_fused_worker = True
        raw_cls_dict: ClassVar = {role: spec.cls for role, spec in roles.items()}

        def __init__(self) -> None:
            self.fused_worker_dict = {role: construct() for role, construct in roles.items()}
            for role, worker in self.fused_worker_dict.items():
                setattr(self, role, worker)
                worker.fused_worker_dict = self.fused_worker_dict

        def _fuw_execute(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
            role, _, method = method_name.partition("_fwmn_")
            if role not in self.fused_worker_dict or not method:
                raise ValueError(
                    f"{method_name!r} is not ROLE_fwmn_METHOD with one of the roles {list(self.fused_worker_dict)}"
                )
            return getattr(self.fused_worker_dict[role], method)(*args, **kwargs)

        def close(self) -> None:
            for worker in reversed(self.fused_worker_dict.values()):
                worker.close()

    FusedWorker.__name__ = FusedWorker.__qualname__ = "_".join(["FusedWorker", *roles])
    return FusedWorker


def _without_ray(cls: Any) -> Any:
    """Return the class that `ray.remote` was given."""
    metadata = getattr(cls, "__ray_metadata__", None)
    return cls if metadata is None else metadata.modified_class.__ray_actor_class__
