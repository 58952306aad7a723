"""What a session has been told: clients send their whole history with each request, and its tokens are found again.

The text that the policy wrote may be the text of other tokens, too. So an answer that comes back as it was given keeps
the tokens that were sampled, and only what is new in a request becomes tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_KEPT = 2048
"""Answers of a session that are known again; of more, those that were last asked for longest ago are forgotten."""


class Chats(Generic[T]):
    """Finds the answer that a chat goes on from.

    Values are what stands for the chat up to and including the answer.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, T] = OrderedDict()

    def longest(self, messages: Sequence[Mapping[str, Any]], setting: Any) -> tuple[int, T] | None:
        """Return how many of the messages are known as a whole, the last of them an answer, and what stands for them.

        Args:
            messages: Of a request.
            setting: What else the rendered chat depends on; JSON.
        """
        digests = _digests(messages, setting)
        for count in range(len(messages) - 1, 0, -1):
            found = self._known.get(digests[count])
            if found is not None:
                self._known.move_to_end(digests[count])
                return count, found
        return None

    def add(self, messages: Sequence[Mapping[str, Any]], setting: Any, answer: Mapping[str, Any], value: T) -> None:
        """Know an answer to messages; a later one of the same words takes its place."""
        digest = _digests([*messages, answer], setting)[-1]
        self._known[digest] = value
        self._known.move_to_end(digest)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)


@dataclass(frozen=True)
class KnownText(Generic[T]):
    """A text that is known.

    Attributes:
        text: A prompt and its continuation.
        ids: Its tokens.
        value: What else stands for it.
    """

    text: str
    ids: Sequence[int]
    value: T


class Texts(Generic[T]):
    """Finds the tokens that the beginning of a text has already."""

    def __init__(self) -> None:
        self._known: list[KnownText[T]] = []

    def longest(self, text: str) -> KnownText[T] | None:
        """Return the longest known text that a text begins with."""
        begun = (known for known in self._known if text.startswith(known.text))
        return max(begun, key=lambda known: len(known.text), default=None)

    def add(self, text: str, ids: Sequence[int], value: T) -> None:
        """Know a text's tokens."""
        others = [known for known in self._known if known.text != text]
        self._known = [*others[-_KEPT + 1 :], KnownText(text, ids, value)]


def _digests(messages: Sequence[Mapping[str, Any]], setting: Any) -> list[bytes]:
    """Return a digest of the first none, one, two, … of the messages."""
    digest = hashlib.blake2b(_plain(setting).encode(), digest_size=16).digest()
    found = [digest]
    for message in messages:
        digest = hashlib.blake2b(digest + _plain(_compared(message)).encode(), digest_size=16).digest()
        found.append(digest)
    return found


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _compared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a message has to be the same. Clients send an answer back without what they have no use for."""
    kept = {name: message[name] for name in ("role", "content", "name", "tool_call_id") if message.get(name)}
    calls = message.get("tool_calls")
    if calls:
        kept["tool_calls"] = [
            [call.get("id"), call["function"]["name"], call["function"].get("arguments")] for call in calls
        ]
    return kept
