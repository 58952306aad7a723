"""The door over HTTP, on a loopback address unless it is told otherwise.

Whoever sends a request is taken for an enemy until its key is known: before that, nothing of a body is read, a name
that stands for another machine is refused (a web site could have its own name point here), and a connection on which
no request comes is closed. After that a body has a size and a time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from aiohttp import web

from hrl.errors import RefusedError
from hrl.loopback import is_loopback, listening_socket
from hrl.serve.answers import STILL_THERE, Choice, Form, error_event
from hrl.serve.asked import ChatAsked, CompletionAsked, read_chat, read_completion
from hrl.serve.door import Door
from hrl.serve.refusals import NO_RETRY, RequestRefusedError, bad_request
from hrl.serve.sessions import Session

logger = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SessionHandler = Callable[[web.Request, Session], Awaitable[web.StreamResponse]]
_SHUTDOWN_S = 5.0


class DoorError(RefusedError, ValueError):
    """The door can't be opened there."""


@dataclass(frozen=True)
class HttpLimits:
    """What a connection may use up.

    Attributes:
        body_bytes: Largest body.
        head_s: Until the first request of a connection has come.
        body_s: Until its body has come.
        read_s: Until the client has read enough of an answer for more of it to be sent.
        idle_s: Between requests of a connection.
        connections: At the same time.
        still_there_s: How often a stream in which nothing is ready says so.
    """

    body_bytes: int = 8 * 2**20
    head_s: float = 30.0
    body_s: float = 60.0
    read_s: float = 60.0
    idle_s: float = 75.0
    connections: int = 2048
    still_there_s: float = 15.0


