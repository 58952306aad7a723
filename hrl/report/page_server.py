"""The page of a run while it goes on, served to this machine alone.

A page of a run has everything that its model was asked and has said. So nobody but this machine gets it: the server
listens on a loopback address, and it answers only requests that name a loopback address, because a web site could
otherwise have its own name point here and read along (DNS rebinding). It serves two things and no file.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import math
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from hrl.errors import HrlError
from hrl.report.html_report import policy, render, run_page
from hrl.report.outcome import is_live, read_outcome

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_LAST_LOOK_S = 3.0
"""How long the page of an ended run is still served, so that open browsers get the end: they ask every 2 s."""


class LiveViewError(HrlError, ValueError):
    """The live view can't be served there."""


class LiveView:
    """Serves the page of a run on a loopback address, in threads of its own, for the duration of a `with` block.

    Args:
        folder: The run folder.
        host: A loopback address, or `localhost`.
        port: The port; 0 for a free one.

    Raises:
        LiveViewError: The address is not a loopback address, or the port is taken.
    """

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.folder = folder
        if not is_loopback(host):
            raise LiveViewError(
                f"the live view is served to this machine alone, and {host} can be reached from others; leave it out, "
                "and from another machine forward the port: ssh -L PORT:127.0.0.1:PORT THIS_MACHINE"
            )
        try:
            self._server = _Server(("127.0.0.1" if host == "localhost" else host, port), _Handler)
        except OSError as error:
            raise LiveViewError(
                f"the live view can't be served on {host}, port {port}: {error.strerror or error}; choose another "
                "port, or 0 for a free one"
            ) from error
        self._server.pages = _Pages(folder)
        self._thread = threading.Thread(target=self._server.serve_forever, name="live-view", daemon=True)

    @property
    def address(self) -> str:
        """The address of the page."""
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/"

    def wait(self) -> None:
        """Wait until the run has ended; for one that had ended before, wait until Ctrl-C."""
        if not self._goes_on():
            threading.Event().wait()
        while self._goes_on():
            time.sleep(_POLL_S)
        self.let_browsers_see_the_end()

    def let_browsers_see_the_end(self) -> None:
        """Wait as long as an open page takes to ask once more, if any is open."""
        if self._server.pages.asked_s_ago() < 2 * _LAST_LOOK_S:
            time.sleep(_LAST_LOOK_S)

    def _goes_on(self) -> bool:
        return read_outcome(self.folder).status == "running"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def is_loopback(host: str) -> bool:
    """Return whether a name or address stands for this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class _Pages:
    """The page of a folder, made anew when the folder has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._seen: Any = None
        self._asked: float | None = None
        self._news = b""
        self._version = ""

    def asked_s_ago(self) -> float:
        """Return how long ago a page asked, in seconds; infinity if none has."""
        return math.inf if self._asked is None else time.monotonic() - self._asked

    def page(self) -> bytes:
        """Return the page as it is now."""
        with self._lock:
            self._asked = time.monotonic()
            return render(run_page(self._folder), live=True).encode()

    def news(self) -> tuple[bytes, str]:
        """Return what the page's script shows, and its version for `ETag`."""
        with self._lock:
            self._asked = time.monotonic()
            seen = self._look()
            if seen != self._seen:
                page = run_page(self._folder)
                answer = {**page.numbers(), "sections": page.sections, "running": page.running}
                self._news = json.dumps(answer, separators=(",", ":")).encode()
                self._seen, self._version = seen, f'"{hashlib.sha256(self._news).hexdigest()[:24]}"'
            return self._news, self._version

    def _look(self) -> Any:
        """Return what changes when the folder does."""
        files = [self._folder / name for name in ("metrics.jsonl", "outcome.json", "alarms.jsonl", "rollouts")]
        found = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()]
        return found, is_live(self._folder)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    pages: _Pages

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note that a request failed, as when a browser hangs up; the next one is answered."""
        logger.debug("a request of the live view failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "hrl"
    sys_version = ""
    timeout = 30.0

    def do_GET(self) -> None:
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if host is None or not is_loopback(host):
            self.send_error(HTTPStatus.FORBIDDEN, "Only requests that name a loopback address are answered")
        elif self.path in ("/", "/data"):
            try:
                self._answer_with_run()
            except (OSError, ValueError) as error:
                if isinstance(error, ConnectionError):
                    raise
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "The run folder can't be read", str(error))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer_with_run(self) -> None:
        if self.path == "/":
            self._answer(self.server.pages.page(), "text/html; charset=utf-8")
        else:
            news, version = self.server.pages.news()
            if self.headers.get("If-None-Match") == version:
                self._answer(b"", "application/json", status=HTTPStatus.NOT_MODIFIED, version=version)
            else:
                self._answer(news, "application/json", version=version)

    def _answer(
        self, body: bytes, content: str, *, status: HTTPStatus = HTTPStatus.OK, version: str | None = None
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": content,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items() | ({("ETag", version)} if version is not None else set()):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
