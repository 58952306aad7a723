"""The episodes of a run: they are announced, played between environments and engines, and collected.

`EpisodeService` lives on one event loop, wherever that is; `EpisodeActor` runs it in a Ray actor on the driver's node,
which all ranks can reach and which has the files that the configuration names. Ranks pull work from it
(`hrl.workers.rollout.single_requests`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ray.exceptions import RayActorError

from hrl.episodes.episode import LEFT_OUT, Episode
from hrl.episodes.play import (
    AgentDoor,
    EpisodeError,
    EpisodeTask,
    Limits,
    Player,
    PlaySetup,
)
from hrl.episodes.pool import EnvironmentPool, PoolCounts
from hrl.episodes.router import Router
from hrl.models.tokenizer import load_tokenizer
from hrl.processes.lifetime import die_with_parent
from hrl.reward.pool import PlayedEpisode
from hrl.single_controller.node_service import NodeService
from hrl.single_controller.worker_errors import death_reason

if TYPE_CHECKING:
    from hrl.config.environment import EnvironmentConfig
    from hrl.environments.loading import EnvironmentSpec
    from hrl.workers.rollout.single_requests import EngineAnswer, EngineWork

logger = logging.getLogger(__name__)

MAX_FAILED_SHARE = 0.1
_CONCURRENT_CALLS = 1000


class EpisodeServiceError(EpisodeError):
    """The process that plays the episodes of a run is gone, or does not answer."""

    may_pass = True


class OpenAgentDoor(AgentDoor, Protocol):
    """One that has to be closed."""

    async def listen(self) -> str:
        """Return the address at which programs ask; it stays until the end."""

    def new_counts(self) -> Counter[str] | None:
        """Return what was counted of all that was asked since the last time; None where it does not listen."""

    async def close(self) -> None:
        """End what it listens with."""


@dataclass(frozen=True)
class EpisodeSetup:
    """What episodes are played with.

    Attributes:
        environment: Which environment, with its arguments.
        settings: The section `environment`.
        limits: What an episode's tokens have to fit into.
        tokenizer_path: Folder of the policy's tokenizer on this node.
        trust_remote_code: Whether it may bring its own code.
        stop_ids: Tokens that end a turn.
        template_kwargs: `data.apply_chat_template_kwargs`.
        rewards: The Ray actor that scores what was answered last; None where environments alone decide.
        agents: Makes what lets environments ask the policy themselves, of what episodes are played by and of what
            has turns sampled; None where none can.
    """

    environment: EnvironmentSpec
    settings: EnvironmentConfig
    limits: Limits
    tokenizer_path: str
    trust_remote_code: bool
    stop_ids: tuple[int, ...]
    template_kwargs: Mapping[str, Any]
    rewards: Any = None
    agents: Callable[[PlaySetup, Router], OpenAgentDoor] | None = None


@dataclass(frozen=True)
class CollectedEpisodes:
    """A batch that was played.

    Attributes:
        episodes: In the order in which they were announced.
        pool: What happened to the environments' processes since the batch before was collected.
        asked: What was counted since then of calls to the door of the run, by programs and from outside; None where
            none is open.
    """

    episodes: list[Episode]
    pool: PoolCounts
    asked: Counter[str] | None


class EpisodeService:
    """Plays the episodes of one batch after the other.

    Args:
        setup: What they are played with.
    """

    def __init__(self, setup: EpisodeSetup) -> None:
        self._setup = setup
        self.router = Router()
        self._pool = EnvironmentPool(setup.environment, setup.settings)
        self._told = PoolCounts()
        self._playing: dict[int, asyncio.Task[list[Episode]]] = {}
        self._agents: OpenAgentDoor | None = None
        self._player: Player

    async def start(self) -> None:
        """Load the tokenizer and start the environments' processes.

        Raises:
            EnvironmentLoadError: The environment can't be loaded.
            ModelSourceError: There is no usable tokenizer.
        """
        setup = self._setup
        starting = asyncio.ensure_future(self._pool.start())
        tokenizer = await asyncio.to_thread(
            load_tokenizer, setup.tokenizer_path, trust_remote_code=setup.trust_remote_code
        )
        playing = PlaySetup(tokenizer, setup.stop_ids, setup.template_kwargs, setup.settings, setup.limits)
        if setup.agents is not None:
            self._agents = setup.agents(playing, self.router)
        self._player = Player(playing, self._pool, self.router.generate, self._agents)
        await asyncio.gather(starting, self._player.prepare())

    async def listen(self) -> str:
        """Return the address at which the policy is asked from outside of its episodes."""
        assert self._agents is not None
        return await self._agents.listen()

    async def begin(
        self,
        batch: int,
        tasks: Sequence[EpisodeTask],
        num_engines: int,
        reward_round: int | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        """Begin the episodes of a batch, and return at once; engines are to ask for work. Another batch is dropped.

        Args:
            batch: Number of the batch, never used twice.
            tasks: The episodes.
            num_engines: Engines that will ask, numbered from 0.
            reward_round: Under which the last answers are sent to the rewards; None sends them nowhere.
            timeout_s: Seconds after which the episodes that are not over are cut off.
        """
        ends_at = asyncio.get_running_loop().time() + timeout_s
        for earlier in list(self._playing):
            await self._drop(earlier)
        self.router.open(num_engines)
        self._playing[batch] = asyncio.create_task(self._play_all(tasks, reward_round, ends_at))

    async def next_work(self, batch: int, engine: int) -> EngineWork | None:
        """Wait until there is work for an engine; None once the batch is over."""
        return await self.router.next_work(engine) if batch in self._playing else None

    async def answered(self, answers: Sequence[EngineAnswer]) -> None:
        """Take what an engine has finished."""
        self.router.answered(answers)

    async def collect(self, batch: int) -> CollectedEpisodes:
        """Return the episodes of a batch once all are over.

        Raises:
            EpisodeError: One failed and `environment.on_error=raise`, or too many did.
        """
        try:
            episodes = await self._playing[batch]
        finally:
            self._playing.pop(batch, None)
        counts, told = replace(self._pool.counts), self._told
        self._told = counts
        asked = None if self._agents is None else self._agents.new_counts()
        return CollectedEpisodes(episodes, counts.since(told), asked)

    async def close(self) -> None:
        """End all episodes and the environments' processes."""
        for batch in list(self._playing):
            await self._drop(batch)
        if self._agents is not None:
            await self._agents.close()
        await self._pool.close()

    async def _drop(self, batch: int) -> None:
        task = self._playing.pop(batch)
        task.cancel()
        await asyncio.wait({task})

    async def _play_all(self, tasks: Sequence[EpisodeTask], reward_round: int | None, ends_at: float) -> list[Episode]:
        settings = self._setup.settings
        seats = asyncio.Semaphore(max(settings.max_concurrent_episodes or len(tasks), 1))
        may_fail = 0 if settings.on_error == "raise" else most_failed(len(tasks))
        rule = f"environment.on_error={settings.on_error}" + (
            f" allows {may_fail}" if settings.on_error == "skip" else ""
        )
        failed: list[str] = []

        async def one(task: EpisodeTask) -> Episode:
            async with seats:
                episode = await self._player.play(task, ends_at)
            self.router.forget(task.key)
            if episode.end == "failed":
                failed.append(f"{self._title_of(task)}, uid {task.key[0]}, sample {task.key[1]}: {episode.error}")
                if len(failed) > may_fail:  # none of the batch will be used, so the others need not be played on
                    raise EpisodeError(
                        f"{len(failed)} of {len(tasks)} episodes failed ({rule}), and the batch was given up; "
                        f"`hrl env-test` plays some of them alone. The first, of {failed[0]}"
                    )
            if reward_round is not None:
                texts = [] if episode.end in LEFT_OUT else [*episode.texts]
                played = PlayedEpisode(texts, episode.messages)
                self._setup.rewards.submit.remote(reward_round, task.key, episode.answer, played)
            return episode

        try:
            async with asyncio.TaskGroup() as group:
                playing = [group.create_task(one(task)) for task in tasks]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self.router.close()
        return [task.result() for task in playing]

    def _title_of(self, task: EpisodeTask) -> str:
        """Return what the environment of an episode is called in messages."""
        named = task.row.get("env")
        return self._setup.environment.title if named is None else f"environment {named}"


