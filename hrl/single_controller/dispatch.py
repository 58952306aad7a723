"""`@register`, and how a call on a group is split into one call per rank and the results are joined.

The decorator only writes a `MethodSpec` onto the function: called on the object itself, the method is an ordinary
method. The worker group reads the spec and calls `dispatch`, which has one small function per mode. No batch is copied
here: a rank's share is `BatchRows`, a batch and some of its row indices, and `transport` decides how rows travel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import numpy as np

from hrl.profiling.spans import phase_span
from hrl.protocol import DataProto, unpad_dataproto
from hrl.single_controller.packing import PackedBatch, join_batches, unpack_result

_SPEC_ATTRIBUTE = "_hrl_method_spec"

F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(Enum):
    """How a call's arguments are split over the ranks, and how their results are joined."""

    RANK_ZERO = "rank_zero"
    """Called on rank 0 only; its result is the result."""
    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; the results are a list by rank."""
    ALL_TO_ALL = "all_to_all"
    """If every argument is a list of world-size entries, rank i gets entry i of each; otherwise as ONE_TO_ALL."""
    DP_COMPUTE = "dp_compute"
    """Every argument must be a list of world-size entries, rank i gets entry i; the results are a list by rank."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Every argument is a DataProto, padded to a multiple of the world size and cut into contiguous chunks; the
    results are DataProtos, joined in order without the rows that answer padding."""
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    """As DP_COMPUTE_PROTO, after a first argument (a function) that every rank gets unchanged."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """As DP_COMPUTE_PROTO but never padded (a padded row would count twice in metrics); results are a list by rank."""
    DP_COMPUTE_PLAN = "dp_compute_plan"
    """`method(batch, request)`: rank i gets the rows `request.rows[i]` and columns `request.columns` of the batch, and
    `request.for_rank(i)`. Returned rows are put back in the batch's order; other results are a list by rank. Of
    `request.ranks_each` consecutive ranks that get the same rows, the first one's results count."""


