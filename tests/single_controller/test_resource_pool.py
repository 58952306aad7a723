"""Parts and unions of pools share slots, and no slot is used more often than it may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hrl.single_controller.resource_pool import (
    RayResourcePool,
    Slot,
    SubRayResourcePool,
    merge_resource_pool,
    split_resource_pool,
)
from hrl.single_controller.worker_errors import PlacementError


def reserved(counts: list[int], name: str, first_node: int = 1, **kwargs: int | bool) -> RayResourcePool:
    """A pool that has its placement groups, one node for each."""
    pool = RayResourcePool(counts, name_prefix=name, **kwargs)
    pool._slots = [
        Slot(SimpleNamespace(id=f"{name}{node}"), index, f"node{node}", f"10.0.0.{node}")
        for node, count in enumerate(counts, first_node)
        for index in range(count)
    ]
    return pool


def places(pool: RayResourcePool) -> list[tuple[str, int]]:
    return [(slot.node_id, slot.bundle_index) for slot in pool.slots()]


def test_a_pool_is_split_into_consecutive_ranks() -> None:
    pool = reserved([4, 4], "all")
    parts = split_resource_pool(pool, 2)
    assert [part.world_size for part in parts] == [2, 2, 2, 2]
    assert [place for part in parts for place in places(part)] == places(pool)
    assert [part.name for part in parts] == [f"all_split_{i}" for i in range(4)]
    assert all(isinstance(part, RayResourcePool) and part.use_gpu for part in parts)
    small, large = split_resource_pool(pool, [3, 5])
    assert (small.process_on_nodes, large.process_on_nodes) == ([3], [1, 4])


def test_a_part_can_be_split_again() -> None:
    pool = reserved([6], "all")
    first, second = split_resource_pool(split_resource_pool(pool, [2, 4])[1], 2)
    assert places(first) + places(second) == places(pool)[2:]


@pytest.mark.parametrize("split_size", [3, 0, [3], [2, 2, 1], [5, -1]])
def test_sizes_that_do_not_add_up_are_refused(split_size: int | list[int]) -> None:
    with pytest.raises(ValueError, match="does not cut the 4 ranks of pool 'all'"):
        split_resource_pool(reserved([4], "all"), split_size)


def test_a_part_and_the_whole_count_the_groups_of_both() -> None:
    pool = reserved([2], "all")
    first, second = split_resource_pool(pool, 1)
    taken = first.take_place()
    with pytest.raises(PlacementError, match="'all' already has 1 worker group"):
        pool.take_place()
    with pytest.raises(PlacementError, match="'all_split_0' already has 1"):
        first.take_place()
    second.give_back_place(second.take_place())
    first.give_back_place(taken)
    assert len(pool.take_place()) == 2


def test_two_pools_become_one_in_the_order_of_their_nodes() -> None:
    late, early = reserved([2], "late", first_node=9), reserved([1, 1], "early")
    merged = merge_resource_pool(late, early)
    assert isinstance(merged, SubRayResourcePool) and merged.name == "late_early"
    assert merged.process_on_nodes == [1, 1, 2] and merged.world_size == 4
    assert places(merged) == [*places(early), *places(late)]
    assert [group.id for group in merged.get_placement_groups()] == ["early1", "early2", "late9"]
    assert places(merge_resource_pool(*split_resource_pool(early, 1))) == places(early)


def test_pools_that_differ_or_overlap_are_not_merged() -> None:
    pool = reserved([2], "a")
    with pytest.raises(ValueError, match="'a' and 'b' can't be merged: use_gpu is True and False"):
        merge_resource_pool(pool, reserved([2], "b", use_gpu=False))
    with pytest.raises(ValueError, match="max_colocate_count is 1 and 2"):
        merge_resource_pool(pool, reserved([2], "b", max_colocate_count=2))
    with pytest.raises(ValueError, match="they share devices"):
        merge_resource_pool(pool, split_resource_pool(pool, 1)[0])


def test_only_the_whole_gives_devices_back_and_its_parts_know(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[str] = []
    monkeypatch.setattr(
        "hrl.single_controller.resource_pool.remove_placement_group", lambda group: given_back.append(group.id)
    )
    pool = reserved([1, 1], "all")
    (part,) = split_resource_pool(pool, 2)
    with pytest.raises(ValueError, match="'all_split_0' was split off or merged: release the pools it was made of"):
        part.release()
    assert given_back == []
    pool.release()
    assert given_back == ["all1", "all2"]
    with pytest.raises(PlacementError, match="'all_split_0' was made from a pool that has since been released"):
        part.take_place()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"process_on_nodes": []}, "at least one process"),
        ({"process_on_nodes": [2, 0]}, "at least one process"),
        ({"process_on_nodes": [1], "max_colocate_count": 0}, "max_colocate_count"),
        ({"process_on_nodes": [1], "detached": True}, "die with their driver"),
    ],
    ids=str,
)
def test_wrong_pools_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayResourcePool(**arguments)


def test_shares_of_a_gpu_never_exceed_it() -> None:
    for count in range(1, 12):
        pool = RayResourcePool([1], max_colocate_count=count)
        assert 0 < pool.gpus_per_process * count <= 1
    assert RayResourcePool([1], use_gpu=False).gpus_per_process == 0
