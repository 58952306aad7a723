"""Episodes that are programs: each gets a key to the door, and what it asked for there is the episode."""

from __future__ import annotations

import asyncio

from hrl.episodes.play import AgentPlay, EpisodeTask, Generate, PlaySetup
from hrl.serve.door import Door, Served
from hrl.serve.policy import PolicyWords, Reading
from hrl.serve.rows import rows_of
from hrl.serve.server import DoorServer
from hrl.serve.sessions import FixedSampling, Session, Sessions
from hrl.serve.sessions import Limits as SessionLimits
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import SampleOutput

MODEL = "policy"
"""What programs call the policy."""


class AgentDoor:
    """The door of a run's episodes, on a loopback address, open from the first program on.

    Args:
        setup: What episodes are played by.
        generate: Has a turn sampled.
    """

    def __init__(
        self,
        setup: PlaySetup,
        generate: Generate,
    ) -> None:
        self._settings, self._limits, self._generate = setup.settings, setup.limits, generate
        longest = setup.limits.prompt + setup.limits.response
        reading = Reading(
            setup.stop_ids, setup.template_kwargs, setup.settings.tool_parser, setup.settings.reasoning_parser
        )
        self._words = PolicyWords(setup.tokenizer, reading, longest)
        self._sessions = Sessions(None, SessionLimits())

        async def nobody(ids: list[int], sampling: SamplingParams, name: str) -> SampleOutput:
            raise AssertionError(f"{name} belongs to no episode")

        self._door = Door(Served(MODEL, SamplingParams(), longest), self._words, nobody, self._sessions)
        self._server: DoorServer | None = None
        self._opening = asyncio.Lock()

    async def open(self, task: EpisodeTask) -> AgentSession:
        """Return the session of an episode; whoever opens it closes it."""
        async with self._opening:
            if self._server is None:
                self._server = await DoorServer(self._door).__aenter__()
        return AgentSession(self._door, self._server.base_url, self._session(task), self._limits.room_of(task))

    async def close(self) -> None:
        """End the server."""
        server, self._server = self._server, None
        if server is not None:
            await server.__aexit__(None, None, None)
        self._words.close()

    def _session(self, task: EpisodeTask) -> Session:
        settings, limits = self._settings, self._limits

        async def generate(ids: list[int], sampling: SamplingParams, name: str) -> SampleOutput:
            return await self._generate(ids, sampling, task.key, f"{name} of {task.name}")

        fixed = FixedSampling(
            task.sampling,
            lambda turn: task.turn_sampling(turn, 1).seed,
            limits.prompt,
            limits.room_of(task),
            settings.max_turn_tokens,
        )
        most = SessionLimits(calls=settings.max_turns, seconds=settings.episode_timeout_s)
        return Session(f"{task.key[0]}-{task.key[1]}", most, fixed, generate)


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
        counts = session.counts
        return AgentPlay(
            rows=rows_of(session.calls, self._room),
            messages=session.messages,
            num_turns=max((call.turn + 1 for call in session.calls), default=0),
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
