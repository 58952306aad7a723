"""The Ray actor behind every rank: one process that holds one worker per role."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from hrl.processes.lifetime import die_with_parent, guard_process_group
from hrl.single_controller import transport
from hrl.single_controller.worker_group import ClassWithInitArgs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessInfo:
    """Who a rank is."""

    pid: int
    node_id: str
    node_ip: str


class RankProcess:
    """One rank. The driver talks to it through `hrl.single_controller.rank_processes`.

    Args:
        label: What stands in front of the process's log lines.
        log_level: Level of the root logger.
    """

    def __init__(self, label: str, log_level: int) -> None:
        # The parent is the raylet, which dies with the driver that started it. Ray notices that within a second or
        # so; the kernel at once, and also when this process is stuck inside a library.
        die_with_parent()
        guard_process_group()
        self._label = label
        self._workers: dict[str, Any] = {}
        logging.basicConfig(level=log_level, format=f"%(asctime)s %(levelname).1s [{label}] %(name)s: %(message)s")

    def __repr__(self) -> str:  # Ray puts it in front of what the process writes
        return self._label

    def info(self) -> ProcessInfo:
        """Who this process is."""
        return ProcessInfo(os.getpid(), ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def reserve_port(self) -> int:
        """Return a TCP port on this node that stays this process's own.

        It alone can listen there, with SO_REUSEADDR.
        """
        self._reserved = socket.socket()  # bound and never listening; open for as long as the process lives
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        return self._reserved.getsockname()[1]

    def set_environ(self, variables: Mapping[str, str]) -> None:
        """Set environment variables."""
        os.environ.update(variables)

    def construct(self, role: str, spec: ClassWithInitArgs) -> None:
        """Construct the worker of a role."""
        self._workers[role] = spec()

    def call(
        self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], transfer_timeout_s: float
    ) -> Any:
        """Call a method of the role's worker; batches come and go packed."""
        args, kwargs = transport.receive(args, kwargs, transfer_timeout_s)
        return transport.pack_result(getattr(self._workers[role], method)(*args, **kwargs))

    def close(self) -> None:
        """Close the workers, the last constructed first."""
        for role in reversed(self._workers):
            self._workers[role].close()
        self._workers.clear()
