"""Which address and interface a process offers to others."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from hrl.workers.rendezvous import address_towards, connect_store, listen_towards, serve_store


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_this_machine_is_reached_from_loopback(address):
    assert address_towards(address) in ("127.0.0.1", "::1")


def test_the_interface_is_the_one_of_that_address_unless_the_user_names_one(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    listen_towards("127.0.0.1")
    chosen = os.environ["GLOO_SOCKET_IFNAME"]
    assert "127.0.0.1" in {entry.address for entry in psutil.net_if_addrs()[chosen]}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    listen_towards("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_a_reserved_port_can_be_listened_on_by_who_reserved_it():
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        port = reserved.getsockname()[1]
        store = serve_store("127.0.0.1", port, 5.0)
        assert store.port == port
        store.set("who", "rank 0")
        assert connect_store("127.0.0.1", port, 5.0).get("who") == b"rank 0"
