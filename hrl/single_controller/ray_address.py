"""Whether a Ray cluster answers at an address, found out in seconds: Ray itself tries for minutes and aborts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from hrl.single_controller.errors import PlacementError

_PROBE_S = 10.0


@contextmanager
def reaching(address: str | None) -> Iterator[None]:
    """Around `ray.init`.

    Args:
        address: `local`, `auto`, `host:port` or `ray://host:port`.

    Raises:
        PlacementError: Nobody answers there within 10 s, or Ray finds no cluster.
    """
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if colon and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
        yield
    except OSError as error:
        if address == "local":
            raise
        raise PlacementError(
            f"cannot reach the Ray cluster at {address}: {error}. The address is that of trainer.ray_kwargs.address or "
            "RAY_ADDRESS; start the cluster there, or set neither for a Ray of this run's own"
        ) from error
