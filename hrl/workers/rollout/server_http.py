"""One server that somebody else started, asked over HTTP: bounded replies, deadlines, and errors that name its address.

What a server answers is a stranger's word. A redirect is refused, since the weights' names, the prompts and the key
would go to whoever it names; a reply is read up to a bound, within a deadline for all of it; and what is not a JSON
object is refused with its first words.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from hrl.workers.rollout.base import RolloutError

OF_ROLLOUT, OF_TEACHER = "rollout.server", "distillation.teacher_models.teacher_model.server"
"""Sections that name servers."""
_DEADLINES = {OF_ROLLOUT: f"{OF_ROLLOUT}.timeout_s", OF_TEACHER: "trainer.timeouts.call_s"}
CONNECT_TIMEOUT_S = 10.0
_SHOWN = 300
_CHUNK_BYTES = 65_536
_REDIRECTS = range(300, 400)
_BUSY = frozenset({408, 425, 429})
_BUSY_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
"""The longest that a server is left alone because it asks for it."""


class ServerError(RolloutError):
    """A server that somebody else started can't be used. The message names its address and the way out."""


class ServerRefusesError(ServerError):
    """The server is there, and is not one that this run can sample from; asking again would change nothing."""


class ServerGoneError(ServerError):
    """The server does not answer, or not to the end, or says that it is broken: another one may do its work."""

    may_pass = True


@dataclass(frozen=True)
class Reply:
    """What a server answered with status 200.

    Attributes:
        url: Of the request.
        content: The body.
        section: Of the configuration, whose `urls` name the server.
    """

    url: str
    content: bytes
    section: str = OF_ROLLOUT

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object.

        Raises:
            ServerRefusesError: It is none; shows its first words.
        """
        try:
            value = json.loads(self.content)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        raise ServerRefusesError(
            f"{self.url} answered with something that is no JSON object: {excerpt(self.content)}; "
            f"does {self.section}.urls name the server itself, and not a page or a proxy before it?"
        )


class Address:
    """A server's address, and how it is asked.

    Args:
        url: `http(s)://host:port`, with or without `/v1`.
        api_key: Sent as a bearer token; None sends none.
        most_at_once: Requests that wait for a turn; see `post`.
        section: Of the configuration, that has the address and the key.

    Attributes:
        url: Without a slash at its end, and without `/v1`.
    """

    def __init__(self, url: str, api_key: str | None, most_at_once: int, *, section: str = OF_ROLLOUT) -> None:
        self._section = section
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._gate = asyncio.Semaphore(most_at_once)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections. Harmless when repeated."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str, *, timeout_s: float, most_bytes: int = 1 << 20) -> Reply:
        """Ask with GET; see `post`."""
        return await self._ask("GET", path, None, timeout_s, most_bytes)

    async def post_in_turn(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, most_bytes: int = 1 << 20
    ) -> Reply:
        """Send what there may be a lot of, so many at once; the deadline begins with its turn. See `post`."""
        async with self._gate:
            return await self._ask("POST", path, body, timeout_s, most_bytes)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float, most_bytes: int = 1 << 20
    ) -> Reply:
        """Send a JSON object, and return what comes back with status 200.

        Args:
            path: From the server's root, with a slash at its beginning.
            body: The object; None sends none.
            timeout_s: For all of it, in seconds.
            most_bytes: Of the reply.

        Raises:
            ServerRefusesError: A redirect, a refusal (status 4xx), or a reply that is too long.
            ServerGoneError: No connection, an unfinished reply, status 5xx, or none of it within the deadline.
        """
        return await self._ask("POST", path, body, timeout_s, most_bytes)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, most_bytes: int
    ) -> Reply:
        url = f"{self.url}{path}"
        end = time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            try:
                status, retry_after, content = await self._once(method, url, body, max(left, 0.001), most_bytes)
            except TimeoutError as error:
                raise ServerGoneError(
                    f"{url} did not answer to the end within {timeout_s:g} s; is the server overloaded, or the "
                    f"deadline ({_DEADLINES[self._section]}) too short for its longest response?"
                ) from error
            except aiohttp.ClientError as error:
                raise ServerGoneError(f"{url} {_in_words(error)}; does the server run, and is this it?") from error
            except ValueError as error:  # of an address that is none
                raise ServerRefusesError(f"{url} can't be asked: {error}; see {self._section}.urls") from error
            if status not in _BUSY:
                return _checked(url, status, content, self._section)
            pause = _pause(retry_after)
            if time.monotonic() + pause >= end:
                raise ServerGoneError(f"{url} said for {timeout_s:g} s that it is busy (status {status})")
            await asyncio.sleep(pause)

    async def _once(
        self, method: str, url: str, body: Mapping[str, Any] | None, timeout_s: float, most_bytes: int
    ) -> tuple[int, str | None, bytes]:
        if self._session is None:
            # No proxy of the environment, no cookies: what is asked goes to the address that was named.
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_TIMEOUT_S))
        async with self._session.request(method, url, json=body, timeout=timeout, allow_redirects=False) as answer:
            if answer.status in _REDIRECTS:
                target = excerpt(answer.headers.get("Location", "nowhere").encode())
                raise ServerRefusesError(
                    f"{url} redirects (status {answer.status}) to {target}, which is not followed: name the address "
                    f"of the server itself in {self._section}.urls"
                )
            content = bytearray()
            async for piece in answer.content.iter_chunked(_CHUNK_BYTES):
                content += piece
                if len(content) > most_bytes:
                    raise ServerRefusesError(
                        f"{url} sent more than the {most_bytes} bytes that its longest answer can have; is it the "
                        "server that rollout.name says?"
                    )
            return answer.status, answer.headers.get("Retry-After"), bytes(content)


def key_of(api_key: str | None, section: str = OF_ROLLOUT) -> str | None:
    """Return the key that a section's `api_key` names, `env:NAME`.

    Raises:
        ServerRefusesError: The variable is not set.
    """
    if api_key is None:
        return None
    name = api_key.removeprefix("env:")
    value = os.environ.get(name)
    if not value:
        raise ServerRefusesError(
            f"the environment variable {name}, which {section}.api_key names, is not set: export it where the "
            "run starts"
        )
    return value


def excerpt(content: bytes) -> str:
    """Return the first words of what a server sent, as text that can be shown."""
    shown = "".join(c if c.isprintable() else " " for c in content[:_SHOWN].decode("utf-8", "replace"))
    text = " ".join(shown.split())
    return repr(text) if text else "(nothing)"


def _checked(url: str, status: int, content: bytes, section: str) -> Reply:
    if status == 200:
        return Reply(url, content, section)
    said = f"{url} answered {status}: {excerpt(content)}"
    if status in (401, 403):
        raise ServerRefusesError(f"{said}; name the variable that has the server's key with {section}.api_key=env:NAME")
    if status >= 500:
        raise ServerGoneError(f"{said}; the server's own log says more")
    raise ServerRefusesError(f"{said}; is this the server that {section}.urls should name?")


def _in_words(error: aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ClientPayloadError):
        return "ended its answer half-way"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "closed the connection without an answer"
    if isinstance(error, aiohttp.ClientSSLError):
        return f"can't be trusted ({error})"
    return f"can't be reached ({error or type(error).__name__})"


def _pause(retry_after: str | None) -> float:
    try:
        seconds = float(retry_after) if retry_after is not None else _BUSY_PAUSE_S
    except ValueError:
        seconds = _BUSY_PAUSE_S
    return min(max(seconds, 0.1), _LONGEST_PAUSE_S)
