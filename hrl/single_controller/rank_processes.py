"""The processes of a group, seen by the driver: one Ray actor per rank, with deadlines and an orderly shutdown."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hrl.processes.evidence import why_memory_ended_it
from hrl.processes.watch import NEEDED, is_gone
from hrl.single_controller import transport
from hrl.single_controller.dispatch import RankCall
from hrl.single_controller.own_ray import LOOK_S, end_lost_ray, is_on_this_machine, require_own_ray
from hrl.single_controller.pulse import SILENT_S, Pulses
from hrl.single_controller.rank_process import ProcessInfo, RankProcess
from hrl.single_controller.resource_pool import RayResourcePool, Slot
from hrl.single_controller.turns import others_have_their_turn
from hrl.single_controller.worker import RankEnv, RayClassWithInitArgs
from hrl.single_controller.worker_errors import (
    WorkerDiedError,
    WorkerError,
    WorkerStuckError,
    WorkerTimeoutError,
    cause_of,
    current_phase,
    death_reason,
    is_death,
    without_colours,
)

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_BUSY_GRACE_S = 10.0  # for finishing current work, such as loading a model, before closing
_CLOSE_TIMEOUT_S = 40.0  # for closing; an engine alone has 30 s (hrl.workers.rollout.host)
_STUCK_GRACE_S = 10.0
_DEATH_NOTICE_S = 2.0
_LONG_DEATH_NOTICE_S = 30.0  # for a process that has ended, as far as the kernel is concerned
_PULSE_S = 15.0  # interval at which whoever waits for ranks reads their pulses


class PendingCalls:
    """One method that runs on ranks 0, 1, 2 and so on.

    Args:
        processes: The processes of those ranks; if the call fails, they remember which ranks are still running.
        refs: The Ray reference of each rank's result.
        method: Name for errors, `role.method`.
        timeout_s: The deadline in seconds from now.
    """

    def __init__(self, processes: RankProcesses, refs: Sequence[ray.ObjectRef], method: str, timeout_s: float) -> None:
        self._processes, self._method, self._timeout_s = processes, method, timeout_s
        self._phase = current_phase(default=method)
        self._deadline = time.monotonic() + timeout_s
        self._open = {ref: rank for rank, ref in enumerate(refs)}
        self._results: list[Any] = [None] * len(refs)

    def get(self, timeout_s: float | None = None) -> list[Any]:
        """Return the results in rank order, batches in them packed; a second call returns the same again.

        Args:
            timeout_s: Seconds to wait at most; None waits until the call's own deadline.

        Raises:
            WorkerError: The first failure of a rank.
            WorkerTimeoutError: A rank has not answered in time.
            AbandonedError: This is one of several calls at once, and another one has failed.
        """
        deadline, waiting_s = self._deadline, self._timeout_s
        if timeout_s is not None:
            deadline, waiting_s = min(deadline, time.monotonic() + timeout_s), timeout_s
        with others_have_their_turn() as require_wanted:
            while not self._all_taken(min(deadline, time.monotonic() + LOOK_S)):
                if time.monotonic() >= deadline:
                    raise self._timed_out(sorted(self._open.values()), waiting_s)
                require_wanted()
                self._look()
        return list(self._results)

    def done(self) -> bool:
        """Return whether `get` would return at once; raise what `get` would raise at once."""
        if self._all_taken(time.monotonic()):
            return True
        if time.monotonic() >= self._deadline:
            raise self._timed_out(sorted(self._open.values()), self._timeout_s)
        self._look()
        return False

    def _look(self) -> None:
        """Raise if the call can't end: Ray is gone, or Python has stood still on a rank."""
        silent = self._processes.look(self._open.values())
        if silent:
            pid, where = self._processes.pid(silent[0]), self._processes.whereabouts(silent)
            self._processes.remember_stuck(self._method, self._open)
            raise WorkerStuckError(silent, self._method, self._phase, SILENT_S, where, pid)

    def _all_taken(self, deadline: float) -> bool:
        """Take results as they arrive, until `deadline`; return whether all have."""
        while self._open:
            waiting = list(self._open)
            if not ray.wait(waiting, num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))[0]:
                return False
            # Those of other ranks that have come too: a wait looks at every open one, so one per rank adds up.
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            self._take(ready, deadline)
        return True

    def _take(self, refs: list[ray.ObjectRef], deadline: float) -> None:
        """Store finished ranks' results, or raise the error of one."""
        try:
            results = ray.get(refs, timeout=max(deadline - time.monotonic(), 1.0))
        except RayError as error:
            if len(refs) > 1:  # whose it is shows one by one
                for ref in refs:
                    self._take([ref], deadline)
                return
            rank = self._open[refs[0]]
            if isinstance(error, GetTimeoutError):
                raise self._timed_out([rank], self._timeout_s) from error
            require_own_ray()  # without which every rank fails, one after the other
            del self._open[refs[0]]
            self._processes.remember_stuck(self._method, self._open)
            raise self._translated(rank, error) from cause_of(error)
        for ref, result in zip(refs, results, strict=True):
            self._results[self._open.pop(ref)] = result

    def _timed_out(self, ranks: list[int], waiting_s: float) -> WorkerTimeoutError:
        where = ""
        if time.monotonic() >= self._deadline:  # before that, only the caller's own `timeout_s` has passed
            self._processes.remember_stuck(self._method, self._open)
            where = self._processes.whereabouts(self._open.values())
        return WorkerTimeoutError(ranks, self._method, self._phase, waiting_s, where)

    def _translated(self, rank: int, error: RayError) -> WorkerError:
        if is_death(error):
            return self._died(rank, error)
        # When a process dies in a collective, its peers raise "connection closed" before the cluster reports the
        # death. The death is the cause, so wait a moment for the report.
        death = self._death_of_another()
        if death is not None:
            return death
        cause = cause_of(error)
        return WorkerError(
            rank, self._method, self._phase, f"{type(cause).__name__}: {cause}", without_colours(str(error))
        )

    def _death_of_another(self) -> WorkerDiedError | None:
        refs = dict(self._open)
        began = time.monotonic()
        while refs and time.monotonic() - began < _LONG_DEATH_NOTICE_S:
            ready, _ = ray.wait(list(refs), num_returns=1, timeout=_DEATH_NOTICE_S / 10)
            for ref in ready:
                rank = refs.pop(ref)
                try:
                    ray.get(ref, timeout=1.0)
                except RayError as error:
                    if is_death(error):
                        return self._died(rank, error)
            is_dying = any(self._processes.is_gone(rank) for rank in refs.values())  # and Ray will notice it
            if not is_dying and time.monotonic() - began > _DEATH_NOTICE_S:
                return None
        return None

    def _died(self, rank: int, error: RayError) -> WorkerDiedError:
        pid = self._processes.pid(rank)
        return WorkerDiedError(rank, self._method, self._phase, pid, self._processes.why_it_ended(rank, error))


