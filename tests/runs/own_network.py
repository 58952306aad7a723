"""A command in a network of its own, whose one way out is watched.

Inside, the machine's name has an address of an interface beside loopback, there is a route to everywhere and a name
server, and nobody answers. So a process that calls out sends packets, each of which is read and told; and since no
other process is inside, every socket of the network's tables is one of the command's. Needs Linux, namespaces (as root,
or of users) and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import functools
import ipaddress
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

_ADDRESS, _GATEWAY, _ADDRESS_6, _GATEWAY_6 = "10.99.0.2", "10.99.0.1", "fd99::2", "fd99::1"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_POLL_S = 0.05
_PROTOCOLS = {6: "tcp", 17: "udp"}
#: The kernel itself says these as soon as an interface is up: IGMP, ICMPv6, and the options before them.
_OF_THE_KERNEL = frozenset({0, 2, 58})
_DNS_PORT = 53
_LISTENING = 10  # the kernel's TCP_LISTEN
#: Of linux/netlink.h and linux/sock_diag.h.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLMSG_DONE = 4, 20, 2, 3
_ALL_OF_THEM = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_FILES = {"net": "net", "mount": "mnt"}
_OWN = tuple(_FILES)


@dataclass
class Report:
    """What was seen of a command.

    Attributes:
        sent: What left, as `tcp 169.254.169.254:80`; a question to a name server as `dns NAME`.
        listening: Sockets that another machine could reach, as `tcp 0.0.0.0:44217 (process)`.
    """

    sent: list[str] = field(default_factory=list)
    listening: list[str] = field(default_factory=list)

    def add(self, seen: list[str], what: str) -> None:
        """Note what was seen, once."""
        if what not in seen:
            seen.append(what)


@functools.cache
def why_not() -> str | None:
    """Return why there can be no network of one's own here, or None if there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    for tool in ("unshare", "ip", "mount"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun can't be opened"
    with tempfile.TemporaryDirectory() as folder:
        command = in_own_network(Path(folder, "report.json"), ["true"])
        tried = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return None if tried.returncode == 0 else f"this machine allows none: {tried.stderr.strip()[-300:]}"


def can_be_watched() -> bool:
    """Return whether runs can have networks of their own, and warn if they can't: what they send is seen by nobody."""
    if (reason := why_not()) is not None:
        warnings.warn(f"What the runs of these tests send is not watched: {reason}", stacklevel=2)
    return reason is None


def in_own_network(report: Path, command: list[str]) -> list[str]:
    """Return the command line that runs a command, as the same process, in a network of its own.

    Args:
        report: File that gets what was seen of it, a moment after its end; see `report_of`.
        command: Program and arguments.
    """
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [
        *("unshare", *user, *(f"--{kind}" for kind in _OWN), "--"),
        *(sys.executable, "-m", "tests.runs.own_network", *_namespaces(), str(report), *command),
    ]


def report_of(file: Path, patience_s: float = 30.0) -> Report:
    """Return what was seen of a command that has ended."""
    deadline = time.monotonic() + patience_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing was reported of the network within {patience_s:g} s")
        time.sleep(_POLL_S)
    return Report(**json.loads(file.read_text()))


def _namespaces() -> list[str]:
    return [os.readlink(f"/proc/self/ns/{_FILES[kind]}") for kind in _OWN]


# ---------------------------------------------------------------------- inside


def main(outside: list[str], report: Path, command: list[str]) -> None:
    """Set the network up, leave a process that watches it, and become the command.

    Args:
        outside: The namespaces that must be left as they are.
        report: See `in_own_network`.
        command: See there.
    """
    if set(outside) & set(_namespaces()):
        raise RuntimeError("this would change the machine's own network: start it with `in_own_network`")
    tunnel = _set_up()
    _reachable()  # what can't be watched is an error here
    leader = os.pidfd_open(os.getpid())
    if (first := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:  # a grandchild: no child of the command
            nowhere = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nowhere, number)
            _watch(tunnel, leader, report)
        os._exit(0)
    os.waitpid(first, 0)
    os.execvp(command[0], command)


def _watch(tunnel: int, leader: int, file: Path) -> None:
    report = Report()
    seen: set[str] = set()
    since: dict[str, float] = {}
    while True:
        ready, _, _ = select.select([tunnel, leader], [], [], _POLL_S)
        if tunnel in ready and (told := packet_told(os.read(tunnel, 65536))) is not None:
            report.add(report.sent, told)
        now = time.monotonic()
        since = {socket_: since.get(socket_, now) for socket_ in _reachable()}
        for socket_ in since.keys() - seen:
            # Whoever looks an address up has a UDP socket for a moment, which libc binds and unbinds: none that stays.
            if not socket_.startswith("udp") or now - since[socket_] >= _POLL_S:
                seen.add(socket_)
                report.add(report.listening, f"{socket_} ({_owner(socket_)})")
        if ready == [leader]:  # it has ended, and what it sent is read
            break
    draft = file.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(report)))
    draft.rename(file)


