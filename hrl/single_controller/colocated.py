"""Which classes a rank's process holds: one, or one per role, merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hrl.single_controller.base import ClassWithInitArgs, Worker
from hrl.single_controller.decorator import registered_methods
from hrl.single_controller.worker_group import RoleMethod


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class, plain or wrapped by `ray.remote`, and the arguments to construct it with on every rank."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        cls = _without_ray(cls)
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise TypeError(f"a worker group runs subclasses of Worker, got {cls!r}")
        super().__init__(cls, *args, **kwargs)

    def roles(self) -> dict[str, ClassWithInitArgs]:
        """Return what each process of the group holds, by role. A class alone plays the role of its own name."""
        return {self.cls.__name__: ClassWithInitArgs(self.cls, *self.args, **self.kwargs)}

    def methods(self) -> dict[str, RoleMethod]:
        """Return the registered methods, by the name that the group calls them."""
        return methods_of_role(self.cls.__name__, self.cls, prefix="")


class ColocatedClasses(RayClassWithInitArgs):
    """Several roles to live in one process per rank. Made by `create_colocated_worker_cls`."""

    def __init__(self, class_dict: Mapping[str, RayClassWithInitArgs]) -> None:
        self.class_dict = dict(class_dict)
        self.methods()

    def roles(self) -> dict[str, ClassWithInitArgs]:
        """Return the class of each role."""
        return {role: ClassWithInitArgs(spec.cls, *spec.args, **spec.kwargs) for role, spec in self.class_dict.items()}

    def methods(self) -> dict[str, RoleMethod]:
        """Return the registered methods of all roles, each behind its role: `critic_update`.

        Raises:
            ValueError: Two roles and methods read the same (`a` with `b_c` and `a_b` with `c`).
        """
        methods: dict[str, RoleMethod] = {}
        for role, spec in self.class_dict.items():
            for name, method in methods_of_role(role, spec.cls, prefix=f"{role}_").items():
                if name in methods:
                    raise ValueError(f"{method} and {methods[name]} would both be called {name}: rename a role")
                methods[name] = method
        return methods


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Merge roles into one process per rank, which holds one object per role.

    Args:
        class_dict: The class of each role. A group made of the result has the roles' methods behind their role
            (`critic_update`); its `spawn` gives one group per role, all on the same processes.

    Raises:
        ValueError: There is no role, or a role's name can't stand in front of a method's name.
    """
    if not class_dict:
        raise ValueError("create_colocated_worker_cls needs at least one role")
    for role, spec in class_dict.items():
        if not role.isidentifier():
            raise ValueError(f"role {role!r} is not a Python name, so no method can be called behind it")
        if not isinstance(spec, RayClassWithInitArgs) or isinstance(spec, ColocatedClasses):
            raise TypeError(f"role {role!r} must be a RayClassWithInitArgs of one class, got {type(spec).__name__}")
    return ColocatedClasses(class_dict)


def methods_of_role(role: str, cls: type, prefix: str) -> dict[str, RoleMethod]:
    """Return the registered methods of `cls`, by name behind `prefix`."""
    return {f"{prefix}{name}": RoleMethod(role, name, spec) for name, spec in registered_methods(cls).items()}


def _without_ray(cls: Any) -> Any:
    """Return the class that `ray.remote` was given."""
    metadata = getattr(cls, "__ray_metadata__", None)
    return cls if metadata is None else metadata.modified_class.__ray_actor_class__
