"""Which addresses stand for this machine alone."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Return whether a name or address stands for this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: An address, or `localhost`.
        port: The port; 0 for a free one.

    Raises:
        OSError: The address is not this machine's, or the port is taken.
    """
    address = "127.0.0.1" if host == "localhost" else host.strip("[]")
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
