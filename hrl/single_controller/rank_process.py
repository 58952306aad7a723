"""The process of a rank, as Ray starts it.

Whatever is large (torch, the workers' modules) is imported only after the process has begun its preludes, which start
work in other processes that goes on in the meantime.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from hrl.errors import HrlError, may_pass
from hrl.processes.imports import quick_imports
from hrl.processes.lifetime import die_with_parent, guard_process_group
from hrl.processes.signals import stay_kept
from hrl.single_controller.pulse import begin_pulse

if TYPE_CHECKING:
    from hrl.single_controller.packing import PackedBatch
    from hrl.single_controller.transport import Message
    from hrl.single_controller.worker import RayClassWithInitArgs, Worker


@dataclass(frozen=True)
class ProcessInfo:
    """A rank's process and node."""

    pid: int
    node_id: str
    node_ip: str


class RankProcess:
    """The process of one rank, with one worker per role. The driver talks to it through `RankProcesses`.

    Args:
        label: Prefix of the process's log lines.
        log_level: Level of the root logger.
        preludes: What it does first; see `RayClassWithInitArgs.prelude`.
    """

    def __init__(self, label: str, log_level: int, preludes: Sequence[Callable[[], None]] = ()) -> None:
        # The parent is the raylet, which dies with the driver that started it. Ray notices that within about a second;
        # the kernel acts at once, even if this process is stuck inside a library.
        die_with_parent()
        guard_process_group()
        stay_kept()
        for prelude in preludes:
            prelude()
        # Ray imports a worker's modules while it unpickles what `construct` gets.
        self._importing = ExitStack()
        self._importing.enter_context(quick_imports())
        begin_pulse(ray.get_runtime_context().get_actor_id())
        self._label = label
        self._workers: dict[str, Worker] = {}
        logging.basicConfig(level=log_level, format=f"%(asctime)s %(levelname).1s [{label}] %(name)s: %(message)s")

    def __repr__(self) -> str:  # Ray prefixes the process's output with it
        return self._label

    def info(self) -> ProcessInfo:
        """Return the ids of this process and its node."""
        return ProcessInfo(os.getpid(), ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def reserve_port(self) -> int:
        """Return a TCP port on this node on which only this process can listen (with SO_REUSEADDR)."""
        self._reserved = socket.socket()  # bound but never listening; stays open for the life of the process
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        return self._reserved.getsockname()[1]

    def set_environ(self, variables: Mapping[str, str]) -> None:
        """Set environment variables."""
        os.environ.update(variables)

    def construct(self, role: str, spec: RayClassWithInitArgs) -> None:
        """Construct the worker of a role."""
        self._importing.close()
        self._workers[role] = worker = spec()
        if not hasattr(worker, "fused_worker_dict"):  # a FusedWorker has the roles within it there
            worker.fused_worker_dict = self._workers

    def call(self, message: Message, *batches: PackedBatch) -> Any:
        """Call a method of a role's worker, as `transport.send` says; batches in the result are packed."""
        from hrl.single_controller import transport
        from hrl.single_controller.packing import pack_result

        role, method, call = transport.receive(message, batches)
        try:
            return pack_result(call.on(self._workers[role], method))
        except HrlError as error:
            error.may_pass = may_pass(error)  # here, because what led to it does not travel
            raise

    def close(self) -> None:
        """Close the workers in reverse order of construction."""
        for role in reversed(self._workers):
            self._workers[role].close()
        self._workers.clear()
