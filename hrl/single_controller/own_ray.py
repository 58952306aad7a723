"""The processes of a Ray that this process has started: which of them a run can't do without, and whether it has ended.

Ray's own answer to their death comes late and names something else: without its GCS a driver goes on for a minute and
is then aborted from C++; a raylet that stands still turns its workers into actors whose "owner's node has crashed".
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import RayError

from hrl.processes import guard
from hrl.processes.evidence import SHARED_MEMORY, exit_in_words, free_shared_memory, why_memory_ended_it
from hrl.processes.watch import NEEDED, is_gone
from hrl.single_controller.turns import others_have_their_turn
from hrl.single_controller.worker_errors import ClusterLostError, SharedMemoryError

_STORE_FILE = f"{SHARED_MEMORY}/plasma"
_ROOM_FOR_A_BATCH_BYTES = 256 << 20
"""More than a batch takes at once: 4 million tokens."""
#: Process type in Ray → what it is. The others (monitor, log monitor) may end, and a run goes on.
VITAL = {
    ray_constants.PROCESS_TYPE_GCS_SERVER: "Ray's control service (GCS)",
    ray_constants.PROCESS_TYPE_RAYLET: "Ray's raylet",
}

LOOK_S = 1.0
"""Interval at which whoever waits for a call asks whether Ray is still there."""
_NOTICE_S = 10.0
"""How long this process may take to notice that its Ray is lost; between calls to Ray, as long as it likes."""
_STUCK_LOOKS = 3
"""In how many looks running it has to be found within Ray after that: it waits there for a process that is stopped."""
_LAST_RESORT_S = 40.0
"""How long a process may go on after its Ray is lost. Some of Ray's calls wait for a dead control service, whatever one
does, and end the process from C++ after 60 s, with a message of theirs."""

_own: OwnRay | None = None


class OwnRay:
    """The processes of the Ray that `ray.init` has just started."""

    def __init__(self) -> None:
        processes = ray._private.worker._global_node.all_processes
        self._vital: dict[str, subprocess.Popen[bytes]] = {
            title: processes[kind][0].process for kind, title in VITAL.items() if kind in processes
        }
        raylet = self.raylet_pid
        self._lost: str | None = None
        self._over = threading.Event()
        self._noticed = threading.Event()
        self._agents = {  # with which the raylet ends
            entry: _title_of(entry.pid) for entry in guard.process_table() if entry.parent == raylet
        }

    @property
    def raylet_pid(self) -> int:
        """Process id of the raylet, the parent of all workers."""
        return self._vital[VITAL[ray_constants.PROCESS_TYPE_RAYLET]].pid

    def lost(self) -> str | None:
        """Return the sentence about the first vital process that has ended; None while all are there."""
        self._lost = self._lost or self._first_that_ended()  # the others end with it, or by `kill`
        return self._lost

    def _first_that_ended(self) -> str | None:
        codes = {title: process.poll() for title, process in self._vital.items()}
        # An agent ends when its raylet is killed. A raylet whose agent was killed ends by itself, with an exit code.
        by_signal = [title for title, code in codes.items() if code is not None and code < 0]
        for agent, title in self._agents.items():
            if is_gone(agent.pid) and not by_signal:
                return self._obituary(f"Ray's {title}", agent.pid, "has ended, and the raylet ends with it")
        for title, process in self._vital.items():
            code = codes[title]
            if code is not None or is_gone(process.pid):
                return self._obituary(title, process.pid, "has ended" if code is None else exit_in_words(code))
            if NEEDED.why_it_ended(process.pid) is not None:
                return self._obituary(title, process.pid, "stands still")
        return None

    @property
    def needed(self) -> dict[int, str]:
        """Process id of each vital process → what it is."""
        return {process.pid: title for title, process in self._vital.items()}

    @staticmethod
    def _obituary(title: str, pid: int, how: str) -> str:
        reason = NEEDED.why_it_ended(pid) or why_memory_ended_it()
        return (
            f"{title} on this machine (pid {pid}) {how}; no call to a worker can go on without it."
            f"{'' if reason is None else f' {reason}.'} Start the run again. Ray's logs are in "
            f"{ray._private.worker._global_node.get_logs_dir_path()}"
        )

    def untouched_bytes(self) -> int:
        """Return how much memory the object store may still take of `/dev/shm`; 0 if it is elsewhere."""
        for link in Path(f"/proc/{self.raylet_pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed while we looked
                if str(link.readlink()).startswith(_STORE_FILE):
                    file = link.stat()
                    return file.st_size - 512 * file.st_blocks
        return 0

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
        self._noticed.set()
        for process in self._vital.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        guard.kill_processes([agent.identity for agent in self._agents])

    def watch(self) -> None:
        """Look after vital processes until `forget`: the end of a Ray, too, waits for them.

        One that stays stopped counts as lost and is killed when this process has noticed: Ray ends a process that is
        talking to a raylet at its death, without a word.
        """
        for title, process in self._vital.items():
            NEEDED.add(process.pid, title, kills=False)
        threading.Thread(target=self._wait_for_loss, name="own-ray", daemon=True).start()

    def forget(self) -> None:
        """Watch no longer."""
        self._over.set()
        for process in self._vital.values():
            NEEDED.remove(process.pid)

    def _wait_for_loss(self) -> None:
        """Say what was lost and end this process, if it does not come to that itself."""
        lost = None
        while lost is None:
            if self._over.wait(LOOK_S):
                return
            lost = self.lost()
        self._noticed.wait(_NOTICE_S)
        stuck = 0
        while not self._noticed.is_set() and stuck < _STUCK_LOOKS:
            stuck = stuck + 1 if _waits_for_ray() else 0
            if self._over.wait(LOOK_S):
                return
        if self._noticed.is_set() and self._over.wait(_LAST_RESORT_S):
            return
        os.write(2, f"\n{ClusterLostError.__name__}: {lost}\n".encode())
        self.kill()
        os._exit(1)


def _title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:40]
    except FileNotFoundError:
        return "agent"


def _waits_for_ray() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_filename.startswith(f"{Path(ray.__file__).parent}{os.sep}")


def require_own_ray() -> None:
    """Raise if a process of the Ray that this process started has ended.

    Raises:
        ClusterLostError: It says which, and how.
    """
    if _own is not None and (lost := _own.lost()) is not None:
        _own.kill()
        raise ClusterLostError(lost)


def watched_get(ref: ray.ObjectRef, timeout_s: float) -> Any:
    """Do what `ray.get` does, and notice within a second or so that the Ray that this process started is gone.

    Raises:
        ClusterLostError: A process of it has ended.
        GetTimeoutError: There is no result in time; further errors are those of `ray.get`.
    """
    deadline = time.monotonic() + timeout_s
    with others_have_their_turn() as require_wanted:
        while (left_s := deadline - time.monotonic()) > 0 and not ray.wait([ref], timeout=min(left_s, LOOK_S))[0]:
            require_wanted()
            require_own_ray()
    try:
        return ray.get(ref, timeout=1.0 if left_s > 0 else 0.0)
    except RayError:
        require_own_ray()
        raise


def require_shared_memory() -> None:
    """Raise if `/dev/shm` lacks what the object store may still need: writing to it would kill this process.

    Raises:
        SharedMemoryError: It says how much is there.
    """
    free = free_shared_memory()
    if _own is None or free is None or free >= _ROOM_FOR_A_BATCH_BYTES or (needed := _own.untouched_bytes()) <= free:
        return
    raise SharedMemoryError(
        f"/dev/shm has only {free >> 20} MiB free, and Ray's object store, which holds the batches, may take "
        f"{needed >> 20} MiB more of it: free some, or give it more (`mount -o remount,size=…`, `docker run "
        "--shm-size=…`)"
    )


def end_lost_ray() -> bool:
    """Kill the rest of a Ray of which a process has ended; return whether there was one: no call would come back."""
    if _own is None or _own.lost() is None:
        return False
    _own.kill()
    return True


def is_on_this_machine(node_id: str) -> bool:
    """Return whether a node is the one that this process runs on."""
    return ray.is_initialized() and node_id == ray.get_runtime_context().get_node_id()
