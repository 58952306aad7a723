"""A group of workers that is called as if it were one object. Backends say how a call reaches a rank."""

from __future__ import annotations

import copy
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

from hrl.protocol import DataProtoFuture
from hrl.single_controller.decorator import Dispatch, Execute, MethodSpec
from hrl.single_controller.dispatch import RankCall, dispatch
from hrl.single_controller.errors import WorkerError

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class ResourcePool:
    """How many processes a group has on each node.

    Args:
        process_on_nodes: Number of processes, node by node: `[8, 8]` is two nodes of eight.
        max_colocate_count: Number of worker groups that will share each of the pool's devices.
    """

    def __init__(self, process_on_nodes: Sequence[int], max_colocate_count: int = 1) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ValueError(f"process_on_nodes must name at least one process per node, got {list(process_on_nodes)}")
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        self.process_on_nodes = list(process_on_nodes)
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        """Number of processes of a group on this pool."""
        return sum(self.process_on_nodes)


class ClassWithInitArgs:
    """A worker class and the arguments to construct it with, on every rank alike."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def __call__(self) -> Any:
        """Construct the object."""
        return self.cls(*self.args, **self.kwargs)


@dataclass(frozen=True)
class RoleMethod:
    """A registered method of the object that plays `role` in each process."""

    role: str
    name: str
    spec: MethodSpec

    def __str__(self) -> str:
        return f"{self.role}.{self.name}"


class PendingResults(Protocol):
    """A call under way, as a backend knows it."""

    def get(self, timeout_s: float | None = None) -> list[Any]:
        """Return the results in rank order.

        Args:
            timeout_s: How long to wait at most from now on; None is until the call's own deadline.

        Raises:
            WorkerError: The first failure of a rank.
            WorkerTimeoutError: A rank has not answered in time.
        """

    def done(self) -> bool:
        """Return whether `get` would return at once; raises what `get` would raise at once."""


class GroupFuture(DataProtoFuture):
    """What a non-blocking call returns: `get()` waits for the ranks and gives what a blocking call would have given."""

    def __init__(self, pending: PendingResults, collect: Callable[[list[Any]], Any]) -> None:
        super().__init__(collect_fn=collect, futures=[pending], resolve_fn=_results_of)

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for the result, at most `timeout_s` from now; None is until the deadline the call was made with."""
        return self.collect_fn(_results_of(self.futures, timeout_s))

    def done(self) -> bool:
        """Return whether `get` would return at once; raises what `get` would raise at once."""
        return all(pending.done() for pending in self.futures)


def wait_for_all(futures: Sequence[GroupFuture]) -> list[Any]:
    """Return the results of calls that run side by side, each by its own deadline.

    Raises:
        WorkerError: The first failure of any call, at once. Calls that have failed too by then are in the log.
    """
    waiting = list(futures)
    while waiting:
        for future in list(waiting):
            try:
                if future.done():
                    waiting.remove(future)
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


def _results_of(pending: list[PendingResults], timeout_s: float | None) -> list[Any]:
    return pending[0].get(timeout_s)


class WorkerGroup(ABC):
    """Calls registered methods on all ranks: `group.method(...)`.

    A backend implements `_submit` and `shutdown`; `methods` maps the names to call to what they are on a rank.
    """

    def __init__(self, world_size: int, methods: Mapping[str, RoleMethod], call_timeout_s: float) -> None:
        taken = sorted(name for name in methods if hasattr(type(self), name))
        if taken:
            raise ValueError(f"registered methods {taken} hide methods of {type(self).__name__}: give them other names")
        self.world_size = world_size
        self.call_timeout_s = call_timeout_s
        self._methods = dict(methods)

    @abstractmethod
    def _submit(self, role: str, method: str, calls: Sequence[RankCall]) -> PendingResults:
        """Start `method` on ranks 0 … len(calls) - 1 of the group."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the group's processes. Further calls fail; a second shutdown does nothing."""

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
        return view

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose methods this group calls."""
        return tuple(dict.fromkeys(method.role for method in self._methods.values()))

    # ---- any method or function, without dispatch ---------------------------------------------------------------

    def execute_all_async(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> GroupFuture:
        """Run `method(...)` on every rank; a function gets the rank's worker as its first argument.

        Arguments are cut as by `Dispatch.ALL_TO_ALL`.

        Args:
            method: The name of a method of the worker, registered or not, or a function that can be pickled.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            ValueError: The group plays several roles; `spawn` says which one is meant.
        """
        return self._execute(_ON_ALL, method, args, kwargs)

    def execute_all_sync(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all_async`, waiting for the list of results in rank order."""
        return self.execute_all_async(method, *args, **kwargs).get()

    def execute_rank_zero_async(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> GroupFuture:
        """As `execute_all_async` on rank 0 alone; every argument is passed as it is."""
        return self._execute(_ON_RANK_ZERO, method, args, kwargs)

    def execute_rank_zero_sync(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero_async`, waiting for the result."""
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


_ON_ALL = MethodSpec(Dispatch.ALL_TO_ALL, Execute.ALL, blocking=False, materialize_futures=False, columns=None)
_ON_RANK_ZERO = replace(_ON_ALL, dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)


def _materialized(arg: Any) -> Any:
    return arg.get() if isinstance(arg, DataProtoFuture) else arg
