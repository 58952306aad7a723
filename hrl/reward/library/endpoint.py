"""Requests to a server that scores: which answers may be asked for again and when, and which are hopeless."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hrl.errors import HrlError
from hrl.reward.library.base import FAILURE, require

if TYPE_CHECKING:
    import aiohttp

LONGEST_SHOWN = 500
"""Characters of a reply in a message."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
_MOST_FAILURES_IN_A_ROW = 32
"""So many samples in a row without a score are no accident: then `on_failure: skip` does not hide them."""

_RETRIED = frozenset({408, 409, 425, 429})
_HOPELESS = frozenset({301, 302, 303, 307, 308, 401, 403, 404, 405})
_LARGEST_REPLY_BYTES = 2**20


class EndpointError(HrlError, RuntimeError):
    """A server gave no score."""


class EndpointRefusedError(EndpointError):
    """The server will not answer any request like this one; `on_failure` does not change that."""


class NotNowError(EndpointError):
    """The server may answer later.

    Attributes:
        pause_s: How long it asks to be left alone; None if it doesn't say.
    """

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class Failures:
    """What becomes of a sample without a score.

    Args:
        skips: It is left out of training; otherwise its error is raised.
    """

    def __init__(self, skips: bool) -> None:
        self._skips, self._in_a_row = skips, 0

    def over(self) -> None:
        """Note a score."""
        self._in_a_row = 0

    def outcome(self, error: EndpointError) -> dict[str, Any]:
        """Return what stands for the score, with the reason; raise the error itself where that hides too much."""
        if isinstance(error, EndpointRefusedError):
            raise error
        self._in_a_row += 1
        if not self._skips or self._in_a_row > _MOST_FAILURES_IN_A_ROW:
            raise error
        return {"score": None, FAILURE: str(error)}


class Pauses:
    """The time between the tries of one request: twice as long after each, or what the server asks for.

    Args:
        deadline_s: Seconds from now in which there has to be an answer.

    Attributes:
        end: Of them, by `time.monotonic`.
        tries: Requests so far, counted by whoever makes them.
    """

    def __init__(self, deadline_s: float) -> None:
        self.end, self.tries = time.monotonic() + deadline_s, 0
        self._deadline_s, self._next_s = deadline_s, _FIRST_PAUSE_S

    def last(self, failure: object) -> EndpointError:
        """Return the error after a failure that is the last one."""
        return EndpointError(f"{failure} (the last of {self.tries} tries in {self._deadline_s:g} s)")

    async def rest(self, error: NotNowError) -> None:
        """Wait until the next try.

        Raises:
            EndpointError: No time is left for one.
        """
        rest_s = error.pause_s if error.pause_s is not None else self._next_s * random.uniform(0.5, 1.0)
        if time.monotonic() + rest_s >= self.end:
            raise self.last(error) from error
        await asyncio.sleep(rest_s)
        self._next_s = min(2 * self._next_s, _LONGEST_PAUSE_S)


def require_address(name: str, url: str) -> None:
    """Refuse what is no address of a server, or one with a login in it.

    Raises:
        ArgumentError: It is not.
    """
    require(url.startswith(("http://", "https://")), f"{name} {url!r} is no http address")
    require("@" not in url.partition("://")[2].partition("/")[0], f"{name} has a login in it; use api_key")


async def post(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], limit_s: float, check: str) -> bytes:
    """Return what a server answers with status 200.

    Args:
        session: With the headers of all requests.
        url: No redirect is followed from it.
        body: Sent as JSON.
        limit_s: Seconds that it may take.
        check: What to look at if the server refuses, for the message.

    Raises:
        NotNowError: The server is busy, broken, late or not there.
        EndpointRefusedError: It refuses every request like this one.
        EndpointError: It refuses this one, or sends more than a megabyte.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=max(limit_s, 0.001))
    try:
        async with session.post(url, json=body, timeout=timeout, allow_redirects=False) as answer:
            content = bytearray()
            async for piece in answer.content.iter_chunked(65_536):
                content += piece
                if len(content) > _LARGEST_REPLY_BYTES:
                    raise EndpointError(f"{url} sent more than {_LARGEST_REPLY_BYTES} bytes")
            status, retry_after = answer.status, answer.headers.get("Retry-After")
    except TimeoutError as error:
        raise NotNowError(f"{url} did not answer within {limit_s:.3g} s") from error
    except aiohttp.ClientError as error:
        raise NotNowError(f"{url} can't be reached: {type(error).__name__}: {error}") from error
    shown = shown_reply(bytes(content))
    if status in _HOPELESS:
        raise EndpointRefusedError(f"{url} answered {status}; check {check}: {shown}")
    if status in _RETRIED or status >= 500:
        raise NotNowError(f"{url} answered {status}: {shown}", _seconds(retry_after))
    if status != 200:
        raise EndpointError(f"{url} answered {status}: {shown}")
    return bytes(content)


def shown_reply(content: bytes) -> str:
    """Return the beginning of a reply, for a message."""
    return content[:LONGEST_SHOWN].decode("utf-8", "replace")


def _seconds(retry_after: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header; None for a date or nonsense."""
    try:
        return max(0.0, float(retry_after)) if retry_after is not None else None
    except ValueError:
        return None
