"""Engines that somebody else started, as one rollout engine: which server gets a request, and what ends one.

All ranks of a run sample from all servers; the first rank gives them the weights. A server is used for a policy version
only once it has said that it holds that version, as this run sent it, and an answer counts only if the server says so
after it: a server that was started anew in between, or that another run has taken, is found before its samples are
used. A server that falters, after some tries, hands its requests to the others with the same seeds, and is used again
once it says that it is well and still holds this version. One that is gone is left alone until the next sync.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import sys
import time
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from hrl.pictures import Picture
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import (
    EngineDeadError,
    EngineSetup,
    FinishReason,
    OnTokens,
    RolloutEngine,
    RolloutError,
    SampleOutput,
)
from hrl.workers.rollout.server_http import (
    Address,
    Patience,
    ServerError,
    ServerFaltersError,
    ServerGoneError,
    ServerRefusesError,
    key_of,
)
from hrl.workers.weight_sync.wire import WeightSyncError

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 30.0
"""For one question about a server's health; SGLang takes up to 20 s to answer it."""
QUESTION_TIMEOUT_S = 120.0
"""For the question which weights a server holds, all its tries together: it is answered between two iterations."""
QUESTION = Patience(4, try_s=30.0)
HEALTH_INTERVAL_S = 10.0
_MOST_UNHEALTHY = 3
"""Questions in a row without a good answer after which a server is taken to falter."""
_MOST_FALLS = 3
"""Between two syncs; a server that falters more often is left alone until the next one."""
COMEBACK_S = 60.0
"""How long a request waits for a server that falters, where no other is left."""
_COMEBACK_LOOK_S = 0.25
_SHARE_OF_SYNC = 0.25
"""Of a sync's deadline for each of its calls to a server: one that hangs leaves time for the others."""
OF_SYNC = Patience(1, too_short=f"{_SHARE_OF_SYNC:g} of rollout.weight_sync.timeout_s too short for these weights")
_LEAST_SPREAD = 4
"""Requests by which a server may be ahead before the next with the same prompt goes elsewhere."""
_BYTES_OF_REPLY, _BYTES_OF_TOKEN = 1 << 20, 4096
"""Bounds of an answer: a token comes with its text, perhaps as escapes, and its log-prob."""


HALF_WRITTEN = "weights"
"""In what a look tells: that they are not those of one version, and why."""