class DoorServer:
    """Serves a door for the duration of an `async with` block.

    Args:
        door: What is served.
        host: An address, or `localhost`.
        port: The port; 0 for a free one.
        allow_remote: Whether the address may be one that other machines reach. Requests may then name any host.
        limits: What a connection may use up.
        opened: What `open_socket` returned for the address; None opens it.

    Raises:
        DoorError: The address can be reached from other machines, or the port is taken.
    """

    def __init__(
        self,
        door: Door,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
        limits: HttpLimits = HttpLimits(),
        opened: socket.socket | None = None,
    ) -> None:
        self._door, self._limits, self._allow_remote = door, limits, allow_remote
        self._socket = open_socket(host, port, allow_remote=allow_remote) if opened is None else opened
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._silent: dict[int, asyncio.TimerHandle] = {}

    @property
    def base_url(self) -> str:
        """What clients take as `base_url`."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._guarded], client_max_size=self._limits.body_bytes)
        for method, path, handler in (
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{model:.+}", self._model),
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._completion),
        ):
            app.router.add_route(method, path, self._for_session(handler))
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,  # whoever hangs up is not sampled for
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._runner.setup()
        self._server = await asyncio.get_running_loop().create_server(self._connection, sock=self._socket)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for session in self._door.sessions:
            await session.stop()
        if self._server is not None:
            self._server.close()
        for handle in self._silent.values():
            handle.cancel()
        self._silent.clear()
        if self._runner is not None:
            await self._runner.cleanup()
        self._socket.close()

    # ---- connections

    def _connection(self) -> asyncio.Protocol:
        assert self._runner is not None and self._runner.server is not None
        server, loop = self._runner.server, asyncio.get_running_loop()
        if len(server.connections) >= self._limits.connections:
            return _Closed()
        protocol = _Connection(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # which means none, in aiohttp's own runner too
            keepalive_timeout=self._limits.idle_s,
            auto_decompress=False,  # a small body may be a large one
        )
        self._silent[id(protocol)] = loop.call_later(self._limits.head_s, self._close_silent, protocol)
        return protocol

    def _close_silent(self, protocol: web.RequestHandler) -> None:
        self._silent.pop(id(protocol), None)
        protocol.force_close()

    # ---- requests

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer every refusal in OpenAI's form, to whoever reads it."""
        spoke = self._silent.pop(id(request.protocol), None)
        if spoke is not None:
            spoke.cancel()
        response = await self._answer(request, handler)
        async with self._read_in_time(request):
            await response.prepare(request)
            await response.write_eof()
        return response

    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            self._require_this_machine(request)
            return await handler(request)
        except RequestRefusedError as refused:
            return _refusal(refused)
        except web.HTTPException as error:
            return _refusal(_of_http(error, request, self._limits))
        except (ConnectionError, asyncio.CancelledError):
            raise
        # Whatever else went wrong is a fault of ours, and the door is for others, too.
        except Exception:
            logger.exception("a request to %s failed", request.path)
            return _refusal(_FAULT_OF_OURS)

    @asynccontextmanager
    async def _read_in_time(self, request: web.Request) -> AsyncIterator[None]:
        """Send something, and hang up on a client that does not read: there is nothing else that it could be told.

        Raises:
            ConnectionError: It does not read, or went away.
        """
        try:
            async with asyncio.timeout(self._limits.read_s):
                yield
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionAbortedError(f"the client has read nothing for {self._limits.read_s:g} s") from None

    def _require_this_machine(self, request: web.Request) -> None:
        if self._allow_remote:
            return
        try:
            host = urlsplit(f"//{request.headers.get('Host', '')}").hostname
        except ValueError:
            host = None
        if host is None or not is_loopback(host):
            raise RequestRefusedError(403, "only requests that name a loopback address are answered")

    def _for_session(self, handler: _SessionHandler) -> _Handler:
        """Return a handler of requests whose key is known."""

        async def handle(request: web.Request) -> web.StreamResponse:
            headers = request.headers
            session = self._door.sessions.of(headers.get("Authorization"), headers.get("X-Session-Id"))
            return await handler(request, session)

        return handle

    async def _models(self, request: web.Request, _: Session) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._described()]})

    async def _model(self, request: web.Request, _: Session) -> web.StreamResponse:
        if request.match_info["model"] != self._door.served.model:
            raise RequestRefusedError(
                404, f"there is no such model here; {self._door.served.model!r} is served", code="model_not_found"
            )
        return web.json_response(self._described())

    def _described(self) -> dict[str, Any]:
        served = self._door.served
        return {
            "id": served.model,
            "object": "model",
            "created": 0,
            "owned_by": "hrl",
            "max_model_len": served.max_model_len,
        }

    async def _chat(self, request: web.Request, session: Session) -> web.StreamResponse:
        asked = read_chat(await self._body(request))
        return await self._answered(request, session, asked, log_probs=asked.logprobs)

    async def _completion(self, request: web.Request, session: Session) -> web.StreamResponse:
        asked = read_completion(await self._body(request))
        return await self._answered(request, session, asked, log_probs=asked.logprobs is not None)

    async def _body(self, request: web.Request) -> bytes:
        if "Content-Encoding" in request.headers:
            raise RequestRefusedError(415, "the body is compressed; send it as it is")
        try:
            async with asyncio.timeout(self._limits.body_s):
                return await request.read()
        except TimeoutError:
            raise RequestRefusedError(
                408, f"the body did not come within {self._limits.body_s:g} s", headers={"Connection": "close"}
            ) from None

    async def _answered(
        self, request: web.Request, session: Session, asked: ChatAsked | CompletionAsked, *, log_probs: bool
    ) -> web.StreamResponse:
        if asked.stream_options is not None and not asked.stream:
            raise bad_request("stream_options is for stream=true", "stream_options")
        contexts = await self._door.begin(session, asked)
        form = Form(
            self._door.served.model,
            isinstance(asked, ChatAsked),
            log_probs=log_probs,
            token_ids=asked.return_token_ids,
            usage=asked.stream_options is not None and asked.stream_options.include_usage,
            calls=isinstance(asked, ChatAsked) and asked.wants_tool_calls,
        )
        answer = partial(self._door.answer, session, asked, contexts, log_probs=log_probs)
        if not asked.stream:
            return web.json_response(form.whole(await answer()))
        return await self._streamed(request, form, answer, asked.n * len(contexts))

    async def _streamed(
        self,
        request: web.Request,
        form: Form,
        answer: Callable[..., Coroutine[Any, Any, list[Choice]]],
        num_choices: int,
    ) -> web.StreamResponse:
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        shown: dict[int, int] = {}

        def show(place: int, choice: Choice, begin: int, end: int) -> None:
            shown[place] = end
            events.put_nowait(form.piece(place, choice, begin, end))

        task = asyncio.ensure_future(answer(show=show))
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            await asyncio.sleep(0)  # the first step of the task is where the session lets it in, or does not
            if task.done() and isinstance(refused := task.exception(), RequestRefusedError):
                raise refused
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
            async with self._read_in_time(request):
                await response.prepare(request)
            for first in form.opening(num_choices):
                await self._send(request, response, first)
            while (event := await self._next(events)) is not None:
                await self._send(request, response, event)
            for last in _rest(form, task, shown):
                await self._send(request, response, last)
            return response
        finally:
            await _ended(task)

    async def _send(self, request: web.Request, response: web.StreamResponse, event: bytes) -> None:
        async with self._read_in_time(request):
            await response.write(event)

    async def _next(self, events: asyncio.Queue[bytes | None]) -> bytes | None:
        """Return the next event of a stream, or a sign of life if there is none for long; None at its end."""
        try:
            async with asyncio.timeout(self._limits.still_there_s):
                return await events.get()
        except TimeoutError:
            return STILL_THERE