class Execute(Enum):
    """Which ranks run a call."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class CustomDispatch:
    """A user's own pair of functions, with verl's signatures."""

    dispatch_fn: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
    """`(worker_group, *args, **kwargs) -> (args, kwargs)`, which are then split as by ALL_TO_ALL."""
    collect_fn: Callable[[Any, list[Any]], Any]
    """`(worker_group, results by rank) -> result`."""


@dataclass(frozen=True)
class MethodSpec:
    """The arguments of `register` for a method."""

    dispatch_mode: Dispatch | CustomDispatch
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool
    columns: tuple[str, ...] | None


def register(
    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    columns: Sequence[str] | None = None,
) -> Callable[[F], F]:
    """Make a method of a `Worker` callable on the worker group.

    Args:
        dispatch_mode: A `Dispatch`, or a dict with `dispatch_fn` and `collect_fn` (see `CustomDispatch`).
        execute_mode: The ranks that run it.
        blocking: If false, the driver gets a future with `.get()` instead of the result.
        materialize_futures: Wait for arguments that are futures and pass on their results.
        columns: Names of the batch columns, tensors and non-tensors, that the method reads; only these are sent to the
            ranks. Names that a batch lacks are ignored. None sends all. Only for modes that split batches.

    Raises:
        ValueError: A mode is unknown, or the two modes or `columns` contradict each other.
    """
    mode = _checked_dispatch_mode(dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise ValueError(f"unknown execute_mode {execute_mode!r}; expected one of {[str(e) for e in Execute]}")
    if execute_mode is Execute.RANK_ZERO and mode in (*_MODES_THAT_CUT_BATCHES, Dispatch.DP_COMPUTE):
        raise ValueError(f"{mode} cuts a batch over all ranks: it can't be run with {execute_mode}")
    if isinstance(columns, str):
        raise ValueError(f"columns must be a sequence of names, not the string {columns!r}")
    if columns is not None and mode not in _MODES_THAT_CUT_BATCHES:
        raise ValueError(f"{mode} passes arguments on as they are: it can't pick columns")
    if mode is Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO
    spec = MethodSpec(mode, execute_mode, blocking, materialize_futures, None if columns is None else tuple(columns))

    def decorate(method: F) -> F:
        if inspect.iscoroutinefunction(method):
            raise ValueError(f"{method.__qualname__} is async: a rank runs one call at a time, register a plain method")
        setattr(method, _SPEC_ATTRIBUTE, spec)
        return method

    return decorate


_MODES_THAT_CUT_BATCHES = (
    Dispatch.DP_COMPUTE_PROTO,
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC,
    Dispatch.DP_COMPUTE_METRIC,
    Dispatch.DP_COMPUTE_PLAN,
)


def _checked_dispatch_mode(mode: Any) -> Dispatch | CustomDispatch:
    if isinstance(mode, Dispatch):
        return mode
    if isinstance(mode, Mapping):
        if set(mode) != {"dispatch_fn", "collect_fn"}:
            raise ValueError(f"a dispatch_mode dict has the keys 'dispatch_fn' and 'collect_fn', not {sorted(mode)}")
        return CustomDispatch(**mode)
    raise ValueError(
        f"unknown dispatch_mode {mode!r}; expected one of {[str(d) for d in Dispatch]} or a dict with dispatch_fn and "
        "collect_fn"
    )


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """Return the methods of `cls` that the driver may call, inherited ones included."""
    specs = {name: getattr(getattr(cls, name, None), _SPEC_ATTRIBUTE, None) for name in dir(cls)}
    return {name: spec for name, spec in specs.items() if spec is not None}


# ---- cutting a call ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchRows:
    """Some rows of a batch, on their way to a rank.

    Attributes:
        batch: The whole batch; shares of one call refer to the same object.
        rows: (n,) int64 row indices; an index may occur more than once.
        columns: Names of the columns to send; None for all.
    """

    batch: DataProto
    rows: np.ndarray
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RankCall:
    """The arguments of one rank."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def mapped(self, function: Callable[[Any], Any]) -> RankCall:
        """Return the call with `function` applied to every argument."""
        return RankCall(tuple(map(function, self.args)), {name: function(arg) for name, arg in self.kwargs.items()})

    def on(self, worker: object, method: str) -> Any:
        """Call a method of a rank's worker; it is a phase of a profile."""
        with phase_span(method):
            return getattr(worker, method)(*self.args, **self.kwargs)


@dataclass(frozen=True)
class GroupCall:
    """A call on a group after splitting: one `RankCall` per rank that runs it, and a function to join the results.

    Batches in the results are packed as the ranks sent them, so that many parts are restored as one.
    """

    ranks: tuple[RankCall, ...]
    collect: Callable[[list[Any]], Any]


class CalledGroup(Protocol):
    """The parts of a worker group that splitting a call needs."""

    world_size: int

    def mesh_places(self, mesh_name: str) -> list[tuple[int, bool]]:
        """Return each rank's place in a mesh: its part of a batch, and whether it returns the result for that part."""


@dataclass(frozen=True)
class DriverCall:
    """A call on a group, as the driver made it; `columns` are those that the method reads."""

    group: CalledGroup
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    columns: tuple[str, ...] | None

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.group.world_size

    @property
    def named(self) -> list[tuple[str, Any]]:
        """All arguments, each with its position or its quoted name for messages."""
        return [
            *((str(i), arg) for i, arg in enumerate(self.args)),
            *((repr(k), arg) for k, arg in self.kwargs.items()),
        ]

    def for_rank(self, of_rank: Callable[[Any], Any]) -> RankCall:
        """Return one rank's call, with `of_rank` applied to every argument."""
        return RankCall(self.args, self.kwargs).mapped(of_rank)


