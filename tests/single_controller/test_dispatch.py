"""How calls are cut and joined, on a group that runs its ranks in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hrl.protocol import DataProto, DataProtoFuture
from hrl.single_controller.dispatch import (
    BatchRows,
    Dispatch,
    Execute,
    RankCall,
    dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    registered_methods,
)
from hrl.single_controller.worker import RayClassWithInitArgs, Worker
from hrl.single_controller.worker_group import WorkerGroup


class LocalGroup(WorkerGroup):
    """Ranks as plain objects, called one after the other: dispatch without processes."""

    def __init__(self, cls: type, world_size: int) -> None:
        super().__init__(world_size, RayClassWithInitArgs(cls), call_timeout_s=1.0)
        self.ranks = [cls(rank) for rank in range(world_size)]

    def _submit(self, role: str, method: str, calls: Sequence[RankCall]) -> Any:
        def local(arg: Any) -> Any:
            return arg.batch.select_idxs(arg.rows) if isinstance(arg, BatchRows) else arg

        local_calls = [call.mapped(local) for call in calls]
        return Done(
            [
                getattr(rank, method)(*call.args, **call.kwargs)
                for rank, call in zip(self.ranks, local_calls, strict=False)
            ]
        )

    def shutdown(self) -> None:
        self.ranks = []


@dataclass
class Done:
    results: list[Any]

    def get(self, timeout_s: float | None = None) -> list[Any]:
        return self.results


def every_other(group: WorkerGroup, *args: Any) -> tuple[list[Any], dict[str, Any]]:
    """Two entries, dealt to the ranks in turn."""
    return [[arg[rank % 2] for rank in range(group.world_size)] for arg in args], {}


class Recorder(Worker):
    def __init__(self, rank: int) -> None:
        self.id = rank

    @register()
    def all_to_all(self, *args: Any, **kwargs: Any) -> Any:
        return self.id, args, kwargs

    @register(Dispatch.ONE_TO_ALL)
    def one_to_all(self, x: Any, y: int = 0) -> Any:
        return self.id, x, y

    @register(Dispatch.RANK_ZERO)
    def rank_zero(self, x: Any) -> Any:
        return self.id, x

    @register(Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def executed_on_zero(self, x: Any) -> Any:
        return self.id, x

    @register(Dispatch.DP_COMPUTE)
    def dp_compute(self, x: int, y: int) -> int:
        return x + y

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add_rank(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"out": data.batch["x"] + 10 + self.id})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_rank_later(self, data: DataProto) -> DataProto:
        return self.add_rank(data)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def samples(self, data: DataProto, n_of: DataProto) -> DataProto:
        return data.repeat(n_of.meta_info["n"])

    @register(Dispatch.DP_COMPUTE_PROTO)
    def one_row_less_on_rank_1(self, data: DataProto) -> DataProto:
        return data[: len(data) - self.id]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def no_batch(self, data: DataProto) -> str:
        return "text"

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def with_func(self, func: Any, data: DataProto) -> DataProto:
        return func(data)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metric(self, data: DataProto) -> int:
        return int(data.batch["x"].sum())

    @register(Dispatch.DP_COMPUTE_PLAN)
    def planned(self, batch: DataProto, request: Any) -> DataProto:
        return DataProto.from_dict({"out": batch.batch["x"] * 2}, meta_info={"metrics": {"asked": request}})

    @register(Dispatch.DP_COMPUTE_PLAN)
    def update(self, batch: DataProto, request: Any) -> tuple[Any, int]:
        return request, len(batch)

    @register({"dispatch_fn": every_other, "collect_fn": lambda group, results: sum(results)})
    def custom(self, x: int) -> int:
        return x


@dataclass
class Plan:
    """A request."""

    rows: list[list[int]]
    ranks: list[Any]
    columns: frozenset[str] = frozenset({"x"})
    ranks_each: int = 1

    def for_rank(self, rank: int) -> Any:
        return self.ranks[rank // self.ranks_each]


def batch_of(num_rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(num_rows)}, {"uid": [str(i) for i in range(num_rows)]})


def group_of(world_size: int) -> LocalGroup:
    return LocalGroup(Recorder, world_size)


def test_one_to_all_gives_every_rank_the_same() -> None:
    assert group_of(3).one_to_all([1, 2, 3], y=4) == [(rank, [1, 2, 3], 4) for rank in range(3)]


def test_all_to_all_deals_lists_of_world_size_and_copies_everything_else() -> None:
    group = group_of(2)
    assert group.all_to_all([1, 2], x=[3, 4]) == [(0, (1,), {"x": 3}), (1, (2,), {"x": 4})]
    assert group.all_to_all(7) == [(0, (7,), {}), (1, (7,), {})]
    assert group.all_to_all([1, 2], 7) == [(0, ([1, 2], 7), {}), (1, ([1, 2], 7), {})]
    assert group.all_to_all() == [(0, (), {}), (1, (), {})]


def test_rank_zero_runs_once_and_returns_the_bare_result() -> None:
    group = group_of(3)
    assert group.rank_zero([1, 2, 3]) == (0, [1, 2, 3])
    assert group.executed_on_zero("x") == (0, "x")


def test_dp_compute_needs_an_entry_per_rank() -> None:
    assert group_of(2).dp_compute([1, 2], y=[10, 20]) == [11, 22]
    with pytest.raises(ValueError, match="argument 0 must be a list of 2"):
        group_of(2).dp_compute([1, 2, 3], [1, 2])


def test_a_custom_pair_cuts_and_joins() -> None:
    assert group_of(4).custom([1, 100]) == 202


def test_proto_is_cut_in_contiguous_chunks() -> None:
    assert group_of(2).add_rank(batch_of(4)).batch["out"].tolist() == [10, 11, 13, 14]


def test_non_blocking_gives_a_future_with_the_same_result() -> None:
    future = group_of(2).add_rank_later(batch_of(4))
    assert isinstance(future, DataProtoFuture)
    assert future.get().batch["out"].tolist() == [10, 11, 13, 14]
    assert [part.get().batch["out"].tolist() for part in future.chunk(2)] == [[10, 11], [13, 14]]


def test_futures_are_waited_for_when_they_are_arguments() -> None:
    group = group_of(2)
    future = group.add_rank_later(batch_of(4))
    assert group.one_to_all(future)[1][1].batch["out"].tolist() == [10, 11, 13, 14]


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 8, 10])
def test_padding_is_added_and_removed(num_rows: int) -> None:
    out = group_of(4).add_rank(batch_of(num_rows)).batch["out"]
    per_rank = -(-num_rows // 4)
    assert out.tolist() == [i + 10 + i // per_rank for i in range(num_rows)]


def test_padding_of_a_method_that_returns_several_rows_per_row_is_removed() -> None:
    batch = batch_of(3)
    batch.meta_info["n"] = 2
    out = group_of(2).samples(batch, batch)
    assert out.batch["x"].tolist() == [0, 0, 1, 1, 2, 2]
    assert out.non_tensor_batch["uid"].tolist() == ["0", "0", "1", "1", "2", "2"]


def test_padding_that_cannot_be_told_apart_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"got \[2, 2\] rows \(1 of them padding\) and returned \[2, 1\]"):
        group_of(2).one_row_less_on_rank_1(batch_of(3))


def test_wrong_arguments_and_results_are_named() -> None:
    group = group_of(2)
    with pytest.raises(TypeError, match="argument 0 is a int"):
        group.add_rank(3)
    with pytest.raises(ValueError, match="same number of rows"):
        group.samples(batch_of(2), batch_of(3))
    with pytest.raises(TypeError, match="rank 0 returned a str"):
        group.no_batch(batch_of(2))


def test_with_func_sends_the_function_to_all() -> None:
    doubled = group_of(2).with_func(lambda data: DataProto.from_dict({"x": data.batch["x"] * 2}), batch_of(4))
    assert doubled.batch["x"].tolist() == [0, 2, 4, 6]


def test_metrics_are_never_computed_over_padding() -> None:
    assert group_of(2).metric(batch_of(4)) == [1, 5]
    with pytest.raises(ValueError, match="3 rows do not divide over 2 ranks"):
        group_of(2).metric(batch_of(3))


def test_a_plan_chooses_the_rows_and_the_batch_keeps_its_order() -> None:
    out = group_of(2).planned(batch_of(5), Plan([[4, 0], [3, 1, 2]], ["a", "b"]))
    assert out.batch["out"].tolist() == [0, 2, 4, 6, 8]
    assert out.meta_info["metrics"] == {"asked": ["a", "b"]}


def test_a_rank_may_have_no_row() -> None:
    out = group_of(3).planned(batch_of(2), request=Plan([[1], [], [0]], [1, 2, 3]))
    assert out.batch["out"].tolist() == [0, 2]
    assert out.meta_info["metrics"] == {"asked": [1, 2, 3]}


def test_what_is_no_rows_is_a_list_by_rank_and_needs_no_cover() -> None:
    assert group_of(2).update(batch_of(5), Plan([[4], [1, 2]], ["a", "b"])) == [("a", 1), ("b", 2)]


def test_ranks_that_share_their_rows_get_the_same_and_the_first_of_them_answers() -> None:
    group, rows = group_of(4), [[4, 0], [4, 0], [3, 1, 2], [3, 1, 2]]
    plan = Plan(rows, ["a", "b"], ranks_each=2)
    out = group.planned(batch_of(5), plan)
    assert out.batch["out"].tolist() == [0, 2, 4, 6, 8]
    assert group.update(batch_of(5), plan) == [("a", 2), ("b", 3)]
    call = dispatch(registered_methods(Recorder)["planned"], group, (batch_of(5), plan), {})
    assert [rank.args[1] for rank in call.ranks] == ["a", "a", "b", "b"]
    assert [rank.args[0].rows.tolist() for rank in call.ranks] == rows


def test_ranks_get_the_columns_of_the_request_alone_and_a_missing_one_is_named() -> None:
    batch = batch_of(2).union(DataProto.from_dict({"y": torch.ones(2)}))
    spec = registered_methods(Recorder)["planned"]
    call = dispatch(spec, group_of(2), (batch, Plan([[0], [1]], [0, 0])), {})
    assert [rank.args[0].columns for rank in call.ranks] == [("x",), ("x",)]
    with pytest.raises(ValueError, match=r"Plan reads the columns \['z'\], and the batch has only \['uid', 'x', 'y'\]"):
        group_of(2).planned(batch, Plan([[0], [1]], [0, 0], frozenset({"x", "z"})))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan([[0], [1]], [0, 0]), "covers 2 of 3 rows"),
        (Plan([[0, 1], [1]], [0, 0]), "covers 2 of 3 rows with 3 entries"),
        (Plan([[0], [3]], [0, 0]), r"gives rank 1 rows 3\.\.3 of a batch of 3"),
        (Plan([[0, 1, 2]], [0]), "can't run on 2 ranks"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_of(2).planned(batch_of(3), plan)


class OnAMesh(Worker):
    """Six ranks: three data-parallel parts, of which the ranks 5, 4, 3, … in pairs hold one."""

    def __init__(self, rank: int) -> None:
        self.id = rank

    @register(Dispatch.ONE_TO_ALL)
    def take_place(self, collecting: list[int]) -> None:
        self._register_dispatch_collect_info("actor", dp_rank=2 - self.id // 2, is_collect=self.id in collecting)

    @register(make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def add_rank(self, data: DataProto, *, other: DataProto) -> DataProto | str:
        if self.id % 2:
            return "a peer's result is not looked at"
        return DataProto.from_dict({"out": data.batch["x"] + 10 * self.id, "same": other.batch["x"]})


def on_a_mesh(collecting: list[int]) -> LocalGroup:
    group = LocalGroup(OnAMesh, 6)
    group.take_place(dict.fromkeys(collecting, True))
    return group


def test_peers_of_a_mesh_get_the_same_rows_and_one_of_them_answers() -> None:
    batch = batch_of(6)
    out = on_a_mesh([0, 2, 4]).add_rank(batch, other=batch)
    assert out.batch["out"].tolist() == [40, 41, 22, 23, 4, 5], "part 0 is on ranks 4 and 5"
    assert out.batch["same"].tolist() == [0, 1, 2, 3, 4, 5], "in the order of the batch, not of the ranks"


@pytest.mark.parametrize("collecting", [[0, 2], [0, 2, 3, 4]])
def test_each_part_of_a_mesh_has_one_answer(collecting: list[int]) -> None:
    with pytest.raises(ValueError, match="mesh 'actor': one rank of each part must collect"):
        on_a_mesh(collecting).add_rank(batch_of(6), other=batch_of(6))


def test_a_mesh_cuts_batches_into_equal_parts_alone() -> None:
    group = on_a_mesh([0, 2, 4])
    with pytest.raises(AssertionError, match="5 rows don't divide into 3"):
        group.add_rank(batch_of(5), other=batch_of(5))
    with pytest.raises(TypeError, match="mesh 'actor' cuts DataProto arguments; argument 0 is a str"):
        group.add_rank("text", other=batch_of(6))
    with pytest.raises(TypeError, match="rank 1 returned a str"):
        on_a_mesh([1, 2, 4]).add_rank(batch_of(6), other=batch_of(6))


def test_a_rank_has_one_place_in_a_mesh() -> None:
    with pytest.raises(ValueError, match=r"already has a place in mesh 'actor': \(2, True\)"):
        on_a_mesh([0, 2, 4]).take_place([])


def test_a_rank_without_a_place_in_the_mesh_says_how_to_take_one() -> None:
    with pytest.raises(
        ValueError, match=r"no place in mesh 'actor', only in \[\]: call _register_dispatch_collect_info"
    ):
        LocalGroup(OnAMesh, 2).add_rank(batch_of(2), other=batch_of(2))


def test_functions_and_unregistered_methods_run_on_all_ranks_or_one() -> None:
    group = group_of(2)
    assert group.execute_all_sync(lambda worker, x: worker.id + x, 10) == [10, 11]
    assert group.execute_all_sync(lambda worker, x: worker.id + x, [10, 20]) == [10, 21]
    assert group.execute_rank_zero_sync(lambda worker, x: (worker.id, x), [1, 2]) == (0, [1, 2])
    assert group.execute_all_async("get_pid").get() == group.get_pid()
    assert group.execute_func(lambda worker: worker.id) == [0, 1]
    assert group.execute_func_rank_zero(max, 3, 4) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"dispatch_mode": "one_to_all"},
        {"dispatch_mode": None},
        {"dispatch_mode": {"dispatch_fn": every_other}},
        {"execute_mode": "all"},
        {"dispatch_mode": Dispatch.DP_COMPUTE_PROTO, "execute_mode": Execute.RANK_ZERO},
        {"columns": "responses"},
        {"dispatch_mode": Dispatch.ONE_TO_ALL, "columns": ["x"]},
        {"dispatch_mode": make_nd_compute_dataproto_dispatch_fn("actor"), "columns": ["x"]},
    ],
    ids=str,
)
def test_wrong_modes_are_refused_when_the_class_is_written(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="mode|columns|cuts"):
        register(**arguments)


def test_a_coroutine_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match="is async"):

        @register()
        async def method(self: Worker) -> None: ...


def test_a_registered_method_is_still_a_method() -> None:
    assert Recorder(3).one_to_all(1) == (3, 1, 0)


def test_an_unknown_method_names_those_there_are() -> None:
    with pytest.raises(AttributeError, match="no registered method 'add_rnk'.*add_rank"):
        _ = group_of(1).add_rnk


def test_a_method_may_not_hide_the_groups_own() -> None:
    class Bad(Worker):
        def __init__(self, rank: int) -> None: ...

        @register()
        def shutdown(self) -> None: ...

    with pytest.raises(ValueError, match=r"\['shutdown'\] hide methods of LocalGroup"):
        LocalGroup(Bad, 1)


def test_a_share_of_a_batch_is_no_copy() -> None:
    seen: list[RankCall] = []

    class Spy(LocalGroup):
        def _submit(self, role: str, method: str, calls: Sequence[RankCall]) -> Any:
            seen.extend(calls)
            return super()._submit(role, method, calls)

    batch = batch_of(4)
    Spy(Recorder, 2).add_rank(batch)
    assert all(call.args[0].batch is batch for call in seen)
    assert [call.args[0].rows.tolist() for call in seen] == [[0, 1], [2, 3]]
    assert np.concatenate([call.args[0].rows for call in seen]).dtype == np.int64
