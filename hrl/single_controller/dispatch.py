"""How a call on a group is cut into one call per rank, and how the results are joined.

One small function per `Dispatch` mode. A batch is never copied here: a rank's share is `BatchRows`, a batch and some of
its row indices, and the backend decides how rows travel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hrl.protocol import DataProto, unpad_dataproto
from hrl.single_controller.decorator import CustomDispatch, Dispatch, Execute, MethodSpec


@dataclass(frozen=True)
class BatchRows:
    """Some rows of a batch, on their way to a rank.

    Attributes:
        batch: The whole batch; shares of one call refer to the same object.
        rows: (n,) int64 row indices; an index may occur more than once.
        columns: Names of the columns that travel; None is all.
    """

    batch: DataProto
    rows: np.ndarray
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RankCall:
    """The arguments of one rank."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class GroupCall:
    """A call on a group, cut: one `RankCall` per rank that runs it, and what makes one result of theirs."""

    ranks: tuple[RankCall, ...]
    collect: Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Request:
    """A call on a group, as the driver made it."""

    group: Any
    world_size: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    columns: tuple[str, ...] | None


def dispatch(spec: MethodSpec, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GroupCall:
    """Cut `group.method(*args, **kwargs)` as the method's spec says.

    Raises:
        TypeError: An argument is not of the kind that the dispatch mode cuts.
        ValueError: Sizes do not fit the group.
    """
    request = Request(group, group.world_size, args, kwargs, spec.columns)
    if isinstance(spec.dispatch_mode, CustomDispatch):
        call = _custom(request, spec.dispatch_mode)
    else:
        call = _DISPATCHERS[spec.dispatch_mode](request)
    if spec.execute_mode is Execute.RANK_ZERO:
        return GroupCall(call.ranks[:1], lambda results: results[0])
    return call


# ---- the same or one entry for every rank ----------------------------------------------------------------------


def _as_list(results: list[Any]) -> list[Any]:
    return results


def _one_to_all(request: Request) -> GroupCall:
    return GroupCall((RankCall(request.args, request.kwargs),) * request.world_size, _as_list)


def _entry_per_rank(args: Sequence[Any], kwargs: Mapping[str, Any], world_size: int) -> tuple[RankCall, ...]:
    return tuple(
        RankCall(tuple(arg[rank] for arg in args), {name: arg[rank] for name, arg in kwargs.items()})
        for rank in range(world_size)
    )


def _is_entry_per_rank(arg: Any, world_size: int) -> bool:
    return isinstance(arg, list) and len(arg) == world_size


def _all_to_all(request: Request) -> GroupCall:
    arguments = [*request.args, *request.kwargs.values()]
    if arguments and all(_is_entry_per_rank(arg, request.world_size) for arg in arguments):
        return GroupCall(_entry_per_rank(request.args, request.kwargs, request.world_size), _as_list)
    return _one_to_all(request)


def _dp_compute(request: Request) -> GroupCall:
    for name, arg in _named(request.args, request.kwargs):
        if not _is_entry_per_rank(arg, request.world_size):
            raise ValueError(f"DP_COMPUTE: argument {name} must be a list of {request.world_size} entries (ranks)")
    return GroupCall(_entry_per_rank(request.args, request.kwargs, request.world_size), _as_list)


def _custom(request: Request, mode: CustomDispatch) -> GroupCall:
    args, kwargs = mode.dispatch_fn(request.group, *request.args, **request.kwargs)
    cut = _all_to_all(Request(request.group, request.world_size, tuple(args), dict(kwargs), request.columns))
    return GroupCall(cut.ranks, lambda results: mode.collect_fn(request.group, results))


# ---- batches in contiguous chunks ------------------------------------------------------------------------------


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [*((str(i), arg) for i, arg in enumerate(args)), *((repr(k), arg) for k, arg in kwargs.items())]


def _common_length(named: list[tuple[str, Any]], mode: str) -> int:
    """Return the number of rows that all batches of a call have."""
    for name, arg in named:
        if not isinstance(arg, DataProto):
            raise TypeError(f"{mode} cuts DataProto arguments; argument {name} is a {type(arg).__name__}")
    lengths = {name: len(arg) for name, arg in named}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"{mode} needs arguments with the same number of rows, got {lengths or 'no argument'}")
    return next(iter(lengths.values()))


def _chunks(
    request: Request, chunks: list[np.ndarray], args: tuple[Any, ...], first: tuple[Any, ...] = ()
) -> tuple[RankCall, ...]:
    """One call per rank, with that rank's rows of every batch, behind the arguments in `first`."""
    return tuple(
        RankCall(
            (*first, *(BatchRows(arg, rows, request.columns) for arg in args)),
            {name: BatchRows(arg, rows, request.columns) for name, arg in request.kwargs.items()},
        )
        for rows in chunks
    )


