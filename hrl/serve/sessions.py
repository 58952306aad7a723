"""Sessions: whose calls belong together, how they are sampled, and what they may use up."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from hrl.serve.history import Chats, Memory, Texts
from hrl.serve.refusals import RequestRefusedError, bad_request, over_limit, too_busy
from hrl.serve.rows import Branches, Call
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import OnTokens, SampleOutput

DEFAULT = "default"
"""Session of calls that name none."""
KEY_PREFIX = "hrl-"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)

Generate = Callable[[list[int], SamplingParams, str, OnTokens | None], Awaitable[SampleOutput]]
"""`RolloutEngine.generate`, or what does the same: samples a response to token ids; the text names the request."""
LimitReached = Literal["max_turns", "max_prompt", "max_tokens", "deadline"]


@dataclass(frozen=True)
class Limits:
    """What a session may use up; None sets no limit.

    Attributes:
        calls: Answers; each choice of a request is one.
        tokens: Sampled tokens.
        seconds: From its first call on.
        concurrent_calls: Answers that are being sampled at the same time.
    """

    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    concurrent_calls: int | None = 64


@dataclass(frozen=True)
class FixedSampling:
    """How the calls of a session are sampled, whatever they ask for: as the policy's turns in training are.

    Attributes:
        sampling: Temperature, top-p and top-k.
        seed_of: Turn → seed.
        max_prompt_tokens: Longest first context.
        max_response_tokens: All tokens after it.
        max_turn_tokens: Longest answer; None for what is left.
    """

    sampling: SamplingParams
    seed_of: Callable[[int], int]
    max_prompt_tokens: int
    max_response_tokens: int
    max_turn_tokens: int | None = None


@dataclass(eq=False)
class Conversation:
    """Calls of a session of which each goes on from an answer of an earlier one.

    Attributes:
        calls: In the order in which they were answered.
        messages: The longest chat with its answer; none of a text.
        places: Turn → where in `messages` its answer stands.
    """

    calls: list[Call] = field(default_factory=list)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    def said(self, messages: Sequence[Mapping[str, Any]], turn: int) -> None:
        """Note a chat with its last answer, and which turn that is."""
        if len(messages) >= len(self.messages):
            self.messages = list(messages)
            place = len(messages) - 1
            self.places = {other: at for other, at in self.places.items() if at != place} | {turn: place}


@dataclass(eq=False)
class Admission:
    """A request that is being answered.

    Attributes:
        turns: That it is.
        longest: Of its answers, in tokens; None where the session sets no limit.
        kept: Tokens that it may still sample, and no other request of the session.
    """

    turns: range
    longest: int | None
    kept: int
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)


@dataclass(eq=False)
class Session:
    """Calls that belong together.

    Attributes:
        name: In the header `X-Session-Id`, and in records.
        limits: What it may use up.
        fixed: How its calls are sampled; None as they ask for.
        generate: Samples its answers, in place of the door's.
        keeps_calls: Whether calls and what was said are kept.
        calls: Those that were answered.
        conversations: What was said.
        memory: Bounds what is known of what its clients were told.
        chats, texts: What its clients were told, to be known again.
        counts: `calls`, `sampled_tokens` (also of answers that nobody was given), `refused` (got an error instead of an
            answer), `dropped` (the client went away), `overridden` (asked for other sampling than `fixed`),
            `tool_calls`, `tool_errors` (of these, calls that can't be read), `unread_calls` (of these, those that no
            parser makes a call of).
        totals: The same of all sessions of a door, also of those that are over.
        reached: The first limit that it ran into.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    fixed: FixedSampling | None = None
    generate: Generate | None = None
    keeps_calls: bool = True
    calls: list[Call] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    chats: Chats[Any] = field(init=False)
    texts: Texts[Conversation] = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    reached: LimitReached | None = None
    engine_s: float = 0.0
    _branches: Branches = field(init=False)
    _turns: int = 0
    _began: float | None = None
    _admitted: set[Admission] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.chats, self.texts = Chats(self.memory), Texts(self.memory)
        self._branches = Branches(None if self.fixed is None else self.fixed.max_response_tokens)

    @property
    def is_idle(self) -> bool:
        """Whether no call of it is being answered."""
        return not self._admitted

    @contextmanager
    def admitted(self, choices: int) -> Iterator[Admission]:
        """Let a request in, for which the session keeps the tokens that its answers may need.

        Args:
            choices: Answers that it asks for.

        Raises:
            RequestRefusedError: The session has not that much left, or too many calls in flight.
        """
        at_once = self.limits.concurrent_calls
        if at_once is not None and choices > at_once:  # in vain, however often it is asked for
            raise bad_request(
                f"{choices} answers are asked for at once (n for each prompt), and a session has at most {at_once} "
                "sampled at the same time; ask for fewer",
                "n",
            )
        now = time.monotonic()
        if self._began is None:
            self._began = now
        limits = self.limits
        if limits.seconds is not None and now - self._began >= limits.seconds:
            raise self._over("deadline", f"its {limits.seconds:g} seconds are over")
        if limits.calls is not None and self._turns + choices > limits.calls:
            raise self._over("max_turns", f"it has had {self._turns} of its {limits.calls} answers")
        left = self.tokens_left()
        if left is not None and left < choices:
            raise self._out_of_tokens(choices)
        in_flight = sum(len(one.turns) for one in self._admitted)
        if at_once is not None and in_flight + choices > at_once:
            raise too_busy(
                f"session {self.name}: {in_flight} answers are being sampled, and at most {at_once} may be at the same "
                "time; ask again when one has ended"
            )
        longest = None if left is None else left // choices
        admission = Admission(range(self._turns, self._turns + choices), longest, (longest or 0) * choices)
        self._turns += choices
        self._admitted.add(admission)
        try:
            yield admission
        except asyncio.CancelledError:
            self.count("dropped", choices)
            raise
        finally:
            self._admitted.discard(admission)

    def count(self, what: str, number: int = 1) -> None:
        """Count something; see `counts`."""
        self.counts[what] += number
        self.totals[what] += number

    def tokens_left(self) -> int | None:
        """Return how many tokens a further request may sample; None for any number."""
        if self.limits.tokens is None:
            return None
        kept = sum(one.kept for one in self._admitted)
        return max(self.limits.tokens - self.counts["sampled_tokens"] - kept, 0)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count a request that gets an error instead of its answers."""
        try:
            yield
        except RequestRefusedError:
            self.count("refused")
            raise

    def sampled(self, admission: Admission, tokens: int) -> None:
        """Count what was sampled for a request, whatever becomes of its answer."""
        self.count("sampled_tokens", tokens)
        admission.kept -= tokens

    def seconds_left(self) -> float | None:
        """Return how long it may still go on; None for ever."""
        if self.limits.seconds is None or self._began is None:
            return self.limits.seconds
        return max(self.limits.seconds - (time.monotonic() - self._began), 0.0)

    def add(self, call: Call, conversation: Conversation) -> None:
        """Count an answer that a client is given, and keep it."""
        self.count("calls")
        if self.keeps_calls:
            self.calls.append(call)
            if not conversation.calls:
                self.conversations.append(conversation)
            conversation.calls.append(call)

    @property
    def branches(self) -> Branches:
        """The rows that its calls make up so far."""
        return self._branches.grow(self.calls)

    @property
    def longest_chat(self) -> Conversation:
        """The conversation with the most messages so far."""
        return max(self.conversations, key=lambda one: len(one.messages), default=Conversation())

    def ran_into(self, limit: LimitReached) -> None:
        """Note a limit that ends what the session is for."""
        self.reached = self.reached or limit

    async def stop(self) -> None:
        """End the calls that are being answered."""
        current = asyncio.current_task()
        tasks = [one.task for one in self._admitted if one.task is not None and one.task is not current]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _out_of_tokens(self, choices: int) -> RequestRefusedError:
        most, sampled = self.limits.tokens or 0, self.counts["sampled_tokens"]
        if most - sampled < choices:
            return self._over("max_tokens", f"{max(most - sampled, 0)} of its {most} sampled tokens are left")
        return too_busy(
            f"session {self.name}: what is left of its {most} sampled tokens is kept for answers that are being "
            "sampled; ask again when one has ended, and name max_tokens, so that less is kept"
        )

    def _over(self, limit: LimitReached, why: str) -> RequestRefusedError:
        self.ran_into(limit)
        return over_limit(f"session {self.name}: {why}")


class Sessions:
    """Finds the session of a request by its key.

    Args:
        key: The server's, with which a client names its session itself: in the header `X-Session-Id`, or behind the
            key, `KEY:NAME`. None where every session has a key of its own.
        limits: Of sessions that clients name.
        keep_calls: Whether these keep their calls.
        most: Sessions that clients may name. Of more, the one whose last call is longest ago goes, if it is idle.
        on_end: Told of a session that goes.

    Attributes:
        totals: What was counted in all sessions so far; see `Session.counts`.
    """

    def __init__(
        self,
        key: str | None,
        limits: Limits,
        *,
        keep_calls: bool = True,
        most: int = 1000,
        on_end: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self.totals: Counter[str] = Counter()
        self._memory = Memory()  # of all sessions that clients name
        self._digest = None if key is None else _digest(key)
        self._limits, self._keep_calls, self._most, self._on_end = limits, keep_calls, most, on_end
        self._named: OrderedDict[str, Session] = OrderedDict()
        self._keyed: dict[bytes, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter([*self._named.values(), *self._keyed.values()])

    def open(self, session: Session) -> str:
        """Let a session be used, and return its key."""
        key = new_key()
        session.totals = self.totals
        self._keyed[_digest(key)] = session
        return key

    def close(self, session: Session) -> None:
        """Know the key of a session no longer."""
        self._keyed = {digest: known for digest, known in self._keyed.items() if known is not session}

    def of(self, authorization: str | None, name: str | None) -> Session:
        """Return the session of a request.

        Args:
            authorization: The header `Authorization`.
            name: The header `X-Session-Id`.

        Raises:
            RequestRefusedError: The key is none that is known, or the name can't be one.
        """
        scheme, _, given = (authorization or "").partition(" ")
        given = given.strip()
        if scheme.lower() != "bearer" or not given:
            raise _unauthorised("there is no key: send the header `Authorization: Bearer KEY`")
        session = self._keyed.get(_digest(given))  # digests say nothing of a key, nor does the time to find one
        if session is not None:
            return session
        key, _, behind = given.partition(":")
        if self._digest is None or not hmac.compare_digest(_digest(key), self._digest):
            raise _unauthorised("the key is not known here")
        return self._called(behind or name or DEFAULT)

    def _called(self, name: str) -> Session:
        if not _NAME.fullmatch(name):
            raise bad_request(
                "a session's name is 1 to 100 letters, digits, dots, dashes or underscores", "X-Session-Id"
            )
        session = self._named.get(name)
        if session is None:
            if len(self._named) >= self._most:
                idle = next((known for known, one in self._named.items() if one.is_idle), None)
                if idle is None:
                    raise too_busy(f"{self._most} sessions are being answered, and no more are taken")
                gone = self._named.pop(idle)
                gone.chats.forget()
                gone.texts.forget()
                self._on_end(gone)
            kept, totals, memory = self._keep_calls, self.totals, self._memory
            session = Session(name, self._limits, keeps_calls=kept, totals=totals, memory=memory)
            self._named[name] = session
        self._named.move_to_end(name)
        return session


def new_key() -> str:
    """Return a key that nobody can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(24)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorised(message: str) -> RequestRefusedError:
    return RequestRefusedError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
