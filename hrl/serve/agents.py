"""Episodes that are programs: each gets a key to the door, and what it asked for there is the episode."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hrl.episodes.clock import EpisodeClock
from hrl.episodes.play import AgentPlay, EpisodeTask, PlaySetup
from hrl.episodes.router import Router
from hrl.serve.door import Door, Served
from hrl.serve.outside import OutsideCalls
from hrl.serve.policy import PolicyWords, Reading
from hrl.serve.rows import Call, rows_of
from hrl.serve.server import DoorServer
from hrl.serve.sessions import FixedSampling, Session, Sessions
from hrl.serve.sessions import Limits as SessionLimits
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import OnTokens, SampleOutput

MODEL = "policy"
"""What programs call the policy."""


@dataclass(frozen=True)
class Outside:
    """How a run is reached by others than its own programs.

    Attributes:
        key: With which a client names its session, as with the key of `hrl serve`.
        sampling: Where a client names no temperature, top-p or top-k.
    """

    key: str
    sampling: SamplingParams


class AgentDoor:
    """The door of a run, on a loopback address: each episode that is a program has a key of its own.

    Args:
        setup: What episodes are played by.
        router: Has turns sampled.
        outside: Lets others in, too, of whom nothing is kept; None lets in nobody else.
    """

    def __init__(self, setup: PlaySetup, router: Router, outside: Outside | None = None) -> None:
        settings, limits = setup.settings, setup.limits
        self._settings, self._limits, self._router = settings, limits, router
        longest = limits.prompt + limits.response
        reading = Reading(setup.stop_ids, setup.template_kwargs, settings.tool_parser, settings.reasoning_parser)
        self._words = PolicyWords(setup.tokenizer, reading, longest)
        sessions = Sessions(None if outside is None else outside.key, SessionLimits(), keep_calls=False)
        served = Served(MODEL, SamplingParams() if outside is None else outside.sampling, longest, limits.response)
        self._door = Door(served, self._words, OutsideCalls(router).generate, sessions)
        self._server: DoorServer | None = None
        self._opening = asyncio.Lock()
        self._told: Counter[str] = Counter()

    async def listen(self) -> str:
        """Return the address, at which the door is open from now on."""
        async with self._opening:
            if self._server is None:
                self._server = await DoorServer(self._door).__aenter__()
        return self._server.base_url

    async def open(self, task: EpisodeTask, clock: EpisodeClock) -> AgentSession:
        """Return the session of an episode, whose clock stands at its calls; whoever opens it closes it."""
        return AgentSession(self._door, await self.listen(), self._session(task, clock), self._limits.room_of(task))

    def new_counts(self) -> Counter[str] | None:
        """Return what was counted since the last time, see `Session.counts`; None where the door is not open."""
        if self._server is None:
            return None
        totals, told = self._door.sessions.totals.copy(), self._told
        self._told = totals
        return totals - told

    async def close(self) -> None:
        """End the server."""
        server, self._server = self._server, None
        if server is not None:
            await server.__aexit__(None, None, None)
        self._words.close()

    def _session(self, task: EpisodeTask, clock: EpisodeClock) -> Session:
        settings, limits = self._settings, self._limits

        async def generate(
            ids: list[int], sampling: SamplingParams, name: str, on_tokens: OnTokens | None
        ) -> SampleOutput:
            with clock.standing():
                # Which row an answer belongs to is known when it is there, so all of its context is asked about.
                whole = 0 if task.with_experts else None
                return await self._router.generate(
                    ids, sampling, task.key, f"{name} of {task.name}", experts_from=whole
                )

        fixed = FixedSampling(
            task.sampling,
            lambda turn: task.turn_sampling(turn, 1).seed,
            limits.prompt,
            limits.room_of(task),
            settings.max_turn_tokens,
        )
        return Session(f"{task.key[0]}-{task.key[1]}", SessionLimits(calls=settings.max_turns), fixed, generate)


class AgentSession:
    """What an episode's program uses, and what became of it.

    Args:
        door: Knows the session until it is closed.
        base_url: Of the server.
        session: Of the episode.
        room: What its tokens after a prompt have to fit into.
    """

    def __init__(self, door: Door, base_url: str, session: Session, room: int) -> None:
        self._door, self._session, self._room = door, session, room
        self.settings = {"base_url": base_url, "api_key": door.sessions.open(session), "model": MODEL}

    def played(self) -> AgentPlay:
        """Return what the program has asked for so far."""
        session = self._session
        counts, chat, texts = session.counts, session.longest_chat, _texts(session.calls)
        return AgentPlay(
            rows=rows_of(session.calls, self._room),
            messages=chat.messages,
            turn_places=[chat.places.get(turn) for turn in range(len(texts))],
            texts=texts,
            answer=max(session.calls, key=lambda call: call.turn).text if session.calls else "",
            num_tool_calls=counts["tool_calls"],
            num_tool_errors=counts["tool_errors"],
            num_unread_calls=counts["unread_calls"],
            engine_s=session.engine_s,
            limit=session.reached,
            metrics={f"agent/{name}": float(counts[name]) for name in ("overridden", "dropped") if counts[name]},
        )

    async def close(self) -> None:
        """Refuse further calls, and end those that are being answered."""
        self._door.sessions.close(self._session)
        await self._session.stop()


def _texts(calls: Sequence[Call]) -> list[str]:
    """Return what the policy wrote in each turn; nothing where the program did not wait for the answer."""
    texts = {call.turn: call.text for call in calls}
    return [texts.get(turn, "") for turn in range(max(texts, default=-1) + 1)]