def _set_up() -> int:
    """Return the descriptor from which packets that leave are read."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (
            ("hosts", f"127.0.0.1 localhost\n::1 localhost\n{_ADDRESS} {socket.gethostname()}\n"),
            ("resolv.conf", f"nameserver {_GATEWAY}\noptions timeout:1 attempts:1\n"),
        ):
            Path(folder, name).write_text(text)
            _call("mount", "--bind", f"{folder}/{name}", os.path.realpath(f"/etc/{name}"))
    tunnel = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH22x", b"out", _IFF_TUN | _IFF_NO_PI))
    lines = ["link set lo up", "link set out up", f"addr add {_ADDRESS}/24 dev out"]
    lines += [f"route add default via {_GATEWAY}"]
    if Path("/proc/net/if_inet6").exists():
        lines += [f"-6 addr add {_ADDRESS_6}/64 dev out nodad", f"-6 route add default via {_GATEWAY_6}"]
    for line in lines:
        _call("ip", *line.split())
    return tunnel


def _call(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


def packet_told(packet: bytes) -> str | None:
    """Return what a packet is, in a few words; None for one of the kernel's own."""
    if packet[0] >> 4 == 4:
        protocol, start = packet[9], (packet[0] & 15) * 4
        target = str(ipaddress.ip_address(packet[16:20]))
    else:
        protocol, start = packet[6], 40
        target = f"[{ipaddress.ip_address(packet[24:40])}]"
    if protocol in _OF_THE_KERNEL:
        return None
    if protocol not in _PROTOCOLS:
        return f"protocol {protocol} {target}"
    port = int.from_bytes(packet[start + 2 : start + 4], "big")
    if protocol == 17 and port == _DNS_PORT:
        return f"dns {_asked(packet[start + 8 + 12 :])}"
    return f"{_PROTOCOLS[protocol]} {target}:{port}"


def _asked(question: bytes) -> str:
    labels = []
    while question and (length := question[0]):
        labels.append(question[1 : 1 + length].decode("ascii", "replace"))
        question = question[1 + length :]
    return ".".join(labels)


def _reachable() -> set[str]:
    """Sockets of this network that wait for another machine: TCP that listens, UDP and raw ones that have no peer."""
    waiting = [("tcp6" if each.ip.version == 6 else "tcp", each.ip, each.port) for each in listening()]
    for table in ("udp", "udp6", "raw", "raw6"):
        path = Path("/proc/net", table)
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            _, local, remote, *_ = line.split()
            (ip, port), (peer, _) = _address(local), _address(remote)
            if peer.is_unspecified:
                waiting.append((table, ip, port))
    return {f"{table} {ip}:{port}" for table, ip, port in waiting if not is_loopback(ip)}


def is_loopback(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether nothing but this machine reaches an address; that of IPv4 in an IPv6 socket is what it stands for."""
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


class Listening(NamedTuple):
    """A TCP socket that waits for connections; `/proc/PID/fd` names its inode."""

    ip: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int
    inode: int


def listening() -> list[Listening]:
    """TCP sockets of this network that listen, whosever they are.

    Asked of the kernel's `sock_diag` (man 7 sock_diag), which looks at these alone. For `/proc/net/tcp` it goes through
    the buckets of all connections of the machine, millisecond after millisecond, and this is asked often.

    Raises:
        OSError: This kernel has no such service.
    """
    return [*_listening(socket.AF_INET), *_listening(socket.AF_INET6)]


def _listening(family: socket.AddressFamily) -> list[Listening]:
    found = []
    of_states = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 1 << _LISTENING) + bytes(48)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(of_states), _SOCK_DIAG_BY_FAMILY, _ALL_OF_THEM, 0, 0) + of_states)
        while True:
            data = memoryview(kernel.recv(1 << 16))
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind == _NLMSG_DONE:
                    return found
                if kind == _NLMSG_ERROR:
                    raise OSError(-struct.unpack_from("=i", data, 16)[0], "sock_diag refused")
                (port,), (inode,) = struct.unpack_from("!H", data, 20), struct.unpack_from("=I", data, 84)
                size = 4 if family == socket.AF_INET else 16
                found.append(Listening(ipaddress.ip_address(bytes(data[24 : 24 + size])), port, inode))
                data = data[(length + 3) & ~3 :]


def _address(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Of a field of the kernel's table: words of four bytes, each in the machine's order."""
    ip, port = text.split(":")
    words = [int(ip[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(ip), 8)]
    return ipaddress.ip_address(b"".join(words)), int(port, 16)


def _owner(reachable: str) -> str:
    port, network = int(reachable.rpartition(":")[2]), os.readlink("/proc/self/ns/net")
    for process in psutil.process_iter():
        try:
            is_inside = os.readlink(f"/proc/{process.pid}/ns/net") == network
            if is_inside and any(each.laddr.port == port for each in process.net_connections("inet")):
                return " ".join(process.cmdline())[:120] or process.name()
        except (OSError, psutil.Error):  # it has ended
            continue
    return "a process that has ended"


if __name__ == "__main__":
    split = 1 + len(_OWN)
    main(sys.argv[1:split], Path(sys.argv[split]), sys.argv[split + 1 :])
