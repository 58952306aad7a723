"""The server of a reward model: where its copies meet, nobody else hears."""

from __future__ import annotations

import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

from hrl.workers.reward_server import ServedModel, command_line
from hrl.workers.reward_server_process import OwnStore


@pytest.mark.parametrize("port", [0, None])
def test_a_store_listens_on_its_own_address_alone(port: int | None) -> None:
    before = {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}
    options = {"timeout": timedelta(seconds=5), "wait_for_workers": False}
    if port is None:
        first = OwnStore("127.0.0.1", 0, is_master=True, **options)
        port = first.port
        del first
    store = OwnStore(host_name="127.0.0.1", port=port, world_size=-1, is_master=True, **options)
    now = {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}
    assert {address.ip for address in now - before} == {"127.0.0.1"} and store.port in {each.port for each in now}
    OwnStore("127.0.0.1", store.port, None, False, **options).set("a", "b")
    assert store.get("a") == b"b"


def test_the_server_is_asked_past_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    served = ServedModel("model", {}, "127.0.0.1", {})
    assert not served._answers(), "nobody listens there yet"
    server = HTTPServer(("127.0.0.1", int(served.address.split(":")[2].removesuffix("/v1"))), Healthy)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    try:
        assert served._answers()
    finally:
        thread.join(10)
        server.server_close()


def test_arguments_become_options_of_a_command_line() -> None:
    arguments = {
        "max_model_len": 8,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv": {"a": 1},
        "seed": None,
    }
    assert [*command_line(arguments)] == [
        *("--max-model-len", "8", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--kv", '{"a": 1}'),
    ]