class Server(ABC):
    """One server, spoken to in its own protocol.

    Args:
        url: Its address.
        setup: What the engine is opened with.

    Attributes:
        address: How it is asked.
        url: Its address, for messages.
        why_down: Why it is not used; None while it is.
        may_return: It may be used again before the next sync, if it says that it holds the right weights.
        outstanding: Requests of this rank that it works on.
        confirmed: Policy version that it said it holds, before it was first sampled from.
    """

    def __init__(self, url: str, setup: EngineSetup) -> None:
        self.setup = setup
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = soft // (2 * len(setup.config.server.urls))  # half of this process's, for all servers
        self.address = Address(url, key_of(setup.config.server.api_key), max(1, min(setup.config.max_num_seqs, files)))
        self.url = self.address.url
        self.why_down: str | None = None
        self.may_return = False
        self.outstanding = 0
        self.confirmed: int | None = None
        self._falls = 0
        self._fell = asyncio.Event()

    def fall(self, reason: str, *, may_return: bool = False) -> None:
        """Stop using the server: until it is well again, where it may return; else until the next sync."""
        if self.why_down is None:
            self._falls += 1
            self.why_down, self.may_return = reason, may_return and self._falls <= _MOST_FALLS
            self._fell.set()
            until = "it is well again" if self.may_return else "the next weight sync"
            logger.warning("%s is left alone until %s: %s", self.url, until, reason)

    def rise(self, confirmed: int | None = None) -> None:
        """Use the server again.

        Args:
            confirmed: The version that it says it holds; None where a sync will bring one.
        """
        self.why_down, self.may_return, self.confirmed = None, False, confirmed
        self._fell = asyncio.Event()
        if confirmed is None:
            self._falls = 0

    async def while_up(self, work: Awaitable[T]) -> T:
        """Return the result of work that the server does; raise, and cancel it, when the server falls meanwhile.

        Raises:
            ServerGoneError: It fell.
        """
        task, fell = asyncio.ensure_future(work), asyncio.ensure_future(self._fell.wait())
        try:
            await asyncio.wait({task, fell}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ServerGoneError(str(self.why_down))  # which `fall` knows already
        finally:
            task.cancel()
            fell.cancel()

    @abstractmethod
    async def look(self, timeout_s: float) -> dict[str, str]:
        """Check that this run can sample from the server, changing nothing; return what to tell of it, by label.

        Raises:
            ServerError: It can't; says why and what to do.
        """

    @abstractmethod
    async def health(self) -> None:
        """Ask for a sign of life.

        Raises:
            ServerError: There was none.
        """

    @abstractmethod
    async def sample(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> SampleOutput:
        """Sample one response; its version is that which the server said it holds when it had finished."""

    @abstractmethod
    async def held_version(self, timeout_s: float = QUESTION_TIMEOUT_S) -> int:
        """Return the policy version that the server holds; where it falters, it is asked again within the deadline.

        Raises:
            ServerGoneError: It holds none that this run sent.
            ServerFaltersError: It does not answer.
        """

    def most_bytes(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> int:
        """Return the most bytes that an answer can have."""
        return _BYTES_OF_REPLY + _BYTES_OF_TOKEN * sampling.max_tokens + 32 * len(prompt_ids)


S = TypeVar("S", bound=Server)


async def look_at_all(servers: Sequence[S], timeout_s: float) -> list[tuple[S, dict[str, str] | BaseException]]:
    """Look at servers side by side, and return what there is to tell of each, or its error; connections are closed."""
    try:
        return await ServedEngine._each(servers, lambda server: server.look(timeout_s))
    finally:
        for server in servers:
            await server.address.close()


class ServedEngine(RolloutEngine, Generic[S]):
    """All servers of a run.

    Subclasses say which kind they are.

    Raises:
        RolloutError: `rollout.engine_kwargs` has arguments for it, or its key is not there.
    """

    own_process = False
    kind: type[S]

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        if setup.arguments:
            raise RolloutError(
                f"rollout.engine_kwargs.{setup.config.name}={setup.arguments}: servers have the arguments that they "
                "were started with"
            )
        self.takes_weights = setup.rank == 0
        self.servers: list[S] = []
        self._watching: list[asyncio.Task[None]] = []
        self._counts = {"rollout/failovers": 0}

    async def start(self) -> None:
        """Look at all servers.

        Raises:
            ServerError: One can't be used, or none is there.
        """
        self.servers = [self.kind(url, self.setup) for url in self.setup.config.server.urls]
        for server, failure in await self._each(self.servers, lambda server: server.look(LOOK_TIMEOUT_S)):
            if isinstance(failure, ServerGoneError):
                server.fall(str(failure))
            elif isinstance(failure, BaseException):
                raise failure
            elif half := failure.get(HALF_WRITTEN):
                logger.warning("%s: its weights are %s", server.url, half)
        self._up()
        self._unusable = "no weights have been sent to the servers"
        self._watching = [asyncio.create_task(self._watch(server)) for server in self.servers]

    async def shutdown(self) -> None:
        """Close the connections. The servers stay, with the weights that they have."""
        watching, self._watching = self._watching, []
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        servers, self.servers = self.servers, []
        for server in servers:
            await server.address.close()

    def take_counts(self) -> dict[str, float]:
        """Return how many requests went to another server because theirs fell; see `RolloutEngine.take_counts`."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return {name: float(count) for name, count in counts.items() if count}

    async def _generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        request_id: str,
        on_tokens: OnTokens | None,
        pictures: Sequence[Picture],
    ) -> SampleOutput:
        if pictures:
            raise RolloutError(f"request {request_id} shows pictures, which servers are not sent: set rollout.name=hf")
        tried: dict[str, str] = {}
        end = math.inf
        while True:
            try:
                server = self._choose(prompt_ids, tried)
            except EngineDeadError:
                end = min(end, time.monotonic() + COMEBACK_S)
                if not await self._one_returns(end):
                    raise
                tried.clear()
                continue
            end = math.inf  # the next wait is one of its own
            tried[server.url] = "the request failed"
            server.outstanding += 1
            try:
                return await server.while_up(self._sample(server, prompt_ids, sampling, request_id))
            except ServerGoneError as error:
                tried[server.url] = str(error)
                server.fall(str(error), may_return=isinstance(error, ServerFaltersError))
                self._counts["rollout/failovers"] += 1
            finally:
                server.outstanding -= 1

    async def _one_returns(self, end: float) -> bool:
        """Wait until a server is used that was not, no longer than to `end`; return whether there is one."""
        while time.monotonic() < end:
            if any(server.why_down is None for server in self.servers):
                return True
            if not any(server.may_return for server in self.servers):
                return False
            await asyncio.sleep(_COMEBACK_LOOK_S)
        return False

    async def _sample(
        self, server: S, prompt_ids: list[int], sampling: SamplingParams, request_id: str
    ) -> SampleOutput:
        if server.confirmed != self.policy_version:
            self._require_held(server, await server.held_version())
            server.confirmed = self.policy_version
        output = await server.sample(prompt_ids, sampling, request_id)
        self._require_held(server, output.policy_version)
        wrong = self._out_of_vocabulary(output.token_ids)
        if wrong is not None:
            raise ServerRefusesError(
                f"{server.url} answered request {request_id} with token {wrong}, and the model's vocabulary has "
                f"{self.setup.tokens.vocab_size}: it serves another model than {self.setup.model.path}"
            )
        return output

    def _require_held(self, server: S, version: int) -> None:
        if version != self.policy_version:
            raise ServerGoneError(
                f"{server.url} holds the weights of version {version}, and this run samples version "
                f"{self.policy_version}: does another run give it weights?"
            )

    def _out_of_vocabulary(self, token_ids: Sequence[int]) -> int | None:
        return next((token for token in token_ids if not 0 <= token < self.setup.tokens.vocab_size), None)

    def _choose(self, prompt_ids: list[int], tried: Mapping[str, str]) -> S:
        """Return the server for a prompt: the same for all its samples, which share its cache there, if it has room."""
        up = [server for server in self._up() if server.url not in tried]
        if not up:
            raise self._none_left(tried)
        most = math.ceil(1.25 * sum(server.outstanding for server in up) / len(up)) + _LEAST_SPREAD
        prompt = array("q", prompt_ids).tobytes()
        ranked = sorted(up, key=lambda server: zlib.crc32(server.url.encode(), zlib.crc32(prompt)))
        return next((server for server in ranked if server.outstanding < most), ranked[0])

    def _up(self) -> list[S]:
        up = [server for server in self.servers if server.why_down is None]
        if not up:
            raise self._none_left()
        return up

    def _none_left(self, tried: Mapping[str, str] | None = None) -> EngineDeadError:
        if not self.servers:
            return EngineDeadError(f"{self.name}: not started, or shut down")
        known = tried or {}
        reasons = "; ".join(f"{server.url}: {server.why_down or known.get(server.url)}" for server in self.servers)
        return EngineDeadError(
            f"no server of rollout.server.urls is left that can sample ({reasons}). Start them again, and the run with "
            "them: it goes on from its newest checkpoint"
        )

    async def _watch(self, server: S) -> None:
        """Ask a server for a sign of life now and then: one that hangs with open connections does not say so."""
        unhealthy = 0
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            if server.why_down is not None:
                unhealthy = 0
                await self._take_back(server)
                continue
            if not server.outstanding:
                unhealthy = 0
                continue
            try:
                await server.health()
                unhealthy = 0
            except RolloutError as error:
                unhealthy += 1
                if unhealthy >= _MOST_UNHEALTHY:
                    server.fall(f"{unhealthy} times in a row without a sign of life: {error}", may_return=True)

    async def _take_back(self, server: S) -> None:
        """Use a server again that has faltered, if it is well and holds the version that is sampled from."""
        if not server.may_return or self._next_version is not None or self._unusable is not None:
            return
        try:
            await server.health()
            held = await server.held_version()
        except ServerFaltersError:
            return
        except (ServerError, WeightSyncError) as error:
            server.may_return = False
            logger.warning("%s does not come back before the next weight sync: %s", server.url, error)
            return
        # Not if a sync has begun meanwhile, which brings all servers back by itself.
        if held == self.policy_version and self._next_version is None and server.may_return:
            server.rise(confirmed=held)
            logger.warning("%s is used again: it is well, and holds version %d", server.url, held)

    # ------------------------------------------------------------------ weights

    async def weights_pass(self, version: int) -> None:
        """Note that the first rank gives the servers the weights of `version`."""
        self._raise_all()
        self.policy_version = version
        self._unusable = None

    def _raise_all(self) -> None:
        """Use the servers again that have fallen: a sync brings all that a new one needs."""
        for server in self.servers:
            server.rise()

    def _version_under_way(self) -> int:
        if self._next_version is None:
            raise WeightSyncError(f"{self.name}: no weight sync is under way")
        return self._next_version

    async def _require_version(self, server: S, version: int) -> None:
        held = await server.held_version()
        if held != version:
            raise WeightSyncError(f"{server.url} says that it holds version {held} after a sync to {version}")
        server.confirmed = version

    @property
    def _call_s(self) -> float:
        return _SHARE_OF_SYNC * self.setup.config.weight_sync.timeout_s

    async def _on_all(self, call: Callable[[S], Awaitable[T]]) -> list[T]:
        """Make a call to every server that is used; one that does not answer falls, a refusal is everybody's."""
        results = list[T]()
        for server, result in await self._each(self._up(), call):
            if isinstance(result, ServerGoneError):
                server.fall(str(result))  # till the next sync: whether it has finished this one, nobody knows
            elif isinstance(result, ServerRefusesError):
                raise WeightSyncError(str(result)) from result
            elif isinstance(result, BaseException):
                raise result
            else:
                results.append(result)
        self._up()
        return results

    @staticmethod
    async def _each(servers: Sequence[S], call: Callable[[S], Awaitable[T]]) -> list[tuple[S, T | BaseException]]:
        results = await asyncio.gather(*map(call, servers), return_exceptions=True)
        return list(zip(servers, results, strict=True))


def read_tokens(
    url: str,
    request_id: str,
    token_ids: Any,
    log_probs: Any,
    reason: FinishReason | None,
) -> tuple[list[int], list[float], FinishReason]:
    """Return an answer's parts, if they are what they have to be.

    Args:
        url: Of the request.
        request_id: Of the request.
        token_ids: As they came.
        log_probs: As they came.
        reason: None where what came is none that is known.

    Raises:
        ServerRefusesError: Names the address, and what the answer lacks.
    """
    said = f"{url} answered request {request_id}"
    if not (isinstance(token_ids, list) and all(type(token) is int for token in token_ids)):
        raise ServerRefusesError(f"{said} without token ids, and text can't be trained on: is it the right server?")
    numbers = isinstance(log_probs, list) and all(type(number) in (int, float) for number in log_probs)
    if not numbers or len(log_probs) != len(token_ids):
        raise ServerRefusesError(f"{said} without a log-prob of each token: is it the right server?")
    # A comparison, because an integer of hundreds of digits is no float at all.
    if not all(abs(number) <= sys.float_info.max for number in log_probs):
        raise ServerRefusesError(f"{said} with a log-prob that is not a finite number: are its weights sound?")
    if reason is None:
        raise ServerRefusesError(f"{said} without a reason for its end that is known")
    return token_ids, [float(number) for number in log_probs], reason
