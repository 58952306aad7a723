"""The TCP store through which processes meet before they have a process group."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def serve_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A store that listens on ``address`` alone: left to itself, torch's listens on every interface, to everybody.

    Args:
        address: of an interface of this machine.
        port: to listen on; 0 takes any that is free, see the store's ``port``.
        timeout_s: of every wait on the store.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    # The server must not wait for clients here: they may hear of its port only after this.
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store that another process serves; waits for it for ``timeout_s`` seconds.

    Raises:
        torch.distributed.DistNetworkError: nobody serves there.
    """
    return dist.TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))
