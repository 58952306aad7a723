import http.client
import io
import json
import re
import socket
import threading
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from hrl.config import compose_cli
from hrl.errors import ConfigError
from hrl.loopback import is_loopback
from hrl.report import page_server
from hrl.report.console import RunConsole
from hrl.report.html_report import run_page
from hrl.report.outcome import Outcome, is_live, read_outcome
from hrl.report.page_server import LiveView, LiveViewError
from hrl.report.reporter import RunReporter
from hrl.report.run_folder import RunFolder, json_line
from hrl.trainer.kinds import KINDS
from tests.report.runs import HOSTILE, finished_run, started_run, step_record


def ask(address, path="/data", *, method="GET", **headers):
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
    try:
        connection.request(
            method, path, headers={"Host": url.netloc} | {k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    with LiveView(finished_run(tmp_path_factory.mktemp("run"))) as shown:
        yield shown


def test_the_page_is_that_of_the_report_and_may_ask_its_server_alone(view):
    status, headers, page = ask(view.address, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"sums &lt;1&gt;" in page and b'id="live"' in page
    assert HOSTILE.encode() not in page
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_news_come_when_there_are_any(tmp_path):
    folder = started_run(tmp_path)
    with LiveView(tmp_path) as view:
        _, headers, body = ask(view.address)
        assert json.loads(body)["runs"][0]["steps"] == []
        assert ask(view.address, If_None_Match=headers["ETag"])[::2] == (304, b"")
        folder.write_metrics(1, step_record(1))
        folder.write_rollouts(1, [{"prompt": "p", "response": HOSTILE, "score": 1.0, "response_length": 3}])
        status, fresh, body = ask(view.address, If_None_Match=headers["ETag"])
    answer = json.loads(body)
    assert status == 200 and fresh["ETag"] != headers["ETag"]
    assert answer["runs"][0]["values"]["reward/mean"] == [0.25]
    assert HOSTILE not in answer["sections"]["samples"] and "&lt;script&gt;" in answer["sections"]["samples"]
    folder.close()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "[::2]", ""])
def test_a_request_under_another_name_is_refused(view, host):
    status, _, body = ask(view.address, Host=host)
    assert status == 403 and b"reward" not in body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_every_name_of_this_machine_is_answered(view, host):
    assert ask(view.address, Host=f"{host}:{urlsplit(view.address).port}")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/config.yaml",
        "/../config.yaml",
        "/%2e%2e/metrics.jsonl",
        "//etc/passwd",
        "/data/../.lock",
        "/data?x=/etc/passwd",
    ],
)
def test_no_file_is_served(view, path):
    assert ask(view.address, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading_is_possible(view, method):
    assert ask(view.address, method=method)[0] == 501


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.7", "::", "example.com", ""])
def test_an_address_that_others_reach_is_refused(tmp_path, host):
    with pytest.raises(LiveViewError, match="ssh -L"):
        LiveView(tmp_path, host=host)


@pytest.mark.parametrize(
    ("host", "ours"), [("127.8.9.1", True), ("[::1]", True), ("localhost", True), ("local", False)]
)
def test_loopback(host, ours):
    assert is_loopback(host) == ours


def test_a_port_that_is_taken_is_named(view):
    port = urlsplit(view.address).port
    with pytest.raises(LiveViewError, match=f"port {port}: Address already in use"):
        LiveView(view.folder, port=port)


def test_a_damaged_file_is_told_and_the_server_goes_on(tmp_path):
    run = finished_run(tmp_path)
    with LiveView(run) as view:
        with (run / "metrics.jsonl").open("a") as file:
            file.write("no json\n")
        status, _, body = ask(view.address)
        assert status == 503 and b"metrics.jsonl, line 5" in body
        (run / "metrics.jsonl").write_text(json_line({"step": 1}))
        assert ask(view.address)[0] == 200


def test_watching_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(page_server, "_LAST_LOOK_S", 0.0)
    monkeypatch.setattr(page_server, "_POLL_S", 0.01)
    folder = started_run(tmp_path)
    with LiveView(tmp_path) as view:
        waiting = threading.Thread(target=view.wait, daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        Outcome("finished").write(folder.path)
        waiting.join(5.0)
        assert not waiting.is_alive()
    folder.close()


def test_how_a_run_goes_is_read_from_its_folder(tmp_path):
    folder = RunFolder(tmp_path)
    Outcome("running", "", 7).write(tmp_path)
    assert is_live(tmp_path) and read_outcome(tmp_path) == Outcome("running", "", 7)
    (tmp_path / ".lock").write_text(f"process {2**22 + 1} on {socket.gethostname()}\n")  # above the kernel's largest
    assert read_outcome(tmp_path) == Outcome("ended without a word", "", 7)
    Outcome.of(ValueError("no"), 7).write(tmp_path)
    assert read_outcome(tmp_path) == Outcome("failed", "ValueError: no", 7)
    folder.close()


@pytest.mark.parametrize("owner", [b"process one on {}\n", b"process 99999999999999999999 on {}\n", b"\xff\xfe", b""])
def test_a_lock_that_no_run_wrote_is_of_no_live_run(tmp_path, owner):
    (tmp_path / ".lock").write_bytes(owner.replace(b"{}", socket.gethostname().encode()))
    assert not is_live(tmp_path)


def test_a_run_that_left_no_outcome_ended_without_a_word(tmp_path):
    assert read_outcome(tmp_path).status == "ended without a word"


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_view_can_be_served_on_the_other_loopback_address(tmp_path, host):
    with LiveView(finished_run(tmp_path), host=host) as view:
        assert view.address.startswith("http://[::1]:")
        assert ask(view.address)[0] == 200


def test_a_page_of_a_long_run_is_made_in_a_tenth_of_the_time_and_its_end_at_once(tmp_path, monkeypatch):
    made = []

    def slow(folder):
        made.append(run_page(folder))
        now[0] += 4.0
        return made[-1]

    now = [100.0]
    monkeypatch.setattr(page_server, "run_page", slow)
    monkeypatch.setattr(page_server.time, "monotonic", lambda: now[0])
    folder = started_run(tmp_path)
    pages = page_server._Pages(tmp_path)
    Outcome("running", "", 7).write(tmp_path)
    for step in range(1, 51):
        folder.write_metrics(step, step_record(step))
        pages.news()
        now[0] += 2.0
    assert 2 <= len(made) <= 5, "200 s and 100 s of pauses, of which a tenth is 30 s, or 7 pages"
    Outcome("finished", "", 7).write(tmp_path)
    before = len(made)
    assert json.loads(pages.news()[0])["running"] is False, "although its process still writes the report"
    folder.close()
    assert len(made) == before + 1
    assert b"finished" in pages.page() and len(made) == before + 1, "what has not changed is not made again"


def test_a_run_with_a_dashboard_serves_its_page_from_another_process_until_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("hrl.report.html_report.run_page", None)  # this process makes no page before the end
    config = compose_cli(["trainer.dashboard=true"])
    shown = io.StringIO()
    console = RunConsole(Console(file=shown, width=120, color_system=None))
    console.expect(2, KINDS["ppo"].line(config), ["gen"])
    with RunReporter(RunFolder(tmp_path), console, config.trainer, {"trainer": {"seed": 1}}) as reporter:
        address = re.search(r"live view: (http://127\.0\.0\.1:\d+/)", shown.getvalue())[1]
        assert json.loads(ask(address)[2])["running"]
        reporter._write_report = lambda *_, **__: []
    with pytest.raises(ConnectionRefusedError):
        ask(address)


@pytest.mark.parametrize("asked", [0, 70000, -1, "yes please"])
def test_a_dashboard_is_on_off_or_a_port(asked):
    with pytest.raises(ConfigError, match=r"trainer\.dashboard"):
        compose_cli([f"trainer.dashboard='{asked}'" if isinstance(asked, str) else f"trainer.dashboard={asked}"])
