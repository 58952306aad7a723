"""The page of a run while it goes on, served to this machine alone.

A page of a run has everything that its model was asked and has said. So nobody but this machine gets it: the server
listens on a loopback address, and it answers only requests that name a loopback address, because a web site could
otherwise have its own name point here and read along (DNS rebinding). It serves two things and no file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from hrl.errors import HrlError
from hrl.loopback import is_loopback, listening_socket
from hrl.report.html_report import Page, policy, render, run_page
from hrl.report.outcome import is_live, read_outcome

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_ASKED_EVERY_S = 2.0
"""How often an open page asks, see `page.js`."""
_LAST_LOOK_S = 3.0
"""How long the page of an ended run is still served, so that open browsers get the end."""
_BUSY_SHARE = 0.1
"""The share of its time that the server makes pages of a run that goes on; a page of a long run takes seconds."""


_SHOWN_FILES = ("config.yaml", "metrics.jsonl", "outcome.json", "alarms.jsonl", "first_look.json", "rollouts")


class LiveViewError(HrlError, ValueError):
    """The live view can't be served there."""


class LiveView:
    """Serves the page of a run on a loopback address, in threads of its own, for the duration of a `with` block.

    Args:
        folder: The run folder.
        host: A loopback address, or `localhost`.
        port: The port; 0 for a free one.
        listening: A socket from `listen_on`, in place of host and port.

    Raises:
        LiveViewError: The address is not a loopback address, or the port is taken.
    """

    def __init__(
        self, folder: Path, *, host: str = "127.0.0.1", port: int = 0, listening: socket.socket | None = None
    ) -> None:
        self.folder = folder
        self._server = _Server(listen_on(host, port) if listening is None else listening, _Pages(folder))
        self._thread = threading.Thread(target=self._server.serve_forever, name="live-view", daemon=True)

    @property
    def address(self) -> str:
        """The address of the page."""
        return address_of(self._server.socket)

    def wait(self) -> None:
        """Wait until the run has ended; for one that had ended before, wait until Ctrl-C."""
        if not self._goes_on():
            threading.Event().wait()
        while self._goes_on():
            time.sleep(_POLL_S)
        self.let_browsers_see_the_end()

    def let_browsers_see_the_end(self) -> None:
        """Wait as long as an open page takes to ask once more and to be answered, if any is open."""
        pages = self._server.pages
        if pages.asked_s_ago() < 2 * _LAST_LOOK_S:
            time.sleep(_LAST_LOOK_S + pages.took_s)

    def _goes_on(self) -> bool:
        return read_outcome(self.folder).status == "running"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def listen_on(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a loopback address.

    Args:
        host: The address, or `localhost`.
        port: The port; 0 for a free one.

    Raises:
        LiveViewError: The address is not a loopback address, or the port is taken.
    """
    if not is_loopback(host):
        raise LiveViewError(
            f"the live view is served to this machine alone, and {host} can be reached from others; leave it out, "
            "and from another machine forward the port: ssh -L PORT:127.0.0.1:PORT THIS_MACHINE"
        )
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise LiveViewError(
            f"the live view can't be served on {host}, port {port}: {error.strerror or error}; choose another "
            "port, or 0 for a free one"
        ) from error


def address_of(listening: socket.socket) -> str:
    """Return the address of what is served at a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class _Pages:
    """The page of a folder, made anew when the folder has changed.

    Attributes:
        took_s: Seconds that it took the last time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._seen: Any = None
        self._asked: float | None = None
        self._rests_until = -math.inf
        self._page: Page | None = None
        self._news: tuple[bytes, str] | None = None
        self.took_s = 0.0

    def asked_s_ago(self) -> float:
        """Return how long ago a page asked, in seconds; infinity if none has."""
        return math.inf if self._asked is None else time.monotonic() - self._asked

    def page(self) -> bytes:
        """Return the page as it is now."""
        with self._lock:
            return render(self._current(), live=True).encode()

    def news(self) -> tuple[bytes, str]:
        """Return what the page's script shows, and its version for `ETag`."""
        with self._lock:
            page = self._current()
            if self._news is None:
                answer = {**page.numbers(), "sections": page.sections, "running": page.running}
                text = json.dumps(answer, separators=(",", ":")).encode()
                self._news = text, f'"{hashlib.sha256(text).hexdigest()[:24]}"'
            return self._news

    def _current(self) -> Page:
        """Return the page; of a run that goes on, it may be that of a moment ago."""
        began = self._asked = time.monotonic()
        seen = self._look()
        rests = began < self._rests_until and read_outcome(self._folder).status == "running"
        if self._page is None or (seen != self._seen and not rests):
            self._page, self._news, self._seen = run_page(self._folder), None, seen
            self.took_s = time.monotonic() - began
            # The first part of the rest is the pause of those who ask.
            self._rests_until = time.monotonic() + self.took_s / _BUSY_SHARE - _ASKED_EVERY_S
        return self._page

    def _look(self) -> Any:
        """Return what changes when the folder does."""
        files = [self._folder / name for name in _SHOWN_FILES]
        found = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()]
        return found, is_live(self._folder)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket, pages: _Pages) -> None:
        self.address_family = listening.family
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.pages = listening, pages

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
