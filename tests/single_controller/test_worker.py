"""Classes that hold the workers of several roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hrl.single_controller.dispatch import Dispatch, register
from hrl.single_controller.worker import (
    RayClassWithInitArgs,
    Worker,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,
)


class Named(Worker):
    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self.closed = name, closed

    @register(Dispatch.ONE_TO_ALL)
    def greet(self, whom: str, mark: str = ".") -> str:
        return f"{self.name} greets {whom}{mark}"

    def close(self) -> None:
        self.closed.append(self.name)


def fused(closed: list[str]) -> type[Worker]:
    return create_colocated_worker_raw_cls(
        {"actor": RayClassWithInitArgs(Named, "a", closed), "critic": RayClassWithInitArgs(Named, "c", closed=closed)}
    )


def test_a_fused_worker_holds_one_worker_per_role_and_each_knows_the_others() -> None:
    cls = fused([])
    assert cls.__name__ == "FusedWorker_actor_critic" and issubclass(cls, Worker) and cls.is_fused_worker
    assert cls.raw_cls_dict == {"actor": Named, "critic": Named}
    worker = cls()
    assert (worker.actor.name, worker.critic.name) == ("a", "c")
    assert worker.actor.fused_worker_dict["critic"] is worker.critic is worker.fused_worker_dict["critic"]


def test_a_fused_worker_calls_a_method_of_one_role() -> None:
    worker = fused([])()
    assert worker._fuw_execute("critic_fwmn_greet", "b", mark="!") == "c greets b!"
    for name in ("rm_fwmn_greet", "critic_greet", "critic_fwmn_"):
        with pytest.raises(ValueError, match=rf"'{name}' is not ROLE_fwmn_METHOD with one of the roles \['actor', 'cr"):
            worker._fuw_execute(name)


def test_a_fused_worker_closes_the_last_first() -> None:
    closed: list[str] = []
    fused(closed)().close()
    assert closed == ["c", "a"]


def test_a_fused_class_can_be_the_class_of_a_group() -> None:
    spec = RayClassWithInitArgs(fused([]))
    assert spec.roles() == {"FusedWorker_actor_critic": spec} and spec().actor.name == "a"


@pytest.mark.parametrize("create", [create_colocated_worker_cls, create_colocated_worker_raw_cls])
def test_wrong_roles_are_refused(create: Callable[[dict[str, RayClassWithInitArgs]], Any]) -> None:
    named = RayClassWithInitArgs(Named, "n", [])
    with pytest.raises(ValueError, match="at least one role"):
        create({})
    with pytest.raises(ValueError, match="not a Python name"):
        create({"actor-rollout": named})
    with pytest.raises(TypeError, match="'both' must be a RayClassWithInitArgs of one class"):
        create({"both": create_colocated_worker_cls({"actor": named})})
    with pytest.raises(TypeError, match="subclasses of Worker"):
        RayClassWithInitArgs(dict)

    class Odd(Worker):
        @register()
        def b_greet(self) -> None: ...

    with pytest.raises(ValueError, match="would both be called a_b_greet"):
        create({"a": RayClassWithInitArgs(Odd), "a_b": named})
