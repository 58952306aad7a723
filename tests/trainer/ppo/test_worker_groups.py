"""The order in which models are loaded: side by side on different pools, in turn on one, the engine last."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Self

import pytest

from hrl.trainer.ppo.roles import Role
from hrl.trainer.ppo.worker_groups import WorkerGroups, build_worker_groups

INIT_S = 100.0


class Group:
    """The roles of a pool; notes what is asked of it, and answers when everybody was asked."""

    asked: list[tuple[str, str, float]] = []  # noqa: RUF012 (emptied by the fixture)
    node_ips = ("127.0.0.1",)
    world_size = 1

    def __init__(self, *, name_prefix: str, ray_cls_with_init: Any, **_: Any) -> None:
        self.pool, self.roles, self.timeout_s = name_prefix, tuple(ray_cls_with_init.roles()), 0.0

    @classmethod
    def start_together(cls, groups: Iterable[Group]) -> None:
        assert not cls.asked, "a group was called before all were up"

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Group]:
        groups = {}
        for role in prefix_set:
            groups[role] = object.__new__(Group)
            groups[role].__dict__ |= {"pool": self.pool, "roles": (role,), "timeout_s": 0.0}
        return groups

    def with_timeout(self, timeout_s: float) -> Self:
        self.timeout_s = timeout_s
        return self

    def execute_all_async(self, method: str) -> Any:
        assert method == "init_model"
        self.asked.append((self.pool, self.roles[0], self.timeout_s))
        return SimpleNamespace(done=lambda: True, get=lambda: None)

    def open_weight_broadcast(self, num_receivers: int, address: str) -> tuple[int, str]:
        return num_receivers, address


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "asked", [])
    merged = "hrl.trainer.ppo.worker_groups.create_colocated_worker_cls"
    monkeypatch.setattr(merged, lambda class_dict: SimpleNamespace(roles=lambda: dict(class_dict)))


def build(mapping: dict[Role, str]) -> WorkerGroups:
    config = SimpleNamespace(
        trainer=SimpleNamespace(timeouts=SimpleNamespace(init_s=INIT_S, call_s=1.0)),
        actor_rollout_ref=SimpleNamespace(
            rollout=SimpleNamespace(weight_sync=SimpleNamespace(driver_timeout_s=1.0)),
        ),
    )
    pools = dict.fromkeys(mapping.values())
    manager = SimpleNamespace(mapping=mapping, create_resource_pool=lambda: None, resource_pool_dict=pools)
    return build_worker_groups(config, dict.fromkeys(mapping), manager, Group)


def test_on_one_pool_the_engine_comes_last_and_deadlines_add_up() -> None:
    mapping = dict.fromkeys((Role.ActorRollout, Role.RefPolicy, Role.Critic, Role.RewardModel), "all")
    build(mapping).init_models()
    assert Group.asked == [
        ("all", "critic", INIT_S),
        ("all", "ref", 2 * INIT_S),
        ("all", "rm", 3 * INIT_S),
        ("all", "actor_rollout", 4 * INIT_S),
    ]


def test_pools_do_not_wait_for_each_other() -> None:
    mapping = {Role.Actor: "a", Role.Rollout: "b", Role.RefPolicy: "a", Role.Critic: "c"}
    build(mapping).init_models()
    assert sorted(Group.asked) == [
        ("a", "actor", 2 * INIT_S),
        ("a", "ref", INIT_S),
        ("b", "rollout", INIT_S),
        ("c", "critic", INIT_S),
    ]