def dispatch(spec: MethodSpec, group: CalledGroup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GroupCall:
    """Split `group.method(*args, **kwargs)` according to the method's spec.

    Raises:
        TypeError: An argument has a type that the dispatch mode can't split.
        ValueError: Sizes do not fit the group.
    """
    call = DriverCall(group, args, kwargs, spec.columns)
    mode = spec.dispatch_mode
    cut = _custom(call, mode) if isinstance(mode, CustomDispatch) else _DISPATCHERS[mode](call)
    if spec.execute_mode is Execute.RANK_ZERO:
        return GroupCall(cut.ranks[:1], lambda results: unpack_result(results[0]))
    if mode is Dispatch.DP_COMPUTE_PLAN:
        return cut
    return GroupCall(cut.ranks, lambda results: cut.collect(unpack_result(results)))


# ---- the same or one entry for every rank ----------------------------------------------------------------------


def _as_list(results: list[Any]) -> list[Any]:
    return results


def _one_to_all(call: DriverCall) -> GroupCall:
    return GroupCall((RankCall(call.args, call.kwargs),) * call.world_size, _as_list)


def _entry_per_rank(call: DriverCall) -> GroupCall:
    return GroupCall(tuple(call.for_rank(itemgetter(rank)) for rank in range(call.world_size)), _as_list)


def _without_an_entry_per_rank(call: DriverCall) -> list[str]:
    return [name for name, arg in call.named if not (isinstance(arg, list) and len(arg) == call.world_size)]


def _all_to_all(call: DriverCall) -> GroupCall:
    return _one_to_all(call) if _without_an_entry_per_rank(call) or not call.named else _entry_per_rank(call)


def _dp_compute(call: DriverCall) -> GroupCall:
    for name in _without_an_entry_per_rank(call):
        raise ValueError(f"DP_COMPUTE: argument {name} must be a list of {call.world_size} entries (ranks)")
    return _entry_per_rank(call)


def _custom(call: DriverCall, mode: CustomDispatch) -> GroupCall:
    args, kwargs = mode.dispatch_fn(call.group, *call.args, **call.kwargs)
    cut = _all_to_all(replace(call, args=tuple(args), kwargs=dict(kwargs)))
    return GroupCall(cut.ranks, lambda results: mode.collect_fn(call.group, results))


# ---- batches in contiguous chunks ------------------------------------------------------------------------------


def _common_length(named: list[tuple[str, Any]], mode: str) -> int:
    """Return the common number of rows of a call's batches."""
    for name, arg in named:
        if not isinstance(arg, DataProto):
            raise TypeError(f"{mode} cuts DataProto arguments; argument {name} is a {type(arg).__name__}")
    lengths = {name: len(arg) for name, arg in named}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"{mode} needs arguments with the same number of rows, got {lengths or 'no argument'}")
    return next(iter(lengths.values()))


def _rows_per_rank(call: DriverCall, chunks: list[np.ndarray]) -> tuple[RankCall, ...]:
    """Return one call per rank, with that rank's rows of every batch."""
    return tuple(call.for_rank(partial(BatchRows, rows=rows, columns=call.columns)) for rows in chunks)