def _padded_chunks(num_rows: int, world_size: int) -> list[np.ndarray]:
    """Row indices of equal, contiguous chunks; the last ones go round to the first rows again to fill up."""
    num_padded = -(-num_rows // world_size) * world_size
    rows = np.arange(num_padded, dtype=np.int64) % max(num_rows, 1)
    return np.split(rows, world_size)


def _dp_compute_proto(request: Request, first: tuple[Any, ...] = ()) -> GroupCall:
    args = request.args[len(first) :]
    num_rows = _common_length(_named(args, request.kwargs), "DP_COMPUTE_PROTO")
    chunks = _padded_chunks(num_rows, request.world_size)
    num_padding = sum(map(len, chunks)) - num_rows
    return GroupCall(_chunks(request, chunks, args, first), lambda results: _join(results, chunks, num_padding))


def _dp_compute_proto_with_func(request: Request) -> GroupCall:
    if not request.args or not callable(request.args[0]):
        raise TypeError("DP_COMPUTE_PROTO_WITH_FUNC needs a function as its first positional argument")
    return _dp_compute_proto(request, first=request.args[:1])


def _dp_compute_metric(request: Request) -> GroupCall:
    num_rows = _common_length(_named(request.args, request.kwargs), "DP_COMPUTE_METRIC")
    if num_rows % request.world_size:
        raise ValueError(
            f"DP_COMPUTE_METRIC: {num_rows} rows do not divide over {request.world_size} ranks, and padding would "
            "count rows twice; give it a multiple, or register the method with DP_COMPUTE_PLAN"
        )
    chunks = np.split(np.arange(num_rows, dtype=np.int64), request.world_size)
    return GroupCall(_chunks(request, chunks, request.args), _as_list)


def _checked_results(results: list[Any]) -> list[DataProto]:
    for rank, result in enumerate(results):
        if not isinstance(result, DataProto):
            raise TypeError(f"the method must return a DataProto; rank {rank} returned a {type(result).__name__}")
    return results


def _join(results: list[Any], chunks: list[np.ndarray], num_padding: int) -> DataProto:
    """Concatenates the ranks' results and takes off the rows that answer padding.

    A method may return several rows per row (samples of a prompt): then as many are taken off per padded row.
    """
    joined = DataProto.concat(_checked_results(results))
    if num_padding == 0 or len(joined) == 0:
        return joined
    num_sent = sum(map(len, chunks))
    per_row, rest = divmod(len(joined), num_sent)
    if rest or any(len(result) != per_row * len(rows) for result, rows in zip(results, chunks, strict=True)):
        raise ValueError(
            f"the ranks got {[len(rows) for rows in chunks]} rows ({num_padding} of them padding) and returned "
            f"{[len(result) for result in results]}: the padding's share can't be told; return a fixed number per row"
        )
    return unpad_dataproto(joined, per_row * num_padding)


# ---- batches by plan -------------------------------------------------------------------------------------------


def _dp_compute_plan(request: Request) -> GroupCall:
    def arguments(batch: Any, plan: Any = None) -> tuple[Any, Any]:
        return batch, plan

    batch, plan = arguments(*request.args, **request.kwargs)
    num_rows = _common_length([("'batch'", batch)], "DP_COMPUTE_PLAN")
    if plan is None:
        chunks = _padded_chunks(num_rows, request.world_size)
        ranks = tuple(RankCall((BatchRows(batch, rows, request.columns), None), {}) for rows in chunks)
        return GroupCall(ranks, lambda results: _join(results, chunks, sum(map(len, chunks)) - num_rows))
    rows_by_rank = _checked_plan(plan, num_rows, request.world_size)
    ranks = tuple(
        RankCall((BatchRows(batch, rows, request.columns), rank_plan), {})
        for rows, rank_plan in zip(rows_by_rank, plan.ranks, strict=True)
    )
    return GroupCall(ranks, lambda results: _restore_order(results, rows_by_rank, num_rows))


def _checked_plan(plan: Any, num_rows: int, world_size: int) -> list[np.ndarray]:
    if len(plan.rows) != world_size or len(plan.ranks) != world_size:
        raise ValueError(f"a plan for {len(plan.rows)} rows/{len(plan.ranks)} ranks can't run on {world_size} ranks")
    rows_by_rank = [np.asarray(rows, dtype=np.int64) for rows in plan.rows]
    for rank, rows in enumerate(rows_by_rank):
        if len(rows) and (rows.min() < 0 or rows.max() >= num_rows):
            raise ValueError(f"the plan gives rank {rank} rows {rows.min()}..{rows.max()} of a batch of {num_rows}")
    return rows_by_rank


def _restore_order(results: list[Any], rows_by_rank: list[np.ndarray], num_rows: int) -> DataProto:
    """Put the ranks' rows back in the batch's order; joins results that have no rows."""
    results = _checked_results(results)
    if all(len(result) == 0 for result in results):
        return DataProto.concat(results)
    for rank, (result, rows) in enumerate(zip(results, rows_by_rank, strict=True)):
        if len(result) != len(rows):
            raise ValueError(f"rank {rank} got {len(rows)} rows and returned {len(result)}; a plan needs one for each")
    order = np.concatenate(rows_by_rank)
    if not np.array_equal(np.sort(order), np.arange(num_rows)):
        raise ValueError(
            f"the plan covers {len(np.unique(order))} of {num_rows} rows with {len(order)} entries, so the rows that "
            "came back are not the batch's: methods that return rows need a plan with every row exactly once"
        )
    meta = DataProto.concat([DataProto(meta_info=result.meta_info) for result in results]).meta_info
    joined = DataProto.concat(
        [DataProto(result.batch, result.non_tensor_batch, {}) for result in results if len(result) > 0]
    ).select_idxs(np.argsort(order))
    return DataProto(joined.batch, joined.non_tensor_batch, meta)


_DISPATCHERS: dict[Dispatch, Callable[[Request], GroupCall]] = {
    Dispatch.RANK_ZERO: _one_to_all,
    Dispatch.ONE_TO_ALL: _one_to_all,
    Dispatch.ALL_TO_ALL: _all_to_all,
    Dispatch.DP_COMPUTE: _dp_compute,
    Dispatch.DP_COMPUTE_PROTO: _dp_compute_proto,
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _dp_compute_proto_with_func,
    Dispatch.DP_COMPUTE_METRIC: _dp_compute_metric,
    Dispatch.DP_COMPUTE_PLAN: _dp_compute_plan,
}
