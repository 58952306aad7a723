"""One episode, from the first prompt to its end, as a coroutine: the policy's turn, the environment's, and so on."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hrl.data.chat import ChatTemplateError, tools_of
from hrl.environments.interface import Action, EnvironmentReplyError, Observation, StepResult
from hrl.environments.replies import read_observation
from hrl.episodes.clock import EpisodeClock
from hrl.episodes.episode import EndReason, Episode, EpisodeRow
from hrl.episodes.parser_choice import known_parsers
from hrl.episodes.parsing import TurnParsers
from hrl.episodes.pictures import EpisodePictures
from hrl.episodes.pool import EnvironmentFailedError, EnvironmentFaultError, EnvironmentLostError
from hrl.episodes.tokens import Transcript
from hrl.episodes.tokens_as_text import stopped_at
from hrl.errors import HrlError
from hrl.pictures import Picture
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import SampleOutput, hashed_seed, sample_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.config.environment import EnvironmentConfig
    from hrl.data.pictures import PictureTokens

T = TypeVar("T")


class Generate(Protocol):
    """Has a turn sampled, as `Router.generate` does."""

    def __call__(
        self,
        context: list[int],
        sampling: SamplingParams,
        episode: tuple[str, int],
        name: str,
        /,
        *,
        experts_from: int | None,
        pictures: tuple[Picture, ...],
    ) -> Awaitable[SampleOutput]:
        """Sample a response.

        Args:
            context: Token ids.
            sampling: How.
            episode: Key of the episode that the turn belongs to.
            name: What errors call the turn.
            experts_from: Place in the context from which on the experts of its tokens are wanted; None for none.
            pictures: That the context shows.
        """


class World(Protocol):
    """The environment of one episode, as `LiveEnvironment` is."""

    clock: EpisodeClock | None

    async def reset(self) -> Observation:
        """Begin the episode."""

    async def step(self, action: Action) -> StepResult:
        """Take the policy's turn."""

    async def close(self) -> None:
        """Let go of it, without a long wait."""


class Worlds(Protocol):
    """Where environments live, as `EnvironmentPool` is."""

    def open(self, key: tuple[str, int], row: Mapping[str, Any], seed: int, sample_seed: int | None = None) -> World:
        """Return the environment of an episode."""


_AGENT_POLL_S = 5.0
"""How long an environment that asks the policy itself may take to say that it is still at work."""
_MANY_TOKENS = 1000
"""From so many on, rendering and reading take longer than handing them to a thread."""
_MOST_INNOCENT_ATTEMPTS = 5
"""How often an episode is begun anew where the process was lost by others."""


class EpisodeError(HrlError, RuntimeError):
    """Episodes can't be played; names the first and what happened."""


@dataclass(frozen=True)
class EpisodeTask:
    """An episode that is to be played.

    Attributes:
        key: `(uid, sample_index)`.
        row: What the environment is given: the row of the data set, with `prompt` as messages.
        sampling: How the policy's turns are sampled; each gets a seed of its own. `max_tokens` holds for all tokens
            after the first prompt.
        run_seed, step: What seeds derive from.
        held_out: Which of the held-out rows it plays. Their environments begin alike at every step, so that validations
            can be compared; None where the policy is trained.
        prompt_ids: The tokens of the row's prompt in a run without environment.
        with_experts: Its rows have the experts that the engine chose for their tokens.
        pictures: That the row's prompt shows.
    """

    key: tuple[str, int]
    row: Mapping[str, Any]
    sampling: SamplingParams
    run_seed: int
    step: int
    held_out: int | None = None
    prompt_ids: Sequence[int] | None = None
    with_experts: bool = False
    pictures: tuple[Picture, ...] = ()

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"episode (uid {self.key[0]}, sample {self.key[1]})"

    @property
    def environment_seeds(self) -> tuple[int, int]:
        """The seeds of its environment: that of all samples of its prompt, whose rewards are compared, and its own."""
        uid, sample = self.key
        of: tuple[int | str, ...] = (self.step, uid) if self.held_out is None else ("held out", self.held_out)
        return hashed_seed(self.run_seed, *of, "environment"), hashed_seed(self.run_seed, *of, sample, "environment")

    def turn_sampling(self, turn: int, max_tokens: int) -> SamplingParams:
        """Return how a turn is sampled. The first turn's seed is that of a response of a single turn."""
        seed = sample_seed(self.run_seed, self.step, *self.key, *([] if turn == 0 else [turn]))
        return replace(self.sampling, seed=seed, max_tokens=max_tokens)


