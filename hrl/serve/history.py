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

K = TypeVar("K")
T = TypeVar("T")

_MOST_BYTES = 512 * 2**20
"""About: what is known is not measured but reckoned, from above for what people and programs say."""
_MOST_TEXTS = 2048
"""Of a session, for all of them are looked at to find one."""
_OF_A_TOKEN, _OF_A_CHARACTER, _OF_A_MESSAGE = 40, 4, 1000
"""Bytes. A token has its id, log-prob, version, turn and mask; a message is known as said and as rendered."""


class Memory:
    """Bounds what is known of all sessions of a door together; what was last asked for longest ago is forgotten.

    Args:
        most_bytes: About.

    Attributes:
        num_bytes: About, of all that is known.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._known: OrderedDict[tuple[int, Any], tuple[dict[Any, Any], int]] = OrderedDict()

    def add(self, known: dict[K, T], key: K, value: T, num_bytes: int) -> None:
        """Keep a value in its place, which another one may have to make room for."""
        self.forget(known, key)
        if num_bytes > self._most_bytes:  # all others would make room, and in vain
            return
        known[key] = value
        self._known[id(known), key] = known, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._most_bytes:
            (_, oldest), (of, _) = next(iter(self._known.items()))
            self.forget(of, oldest)

    def asked_for(self, known: dict[K, T], key: K) -> None:
        """Note that a value was of use."""
        self._known.move_to_end((id(known), key))

    def forget(self, known: dict[K, T], key: K) -> None:
        """Let go of a value, if it is there."""
        _, num_bytes = self._known.pop((id(known), key), (known, 0))
        self.num_bytes -= num_bytes
        known.pop(key, None)


class _Known(Generic[K, T]):
    """What is known in one respect of one session."""

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory or Memory()
        self._known: dict[K, T] = {}

    def forget(self) -> None:
        """Let go of all of it."""
        for key in list(self._known):
            self._memory.forget(self._known, key)


class Chats(_Known[bytes, T]):
    """Finds the answer that a chat goes on from.

    Values are what stands for the chat up to and including the answer.

    Args:
        memory: That bounds it; one of its own where there is none.
    """

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
                self._memory.asked_for(self._known, digests[count])
                return count, found
        return None

    def add(
        self,
        messages: Sequence[Mapping[str, Any]],
        setting: Any,
        answer: Mapping[str, Any],
        value: T,
        num_tokens: int,
    ) -> None:
        """Know an answer to messages; a later one of the same words takes its place.

        Args:
            messages: Of the request.
            setting: As for `longest`.
            answer: To them.
            value: Stands for all of it.
            num_tokens: Those of `value`.
        """
        said = [*messages, answer]
        characters = len(_plain(setting)) + sum(len(_plain(message)) for message in said)
        num_bytes = _OF_A_TOKEN * num_tokens + _OF_A_CHARACTER * characters + _OF_A_MESSAGE * len(said)
        self._memory.add(self._known, _digests(said, setting)[-1], value, num_bytes)


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


class Texts(_Known[str, KnownText[T]]):
    """Finds the tokens that the beginning of a text has already.

    Args:
        memory: That bounds it; one of its own where there is none.
    """

    def longest(self, text: str) -> KnownText[T] | None:
        """Return the longest known text that a text begins with."""
        begun = (known for known in self._known.values() if text.startswith(known.text))
        found = max(begun, key=lambda known: len(known.text), default=None)
        if found is not None:
            self._memory.asked_for(self._known, found.text)
        return found

    def add(self, text: str, ids: Sequence[int], value: T) -> None:
        """Know a text's tokens."""
        num_bytes = _OF_A_TOKEN * len(ids) + _OF_A_CHARACTER * len(text) + _OF_A_MESSAGE
        self._memory.add(self._known, text, KnownText(text, ids, value), num_bytes)
        if len(self._known) > _MOST_TEXTS:
            self._memory.forget(self._known, next(iter(self._known)))


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
