"""A trial of an environment before a run: some episodes, and whether it keeps to what a run relies on.

Episodes are played as a run plays them, in a process for environments. Then what the policy did is done again, from the
same seeds: alone, among the other episodes at the same time, and only up to its first turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from hrl.config.arithmetic import count
from hrl.data.chat import ChatTemplateError, render_prompt, text_of, with_tools
from hrl.environments.interface import Action, EnvironmentReplyError, Observation, StepResult
from hrl.environments.loading import EnvironmentSpec
from hrl.environments.replies import observation_to_plain, step_to_plain
from hrl.episodes.clock import EpisodeClock
from hrl.episodes.episode import Episode, limits_by_end
from hrl.episodes.parser_choice import ParserChoiceError, tool_parser_for
from hrl.episodes.play import EpisodeTask, Generate, Limits, Player, PlaySetup
from hrl.episodes.pool import EnvironmentFaultError, EnvironmentPool, EnvironmentTimeoutError, LiveEnvironment
from hrl.episodes.router import Router
from hrl.pictures import Picture
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import SampleOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.config.environment import EnvironmentConfig
    from hrl.episodes.service import OpenAgentDoor

Key = tuple[str, int]
_SLOW = 0.5
"""The share of a deadline from which on a call is worth a remark."""
_SHOWN = 200
_BY_ITSELF = ("done", "truncated")
"""Ends that an environment itself tells."""
_ERRORS = 3
_POLL_S = 0.2
"""How long a program is let run before its episode is cut off."""


@dataclass(frozen=True)
class Check:
    """Something that a run relies on.

    Attributes:
        name: What it is.
        is_right: Whether it holds; None for a remark.
        says: What was found, a clause.
    """

    name: str
    is_right: bool | None
    says: str


@dataclass
class Record:
    """What happened between the policy and the environment in the last attempt at an episode.

    Attributes:
        task: The episode.
        first: What `reset` returned.
        steps: What the policy did, and what came of it.
        sampled: The context of each turn, and what was sampled in it.
        pictures: That the context of a turn shows.
        slowest_s: The longest call of the environment.
        slowest_call: Its name.
    """

    task: EpisodeTask
    first: Observation | None = None
    steps: list[tuple[Action, StepResult]] = field(default_factory=list)
    sampled: list[tuple[list[int], SampleOutput]] = field(default_factory=list)
    pictures: tuple[Picture, ...] = ()
    slowest_s: float = 0.0
    slowest_call: str = ""

    @property
    def is_agent(self) -> bool:
        """Whether the environment asks the policy itself."""
        return self.first is not None and self.first.is_agent

    def took(self, seconds: float, call: str) -> None:
        """Take how long a call took."""
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest_call = seconds, call


_NOT_REPEATED = Check("repeats", None, "not looked at: an agent's program is not run again with the same answers")


Policy = Callable[[Record, list[int], SamplingParams], Awaitable[SampleOutput]]
"""Samples a turn: what has happened in the episode, the context, how it is sampled."""


@dataclass(frozen=True)
class TrialSetup:
    """What an environment is tried with.

    Attributes:
        environment: Which one.
        settings: The section `environment`.
        limits: What an episode's tokens have to fit into.
        tokenizer: The policy's.
        stop_ids: Tokens that end a turn.
        template_kwargs: `data.apply_chat_template_kwargs`.
        has_reward: Whether reward functions or a model of the run say what an episode is worth, too.
    """

    environment: EnvironmentSpec
    settings: EnvironmentConfig
    limits: Limits
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    template_kwargs: Mapping[str, Any]
    has_reward: bool


@dataclass(frozen=True)
class Trial:
    """What came of a trial.

    Attributes:
        episodes: As a run would have them.
        checks: What was found.
    """

    episodes: Sequence[Episode]
    checks: Sequence[Check]

    @property
    def fits(self) -> bool:
        """Whether all that a run relies on holds."""
        return all(check.is_right is not False for check in self.checks)


async def run_trial(
    setup: TrialSetup,
    tasks: Sequence[EpisodeTask],
    policy: Policy,
    agents: Callable[[PlaySetup, Router], OpenAgentDoor] | None = None,
) -> Trial:
    """Play episodes, and look at what came of them.

    Args:
        setup: What it is tried with.
        tasks: The episodes.
        policy: Samples their turns.
        agents: As in `hrl.episodes.service.EpisodeSetup`.

    Raises:
        EnvironmentLoadError: The environment can't be loaded.
    """
    # In one process, where episodes can get in each other's way.
    settings = setup.settings.model_copy(update={"num_workers": 1})
    records: dict[Key, Record] = {}
    async with EnvironmentPool(setup.environment, settings) as pool:

        async def generate(
            context: list[int],
            sampling: SamplingParams,
            key: Key,
            _: str,
            *,
            experts_from: int | None,
            pictures: tuple[Picture, ...],
        ) -> SampleOutput:
            records[key].pictures = pictures
            output = await policy(records[key], context, sampling)
            records[key].sampled.append((context, output))
            return output

        kept = _Kept(pool)
        watched = _Watched(kept, records, {task.key: task for task in tasks})
        playing = PlaySetup(setup.tokenizer, setup.stop_ids, setup.template_kwargs, settings, setup.limits)
        async with _opened(agents, playing, _AtOnce(generate)) as door:
            player = Player(playing, watched, generate, door)
            await player.prepare()
            episodes = [await player.play(task) for task in tasks]
        played = [
            (number, records[episode.key])
            for number, episode in enumerate(episodes, start=1)
            if episode.end != "failed"
        ]
        # What an agent was told is good for one episode alone, and each call of it only looks whether it is done.
        stepped = [(number, record) for number, record in played if not record.is_agent]
        checks = [
            _replies(episodes),
            *_ends(setup, episodes),
            *_tools(setup, [record for _, record in played]),
            *_masks(episodes, records),
            *_rewards(setup, [episode for episode in episodes if episode.end != "failed"]),
            *(await _repeats(kept, stepped) if stepped or not played else [_NOT_REPEATED]),
            *(await _closes(kept, played, functools.partial(_opened, agents, playing))),
            *_times(settings, [record for record in records.values() if not record.is_agent]),
            *_cut(setup, [record for _, record in stepped]),
        ]
    return Trial(episodes, checks)


# ---------------------------------------------------------------------------------------------- what happens


@contextlib.asynccontextmanager
async def _opened(
    agents: Callable[[PlaySetup, Router], OpenAgentDoor] | None, playing: PlaySetup, router: Router
) -> AsyncIterator[OpenAgentDoor | None]:
    """Give a door that is closed at the end; None where none can be opened."""
    if agents is None:
        yield None
        return
    door = agents(playing, router)
    try:
        yield door
    finally:
        await door.close()


class _AtOnce(Router):
    """A router without engines: whoever plays in the trial samples at once."""

    def __init__(self, sample: Generate) -> None:
        super().__init__()
        self._sample = sample

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        episode: Any,
        name: str,
        *,
        may_fail: bool = False,
        experts_from: int | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        return await self._sample([*token_ids], sampling, episode, name, experts_from=experts_from, pictures=pictures)


class _Kept:
    """A pool that keeps its environments, whose ends are looked at."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self.opened: list[LiveEnvironment] = []

    def open(self, key: Key, row: Mapping[str, Any], seed: int, sample_seed: int | None = None) -> LiveEnvironment:
        self.opened.append(self._pool.open(key, row, seed, sample_seed))
        return self.opened[-1]

    async def settled(self) -> None:
        await self._pool.settled()


