"""What watches runs finds what they must not do, in a network of their own, and knows whose shared memory is whose."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.runs import own_network
from tests.runs.own_network import (
    Report,
    can_be_watched,
    in_own_network,
    listening,
    packet_told,
    report_of,
    why_not,
)
from tests.runs.runner import beyond_loopback, owners_of, without_owner

inside = pytest.mark.skipif(why_not() is not None, reason=f"what runs send is not watched: {why_not()}")

CALLS = """
import socket
for family, address in ((socket.AF_INET, "169.254.169.254"), (socket.AF_INET6, "2001:db8::1")):
    with socket.socket(family) as client:
        client.settimeout(0.1)
        try:
            client.connect((address, 80))
        except OSError:
            pass
try:
    socket.getaddrinfo("hub.example", 443)
except OSError:
    pass
"""
LISTENS = """
import socket, time
with socket.create_server(("", 0)) as one, socket.create_server((socket.gethostname(), 0)) as other:
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams, socket.create_server(("127.0.0.1", 0)) as loopback:
        datagrams.bind(("", 0))
        print(*(each.getsockname()[1] for each in (one, other, datagrams)))
        time.sleep(0.5)
"""


def seen_of(script: str, folder: Path) -> tuple[Report, str]:
    command = in_own_network(folder / "report.json", [sys.executable, "-c", script])
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return report_of(folder / "report.json"), done.stdout


@inside
def test_a_connection_a_question_for_a_name_and_every_open_socket_are_told(tmp_path: Path) -> None:
    (tmp_path / "calls").mkdir()
    called, _ = seen_of(CALLS, tmp_path / "calls")
    assert sorted(called.sent) == ["dns hub.example", "tcp 169.254.169.254:80", "tcp [2001:db8::1]:80"]

    listened, said = seen_of(LISTENS, tmp_path)
    one, other, datagrams = said.split()
    sockets = sorted(f"{where.split()[0]} {where.split()[1]}" for where in listened.listening)
    assert sockets == sorted([f"tcp 0.0.0.0:{one}", f"tcp 10.99.0.2:{other}", f"udp 0.0.0.0:{datagrams}"])
    assert not listened.sent


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_a_process_of_this_network_that_listens_beyond_loopback_is_found_by_what_it_is() -> None:
    own = [psutil.Process()]
    before = beyond_loopback(own)
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6):
        assert beyond_loopback(own) == before
    with socket.create_server(("", 0)) as server:
        assert beyond_loopback(own) - before == {f"{own[0].name()} on 0.0.0.0"}
        assert server.getsockname()[1] in {each.port for each in listening()}
    assert beyond_loopback(own) == before


def test_where_there_is_no_such_network_the_summary_says_that_runs_are_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_network, "why_not", lambda: "there is no unshare")
    with pytest.warns(UserWarning, match="the runs of these tests send is not watched: there is no unshare"):
        assert not can_be_watched()
    monkeypatch.setattr(own_network, "why_not", lambda: None)
    assert can_be_watched()


def test_the_machines_own_network_is_refused() -> None:
    own = [str(Path("/proc/self/ns", kind).readlink()) for kind in ("net", "mnt")]
    command = [sys.executable, "-m", "tests.runs.own_network", *own, "report.json", "true"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert refused.returncode == 1
    assert "would change the machine's own network" in refused.stderr


def test_a_packet_is_told_by_protocol_and_target() -> None:
    header = bytes([0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 99, 0, 2, 192, 0, 2, 7])
    assert packet_told(header + bytes([0x9C, 0x40, 0x01, 0xBB]) + bytes(16)) == "tcp 192.0.2.7:443"
    igmp = bytes([*header[:9], 2, *header[10:]])
    assert packet_told(igmp + bytes(8)) is None, "the kernel says this by itself"


def test_a_semaphore_belongs_to_who_made_it_until_that_process_ends():
    made = (
        "import multiprocessing as m, os; lock = m.get_context('spawn').Lock(); print(lock._semlock.name, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{made}; os.read(0, 1); os._exit(0)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    name = f"sem.{process.stdout.readline().decode().strip().lstrip('/')}"
    assert owners_of({name}) == {name: {process.pid}} and without_owner({name}) == set()
    process.communicate(b"x")
    assert owners_of({name}) == {}
