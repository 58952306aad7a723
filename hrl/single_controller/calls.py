"""A call under way on several ranks: bounded, and the first failure wins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from hrl.single_controller import transport
from hrl.single_controller.errors import WorkerDiedError, WorkerError, WorkerTimeoutError, current_phase
from hrl.single_controller.ray_errors import cause_of, death_reason, is_death, without_colours

_DEATH_NOTICE_S = 2.0


class PendingCalls:
    """One method running on some ranks.

    Args:
        refs: The Ray reference of each rank's result, by rank.
        method: Name for errors, `role.method`.
        pids: Process id of every rank.
        timeout_s: The deadline, counted from now.
        on_failure: Told the references that are still open when the call fails.
    """

    def __init__(
        self,
        refs: dict[int, ray.ObjectRef],
        method: str,
        pids: dict[int, int],
        timeout_s: float,
        on_failure: Callable[[str, dict[int, ray.ObjectRef]], None],
    ) -> None:
        self._method, self._pids, self._timeout_s, self._on_failure = method, pids, timeout_s, on_failure
        self._phase = current_phase(default=method)
        self._deadline = time.monotonic() + timeout_s
        self._open = {ref: rank for rank, ref in refs.items()}
        self._results: dict[int, Any] = {}

    def get(self, timeout_s: float | None = None) -> list[Any]:
        """Return the results in rank order (see `PendingResults.get`). A second call gives the same again."""
        deadline, waiting_s = self._deadline, self._timeout_s
        if timeout_s is not None:
            deadline, waiting_s = min(deadline, time.monotonic() + timeout_s), timeout_s
        while self._open:
            ready, _ = ray.wait(list(self._open), num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise self._timed_out(sorted(self._open.values()), waiting_s)
            self._take(ready[0], deadline)
        return [self._results[rank] for rank in sorted(self._results)]

    def done(self) -> bool:
        """Return whether every rank has answered (see `PendingResults.done`)."""
        while self._open:
            ready, _ = ray.wait(list(self._open), num_returns=1, timeout=0)
            if not ready:
                if time.monotonic() >= self._deadline:
                    raise self._timed_out(sorted(self._open.values()), self._timeout_s)
                return False
            self._take(ready[0], self._deadline)
        return True

    def _take(self, ref: ray.ObjectRef, deadline: float) -> None:
        """Move a finished rank's result over, or raise its error."""
        rank = self._open[ref]
        try:
            result = ray.get(ref, timeout=max(deadline - time.monotonic(), 1.0))
        except GetTimeoutError as error:
            raise self._timed_out([rank], self._timeout_s) from error
        except RayError as error:
            del self._open[ref]
            self._fail()
            raise self._translated(rank, error) from cause_of(error)
        del self._open[ref]
        self._results[rank] = transport.unpack_result(result)

    def _fail(self) -> None:
        self._on_failure(self._method, {rank: ref for ref, rank in self._open.items()})

    def _timed_out(self, ranks: list[int], waiting_s: float) -> WorkerTimeoutError:
        if time.monotonic() >= self._deadline:  # before that, the caller only did not want to wait any longer
            self._fail()
        return WorkerTimeoutError(ranks, self._method, self._phase, waiting_s)

    def _translated(self, rank: int, error: RayError) -> WorkerError:
        if is_death(error):
            return self._died(rank, error)
        # When a process dies in a collective, its peers raise "connection closed" before the cluster knows of the
        # death. The death is the cause, so give its notice a moment to arrive.
        death = self._death_of_another()
        if death is not None:
            return death
        cause = cause_of(error)
        return WorkerError(
            rank, self._method, self._phase, f"{type(cause).__name__}: {cause}", without_colours(str(error))
        )

    def _death_of_another(self) -> WorkerDiedError | None:
        deadline = time.monotonic() + _DEATH_NOTICE_S
        refs = dict(self._open)
        while refs:
            ready, _ = ray.wait(list(refs), num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                return None
            rank = refs.pop(ready[0])
            try:
                ray.get(ready[0], timeout=1.0)
            except RayError as error:
                if is_death(error):
                    return self._died(rank, error)
        return None

    def _died(self, rank: int, error: RayError) -> WorkerDiedError:
        return WorkerDiedError(rank, self._method, self._phase, self._pids.get(rank, -1), death_reason(error))