def most_failed(num_episodes: int) -> int:
    """Return how many episodes of a batch may fail where failed ones are left out: a tenth, and one of a few."""
    return max(int(MAX_FAILED_SHARE * num_episodes), min(1, num_episodes - 1), 0)


# ---------------------------------------------------------------------- as a Ray actor


@dataclass(frozen=True)
class RayInbox:
    """What ranks reach the service by, see `hrl.workers.rollout.single_requests.Inbox`.

    Attributes:
        handle: Of the actor.
        batch: Whose requests they answer.
    """

    handle: Any
    batch: int

    async def take(self, engine: int) -> EngineWork | None:
        """Wait for work of an engine; None when the batch is over.

        Raises:
            EpisodeServiceError: The actor is gone.
        """
        try:
            work: EngineWork | None = await asyncio.wrap_future(
                self.handle.next_work.remote(self.batch, engine).future()
            )
        except RayActorError as error:
            raise EpisodeServiceError(f"the process that plays the episodes is gone: {death_reason(error)}") from None
        return work

    def give(self, answers: list[EngineAnswer]) -> None:
        """Hand over what is finished."""
        self.handle.answered.remote(answers)


class EpisodeProcess(EpisodeService):
    """The service in a process of its own, which `ps` shows as `ray::EpisodeProcess`."""

    def __init__(self, setup: EpisodeSetup) -> None:
        die_with_parent()  # the parent is the raylet, which ends with the driver; the kernel is faster than Ray here
        super().__init__(setup)

    async def process_id(self) -> int:
        """Return the id of this process."""
        return os.getpid()


class EpisodeActor(NodeService):
    """An `EpisodeService` in a Ray actor on this node, which starts at once: the same calls, results and errors.

    Args:
        setup: What episodes are played with.
    """

    title = "the episode service"
    failure, gone = EpisodeError, EpisodeServiceError
    closing = "close"
    start_timeout_s = 300.0

    def __init__(self, setup: EpisodeSetup) -> None:
        super().__init__(EpisodeProcess, setup, max_concurrency=_CONCURRENT_CALLS)
        self.begin_start()

    def inbox(self, batch: int) -> RayInbox:
        """Return what ranks reach the service by."""
        return RayInbox(self.handle, batch)

    def listen(self) -> str:
        """Return the address at which the policy is asked; see `EpisodeService.listen`."""
        return str(self._call("listen"))

    def begin(
        self, batch: int, tasks: Sequence[EpisodeTask], num_engines: int, reward_round: int | None, timeout_s: float
    ) -> None:
        """Begin the episodes of a batch; see `EpisodeService.begin`."""
        self._call("begin", batch, tasks, num_engines, reward_round, timeout_s)

    def collect(self, batch: int) -> CollectedEpisodes:
        """Return the episodes of a batch; see `EpisodeService.collect`."""
        collected: CollectedEpisodes = self._call("collect", batch)
        return collected