@dataclass(frozen=True)
class Limits:
    """What an episode's tokens have to fit into.

    Attributes:
        prompt: Longest first prompt, in tokens.
        response: All tokens after it.
    """

    prompt: int
    response: int

    def room_of(self, task: EpisodeTask) -> int:
        """Return how many tokens an episode may have after its first prompt: what it asks for may be less."""
        return min(self.response, task.sampling.max_tokens)


@dataclass(frozen=True)
class PlaySetup:
    """What episodes are played by.

    Attributes:
        tokenizer: The policy's.
        stop_ids: Tokens that end a turn.
        template_kwargs: `data.apply_chat_template_kwargs`.
        settings: The section `environment`.
        limits: What an episode's tokens have to fit into.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    template_kwargs: Mapping[str, Any]
    settings: EnvironmentConfig
    limits: Limits

    def parsers(self) -> TurnParsers:
        """Return what reads the policy's turns."""
        settings = self.settings
        return TurnParsers(self.tokenizer, settings.tool_parser, settings.reasoning_parser, stop_ids=self.stop_ids)

    def shown_by(self, task: EpisodeTask) -> EpisodePictures | None:
        """Return the pictures of an episode's row; None without.

        Raises:
            DatasetError: The model does not see.
        """
        return EpisodePictures(self._picture_tokens, task.pictures) if task.pictures else None

    @functools.cached_property
    def _picture_tokens(self) -> PictureTokens:
        from hrl.data.pictures import PictureTokens

        return PictureTokens(self.tokenizer)


@dataclass(frozen=True)
class AgentPlay:
    """What the program of an episode has asked the policy for.

    Attributes:
        rows: What its calls make up.
        messages: The longest conversation.
        turn_places: As in `Episode`.
        texts, answer: As in `Episode`.
        num_tool_calls, num_tool_errors, num_unread_calls, engine_s: As in `Episode`.
        limit: The limit of the run that it ran into.
        metrics: Of its calls.
    """

    rows: Sequence[EpisodeRow]
    messages: Sequence[Mapping[str, Any]]
    turn_places: Sequence[int | None]
    texts: Sequence[str]
    answer: str
    num_tool_calls: int
    num_tool_errors: int
    num_unread_calls: int
    engine_s: float
    limit: EndReason | None
    metrics: Mapping[str, float]


class AgentSession(Protocol):
    """Where the program of an episode reaches the policy."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What the program is told; fields of `hrl.environments.agent.ClientSettings`."""

    def played(self) -> AgentPlay:
        """Return what the program has asked for so far."""

    async def close(self) -> None:
        """Refuse further calls, and end those that are being answered."""


class AgentDoor(Protocol):
    """Lets programs ask the policy."""

    async def open(self, task: EpisodeTask, clock: EpisodeClock) -> AgentSession:
        """Return the session of an episode, whose clock stands at its calls; whoever opens it closes it."""