class _Watched:
    """A pool that keeps what its environments were told and what they said."""

    def __init__(self, pool: _Kept, records: dict[Key, Record], tasks: Mapping[Key, EpisodeTask]) -> None:
        self._pool, self._records, self._tasks = pool, records, tasks

    def open(self, key: Key, row: Mapping[str, Any], seed: int, sample_seed: int | None = None) -> _WatchedEnvironment:
        self._records[key] = Record(self._tasks[key])
        return _WatchedEnvironment(self._pool.open(key, row, seed, sample_seed), self._records[key])


class _WatchedEnvironment:
    clock: EpisodeClock | None = None

    def __init__(self, live: LiveEnvironment, record: Record) -> None:
        self._live, self._record = live, record

    async def reset(self) -> Observation:
        with self._timed("reset"):
            self._record.first = first = await self._live.reset()
        return first

    async def step(self, action: Action) -> StepResult:
        with self._timed("step"):
            result = await self._live.step(action)
        self._record.steps.append((action, result))
        return result

    @contextlib.contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        """Keep how long a call takes, also one that is past its deadline."""
        began = time.perf_counter()
        try:
            yield
        except EnvironmentTimeoutError:
            self._record.took(time.perf_counter() - began, call)
            raise
        self._record.took(time.perf_counter() - began, call)

    async def close(self) -> None:
        await self._live.close()


