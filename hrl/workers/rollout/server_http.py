"""One server that somebody else started, asked over HTTP: bounded replies, deadlines, and errors that name its address.

What a server answers is a stranger's word. A redirect is refused, since the weights' names, the prompts and the key
would go to whoever it names; a reply is read up to a bound, within a deadline for all of it; what is not a JSON object,
or has a field of another type, is refused with what was seen. Who asks for something that changes nothing asks again
when the server falters.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError

from hrl.workers.rollout.base import RolloutError

OF_ROLLOUT, OF_TEACHER = "rollout.server", "distillation.teacher_models.teacher_model.server"
"""Sections that name servers."""
_DEADLINES = {OF_ROLLOUT: f"{OF_ROLLOUT}.timeout_s", OF_TEACHER: "trainer.timeouts.call_s"}
"""By which a response has to be there."""
CONNECT_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 0.5
"""Before a server that falters is asked again; each further pause is twice as long."""
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
    """Nobody is there, or not with this run's weights: another server may do its work."""

    may_pass = True


class ServerFaltersError(ServerGoneError):
    """Somebody is there who did not answer, or not to the end, or is broken by his own word: he may, the next time."""


@dataclass(frozen=True)
class Patience:
    """How often a server is asked that falters.

    Attributes:
        tries: At most, all within the deadline of the question.
        try_s: After which one that was not answered is given up for the next, in seconds.
        too_short: The deadline that a user can have set too short, in words; None where no key sets it.
    """

    tries: int
    try_s: float = math.inf
    too_short: str | None = None


ONCE = Patience(1)
MOST_TRIES = 4
"""Of a request that the server may well do twice."""


class Answer(BaseModel):
    """What is read of a reply: fields of exactly these types; others are left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


A = TypeVar("A", bound=Answer)


def read(kind: type[A], value: Any, of: str) -> A:
    """Return what a server sent as what it has to be.

    Args:
        kind: What it has to be.
        value: As it came.
        of: The address, and what was asked there, for the message.

    Raises:
        ServerRefusesError: A field is missing or of another type; names it and shows what was seen.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or "the answer"
        seen = "is missing" if first["type"] == "missing" else f"is {_printable(repr(first['input']))}"
        raise ServerRefusesError(
            f"{of}: {field} {seen}, where hrl expects {_EXPECTED.get(first['type'], first['msg'])}; is it the server "
            "that rollout.name says, with the same version of hrl where it has hrl's extension?"
        ) from error


