"""What a client is told when its request is not answered, in the form that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INVALID = "invalid_request_error"
NO_RETRY: Mapping[str, str] = {"X-Should-Retry": "false"}
"""OpenAI's client asks twice more after a 429 or a 5xx, unless it is told that this is no use."""
RETRY_SOON: Mapping[str, str] = {"Retry-After": "1"}


@dataclass(eq=False)
class RequestRefusedError(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: Of HTTP.
        message: What is wrong, and the way out.
        kind: OpenAI's `type`.
        code: OpenAI's `code`.
        param: The parameter that is wrong.
        headers: Further headers of the answer.
    """

    status: int
    message: str
    kind: str = INVALID
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return the answer's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> RequestRefusedError:
    """Return the refusal of a request that makes no sense, or that asks for what is not there."""
    return RequestRefusedError(400, message, param=param, code=code)


def over_limit(message: str) -> RequestRefusedError:
    """Return the refusal of a call for which its session has nothing left."""
    return RequestRefusedError(429, message, "insufficient_quota", "insufficient_quota", headers=NO_RETRY)


def too_busy(message: str) -> RequestRefusedError:
    """Return the refusal of a call that may be made a little later."""
    return RequestRefusedError(429, message, "rate_limit_exceeded", "rate_limit_exceeded", headers=RETRY_SOON)


def not_now(message: str) -> RequestRefusedError:
    """Return the refusal of a call while the engine does something else, such as taking new weights."""
    return RequestRefusedError(503, message, "server_error", "engine_unavailable", headers=RETRY_SOON)


def engine_failed(message: str) -> RequestRefusedError:
    """Return the answer to a call that the engine failed at."""
    return RequestRefusedError(500, message, "server_error", "engine_failed", headers=NO_RETRY)