class _Connection(web.RequestHandler):
    """A connection whose errors, too, are in OpenAI's form, and are no news for the log where they are the client's."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer to what is no HTTP; a client that went away gets none."""
        if isinstance(exc, ConnectionError):
            raise exc
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        first = next(iter((message or "").splitlines()), "").rstrip(":")[:200]
        refused = RequestRefusedError(status, f"the request is no HTTP that can be read: {first}", code="invalid_http")
        response = _refusal(refused)
        response.force_close()
        return response


class _Closed(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _rest(form: Form, task: asyncio.Task[list[Choice]], shown: Mapping[int, int]) -> Iterator[bytes]:
    """Return the events that end a stream; its status says already that all is well."""
    error = task.exception()
    if error is None:
        yield from form.events(task.result(), shown)
    elif isinstance(error, RequestRefusedError):
        yield error_event(error.body())
    else:
        yield error_event(_FAULT_OF_OURS.body())


async def _ended(task: asyncio.Task[list[Choice]]) -> None:
    """Have a stream's answer ended when its request is; what failed is in the log, for the client may be gone."""
    task.cancel()
    await asyncio.wait([task])
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, RequestRefusedError):
        logger.error("a streamed request failed", exc_info=error)


_FAULT_OF_OURS = RequestRefusedError(
    500, "hrl failed at this request; its log has why", "server_error", headers=NO_RETRY
)


def _refusal(refused: RequestRefusedError) -> web.Response:
    return web.json_response(refused.body(), status=refused.status, headers=dict(refused.headers))


def _of_http(error: web.HTTPException, request: web.Request, limits: HttpLimits) -> RequestRefusedError:
    """Return what the server itself refuses, in OpenAI's form."""
    if error.status == 413:
        return RequestRefusedError(413, f"the body has more than {limits.body_bytes:,} bytes", code="request_too_large")
    if error.status in (404, 405):
        what = f"{request.method[:20]} {request.path[:200]}"
        return RequestRefusedError(error.status, f"{what} is not served: there are {_PATHS}", code="unknown_url")
    return RequestRefusedError(error.status, error.reason)


_PATHS = "GET /v1/models, POST /v1/chat/completions and POST /v1/completions"


def open_socket(host: str, port: int, *, allow_remote: bool) -> socket.socket:
    """Return the socket of a door; whoever connects waits until a server has it.

    Raises:
        DoorError: See `DoorServer`.
    """
    if not allow_remote and not is_loopback(host):
        raise DoorError(
            f"{host} can be reached from other machines, and who has the key could use the engine from there; leave "
            "--host out and forward the port (ssh -L PORT:127.0.0.1:PORT THIS_MACHINE), or say --allow-remote"
        )
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise DoorError(
            f"nothing can be served on {host}, port {port}: {error.strerror or error}; choose another port, or 0 for a "
            "free one"
        ) from error