_EXPECTED = {
    "missing": "one",
    "string_type": "text",
    "int_type": "an integer",
    "bool_type": "true or false",
    "dict_type": "an object",
    "list_type": "a list",
    "model_type": "an object",
    "too_short": "at least one",
}
"""In words, by pydantic's names of what was wrong."""


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

    async def get(self, path: str, *, timeout_s: float, most_bytes: int = 1 << 20, patience: Patience = ONCE) -> Reply:
        """Ask with GET; see `post`."""
        return await self._ask("GET", path, None, timeout_s, most_bytes, patience)

    async def post_in_turn(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float,
        most_bytes: int = 1 << 20,
        is_look: bool = False,
        require_up: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Send what there may be a lot of, so many at once; the deadline begins with its turn. See `post`.

        Args:
            path: See `post`.
            body: See `post`.
            timeout_s: See `post`.
            most_bytes: See `post`.
            is_look: Sent to look at the server, with a deadline that no key sets.
            require_up: Called when its turn has come; raises if the server has fallen meanwhile.
        """
        too_short = f"the deadline ({_DEADLINES[self._section]}) too short for its longest response"
        patience = Patience(MOST_TRIES, too_short=None if is_look else too_short)
        async with self._gate:
            require_up()
            return await self._ask("POST", path, body, timeout_s, most_bytes, patience)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        most_bytes: int = 1 << 20,
        patience: Patience = ONCE,
    ) -> Reply:
        """Send a JSON object, and return what comes back with status 200.

        Args:
            path: From the server's root, with a slash at its beginning.
            body: The object; None sends none.
            timeout_s: For all of it, in seconds.
            most_bytes: Of the reply.
            patience: What is done where the server falters. More than one try is for requests that may be made twice.

        Raises:
            ServerRefusesError: A redirect, a refusal (status 4xx), or a reply that is too long.
            ServerGoneError: Nobody listens there.
            ServerFaltersError: An unfinished reply, status 5xx, or none of it within the deadline, in every try.
        """
        return await self._ask("POST", path, body, timeout_s, most_bytes, patience)

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        most_bytes: int,
        patience: Patience,
    ) -> Reply:
        url = f"{self.url}{path}"
        end, tries = time.monotonic() + timeout_s, 0
        while True:
            left = min(max(end - time.monotonic(), 0.001), patience.try_s)
            try:
                status, retry_after, content = await self._answer(
                    method, url, body, left, most_bytes, patience, told_s=min(timeout_s, patience.try_s)
                )
                if status not in _BUSY:
                    return _checked(url, status, content, self._section)
                pause = _pause(retry_after)
                why: ServerFaltersError = ServerFaltersError(
                    f"{url} said for {timeout_s:g} s that it is busy (status {status})"
                )
            except ServerFaltersError as error:
                tries += 1
                if tries >= patience.tries:
                    raise
                # Of a random length, so that not all who wait for a server in trouble come back at once.
                pause, why = FIRST_PAUSE_S * 2 ** (tries - 1) * random.uniform(0.5, 1.0), error
            if time.monotonic() + pause >= end:
                raise why
            await asyncio.sleep(pause)

    async def _answer(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        most_bytes: int,
        patience: Patience,
        *,
        told_s: float,
    ) -> tuple[int, str | None, bytes]:
        try:
            return await self._once(method, url, body, timeout_s, most_bytes)
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerFaltersError(
                f"{url} let no connection in within {min(timeout_s, CONNECT_TIMEOUT_S):g} s; is it reachable from here?"
            ) from error
        except TimeoutError as error:
            too_short = f", or {patience.too_short}" if patience.too_short else ""
            raise ServerFaltersError(
                f"{url} did not answer to the end within {told_s:g} s; is the server overloaded{too_short}?"
            ) from error
        except aiohttp.ClientError as error:
            is_absent = isinstance(error, aiohttp.ClientConnectorDNSError | aiohttp.ClientSSLError) or isinstance(
                getattr(error, "os_error", None), ConnectionRefusedError
            )
            kind = ServerGoneError if is_absent else ServerFaltersError
            raise kind(f"{url} {_in_words(error)}; does the server run, and is this it?") from error
        except ValueError as error:  # of an address that is none
            raise ServerRefusesError(f"{url} can't be asked: {error}; see {self._section}.urls") from error

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
                target = excerpt(answer.headers.get("Location", "nowhere"))
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


def excerpt(content: bytes | str) -> str:
    """Return the first words of what a server sent, as text that can be shown."""
    return repr(text) if (text := _printable(content)) else "(nothing)"


def _printable(content: bytes | str) -> str:
    start = content[:_SHOWN] if isinstance(content, str) else content[:_SHOWN].decode("utf-8", "replace")
    return " ".join("".join(c if c.isprintable() else " " for c in start).split())


def _checked(url: str, status: int, content: bytes, section: str) -> Reply:
    if status == 200:
        return Reply(url, content, section)
    said = f"{url} answered {status}: {excerpt(content)}"
    if status in (401, 403):
        raise ServerRefusesError(f"{said}; name the variable that has the server's key with {section}.api_key=env:NAME")
    if status >= 500:
        raise ServerFaltersError(f"{said}; the server's own log says more")
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
    return min(max(seconds, 0.1), _LONGEST_PAUSE_S) if math.isfinite(seconds) else _LONGEST_PAUSE_S