# ---------------------------------------------------------------------------------------------- what is found


def _replies(episodes: Sequence[Episode]) -> Check:
    failed = [(number, episode) for number, episode in enumerate(episodes, start=1) if episode.end == "failed"]
    if not failed:
        return Check("replies", True, "what `reset` and `step` return is what a run takes, in all episodes")
    told: dict[str, int] = {}
    for number, episode in failed:
        told.setdefault(str(episode.error), number)
    errors = "\n".join(f"episode {number}: {error}" for error, number in [*told.items()][:_ERRORS])
    more = f"\nand {len(told) - _ERRORS} other errors" if len(told) > _ERRORS else ""
    says = f"{len(failed)} of {count(len(episodes), 'episode')} failed:\n{errors}{more}"
    return Check("replies", False, says)


def _ends(setup: TrialSetup, episodes: Sequence[Episode]) -> list[Check]:
    if all(episode.end == "failed" for episode in episodes):
        return []
    limits = limits_by_end(setup.settings, setup.limits.prompt, setup.limits.response)
    found = []
    for number, episode in enumerate(episodes, start=1):
        by = f" ({limits[episode.end]})" if episode.end in limits else ""
        found.append(f"episode {number} {episode.end} after {count(episode.num_turns, 'turn')}{by}")
    by_itself = any(episode.end in _BY_ITSELF for episode in episodes)
    never = "" if by_itself else "; the environment itself ended none (done=True): is there a way to its end?"
    return [Check("ends", None, ", ".join(found) + never)]


def _tools(setup: TrialSetup, records: Sequence[Record]) -> list[Check]:
    """Return whether the template shows the tools, and whether calls can be read."""
    firsts = [record.first for record in records if record.first is not None and record.first.tools is not None]
    with_some = [first for first in firsts if first.tools]
    if firsts and not with_some:
        why = (
            "there are none for the policy to call: name functions with environment.tools=[my_tools.py:function], or "
            "mark methods of the class with @hrl.tool"
        )
        return [Check("tools", None, why)]
    if not with_some:
        return []
    first = with_some[0]
    tools = first.tools or ()
    names = ", ".join(str(tool["function"].get("name")) for tool in tools)
    template = setup.tokenizer.chat_template
    shown = "the first tokens are the environment's own"
    if first.messages is not None:
        try:
            text = render_prompt(setup.tokenizer, first.messages, with_tools(setup.template_kwargs, tools))
        except ChatTemplateError as error:
            return [Check("tools", False, f"the chat template refuses {names}: {error}")]
        hidden = [name for tool in tools if (name := str(tool["function"].get("name"))) not in text]
        if hidden:
            why = (
                f"the first prompt does not name {', '.join(hidden)}, so the policy never learns of them: the chat "
                "template shows no tools. Take a model whose template does, or describe them in the first messages"
            )
            return [Check("tools", False, why)]
        shown = f"the first prompt names {names}"
    try:
        parser, why = tool_parser_for(template if isinstance(template, str) else None, setup.settings.tool_parser)
    except ParserChoiceError as error:
        return [Check("tools", False, str(error))]
    return [Check("tools", True, f"{shown}; calls are read by vLLM's parser {parser} ({why})")]


