"""A cluster of several nodes that lets in who has its token and a certificate, and says at once whom it doesn't."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray._common.tls_utils import generate_self_signed_tls_certs

from tests.processes.process_table import descendants, still_alive

pytestmark = pytest.mark.cluster

TOKEN, WRONG = "a" * 64, "b" * 64
TLS = "tls"
JOIN = """
import sys, time, ray
from hrl.errors import HrlError
from hrl.single_controller.dispatch import Dispatch, register
from hrl.single_controller.ray_cluster import ray_cluster
from hrl.single_controller.resource_pool import RayResourcePool
from hrl.single_controller.worker import RayClassWithInitArgs, Worker
from hrl.single_controller.worker_group import RayWorkerGroup

class Answers(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def answer(self):
        return ray.get_runtime_context().get_node_id()

try:
    with ray_cluster(sys.argv[1]):
        for _ in range(3000):
            if len(ray.nodes()) == 2:
                break
            time.sleep(0.1)
        pool = RayResourcePool([1, 1], use_gpu=False)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Answers))
        print("joined", len(set(group.answer())))
        group.shutdown()
except HrlError as error:
    print(f"{type(error).__name__}: {error}")
"""


def environment(home: Path, token: str | None, certificates: Path | None, *, is_patient: bool = True) -> dict[str, str]:
    """This process's, with a token and a certificate or without."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Ray would wait 5 and 30 s for a server that is silent because it wants another certificate.
    first, all_in_all = ("60", "120") if is_patient else ("2", "5")
    given = {"RAY_gcs_rpc_server_connect_timeout_s": first, "RAY_py_gcs_connect_timeout_s": all_in_all}
    if token:
        given |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    if certificates:
        given |= {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_KEY": str(certificates / "key.pem")}
        given |= dict.fromkeys(("RAY_TLS_SERVER_CERT", "RAY_TLS_CA_CERT"), str(certificates / "certificate.pem"))
    root = str(Path(__file__).parents[2])
    return {**kept, "HOME": str(home), "PYTHONPATH": root, "RAY_USAGE_STATS_ENABLED": "0", **given}


def new_certificate(folder: Path) -> Path:
    """Write a certificate that is its own authority, and its key."""
    folder.mkdir()
    certificate, key = generate_self_signed_tls_certs()
    (folder / "certificate.pem").write_text(certificate)
    (folder / "key.pem").write_text(key)
    return folder


def ray_start(home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a node, and wait until it is there: Ray gives one up after 30 s, which a busy machine may need."""
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "start", "--num-cpus=1", "--disable-usage-stats", "--block", *arguments]
    given = environment(home, TOKEN, home / TLS)
    for _ in range(5):
        log = home / f"{len(list(home.iterdir()))}.log"
        with log.open("wb") as out:
            node = subprocess.Popen(command, env=given, stdout=out, stderr=out, start_new_session=True)
        while node.poll() is None:
            if "will now block forever" in log.read_text():
                return node
            time.sleep(0.2)
    pytest.fail(f"a node does not start:\n{log.read_text()}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Two nodes on this machine that share a token and a certificate: their address, and the home of their user."""
    home = tmp_path_factory.mktemp("r")  # short: Ray's sockets lie below
    new_certificate(home / TLS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    head = ["--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false"]
    nodes = [ray_start(home, *head, f"--temp-dir={home}")]
    try:
        wait_for_port(port)
        nodes.append(ray_start(home, f"--address={address}", "--node-ip-address=127.0.0.1"))
        yield address, home
    finally:
        family = [pid for node in nodes for pid in (node.pid, *descendants(node.pid))]
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for node in nodes:
            node.wait(30)
        assert not still_alive(family, within_s=15)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    pytest.fail("the first node does not answer")


def join(
    cluster: tuple[str, Path], token: str | None, home: Path, certificates: Path | None, *, is_patient: bool = True
) -> str:
    done = subprocess.run(
        [sys.executable, "-c", JOIN, cluster[0]],
        env=environment(home, token, certificates, is_patient=is_patient),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout.strip() or done.stderr


def test_who_has_the_token_and_the_certificate_works_on_both_nodes(cluster: tuple[str, Path]) -> None:
    _, home = cluster
    assert join(cluster, TOKEN, home, home / TLS) == "joined 2"


@pytest.mark.parametrize("token", [WRONG, None], ids=["wrong", "none"])
def test_a_wrong_token_and_none_are_refused_in_one_line(
    cluster: tuple[str, Path], token: str | None, tmp_path: Path
) -> None:
    said = join(cluster, token, tmp_path, cluster[1] / TLS)
    assert said.startswith(
        f"PlacementError: the Ray cluster at {cluster[0]} refuses this process: its token is missing"
    )
    assert "RAY_AUTH_TOKEN" in said and "\n" not in said
    assert token is None or token not in said


@pytest.fixture(scope="module")
def refused(cluster: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What who has the certificate of another authority is told, and who has none; both wait for Ray, side by side."""
    homes = {whose: tmp_path_factory.mktemp("home") for whose in ("another's", "none")}
    certificates = {"another's": new_certificate(homes["another's"] / TLS), "none": None}
    with ThreadPoolExecutor() as both:
        said = {
            whose: both.submit(join, cluster, TOKEN, homes[whose], certificates[whose], is_patient=False)
            for whose in homes
        }
    return {whose: future.result() for whose, future in said.items()}


@pytest.mark.parametrize("whose", ["another's", "none"])
def test_a_certificate_of_another_authority_and_none_are_refused_in_one_line(
    cluster: tuple[str, Path], refused: dict[str, str], whose: str
) -> None:
    said = refused[whose]
    assert said.startswith(f"PlacementError: cannot reach the Ray cluster at {cluster[0]}: ")
    assert "RAY_USE_TLS" in said and "\n" not in said
