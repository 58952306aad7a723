"""The processes of a Ray that this process has started: which of them a run can't do without, and whether it has ended.

Ray's own answer to their death comes late and names something else: without its GCS a driver goes on for a minute and
is then aborted from C++; a raylet that stands still turns its workers into actors whose "owner's node has crashed".
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import RayError

from hrl.processes import guard
from hrl.processes.evidence import why_memory_ended_it
from hrl.processes.watch import NEEDED, is_gone
from hrl.single_controller.worker_errors import ClusterLostError

#: Process type in Ray → what it is. The others (monitor, log monitor) may end, and a run goes on.
_VITAL = {
    ray_constants.PROCESS_TYPE_GCS_SERVER: "Ray's control service (GCS)",
    ray_constants.PROCESS_TYPE_RAYLET: "Ray's raylet",
}

LOOK_S = 1.0
"""Interval at which whoever waits for a call asks whether Ray is still there."""

_own: OwnRay | None = None


class OwnRay:
    """The processes of the Ray that `ray.init` has just started."""

    def __init__(self) -> None:
        processes = ray._private.worker._global_node.all_processes
        self._vital: dict[str, subprocess.Popen[bytes]] = {
            title: processes[kind][0].process for kind, title in _VITAL.items() if kind in processes
        }
        raylet = self.raylet_pid
        self._agents = {  # with which the raylet ends
            entry.pid: (_title_of(entry.pid), entry.start) for entry in guard.process_table() if entry.parent == raylet
        }

    @property
    def raylet_pid(self) -> int:
        """Process id of the raylet, the parent of all workers."""
        return self._vital[_VITAL[ray_constants.PROCESS_TYPE_RAYLET]].pid

    def lost(self) -> str | None:
        """Return the sentence about the first vital process that has ended; None while all are there."""
        for pid, (title, _) in self._agents.items():
            if is_gone(pid):
                return self._obituary(f"Ray's {title}", pid, "has ended, and the raylet ends with it")
        for title, process in self._vital.items():
            code = process.poll()
            if code is not None or is_gone(process.pid):
                return self._obituary(title, process.pid, "has ended" if code is None else _how(code))
        return None

    @staticmethod
    def _obituary(title: str, pid: int, how: str) -> str:
        reason = NEEDED.why_it_ended(pid) or why_memory_ended_it()
        return (
            f"{title} on this machine (pid {pid}) {how}; no call to a worker can go on without it."
            f"{'' if reason is None else f' {reason}.'} Start the run again. Ray's logs are in "
            f"{ray._private.worker._global_node.get_logs_dir_path()}"
        )

    @contextmanager
    def supervised(self) -> Iterator[None]:
        """Raise for a vital process that has ended within the block.

        Raises:
            ClusterLostError: The block failed and a vital process has ended.
        """
        global _own
        before, _own = _own, self
        try:
            yield
        except Exception as error:
            lost = self.lost()
            if lost is None or isinstance(error, ClusterLostError):
                raise
            raise ClusterLostError(lost) from error
        finally:
            _own = before
            if self.lost() is not None:
                self.kill()

    def kill(self) -> None:
        """Kill what is left of it: nobody who talks to the others would get an answer. Workers end with the raylet."""
        for process in self._vital.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        guard.kill_processes([f"{pid}@{start}" for pid, (_, start) in self._agents.items()])

    def watch(self) -> None:
        """Kill vital processes that stay stopped, until `forget`: the end of a Ray, too, waits for them."""
        for title, process in self._vital.items():
            NEEDED.add(process.pid, title)

    def forget(self) -> None:
        """Watch no longer."""
        for process in self._vital.values():
            NEEDED.remove(process.pid)


def _title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:40]
    except FileNotFoundError:
        return "agent"


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def require_own_ray() -> None:
    """Raise if a process of the Ray that this process started has ended.

    Raises:
        ClusterLostError: It says which, and how.
    """
    if _own is not None and (lost := _own.lost()) is not None:
        raise ClusterLostError(lost)


def watched_get(ref: ray.ObjectRef, timeout_s: float) -> Any:
    """Do what `ray.get` does, and notice within a second or so that the Ray that this process started is gone.

    Raises:
        ClusterLostError: A process of it has ended.
        GetTimeoutError: There is no result in time; further errors are those of `ray.get`.
    """
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0 and not ray.wait([ref], timeout=min(left_s, LOOK_S))[0]:
        require_own_ray()
    try:
        return ray.get(ref, timeout=1.0 if left_s > 0 else 0.0)
    except RayError:
        require_own_ray()
        raise


def end_lost_ray() -> bool:
    """Kill the rest of a Ray of which a process has ended; return whether there was one: no call would come back."""
    if _own is None or _own.lost() is None:
        return False
    _own.kill()
    return True


def is_on_this_machine(node_id: str) -> bool:
    """Return whether a node is the one that this process runs on."""
    return ray.is_initialized() and node_id == ray.get_runtime_context().get_node_id()
