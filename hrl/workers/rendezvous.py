"""How processes find each other before they have a process group: the TCP store they meet at, and their own address."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def serve_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Return a store that listens on `address` alone: left to itself, torch's listens on every interface, to everybody.

    Args:
        address: Of an interface of this machine.
        port: To listen on; 0 takes any that is free, see the store's `port`.
        timeout_s: Of every wait on the store.

    Raises:
        OSError: The address is not this machine's, or the port is taken.
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


def address_towards(address: str) -> str:
    """Return the address of this machine from which `address` is reached. Nothing is sent.

    Raises:
        OSError: There is no route to it, or it is no address.
    """
    family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def listen_towards(address: str) -> None:
    """Make this process's gloo groups use the interface from which `address` is reached, unless the user names one.

    Left to itself, gloo takes the interface of the host's name, which on many machines is loopback: ranks on other
    nodes would be told to come there.
    """
    if _GLOO_INTERFACE in os.environ:
        return
    own = address_towards(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            os.environ[_GLOO_INTERFACE] = name
            return


def connect_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Return the store that another process serves; waits for it for `timeout_s` seconds.

    Raises:
        torch.distributed.DistNetworkError: Nobody serves there.
    """
    return dist.TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))
