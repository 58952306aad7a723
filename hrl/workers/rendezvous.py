"""How processes find each other before they have a process group: the TCP store they meet at, and their own address."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_NAME_SERVICES = Path("/etc/nsswitch.conf")
_SERVICES_OF_GLIBC = "dns [!UNAVAIL=return] files"


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
    with _without_name_server(address):
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
    with _without_name_server(address):
        return dist.TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))


@contextmanager
def _without_name_server(address: str) -> Iterator[None]:
    """Have names looked up in this machine's files alone inside the block, if `address` is on loopback.

    torch asks for the name of each address that it connects to, to have it for its log, and does so in the form of
    IPv6. `/etc/hosts` has no name for 127.0.0.1 in that form, so the question would go to a name server: out of the
    machine, and with a wait of many seconds where none answers.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # of glibc
    if configure is None or not _is_loopback(address):
        yield
        return
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        configure(b"hosts", _name_services().encode())


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return address == "localhost"


def _name_services() -> str:
    """Return where this machine looks up names of hosts, as glibc reads it."""
    text = _NAME_SERVICES.read_text() if _NAME_SERVICES.exists() else ""
    lines = re.findall(r"^[ \t]*hosts:([^#\n]*)", text, re.MULTILINE)
    return lines[0].strip() if lines else _SERVICES_OF_GLIBC