@dataclass(eq=False)
class _Play:
    """An episode in play."""

    task: EpisodeTask
    transcript: Transcript | None = None
    agent: AgentPlay | None = None
    rewards: list[float | None] = field(default_factory=list)
    token_rewards: list[Sequence[float] | None] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    answer: str = ""
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    num_unread_calls: int = 0
    engine_s: float = 0.0
    environment_s: float = 0.0

    def ended(self, end: EndReason, attempts: int, error: str | None = None) -> Episode:
        """Return what is left of it."""
        script, agent = self.transcript, self.agent
        if agent is not None:
            self.texts, self.answer, self.engine_s = [*agent.texts], agent.answer, agent.engine_s
            self.num_tool_calls, self.num_tool_errors = agent.num_tool_calls, agent.num_tool_errors
            self.num_unread_calls = agent.num_unread_calls
            self.metrics |= agent.metrics
            # The reward is that of the whole episode, so it stands at the last turn.
            self.rewards = [*[None] * (len(self.texts) - len(self.rewards)), *self.rewards]
            return self._episode(agent.rows, agent.messages, agent.turn_places, end, attempts, error)
        if script is None:
            return self._episode([], [], [], end, attempts, error)
        return self._episode(script.rows(), script.messages, script.turn_places, end, attempts, error)

    def _episode(
        self,
        rows: Sequence[EpisodeRow],
        messages: Sequence[Mapping[str, Any]],
        turn_places: Sequence[int | None],
        end: EndReason,
        attempts: int,
        error: str | None,
    ) -> Episode:
        return Episode(
            key=self.task.key,
            rows=rows,
            messages=messages,
            turn_places=turn_places,
            turn_rewards=[*self.rewards, *[None] * (len(self.texts) - len(self.rewards))],
            end=end,
            error=error,
            num_tool_calls=self.num_tool_calls,
            num_tool_errors=self.num_tool_errors,
            num_unread_calls=self.num_unread_calls,
            num_cut_observations=0 if self.transcript is None else self.transcript.num_cut_texts,
            engine_s=self.engine_s,
            environment_s=self.environment_s,
            attempts=attempts,
            texts=self.texts,
            answer=self.answer,
            metrics=self.metrics,
            token_rewards=self.token_rewards if any(one is not None for one in self.token_rewards) else (),
        )

    def pay(self, reward: float | Sequence[float] | None) -> None:
        """Take what a turn was worth, or what each of its tokens was."""
        of_tokens = reward if isinstance(reward, Sequence) else None
        self.token_rewards.append(of_tokens)
        self.rewards.append(reward if not isinstance(reward, Sequence) else math.fsum(reward))


