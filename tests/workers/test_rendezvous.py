"""Which address and interface a process offers to others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
import pytest

from hrl.workers.rendezvous import _name_services, address_towards, connect_store, listen_towards, serve_store
from tests.runs.own_network import in_own_network, report_of, why_not

MEETS = """
import socket
from hrl.workers.rendezvous import connect_store, serve_store
store = serve_store("127.0.0.1", 0, 10)
connect_store("127.0.0.1", store.port, 10)
try:
    socket.getaddrinfo("hub.example", 443)
except OSError:
    pass
"""


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


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_to_meet_on_loopback_asks_no_name_server_and_names_are_looked_up_as_before_afterwards(tmp_path):
    command = in_own_network(tmp_path / "report.json", [sys.executable, "-c", MEETS])
    subprocess.run(command, check=True, timeout=600, capture_output=True)
    seen = report_of(tmp_path / "report.json")
    assert seen.sent == ["dns hub.example"]
    assert not seen.listening


@pytest.mark.parametrize(
    ("text", "services"),
    [
        ("passwd: files\n hosts:  files mdns4 [NOTFOUND=return] dns # ours\n", "files mdns4 [NOTFOUND=return] dns"),
        ("# hosts: nis\n", "dns [!UNAVAIL=return] files"),
        (None, "dns [!UNAVAIL=return] files"),
    ],
)
def test_where_names_are_looked_up_is_read_as_glibc_does(text, services, tmp_path, monkeypatch):
    file = tmp_path / "nsswitch.conf"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr("hrl.workers.rendezvous._NAME_SERVICES", file)
    assert _name_services() == services