def _masks(episodes: Sequence[Episode], records: Mapping[Key, Record]) -> list[Check]:
    """Return whether all tokens that are trained on were sampled, each in the context in which it is trained."""
    wrong = functools.partial(Check, "masks", False)
    trained = sampled = 0
    for number, episode in enumerate(episodes, start=1):
        if episode.end == "failed":
            continue
        rows = [([*row.prompt_ids, *row.response_ids], [0] * len(row.prompt_ids) + [*row.mask]) for row in episode.rows]
        trained += sum(sum(mask) for _, mask in rows)
        record = records[episode.key]
        for turn, (context, output) in enumerate(record.sampled[: episode.num_turns], start=1):
            kept = max((_kept_of(context, output.token_ids, *row) for row in rows), default=0)
            # An agent may ask to be told no more than what stands before a text; the rest is nothing that it acts on.
            if kept < len(output.token_ids) and not (record.is_agent and kept):
                return [wrong(f"turn {turn} of episode {number} is trained in another context")]
            sampled += kept
    if trained != sampled:
        return [wrong(f"{trained} tokens are trained, and {sampled} were sampled")]
    if not trained:
        return []
    return [Check("masks", True, f"all {count(trained, 'token')} that would be trained were sampled in their context")]


def _kept_of(context: Sequence[int], sampled: Sequence[int], ids: Sequence[int], mask: Sequence[int]) -> int:
    """Return how many of the sampled tokens a row trains in their context, from the first on."""
    begin = len(context)
    if [*ids[:begin]] != [*context]:
        return 0
    behind = zip(sampled, ids[begin:], mask[begin:], strict=False)
    return len([*takewhile(lambda one: one[0] == one[1] and one[2], behind)])


def _rewards(setup: TrialSetup, episodes: Sequence[Episode]) -> list[Check]:
    if not episodes:
        return []
    sums = [
        sum(reward for reward in episode.turn_rewards if reward is not None)
        for episode in episodes
        if any(reward is not None for reward in episode.turn_rewards)
    ]
    if sums:
        says = f"finite; the episodes' sums are {', '.join(f'{total:.4g}' for total in sums)}"
        finite = Check("rewards", True, says)
        if len(sums) == 1 or min(sums) < max(sums):
            return [finite]
        equal = (
            f"all episodes earned {sums[0]:.4g}: a policy learns only where samples of a prompt earn different rewards"
        )
        return [finite, Check("spread", None, equal)]
    if setup.has_reward:
        says = "none from the environment: the run's reward functions say what an episode is worth"
        return [Check("rewards", True, says)]
    why = "no turn had a reward, and the run has no reward function: return one from `step`, or set reward.functions"
    return [Check("rewards", False, why)]


async def _repeats(pool: _Kept, played: Sequence[tuple[int, Record]]) -> list[Check]:
    """Return whether the same seed and actions give the same, alone and among others."""
    if not played:
        return []
    alone = [await _difference(pool, *one) for one in played]
    if (found := next(filter(None, alone), None)) is not None:
        why = f"{found}: what is drawn has to come from the `seed` of `reset`, and from nothing that episodes share"
        return [Check("repeats", False, why)]
    among = await asyncio.gather(*(_difference(pool, *one) for one in [*played, *played]))
    if (found := next(filter(None, among), None)) is not None:
        why = (
            f"{found}, while others play in the same process: they share something, such as a global variable or the "
            "state of the module random"
        )
        return [Check("repeats", False, why)]
    says = "the same seed and actions give the same again, alone and with other episodes in between"
    return [Check("repeats", True, says)]


