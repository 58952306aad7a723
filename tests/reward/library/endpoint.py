"""A small OpenAI-compatible endpoint on loopback, whose answers a test scripts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What the endpoint answers to a request.

    Attributes:
        text: The message; None sends `body` as it is.
        status: HTTP status.
        body: Sent in place of a chat completion.
        headers: Further headers.
        after_s: How long it takes.
    """

    text: str | None = "Fine.\nScore: 10"
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0


@dataclass
class Endpoint:
    """What the endpoint was asked.

    Attributes:
        base_url: Its address.
        requests: The bodies, in the order in which they came.
        headers: The headers of each.
        times_s: When each came.
        most_at_once: Most requests that were open at the same time.
    """

    base_url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    most_at_once: int = 0

    @property
    def questions(self) -> list[str]:
        """The last message of each request."""
        return [request["messages"][-1]["content"] for request in self.requests]


@contextmanager
def serving(answer: Callable[[int, str], Reply], path: str = "/v1/chat/completions") -> Iterator[Endpoint]:
    """Serve for the duration of the block; `answer` gets the number of the request, from 0, and the question."""
    seen, lock, opened = Endpoint(), threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(seen.requests)
                seen.requests.append(body)
                seen.headers.append(dict(self.headers))
                seen.times_s.append(time.monotonic())
                opened[0] += 1
                seen.most_at_once = max(seen.most_at_once, opened[0])
            try:
                reply = answer(number, body["messages"][-1]["content"] if "messages" in body else json.dumps(body))
                time.sleep(reply.after_s)
            finally:
                with lock:
                    opened[0] -= 1
            content = reply.body
            if reply.text is not None:
                message = {"role": "assistant", "content": reply.text}
                content = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
            try:
                self.send_response(reply.status if self.path == path else 404)
                for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            except ConnectionError:  # the judge has given up
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    seen.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