class RankProcesses:
    """One process per slot of a pool; several worker groups may be views of it.

    The constructor starts the processes; they are ready for calls after `connect`.

    Args:
        pool: The pool that they run on.
        name: Prefix of each process's name.
        environ: Environment variables that the processes are started with.
        start_timeout_s: Deadline for all processes to be up.
        preludes: What each does first; see `RayClassWithInitArgs.prelude`.

    Raises:
        PlacementError: The cluster lacks the resources.
    """

    def __init__(
        self,
        pool: RayResourcePool,
        name: str,
        environ: Mapping[str, str],
        start_timeout_s: float,
        preludes: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._pool = pool
        self._slots = pool.take_place()
        self.names = [f"{name}_{rank}" for rank in range(len(self._slots))]
        self.actors: list[ray.actor.ActorHandle] = []
        self.infos: list[ProcessInfo] = []
        self._stuck: dict[ray.ObjectRef, int] = {}
        self._stuck_method = ""
        self._here: set[int] = set()  # ranks whose processes are on this machine
        self._pulses = Pulses([])
        self._next_look = self._next_pulse = 0.0
        self._start_timeout_s = start_timeout_s
        try:
            for slot, actor_name in zip(self._slots, self.names, strict=True):
                self.actors.append(self._start(slot, actor_name, environ, preludes))
        except BaseException:  # including Ctrl-C: leave no process behind
            self.shutdown()
            raise
        self._starting = PendingCalls(self, [actor.info.remote() for actor in self.actors], "start", start_timeout_s)

    def connect(self) -> None:
        """Wait until the processes are up, and tell each one its rank.

        Raises:
            WorkerTimeoutError: A process was not up by the deadline.
        """
        self.infos = self._starting.get()
        self._here = {rank for rank, info in enumerate(self.infos) if is_on_this_machine(info.node_id)}
        for rank in self._here:
            NEEDED.add(self.infos[rank].pid, f"rank {rank}'s process")
        self._pulses = Pulses([actor._actor_id.hex() for actor in self.actors])
        (port,) = self._wait_for([self.actors[0].reserve_port.remote()], "reserve_port")
        environs = _rank_environs(self.infos, port)
        told = [actor.set_environ.remote(environ) for actor, environ in zip(self.actors, environs, strict=True)]
        self._wait_for(told, "set_environ")

    def _wait_for(self, refs: Sequence[ray.ObjectRef], method: str) -> list[Any]:
        return PendingCalls(self, refs, method, self._start_timeout_s).get()

    def _start(
        self, slot: Slot, name: str, environ: Mapping[str, str], preludes: Sequence[Callable[[], None]]
    ) -> ray.actor.ActorHandle:
        options = {
            "name": name,
            "num_cpus": 1,
            "num_gpus": self._pool.gpus_per_process,
            "max_restarts": 0,
            "max_task_retries": 0,
            "enable_task_events": False,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                slot.placement_group, slot.bundle_index, placement_group_capture_child_tasks=False
            ),
        }
        if environ:
            options["runtime_env"] = {"env_vars": dict(environ)}
        level = logging.getLogger().getEffectiveLevel()
        return ray.remote(RankProcess).options(**options).remote(name, level, preludes)

    def construct(self, role: str, spec: RayClassWithInitArgs, timeout_s: float) -> PendingCalls:
        """Begin to construct a role's worker on every rank."""
        refs = [actor.construct.remote(role, spec) for actor in self.actors]
        return PendingCalls(self, refs, f"{role}.__init__", timeout_s)

    def call(self, role: str, method: str, calls: Sequence[RankCall], timeout_s: float) -> PendingCalls:
        """Start a method of a role on ranks 0 … len(calls) - 1.

        Raises:
            WorkerTimeoutError: An earlier call has failed and some ranks are still in it.
            RuntimeError: The processes were shut down.
        """
        name = f"{role}.{method}"
        self._refuse_if_unusable(name)
        nodes = [info.node_id for info in self.infos[: len(calls)]] or [""] * len(calls)
        sent = transport.send(role, method, calls, nodes)
        refs = [self.actors[rank].call.remote(*arguments) for rank, arguments in enumerate(sent)]
        return PendingCalls(self, refs, name, timeout_s)

    # ---- the ranks from outside ------------------------------------------------------------------------------

    def look(self, ranks: Iterable[int]) -> list[int]:
        """Return which of these ranks stand still, at most once in a second; empty between.

        Raises:
            ClusterLostError: A process of Ray itself has ended.
        """
        now = time.monotonic()
        if now < self._next_look:
            return []
        self._next_look = now + LOOK_S
        require_own_ray()
        if not self.infos:  # they start; that has a deadline of its own
            return []
        if now < self._next_pulse:
            return []
        self._next_pulse = now + _PULSE_S
        waited_for = list(ranks)
        self._pulses.look(waited_for, 2 * _PULSE_S)
        return self._pulses.silent(waited_for)

    def whereabouts(self, ranks: Iterable[int]) -> str:
        """Return where ranks are, or were when they were last heard of."""
        asked = list(ranks)
        if self.infos:
            require_own_ray()
            self._pulses.look(asked, 2 * _PULSE_S)
        return self._pulses.whereabouts(asked)

    def pid(self, rank: int) -> int:
        """Return a rank's process id; -1 while the processes start."""
        return self.infos[rank].pid if self.infos else -1

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank's process has ended, as far as this machine knows."""
        return rank in self._here and is_gone(self.infos[rank].pid)

    def why_it_ended(self, rank: int, error: RayError) -> str:
        """Return why a rank's process died: what is known on this machine, else what Ray says."""
        if rank in self._here:
            reason = NEEDED.why_it_ended(self.infos[rank].pid) or why_memory_ended_it()
            if reason is not None:
                beat = self._pulses.last(rank)
                return f"{reason}." + (f" It had held up to {beat.peak_gib:.1f} GiB." if beat is not None else "")
        return death_reason(error)

    def shutdown(self) -> None:
        """Let the workers close, within a deadline, and end the processes. A second call does nothing."""
        for rank in self._here:
            NEEDED.remove(self.infos[rank].pid)
        self._here = set()
        if self.actors and end_lost_ray():
            still = [info.pid for info in self.infos if not is_gone(info.pid)]  # they end with the raylet
            deadline = time.monotonic() + _BUSY_GRACE_S
            while any(not is_gone(pid) for pid in still) and time.monotonic() < deadline:
                time.sleep(_DEATH_NOTICE_S / 20)
        elif self.actors and ray.is_initialized():
            self._close_workers()
            for actor in self.actors:
                ray.kill(actor)
            # Ray answers a call to a killed actor with an error once it has noticed the death, so wait for that.
            refs = [actor.info.remote() for actor in self.actors]
            ray.wait(refs, num_returns=len(refs), timeout=_CLOSE_TIMEOUT_S)
            self._pulses.forget()
        self._pool.give_back_place(self._slots)
        self.actors, self._slots = [], []

    def _close_workers(self) -> None:
        stuck = self._stuck_ranks(grace_s=1.0)  # their close would wait for the call that they are stuck in
        # A process runs one call at a time: one that doesn't answer `info` would not close either.
        asked = {actor.info.remote(): rank for rank, actor in enumerate(self.actors) if rank not in stuck}
        if not asked:
            return
        free, busy = ray.wait(list(asked), num_returns=len(asked), timeout=_BUSY_GRACE_S)
        for ref in busy:
            logger.warning("%s was busy for more than %g s and is killed", self.names[asked[ref]], _BUSY_GRACE_S)
        refs = {self.actors[asked[ref]].close.remote(): asked[ref] for ref in free}
        closed, late = ray.wait(list(refs), num_returns=len(refs), timeout=_CLOSE_TIMEOUT_S)
        for ref in late:
            logger.warning("%s did not close within %g s and is killed", self.names[refs[ref]], _CLOSE_TIMEOUT_S)
        for ref in closed:
            try:
                ray.get(ref, timeout=1.0)
            except RayActorError:
                logger.debug("%s was dead before it could close", self.names[refs[ref]])
            except RayError as error:
                logger.warning("%s failed to close: %s", self.names[refs[ref]], error)

    def _refuse_if_unusable(self, method: str) -> None:
        """Raise if a call can't start because peers of a failed rank are stuck in a collective."""
        if not self.actors:
            raise RuntimeError(f"{method}: the group was shut down")
        ranks = self._stuck_ranks(_STUCK_GRACE_S)
        if ranks:
            blocker = f"{self._stuck_method}, which failed and blocks {method},"
            raise WorkerTimeoutError(ranks, blocker, blocker, _STUCK_GRACE_S)

    def _stuck_ranks(self, grace_s: float) -> list[int]:
        """Return the ranks that, after `grace_s`, are still in a call that failed on another rank."""
        if self._stuck:
            _, running = ray.wait(list(self._stuck), num_returns=len(self._stuck), timeout=grace_s)
            self._stuck = {ref: self._stuck[ref] for ref in running}
        return sorted(self._stuck.values())

    def remember_stuck(self, method: str, refs: Mapping[ray.ObjectRef, int]) -> None:
        """Record the ranks (result reference → rank) that are still in a call that failed elsewhere."""
        self._stuck |= refs
        self._stuck_method = method


def _rank_environs(infos: Sequence[ProcessInfo], master_port: int) -> list[dict[str, str]]:
    """Return RANK, LOCAL_RANK, MASTER_ADDR … of each process; rank 0 is the master, on loopback if all share a node."""
    nodes = [info.node_id for info in infos]
    master_addr = _LOOPBACK if len(set(nodes)) == 1 else infos[0].node_ip
    sizes, seen = Counter(nodes), Counter[str]()
    environs = []
    for rank, node in enumerate(nodes):
        environs.append(RankEnv(rank, len(nodes), seen[node], sizes[node], master_addr, master_port).as_environ())
        seen[node] += 1
    return environs