async def _difference(pool: _Kept, number: int, record: Record) -> str | None:
    """Do the same again, and return the first difference, a clause."""
    task = record.task
    live = pool.open(task.key, task.row, *task.environment_seeds)
    try:
        place = f"`reset` of episode {number}"
        again = observation_to_plain(await live.reset())
        then = observation_to_plain(record.first or Observation())
        if again != then:
            return _told(place, "returned", then, again)
        for turn, (action, result) in enumerate(record.steps, start=1):
            place = f"turn {turn} of episode {number}"
            then, again = step_to_plain(result), step_to_plain(await live.step(action))
            for name in ("observation", "reward", "done", "truncated"):
                if then[name] != again[name]:
                    return _told(place, f"had, as its `{name}`,", then[name], again[name])
    except (EnvironmentFaultError, EnvironmentReplyError) as error:
        return f"{place} failed when it was played again: {error}"
    finally:
        await live.close()
    return None


def _told(place: str, verb: str, then: object, again: object) -> str:
    return f"{place} {verb} {_short(then)}, and {_short(again)} when it was played again"


def _short(value: object) -> str:
    if isinstance(value, dict) and isinstance(messages := value.get("messages"), list) and messages:
        value = text_of(messages[-1]) if "content" in messages[-1] else messages[-1]
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


async def _closes(
    pool: _Kept,
    played: Sequence[tuple[int, Record]],
    opened: Callable[[Router], AbstractAsyncContextManager[OpenAgentDoor | None]],
) -> list[Check]:
    """Return whether `close` works, at the end and after an episode that was cut off.

    Nothing is said of episodes for which no object was made, and of those in which an earlier call never ends.

    Args:
        pool: Where environments live.
        played: The episodes that did not fail.
        opened: Opens a door for programs, whose calls a router answers.
    """
    records = [record for _, record in played]
    nobody = Router()
    nobody.open(1)  # no engine asks for work there, so that a program waits for its answer until its episode is closed
    async with opened(nobody) as door:
        for record in records:
            live = pool.open(record.task.key, record.task.row, *record.task.environment_seeds)
            session = await door.open(record.task, EpisodeClock(math.inf)) if record.is_agent and door else None
            try:
                await live.reset()
                if session is not None:
                    await live.step(Action(text=json.dumps({**session.settings, "poll_s": _POLL_S})))
                elif record.steps:
                    await live.step(record.steps[0][0])
            except (EnvironmentFaultError, EnvironmentReplyError):
                pass  # told already, as what does not repeat
            finally:
                if session is not None:
                    await session.close()
                await live.close()
    await pool.settled()
    closed = [live.closed for live in pool.opened if not live.is_stuck and live.closed is not None]
    if failed := closed.count(False):
        return [Check("close", False, f"`close` failed or took too long {failed}×; the log above has why")]
    if not closed:
        return []
    each = "each episode" if len(closed) == len(pool.opened) else "each episode in which no other call was at work"
    early = "after a turn" if not all(record.is_agent for record in records) else "while a program waits for an answer"
    ends = f", also for those that end {early}" if records else ""
    return [Check("close", True, f"called once for {each}{ends}")]


def _times(settings: EnvironmentConfig, records: Sequence[Record]) -> list[Check]:
    slowest = max(records, key=lambda record: record.slowest_s, default=None)
    if slowest is None or not slowest.slowest_call:
        return []
    limit = settings.step_timeout_s
    near = ", near its deadline" if slowest.slowest_s > _SLOW * limit else ""
    near = ", and past its deadline" if slowest.slowest_s >= limit else near
    took = f"{slowest.slowest_s:.3g} s of environment.step_timeout_s={limit:g}"
    return [Check("time", None, f"the slowest call was `{slowest.slowest_call}`, {took}{near}")]


def _cut(setup: TrialSetup, records: Sequence[Record]) -> list[Check]:
    """Return a remark about messages that are too long."""
    limit = setup.settings.max_observation_tokens
    if limit is None:
        return []
    said = [
        text_of(message)
        for record in records
        for _, result in record.steps
        if isinstance(result.observation, Observation)
        for message in result.observation.messages or ()
        if "content" in message
    ]
    longest = max((len(setup.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in said), default=0)
    if longest <= limit:
        return []
    says = f"one has {longest} tokens; what is longer than environment.max_observation_tokens={limit} loses its middle"
    return [Check("observations", None, says)]