class Player:
    """Plays episodes.

    Args:
        setup: What they are played by.
        pool: Where environments live.
        generate: Has a turn sampled.
        agents: Lets environments that are programs ask the policy themselves; None where none can.
    """

    def __init__(
        self,
        setup: PlaySetup,
        pool: Worlds,
        generate: Generate,
        agents: AgentDoor | None = None,
    ) -> None:
        self._setup, self._settings, self._limits = setup, setup.settings, setup.limits
        self._pool, self._generate, self._agents = pool, generate, agents
        self._parsers = setup.parsers()
        self._thread = ThreadPoolExecutor(1, "texts")

    async def prepare(self) -> None:
        """Import the engine's parsers if it is known that they will be needed, so that no episode waits for them.

        Raises:
            ParserChoiceError: There is no vLLM, which has them.
        """
        if self._settings.will_be_parsed:
            await asyncio.to_thread(known_parsers)

    async def play(self, task: EpisodeTask, batch_ends_at: float = math.inf) -> Episode:
        """Play an episode to its end. What fails in its environment ends it as failed; it is not raised.

        Args:
            task: The episode.
            batch_ends_at: Time of the event loop at which it is cut off, whatever it waits for.
        """
        return self._fitting(await self._play_attempts(task, batch_ends_at))

    def _fitting(self, episode: Episode) -> Episode:
        """Return an episode as failed if a batch has no place for one of its rows."""
        limits = self._limits
        for branch, row in enumerate(episode.rows):
            prompt, response = len(row.prompt_ids), len(row.response_ids)
            if episode.end != "failed" and (prompt > limits.prompt or response > limits.response):
                error = (
                    f"branch {branch} has a prompt of {prompt} tokens and {response} behind it, more than "
                    f"data.max_prompt_length={limits.prompt} and data.max_response_length={limits.response} allow"
                )
                return replace(episode, end="failed", error=error)
        return episode

    async def _play_attempts(self, task: EpisodeTask, batch_ends_at: float) -> Episode:
        """Play an episode, anew where its process was lost; all attempts have one deadline."""
        clock = EpisodeClock(self._settings.episode_timeout_s, batch_ends_at)
        attempts, blamed = 0, 0
        while True:
            play = _Play(task)
            if clock.is_over:
                return play.ended("deadline", attempts)
            attempts += 1
            try:
                end = await self._play(play, clock)
            except EnvironmentLostError as lost:
                blamed += lost.is_to_blame
                if blamed >= self._settings.max_attempts or attempts >= _MOST_INNOCENT_ATTEMPTS:
                    return play.ended("failed", attempts, str(lost))
            except (EnvironmentFaultError, EnvironmentReplyError, ChatTemplateError, _UnplayableError) as error:
                return play.ended("failed", attempts, str(error))
            else:
                return play.ended(end, attempts)

    async def _play(self, play: _Play, clock: EpisodeClock) -> EndReason:
        live = self._pool.open(play.task.key, play.task.row, *play.task.environment_seeds)
        live.clock = clock
        try:
            async with clock.running() as deadline:
                return await self._take_turns(play, live, clock)
        except TimeoutError:
            if not deadline.expired():
                raise
            return "deadline"
        finally:
            await live.close()

    async def _take_turns(self, play: _Play, live: World, clock: EpisodeClock) -> EndReason:
        settings, task = self._settings, play.task
        began = time.perf_counter()
        first = await live.reset()
        play.environment_s += time.perf_counter() - began
        if first.is_agent:
            return await self._let_agent_play(play, live, clock)
        is_row = task.prompt_ids is not None and _is_prompt_of(task.row, first)
        begun = functools.partial(
            Transcript,
            self._setup.tokenizer,
            self._setup.stop_ids,
            self._setup.template_kwargs,
            first=replace(first, tools=_tools_of(task.row)) if is_row else first,
            max_observation_tokens=settings.max_observation_tokens,
            prompt_ids=task.prompt_ids if is_row else None,
            pictures=self._setup.shown_by(task),
        )
        script = await self._aside(begun, _size(first))
        if script.num_tokens > self._limits.prompt:
            raise _UnplayableError(
                f"the first prompt has {script.num_tokens} tokens, more than data.max_prompt_length="
                f"{self._limits.prompt}; tools and what `reset` returns count. Raise data.max_prompt_length"
            )
        play.transcript = script
        parser = await self._parsers.ready(first.tools)
        room = self._limits.room_of(task)
        for turn in range(settings.max_turns):
            left = room - script.num_response_tokens
            if left < 1:
                return "max_tokens"
            sampling = task.turn_sampling(turn, min(left, settings.max_turn_tokens or left))
            began = time.perf_counter()
            with clock.standing():
                name, experts_from = f"turn {turn} of {task.name}", script.num_routed if task.with_experts else None
                output = await self._generate(
                    script.context, sampling, task.key, name, experts_from=experts_from, pictures=script.pictures
                )
            play.engine_s += time.perf_counter() - began
            if settings.stop and output.finish_reason != "abort":
                output = await self._aside(functools.partial(self._stopped, output), len(output.token_ids))
            if output.finish_reason == "abort":
                raise _UnplayableError(f"the engine aborted turn {turn}")
            read = functools.partial(parser.parse, output.token_ids, turn=turn)
            parsed = await self._aside(read, len(output.token_ids))
            script.add_turn(output.token_ids, output.log_probs, output.policy_version, parsed.message, output.routed)
            play.texts.append(parsed.text)
            play.answer = parsed.text
            play.num_tool_calls += len(parsed.tool_calls) + (parsed.error is not None)
            play.num_unread_calls += parsed.error is not None
            action = Action(
                text=parsed.text,
                token_ids=tuple(output.token_ids),
                content=parsed.content,
                reasoning=parsed.reasoning,
                tool_calls=parsed.tool_calls,
                finish_reason=output.finish_reason,
                turn=turn,
                error=parsed.error,
            )
            began = time.perf_counter()
            result = await live.step(action)
            play.environment_s += time.perf_counter() - began
            play.pay(result.reward)
            play.metrics.update(result.metrics)
            play.num_tool_errors = int(play.metrics.get("tool_errors", 0)) + play.num_unread_calls
            # The environment knows whether its task is over, whatever the last tokens of its last turn would have been.
            if result.done and not result.truncated:
                return "done"
            if output.finish_reason == "length" and len(output.token_ids) == left:
                return "max_tokens"
            if result.done:
                return "truncated"
            if turn + 1 < settings.max_turns:
                heard = _full(result.observation)
                await self._aside(functools.partial(script.add_observation, heard), script.num_tokens + _size(heard))
        return "max_turns"

    def _stopped(self, output: SampleOutput) -> SampleOutput:
        """Return a turn up to the token that completes a text of `environment.stop`; nothing behind it was said."""
        found = stopped_at(self._setup.tokenizer, output.token_ids, self._settings.stop)
        if found is None:
            return output
        count = found.num_tokens
        return replace(
            output, token_ids=output.token_ids[:count], log_probs=output.log_probs[:count], finish_reason="stop"
        )

    async def _aside(self, work: Callable[[], T], num_tokens: int) -> T:
        """Return what is made of tokens or of their text; of many on a thread, so that no other episode waits for it.

        Whoever is cancelled waits for the thread, which may be changing the episode.
        """
        if num_tokens < _MANY_TOKENS:
            return work()
        working = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait({working})
            raise

    async def _let_agent_play(self, play: _Play, live: World, clock: EpisodeClock) -> EndReason:
        """Have an environment ask the policy itself until it has a result."""
        if self._agents is None:
            raise _UnplayableError(
                "the environment asks the policy itself, and no server is there for it; try its program against "
                "`hrl serve`"
            )
        if play.task.pictures:
            raise _UnplayableError(
                "the environment asks the policy itself, and its row shows pictures, which the server takes from no "
                "program: set data.image_key=null to read the words alone"
            )
        session = await self._agents.open(play.task, clock)
        began = time.perf_counter()
        try:
            poll_s = min(_AGENT_POLL_S, self._settings.step_timeout_s / 4)
            action = Action(text=json.dumps({**session.settings, "poll_s": poll_s}))
            while not (result := await live.step(action)).done:
                action = Action(text="")
        except EnvironmentFailedError:
            if session.played().limit is None:
                raise
            result = StepResult(done=True)  # it could not go on, and is not to blame
        finally:
            await session.close()
            play.agent = session.played()
            play.environment_s += max(time.perf_counter() - began - play.agent.engine_s, 0.0)
        if not play.agent.texts:
            raise _UnplayableError("the environment ended without asking the policy anything")
        play.pay(result.reward)
        play.metrics.update(result.metrics)
        return play.agent.limit or ("truncated" if result.truncated else "done")


class _UnplayableError(HrlError, RuntimeError):
    """An episode can't go on, for a reason that is neither the environment's failure nor a limit."""


def _is_prompt_of(row: Mapping[str, Any], first: Observation) -> bool:
    """Return whether an environment begins with the row's own prompt and brings no tools."""
    if first.messages is None or first.tools is not None:
        return False
    try:
        return first == read_observation(row["prompt"])
    except EnvironmentReplyError:  # nobody can have returned it
        return False


def _tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that the data set has found in a row."""
    tools = tools_of(row)
    return None if isinstance(tools, str) else tools


def _size(observation: Observation) -> int:
    """Return about how many tokens an observation has, at least."""
    return sum(len(str(one.get("content") or "")) // 4 for one in observation.messages or ())


def _full(observation: object) -> Observation:
    """Return what a step showed; without anything, the policy has another turn."""
    return observation if isinstance(observation, Observation) else Observation(messages=[])