def _padded_chunks(num_rows: int, world_size: int) -> list[np.ndarray]:
    """Return row indices of equal, contiguous chunks; the last ones are padded with the first rows."""
    num_padded = -(-num_rows // world_size) * world_size
    rows = np.arange(num_padded, dtype=np.int64) % max(num_rows, 1)
    return np.split(rows, world_size)


def _dp_compute_proto(call: DriverCall) -> GroupCall:
    num_rows = _common_length(call.named, "DP_COMPUTE_PROTO")
    chunks = _padded_chunks(num_rows, call.world_size)
    return GroupCall(_rows_per_rank(call, chunks), lambda results: _join(results, chunks, num_rows))


def _dp_compute_proto_with_func(call: DriverCall) -> GroupCall:
    if not call.args or not callable(call.args[0]):
        raise TypeError("DP_COMPUTE_PROTO_WITH_FUNC needs a function as its first positional argument")
    function, *batches = call.args
    cut = _dp_compute_proto(replace(call, args=tuple(batches)))
    return GroupCall(tuple(RankCall((function, *rank.args), rank.kwargs) for rank in cut.ranks), cut.collect)


def _dp_compute_metric(call: DriverCall) -> GroupCall:
    num_rows = _common_length(call.named, "DP_COMPUTE_METRIC")
    if num_rows % call.world_size:
        raise ValueError(
            f"DP_COMPUTE_METRIC: {num_rows} rows do not divide over {call.world_size} ranks, and padding would "
            "count rows twice; give it a multiple, or register the method with DP_COMPUTE_PLAN"
        )
    return GroupCall(_rows_per_rank(call, _padded_chunks(num_rows, call.world_size)), _as_list)


def _checked_result(rank: int, result: Any) -> Any:
    if not isinstance(result, DataProto | PackedBatch):
        raise TypeError(f"the method must return a DataProto; rank {rank} returned a {type(result).__name__}")
    return result


def _checked_results(results: list[Any]) -> list[DataProto]:
    return [_checked_result(rank, result) for rank, result in enumerate(results)]


def _join(results: list[Any], chunks: list[np.ndarray], num_rows: int) -> DataProto:
    """Concatenate the ranks' results without the rows that belong to padding.

    A method may return several rows per row, such as samples of a prompt; each padded row then removes that many.
    """
    joined = DataProto.concat(_checked_results(results))
    num_sent = sum(map(len, chunks))
    num_padding = num_sent - num_rows
    if num_padding == 0 or len(joined) == 0:
        return joined
    per_row, rest = divmod(len(joined), num_sent)
    if rest or any(len(result) != per_row * len(rows) for result, rows in zip(results, chunks, strict=True)):
        raise ValueError(
            f"the ranks got {[len(rows) for rows in chunks]} rows ({num_padding} of them padding) and returned "
            f"{[len(result) for result in results]}: the padding can't be removed; return a fixed number per row"
        )
    return unpad_dataproto(joined, per_row * num_padding)


# ---- batches over a mesh ---------------------------------------------------------------------------------------


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """Return a `dispatch_mode` for ranks in a device mesh, like verl's function of this name.

    Batches are split over the mesh's data-parallel ranks. Ranks that work on the same part, such as tensor-parallel
    peers, get the same rows, and one of them returns the result. Each worker registers its place with
    `_register_dispatch_collect_info`.
    """
    return {"dispatch_fn": partial(_cut_over_mesh, mesh_name), "collect_fn": partial(_join_from_mesh, mesh_name)}


def _cut_over_mesh(mesh_name: str, group: CalledGroup, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    of_rank = [part for part, _ in group.mesh_places(mesh_name)]
    call = DriverCall(group, args, kwargs, None)
    _common_length(call.named, f"mesh {mesh_name!r}")

    def entries(batch: DataProto) -> list[DataProto]:
        parts = batch.chunk(max(of_rank) + 1)
        return [parts[part] for part in of_rank]

    cut = call.for_rank(entries)
    return list(cut.args), cut.kwargs


def _join_from_mesh(mesh_name: str, group: CalledGroup, results: list[Any]) -> DataProto:
    places = group.mesh_places(mesh_name)
    by_part = sorted((part, rank) for rank, (part, is_collect) in enumerate(places) if is_collect)
    if [part for part, _ in by_part] != sorted({part for part, _ in places}):
        raise ValueError(f"mesh {mesh_name!r}: one rank of each part must collect, but the ranks said {places}")
    return DataProto.concat([_checked_result(rank, results[rank]) for _, rank in by_part])


# ---- batches by plan -------------------------------------------------------------------------------------------


class PlannedRequest(Protocol):
    """The request argument of a `DP_COMPUTE_PLAN` call."""

    @property
    def rows(self) -> Sequence[Sequence[int]]:
        """Indices of the batch's rows that each rank gets."""

    @property
    def columns(self) -> Collection[str]:
        """Names of the batch's columns that the ranks read; only these are sent."""

    @property
    def ranks_each(self) -> int:
        """Consecutive ranks that work on the same rows together, and return the same."""

    def for_rank(self, rank: int) -> Any:
        """Return the request for one rank."""


def _dp_compute_plan(call: DriverCall) -> GroupCall:
    def arguments(batch: Any, request: PlannedRequest) -> tuple[Any, PlannedRequest]:
        return batch, request

    batch, request = arguments(*call.args, **call.kwargs)
    num_rows = _common_length([("'batch'", batch)], "DP_COMPUTE_PLAN")
    rows_by_rank = _checked_rows(request, num_rows, call.world_size)
    columns = _checked_columns(request, batch)
    ranks = tuple(
        RankCall((BatchRows(batch, rows, columns), request.for_rank(rank)), {})
        for rank, rows in enumerate(rows_by_rank)
    )
    first = slice(None, None, request.ranks_each)
    return GroupCall(ranks, lambda results: _join_planned(results[first], rows_by_rank[first], num_rows))


def _checked_columns(request: PlannedRequest, batch: DataProto) -> tuple[str, ...]:
    has = {*([] if batch.batch is None else batch.batch.keys()), *batch.non_tensor_batch}
    missing = sorted(set(request.columns) - has)
    if missing:
        raise ValueError(f"{type(request).__name__} reads the columns {missing}, and the batch has only {sorted(has)}")
    return tuple(sorted(request.columns))


def _checked_rows(request: PlannedRequest, num_rows: int, world_size: int) -> list[np.ndarray]:
    if len(request.rows) != world_size:
        raise ValueError(f"a plan for {len(request.rows)} ranks can't run on {world_size} ranks")
    rows_by_rank = [np.asarray(rows, dtype=np.int64) for rows in request.rows]
    for rank, rows in enumerate(rows_by_rank):
        if len(rows) and (rows.min() < 0 or rows.max() >= num_rows):
            raise ValueError(f"the plan gives rank {rank} rows {rows.min()}..{rows.max()} of a batch of {num_rows}")
    return rows_by_rank


def _join_planned(results: list[Any], rows_by_rank: list[np.ndarray], num_rows: int) -> Any:
    """Put the ranks' rows back in the batch's order; results that are no rows stay a list by rank."""
    if not any(isinstance(result, DataProto | PackedBatch) for result in results):
        return unpack_result(results)
    for rank, (result, rows) in enumerate(zip(results, rows_by_rank, strict=True)):
        if len(_checked_result(rank, result)) != len(rows):
            raise ValueError(f"rank {rank} got {len(rows)} rows and returned {len(result)}; a plan needs one for each")
    order = np.concatenate(rows_by_rank)
    if not np.array_equal(np.sort(order), np.arange(num_rows)):
        raise ValueError(
            f"the plan covers {len(np.unique(order))} of {num_rows} rows with {len(order)} entries, so the rows that "
            "came back are not the batch's: methods that return rows need a plan with every row exactly once"
        )
    meta = DataProto.concat([DataProto(meta_info=result.meta_info) for result in results]).meta_info
    parts = [(result, rows) for result, rows in zip(results, rows_by_rank, strict=True) if len(rows)]
    joined = join_batches(*zip(*(parts or [(results[0], order)]), strict=True))
    return DataProto(joined.batch, joined.non_tensor_batch, meta)


_DISPATCHERS: dict[Dispatch, Callable[[DriverCall], GroupCall]] = {
    Dispatch.RANK_ZERO: _one_to_all,
    Dispatch.ONE_TO_ALL: _one_to_all,
    Dispatch.ALL_TO_ALL: _all_to_all,
    Dispatch.DP_COMPUTE: _dp_compute,
    Dispatch.DP_COMPUTE_PROTO: _dp_compute_proto,
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _dp_compute_proto_with_func,
    Dispatch.DP_COMPUTE_METRIC: _dp_compute_metric,
    Dispatch.DP_COMPUTE_PLAN: _dp_compute_plan,
}
