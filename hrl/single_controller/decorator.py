"""`@register`: how a worker's method is called from the driver.

The decorator only writes a `MethodSpec` onto the function: called on the object itself, the method is an ordinary
method. The worker group reads the spec, `base/dispatch.py` does the cutting and joining.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

_SPEC_ATTRIBUTE = "_hrl_method_spec"

F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(Enum):
    """How the arguments of a call become the arguments of the ranks, and their results one result."""

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
    results are DataProtos, joined in order and freed of what the padding added."""
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    """As DP_COMPUTE_PROTO, behind a first argument (a function) that every rank gets as it is."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Cut as DP_COMPUTE_PROTO but never padded (a padded row would be measured twice); results are a list by rank."""
    DP_COMPUTE_PLAN = "dp_compute_plan"
    """`method(batch, plan)`: rank i gets the rows `plan.rows[i]` of the batch and `plan.ranks[i]`. Rows that come back
    return to the batch's order; results without rows are joined. With `plan=None`, as DP_COMPUTE_PROTO."""


class Execute(Enum):
    """Which ranks run a call."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class CustomDispatch:
    """A user's own pair of functions, with verl's signatures."""

    dispatch_fn: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
    """`(worker_group, *args, **kwargs) -> (args, kwargs)`, which are then cut as by ALL_TO_ALL."""
    collect_fn: Callable[[Any, list[Any]], Any]
    """`(worker_group, results by rank) -> result`."""


@dataclass(frozen=True)
class MethodSpec:
    """What `register` was told about a method."""

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
        blocking: False gives the driver a future with `.get()` in place of the result.
        materialize_futures: Wait for arguments that are futures and pass on their results.
        columns: Names of the batch columns, tensors and non-tensors, that the method reads; no other travels to the
            ranks. Names that a batch lacks are passed over. None: all travel.

    Raises:
        ValueError: A mode is unknown, or the two modes contradict each other.
    """
    mode = _checked_dispatch_mode(dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise ValueError(f"unknown execute_mode {execute_mode!r}; expected one of {[str(e) for e in Execute]}")
    if execute_mode is Execute.RANK_ZERO and mode not in _MODES_FOR_RANK_ZERO and isinstance(mode, Dispatch):
        raise ValueError(f"{mode} cuts a batch over all ranks: it can't be run with {execute_mode}")
    if isinstance(columns, str):
        raise ValueError(f"columns must be a sequence of names, not the string {columns!r}")
    if mode is Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO
    spec = MethodSpec(mode, execute_mode, blocking, materialize_futures, None if columns is None else tuple(columns))

    def decorate(method: F) -> F:
        if inspect.iscoroutinefunction(method):
            raise ValueError(f"{method.__qualname__} is async: a rank runs one call at a time, register a plain method")
        setattr(method, _SPEC_ATTRIBUTE, spec)
        return method

    return decorate


_MODES_FOR_RANK_ZERO = (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL)


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
