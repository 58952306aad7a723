"""Which engine answers a request: that of the episode's last one, else the one with the least to do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hrl.pictures import Picture
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import SampleOutput
from hrl.workers.rollout.single_requests import EngineAnswer, EngineRequest, EngineWork

_LONGEST_SILENCE_S = 5.0
"""After which an engine that asks for work is answered with none, so that it knows that somebody is there."""


class RoundOverError(Exception):
    """No engine asks for work any longer, and a request has no answer."""


@dataclass(eq=False)
class _Engine:
    queue: list[EngineRequest] = field(default_factory=list)
    withdrawn: list[int] = field(default_factory=list)
    outstanding_tokens: int = 0
    has_work: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Waiting:
    engine: int
    tokens: int
    answer: asyncio.Future[SampleOutput]


class Router:
    """Hands requests of episodes to the engines that ask for work.

    An episode stays with its engine, which has the keys and values of its earlier turns. A new one goes to the engine
    with the fewest outstanding tokens: those of contexts and of the longest answers that are still to come. What an
    engine samples depends on the request's seed and not on the choice.

    Attributes:
        is_open: Set while engines ask for work.
    """

    def __init__(self) -> None:
        self._engines: list[_Engine] = []
        self._waiting: dict[int, _Waiting] = {}
        self._engine_of: dict[object, int] = {}
        self._numbers = itertools.count()
        self.is_open = asyncio.Event()

    def open(self, num_engines: int) -> None:
        """Begin a round, in which so many engines ask for work."""
        self._engines = [_Engine() for _ in range(num_engines)]
        self._engine_of = {}
        self.is_open.set()

    def close(self) -> None:
        """End the round: engines hear that there is no more to come, and whoever waits that there is no answer."""
        self.is_open.clear()
        for engine in self._engines:
            engine.has_work.set()
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(RoundOverError())
        self._waiting = {}

    @property
    def outstanding_tokens(self) -> list[int]:
        """Of each engine."""
        return [engine.outstanding_tokens for engine in self._engines]

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        episode: object,
        name: str,
        *,
        may_fail: bool = False,
        experts_from: int | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        """Have a response sampled; whoever is cancelled while waiting withdraws the request.

        Args:
            token_ids: The context.
            sampling: How it is sampled.
            episode: Requests of the same episode go to the same engine.
            name: What errors call the request.
            may_fail: See `EngineRequest`.
            experts_from: Likewise.
            pictures: Likewise.

        Raises:
            RoundOverError: The round ended before there was an answer, or none has begun.
        """
        if not self.is_open.is_set():
            raise RoundOverError
        number = next(self._numbers)
        place = self._engine_of.get(episode)
        if place is None:
            place = min(range(len(self._engines)), key=lambda one: self._engines[one].outstanding_tokens)
            self._engine_of[episode] = place
        engine, tokens = self._engines[place], len(token_ids) + sampling.max_tokens
        waiting = _Waiting(place, tokens, asyncio.get_running_loop().create_future())
        self._waiting[number] = waiting
        engine.outstanding_tokens += tokens
        context = np.array(token_ids, np.int32)
        engine.queue.append(EngineRequest(number, name, context, sampling, may_fail, experts_from, pictures))
        engine.has_work.set()
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None:
                engine.outstanding_tokens -= tokens
                engine.queue = [request for request in engine.queue if request.number != number]
                engine.withdrawn.append(number)
                engine.has_work.set()
            raise

    def forget(self, episode: object) -> None:
        """Let go of an episode that is over."""
        self._engine_of.pop(episode, None)

    async def next_work(self, place: int) -> EngineWork | None:
        """Wait until there is work for an engine; None once there is no more to come."""
        engine = self._engines[place]
        if self.is_open.is_set() and not engine.has_work.is_set():
            try:
                async with asyncio.timeout(_LONGEST_SILENCE_S):
                    await engine.has_work.wait()
            except TimeoutError:
                return EngineWork()
        if not self.is_open.is_set():
            return None
        engine.has_work.clear()
        work = EngineWork(engine.queue, engine.withdrawn)
        engine.queue, engine.withdrawn = [], []
        return work

    def answered(self, answers: Iterable[EngineAnswer]) -> None:
        """Give answers to those who wait for them; those of withdrawn requests go nowhere."""
        for answer in answers:
            waiting = self._waiting.pop(answer.number, None)
            if waiting is None:
                continue
            self._engines[waiting.engine].outstanding_tokens -= waiting.tokens
            if not waiting.answer.done():
                waiting.answer.set_result(answer.output())
