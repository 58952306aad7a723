"""Episodes are played between environments and engines, whatever some of them meet."""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError
from transformers import PreTrainedTokenizerBase

from hrl.columns import object_column
from hrl.config.data import DataConfig
from hrl.config.environment import EnvironmentConfig
from hrl.data.dataset import RLHFDataset
from hrl.environments.interface import Action, Observation, StepResult
from hrl.environments.loading import EnvironmentLoadError
from hrl.environments.single_turn import SingleTurn
from hrl.environments.tools import ToolEnvironment
from hrl.episodes.episode import Episode, EpisodeRow
from hrl.episodes.metrics import episode_metrics
from hrl.episodes.parsing import ParsedTurn, TurnParser
from hrl.episodes.play import AgentPlay, EpisodeError, EpisodeTask, Limits, Player, PlaySetup
from hrl.episodes.pool import EnvironmentLostError, PoolCounts, environment_of
from hrl.episodes.rows import episode_batch
from hrl.episodes.service import EpisodeService, EpisodeServiceError, EpisodeSetup, RayInbox, most_failed
from hrl.errors import may_pass
from hrl.protocol import DataProto
from hrl.reward.pool import PlayedEpisode
from hrl.trainer.ppo.episodes import tasks_of
from hrl.trainer.ppo.generation import Asked, prompt_batch
from hrl.workers.requests import SampleRequest, SamplingParams
from hrl.workers.rollout.base import RolloutError, SampleOutput, sample_seed
from hrl.workers.rollout.single_requests import serve_requests
from tests.episodes.families import FAMILIES, TOOL

GAMES = Path(__file__).with_name("games.py")
TOKENIZER: PreTrainedTokenizerBase = FAMILIES["smollm2"].tokenizer
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
VERSION = 4


class Engine:
    """Samples letters that follow from seed and context, and waits now and then."""

    policy_version = VERSION

    def __init__(self, wait_s: Callable[[int], float] = lambda seed: seed % 3 * 1e-3) -> None:
        self.wait_s = wait_s
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.cancelled = 0

    async def generate(self, prompt: list[int], sampling: SamplingParams, request_id: str, **_: Any) -> SampleOutput:
        self.asked.append((prompt, sampling))
        try:
            await asyncio.sleep(self.wait_s(sampling.seed))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        drawn = hashlib.sha256(repr((prompt, sampling.seed)).encode()).digest()
        ids = TOKENIZER.encode("".join(chr(97 + byte % 26) for byte in drawn[: 1 + drawn[0] % 5]))
        ids = [*ids, STOP][: sampling.max_tokens]
        return SampleOutput(ids, [-0.25] * len(ids), "stop" if ids[-1] == STOP else "length", VERSION)


def setup(environment: str, limits: Limits, **settings: Any) -> EpisodeSetup:
    config = EnvironmentConfig(path=f"{GAMES}:{environment}", **{"num_workers": 1, **settings})
    return EpisodeSetup(environment_of(config), config, limits, "", False, (STOP,), {})


def tasks(count: int, **row: Any) -> list[EpisodeTask]:
    sampling = SamplingParams(max_tokens=1000)
    return [EpisodeTask((f"u{place}", place % 2), {"prompt": [], **row}, sampling, 1, 2) for place in range(count)]


def play(
    environment: str,
    asked: Sequence[EpisodeTask],
    *,
    engines: Sequence[Any] = (),
    limits: Limits = Limits(100, 300),  # noqa: B008  a frozen value
    rewards: Any = None,
    timeout_s: float = math.inf,
    **settings: Any,
) -> list[Episode]:
    """Plays episodes with engines that pull, as ranks do."""
    engines = engines or [Engine()]

    async def run() -> list[Episode]:
        service = EpisodeService(replace(setup(environment, limits, **settings), rewards=rewards))
        await service.start()
        try:
            await service.begin(1, asked, len(engines), None if rewards is None else 7, timeout_s)

            async def give(answers: list[Any]) -> None:
                await service.answered(answers)

            ranks = [
                serve_requests(
                    engine,
                    lambda place=place: service.next_work(1, place),
                    lambda answers: asyncio.ensure_future(give(answers)),
                    len(TOKENIZER),
                )
                for place, engine in enumerate(engines)
            ]
            await asyncio.gather(*ranks)
            return (await service.collect(1)).episodes
        finally:
            await service.close()

    return asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hrl.episodes.service.load_tokenizer", lambda *_, **__: TOKENIZER)


def what_is_trained(episodes: Sequence[Episode]) -> list[Any]:
    return [(one.key, one.rows, one.turn_rewards, one.messages, one.end) for one in episodes]


def test_the_same_seed_gives_the_same_episodes_for_one_engine_two_and_few_at_a_time() -> None:
    asked = tasks(12)
    one = play("Game", asked)
    two = play("Game", asked, engines=[Engine(), Engine(lambda seed: seed % 5 * 2e-3)], num_workers=2)
    few = play("Game", asked, max_concurrent_episodes=3)
    assert what_is_trained(one) == what_is_trained(two) == what_is_trained(few)
    assert [episode.key for episode in one] == [task.key for task in asked]
    assert len({tuple(episode.rows[0].response_ids) for episode in one}) == 12, "each has seeds of its own"


def test_every_trained_token_was_sampled_in_its_context_with_the_seed_of_its_turn() -> None:
    engine = Engine()
    (task,) = tasks(1)
    (episode,) = play("Game", [task], engines=[engine])
    (row,) = episode.rows
    assert episode.num_turns == 3 and episode.end == "done"
    assert episode.turn_rewards == [
        0.5,
        0.5,
        float(sum(turn == 2 and bit for turn, bit in zip(row.turns, row.mask, strict=True))),
    ]
    for turn, (context, sampling) in enumerate(engine.asked):
        start = next(i for i, (bit, of) in enumerate(zip(row.mask, row.turns, strict=True)) if bit and of == turn)
        assert context == [*row.prompt_ids, *row.response_ids[:start]]
        assert sampling.seed == task.turn_sampling(turn, 16).seed
    assert set(row.versions) == {VERSION, -1} and set(row.log_probs) == {-0.25, 0.0}
    assert len({sampling.seed for _, sampling in engine.asked}) == 3


def test_samples_of_a_prompt_play_the_same_game_and_what_is_a_samples_own_has_to_be_asked_for() -> None:
    asked = [replace(one, key=("same", place)) for place, one in enumerate(tasks(2))]
    asked += [replace(asked[1], key=("other", 1)), replace(asked[1], step=3)]
    said = [str(episode.messages[0]["content"]).split() for episode in play("Draws", asked)]
    seeds, of_samples = zip(*said, strict=True)
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3, "another prompt is another game, and so is another step"
    assert len({*seeds, *of_samples}) == 7


CHAT = [{"role": "user", "content": "What is 1 + 1?"}]
#: Rows of all kinds; the last two are longer than they may be.
ROWS = [
    {"prompt": CHAT},
    {"prompt": "What is 1 + 1?", "tools": json.dumps([TOOL])},
    {"prompt": [*CHAT, {"role": "assistant", "content": "It is"}]},
    {"prompt": "one two three " * 60},
    {"prompt": "one two three " * 60, "tools": [TOOL]},
]


def episodes_of(
    rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, truncation: Any = "error"
) -> tuple[RLHFDataset, list[Episode], dict[int, list[int]]]:
    """What comes of rows that are asked again: as a run reads them, their episodes, and the context of each seed."""
    data = RLHFDataset(rows, tokenizer, DataConfig(max_prompt_length=150, truncation=truncation, seed=0))
    prompts = data.batch(range(len(rows)))
    request: SampleRequest[Any] = SampleRequest(
        plan=None, sampling=SamplingParams(max_tokens=100), seed=1, step=2, with_greedy=False, reward_round=None
    )
    asked, engine = tasks_of(Asked(prompts, prompt_batch(prompts, 1, step=2), request, validate=False)), Engine()
    episodes = play("Questions", asked, engines=[engine], limits=Limits(150, 100))
    assert [episode.end for episode in episodes] == ["done"] * len(rows)
    return data, episodes, {sampling.seed: context for context, sampling in engine.asked}


@pytest.fixture
def with_tools(monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerBase:
    """The tokenizer with a chat template that shows tools."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = FAMILIES["qwen2_5"].tokenizer.chat_template
    monkeypatch.setattr("hrl.episodes.service.load_tokenizer", lambda *_, **__: tokenizer)
    return tokenizer


@pytest.mark.parametrize("truncation", ["left", "right"])
def test_a_rows_own_prompt_has_the_tokens_of_a_run_without_environment_and_the_episode_goes_on_behind_it(
    truncation: str, with_tools: PreTrainedTokenizerBase
) -> None:
    data, episodes, contexts = episodes_of(ROWS, with_tools, truncation)
    again = with_tools.encode("\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n")
    lengths = []
    for place, episode in enumerate(episodes):
        prompt = data[place]["raw_prompt_ids"]
        assert contexts[sample_seed(1, 2, *episode.key)] == prompt
        (row,) = episode.rows
        assert row.prompt_ids == prompt, "the episode has one row"
        first = row.response_ids[: row.mask.index(0)]
        behind = contexts[sample_seed(1, 2, *episode.key, 1)]
        assert behind[: len(prompt) + len(first)] == [*prompt, *first] and behind[-len(again) :] == again
        lengths.append(len(prompt))
    assert lengths[0] < lengths[2] < lengths[1] < lengths[3] == lengths[4] == 150


def test_a_branch_behind_a_rows_own_prompt_shows_the_rows_tools_and_goes_on_behind_its_last_words(
    with_tools: PreTrainedTokenizerBase,
) -> None:
    template = str(with_tools.chat_template)
    said = "(message.content if loop.last or message.role != 'assistant' else '(said)')"
    written, instead = "message.content + '<|im_end|>", said + " + '<|im_end|>"
    with_tools.chat_template = template.replace(rf"\n' + {written}", rf"\n' + {instead}")
    assert with_tools.chat_template != template
    _, episodes, contexts = episodes_of(ROWS[:3], with_tools)
    shown = [with_tools.decode(contexts[sample_seed(1, 2, *episode.key, 1)]) for episode in episodes]
    assert ["look_up" in text for text in shown] == [False, True, False]
    assert [text.count("(said)") for text in shown] == [1, 1, 2] and [len(one.rows) for one in episodes] == [2, 2, 2]


def test_an_environment_that_fails_ends_its_own_episode_alone() -> None:
    asked = tasks(20)
    asked[7] = replace(asked[7], row={"prompt": [], "what": "raise"})
    episodes = play("Faulty", [replace(task, row={"what": "", **task.row}) for task in asked])
    assert [episode.end for episode in episodes] == ["done"] * 7 + ["failed"] + ["done"] * 12
    assert "KeyError: 'no such drawer'" in episodes[7].error and "Faulty" in episodes[7].error
    assert episodes[7].num_turns == 2 and episodes[7].turn_rewards == [0.5, None]


@pytest.mark.parametrize(
    ("on_error", "rule", "num_first"),
    [
        ("skip", "2 of 4 episodes failed (environment.on_error=skip allows 1)", 2),
        ("raise", "1 of 4 episodes failed (environment.on_error=raise)", 1),
    ],
)
def test_too_many_that_fail_end_the_batch_with_the_first_of_them_and_none_is_waited_for(
    on_error: str, rule: str, num_first: int
) -> None:
    asked = tasks(4, what="raise")
    seeds = {task.turn_sampling(turn, 1).seed for task in asked[:num_first] for turn in range(2)}
    engine = Engine(lambda seed: 0.0 if seed in seeds else 100.0)
    with pytest.raises(EpisodeError) as end:
        play("Faulty", asked, engines=[engine], on_error=on_error)
    told, _, first = str(end.value).partition(" The first, of ")
    assert told == f"{rule}, and the batch was given up; `hrl env-test` plays some of them alone."
    assert first.startswith(f"environment Faulty in {GAMES}, uid u") and "KeyError: 'no such drawer'" in first
    assert engine.cancelled == 4 - num_first


def test_episodes_that_fail_are_told_with_the_environment_that_their_row_names() -> None:
    with pytest.raises(EpisodeError, match="The first, of environment nowhere, uid u0, sample 0: the row .*'nowhere'"):
        play("Game", tasks(1, env="nowhere"))


def test_episodes_that_lose_their_process_are_played_again_from_their_seeds(tmp_path: Path) -> None:
    straight = play("Faulty", tasks(6, what=""))
    lost = tasks(6, what="")
    lost[2] = replace(lost[2], row={"prompt": [], "what": "die once", "mark": str(tmp_path / "mark")})
    again = play("Faulty", lost)
    assert what_is_trained(again) == what_is_trained(straight)
    assert again[2].attempts == 2 and all(episode.attempts <= 2 for episode in again)


def test_one_that_always_ends_its_process_counts_out_after_its_attempts_and_no_other_does() -> None:
    asked = tasks(12, what="")
    asked[5] = replace(asked[5], row={"prompt": [], "what": "die"})
    episodes = play("Faulty", asked, num_workers=2)
    assert [episode.end for episode in episodes] == ["done"] * 5 + ["failed"] + ["done"] * 6
    assert episodes[5].attempts == 2 and "exit" in episodes[5].error


@pytest.mark.parametrize(
    ("environment", "settings", "limits", "end"),
    [
        ("Game", {"max_turns": 2}, Limits(100, 300), "max_turns"),
        ("Game", {}, Limits(100, 20), "max_tokens"),
        ("Slow", {"episode_timeout_s": 0.5}, Limits(100, 300), "deadline"),
    ],
)
def test_a_limit_ends_an_episode_with_what_it_has(environment: str, settings: Any, limits: Limits, end: str) -> None:
    (episode,) = play(environment, tasks(1), limits=limits, **settings)
    (row,) = episode.rows
    assert episode.end == end and episode.is_truncated and episode.error is None
    assert 0 < len(row.response_ids) <= limits.response and row.mask[-1] == 1


@pytest.mark.parametrize(("episodes", "failed"), [(0, 0), (1, 0), (2, 1), (9, 1), (19, 1), (20, 2), (512, 51)])
def test_a_tenth_may_fail_and_one_of_a_few(episodes: int, failed: int) -> None:
    assert most_failed(episodes) == failed


def test_a_batch_ends_what_is_not_over_by_its_deadline_and_begins_nothing_after_it() -> None:
    engine = Engine(lambda seed: 60.0)
    episodes = play("Game", tasks(6), engines=[engine], max_concurrent_episodes=2, timeout_s=0.5)
    assert {episode.end for episode in episodes} == {"deadline"} and engine.cancelled == 2
    assert [episode.attempts for episode in episodes] == [1, 1, 0, 0, 0, 0]


def test_an_environment_that_takes_long_to_close_holds_no_episode_up() -> None:
    episodes = play("Clinging", tasks(1), step_timeout_s=120.0)
    assert {episode.end for episode in episodes} == {"done"}


class Lost:
    """A world whose process is always lost by others, a while after it was begun."""

    def open(self, *_: Any) -> Lost:
        return self

    async def reset(self) -> Observation:
        await asyncio.sleep(0.2)
        raise EnvironmentLostError("gone")

    async def close(self) -> None:
        pass


def test_all_attempts_have_one_deadline() -> None:
    settings = EnvironmentConfig(episode_timeout_s=0.3)
    player = Player(PlaySetup(TOKENIZER, (STOP,), {}, settings, Limits(9, 9)), Lost(), Engine().generate)  # type: ignore[arg-type]
    episode = asyncio.run(player.play(*tasks(1)))
    assert (episode.end, episode.attempts) == ("deadline", 2)


class Program:
    """The environment, door and session of a program whose calls make up one row."""

    settings: Mapping[str, str] = {}

    def __init__(self, prompt: int, response: int) -> None:
        zeros = [0] * response
        self.row = EpisodeRow([7] * prompt, zeros, [1] * response, [0.0] * response, zeros, zeros)

    def played(self) -> AgentPlay:
        return AgentPlay([self.row], [], [], [""], "", 0, 0, 0, 0.0, None, {})

    def open(self, *_: Any) -> Any:
        return self if len(_) > 2 else asyncio.sleep(0, self)

    async def reset(self) -> Observation:
        return Observation(messages=[], is_agent=True)

    async def step(self, _: Any) -> StepResult:
        return StepResult(done=True)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("prompt", "response", "end"), [(5, 7, "done"), (6, 7, "failed"), (5, 8, "failed")])
def test_a_row_for_which_a_batch_has_no_place_fails_its_episode(prompt: int, response: int, end: str) -> None:
    one: Any = Program(prompt, response)
    player = Player(PlaySetup(TOKENIZER, (STOP,), {}, EnvironmentConfig(), Limits(5, 7)), one, one, one)
    episode = asyncio.run(player.play(*tasks(1)))
    assert episode.end == end
    if end == "failed":
        assert f"branch 0 has a prompt of {prompt} tokens and {response} behind it" in str(episode.error)
        assert "data.max_prompt_length=5 and data.max_response_length=7" in str(episode.error)


def test_a_rank_that_finds_the_service_gone_says_so_as_what_may_pass() -> None:
    gone: Future[Any] = Future()
    gone.set_exception(ActorDiedError())
    reference = SimpleNamespace(future=lambda: gone)
    handle = SimpleNamespace(next_work=SimpleNamespace(remote=lambda *_: reference))
    with pytest.raises(EpisodeServiceError, match="the process that plays the episodes is gone") as end:
        asyncio.run(RayInbox(handle, 1).take(0))
    assert may_pass(end.value)


def test_what_was_asked_for_limits_an_episode_too() -> None:
    (task,) = tasks(1)
    (episode,) = play("Game", [replace(task, sampling=SamplingParams(max_tokens=7))])
    (row,) = episode.rows
    assert episode.end == "max_tokens" and len(row.response_ids) <= 7


@pytest.mark.parametrize("most", [1000, 40])
def test_a_turn_ends_with_the_text_that_ends_it_and_nothing_behind_it_is_trained(most: int) -> None:
    class Searches(Engine):
        async def generate(
            self, prompt: list[int], sampling: SamplingParams, request_id: str, **_: Any
        ) -> SampleOutput:
            self.asked.append((prompt, sampling))
            ids = [*TOKENIZER.encode("I look. <q>word</q> It says: nothing."), STOP]
            ids = (ids * 9)[: sampling.max_tokens]
            return SampleOutput(ids, [-0.25] * len(ids), "length", VERSION)

    engine = Searches()
    (task,) = tasks(1)
    asked = replace(task, sampling=SamplingParams(max_tokens=most))
    (episode,) = play("Game", [asked], engines=[engine], stop=["</q>", "never"], max_turns=2)
    assert set(episode.texts) == {"I look. <q>word</q>"}
    (row,) = episode.rows
    end = len(TOKENIZER.encode("I look. <q>word</q>"))
    assert TOKENIZER.decode(row.response_ids[:end]) == "I look. <q>word</q>" and row.mask[: end + 1] == [1] * end + [0]
    assert episode.num_turns == 2 and episode.end == "max_turns", "what was dropped takes no room"
    assert engine.asked[1][0] == [*row.prompt_ids, *row.response_ids[: -sum(turn == 1 for turn in row.turns)]]


def test_a_call_that_can_not_be_read_and_a_text_that_was_cut_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Action] = []
    parsed = ParsedTurn("a", "a", None, (), {"role": "assistant", "content": "a"}, "half a call")
    monkeypatch.setattr("hrl.episodes.parsing.TurnParser.parse", lambda *_, **__: parsed)

    class Long(Lost):
        async def reset(self) -> Observation:
            return Observation(messages=[{"role": "user", "content": "?"}])

        async def step(self, action: Action) -> StepResult:
            told.append(action)
            return StepResult(Observation(messages=[{"role": "user", "content": "long " * 50}]), done=action.turn == 2)

    async def generate(*_: Any, **__: Any) -> SampleOutput:
        return SampleOutput([5, STOP], [-0.5, -0.5], "stop", VERSION)

    settings = EnvironmentConfig(max_observation_tokens=10)
    player = Player(PlaySetup(TOKENIZER, (STOP,), {}, settings, Limits(99, 999)), Long(), generate)  # type: ignore[arg-type]
    episode = asyncio.run(player.play(*tasks(1)))
    assert (episode.end, episode.num_unread_calls, episode.num_cut_observations) == ("done", 3, 2)
    assert (episode.num_tool_calls, episode.num_tool_errors) == (3, 3), "a call that can't be read has failed"
    assert [action.error for action in told] == ["half a call"] * 3


class Says(Lost):
    """A world of one turn, which ends as it is told to."""

    def __init__(self, result: StepResult) -> None:
        self.result = result

    async def reset(self) -> Observation:
        return Observation(messages=[{"role": "user", "content": "?"}])

    async def step(self, action: Action) -> StepResult:
        return self.result


@pytest.mark.parametrize(
    ("limit", "result", "end", "finish"),
    [
        (2, StepResult(done=True), "done", "stop"),
        (2, StepResult(done=True, truncated=True), "max_tokens", "length"),
        (2, StepResult("go on"), "max_tokens", "length"),
        (3, StepResult(done=True), "done", "stop"),
        (3, StepResult(done=True, truncated=True), "truncated", "length"),
    ],
)
def test_what_the_environment_calls_done_is_done_also_of_a_turn_that_was_cut_off(
    limit: int, result: StepResult, end: str, finish: str
) -> None:
    async def generate(_: list[int], sampling: SamplingParams, *__: Any, **___: Any) -> SampleOutput:
        ids = [5, 6, STOP][: sampling.max_tokens]
        return SampleOutput(ids, [-0.5] * len(ids), "stop" if STOP in ids else "length", VERSION)

    world: Any = Says(result)
    player = Player(PlaySetup(TOKENIZER, (STOP,), {}, EnvironmentConfig(), Limits(99, limit)), world, generate)
    (task,) = tasks(1)
    episode = asyncio.run(player.play(task))
    assert episode.end == end and episode.is_truncated is (end != "done")
    assert episode_metrics([episode])["episode/truncated_ratio"].result() == float(end != "done")
    prompts = torch.ones(1, 1, dtype=torch.int64)
    asked = DataProto.from_dict(
        tensors={"prompts": prompts, "attention_mask": prompts},
        non_tensors={"uid": object_column(["u0"]), "sample_index": object_column([0])},
    )
    batch = episode_batch(asked, [episode], prompt_width=99, response_width=limit, pad_id=0)
    assert batch.non_tensor_batch["finish_reason"].tolist() == [finish]


@pytest.mark.parametrize("environment", [SingleTurn(), ToolEnvironment()])
@pytest.mark.parametrize(("finish", "is_cut"), [("stop", False), ("length", True)])
def test_an_answer_that_was_cut_off_is_truncated_where_any_text_is_an_answer(
    environment: Any, finish: str, is_cut: bool
) -> None:
    returned = environment.step(Action("It is", finish_reason=finish))
    result = asyncio.run(returned) if asyncio.iscoroutine(returned) else returned
    assert result.done and result.truncated is is_cut


def test_no_turn_waits_while_a_parser_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes with tools come to a parser that takes long; others are played to their end meanwhile."""
    others_are_over, made = threading.Event(), []

    class Slow(TurnParser):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            _, _, _, tools = args
            if tools:
                made.append(others_are_over.wait(30.0))
            super().__init__(*args[:3], None, **kwargs)

    monkeypatch.setattr("hrl.episodes.parsing.TurnParser", Slow)

    class Shown(Lost):
        def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
            self.tools = tools

        def open(self, *_: Any) -> Any:
            return self

        async def reset(self) -> Observation:
            return Observation(messages=[{"role": "user", "content": "?"}], tools=self.tools)

        async def step(self, action: Action) -> StepResult:
            return StepResult(done=True)

    async def generate(*_: Any, **__: Any) -> SampleOutput:
        return SampleOutput([5, STOP], [-0.5, -0.5], "stop", VERSION)

    async def run() -> list[str]:
        playing = PlaySetup(TOKENIZER, (STOP,), {}, EnvironmentConfig(), Limits(99, 999))
        plain = Player(playing, Shown(None), generate)  # type: ignore[arg-type]
        tooled = Player(playing, Shown([{"type": "function"}]), generate)  # type: ignore[arg-type]
        waiting = [asyncio.ensure_future(tooled.play(task)) for task in tasks(2)]
        ends = [(await plain.play(task)).end for task in tasks(3)]
        others_are_over.set()
        return [*ends, *[(await one).end for one in waiting]]

    assert asyncio.run(run()) == ["done"] * 5 and made == [True], "one parser serves both episodes"


def test_parsers_are_imported_when_the_service_starts_where_tools_are_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    monkeypatch.setattr(
        "hrl.episodes.play.known_parsers",
        lambda: threads.append(threading.current_thread() is threading.main_thread()),
    )
    play("Game", tasks(1))
    assert threads == []
    play("Game", tasks(1), tool_parser="hermes")
    assert threads == [False]


def test_what_happened_to_the_processes_comes_with_each_batch() -> None:
    async def run() -> list[PoolCounts]:
        service = EpisodeService(setup("Faulty", Limits(100, 300), on_error="skip"))
        await service.start()
        counts = []
        try:
            for batch, what in enumerate(("raise", "", "raise")):
                asked = tasks(2, what="")
                asked[0] = replace(asked[0], row={"prompt": [], "what": what})
                await service.begin(batch, asked, 1)
                take = functools.partial(service.next_work, batch, 0)
                await serve_requests(
                    Engine(), take, lambda answers: asyncio.ensure_future(service.answered(answers)), len(TOKENIZER)
                )
                counts.append((await service.collect(batch)).pool)
        finally:
            await service.close()
        return counts

    counts = asyncio.run(asyncio.wait_for(run(), 60.0))
    assert counts == [PoolCounts(failures=1), PoolCounts(), PoolCounts(failures=1)]


def test_the_environments_own_limit_is_told_from_its_end() -> None:
    (episode,) = play("Faulty", tasks(1, what="stop"))
    assert (episode.end, episode.num_turns) == ("truncated", 2)


def test_an_episode_that_is_cut_off_while_its_turn_is_sampled_withdraws_the_request() -> None:
    engine = Engine(lambda seed: 60.0)
    (episode,) = play("Game", tasks(1), engines=[engine], timeout_s=0.5)
    assert (episode.end, episode.num_turns, engine.cancelled) == ("deadline", 0, 1)


def test_a_first_prompt_that_is_too_long_names_the_key() -> None:
    with pytest.raises(EpisodeError, match=r"0: the first prompt has \d+ tokens, more than data.max_prompt_length=5"):
        play("Game", tasks(1), limits=Limits(5, 300))


def test_last_answers_and_turns_go_to_the_rewards_as_episodes_end() -> None:
    sent: list[Any] = []
    rewards = SimpleNamespace(submit=SimpleNamespace(remote=lambda *args: sent.append(args)))
    episodes = play("Game", tasks(5), rewards=rewards)
    said = {one.key: [each["content"] for each in one.messages if each["role"] == "assistant"] for one in episodes}
    by_key = {key: (number, answer, played) for number, key, answer, played in sent}
    for one in episodes:
        texts = said[one.key]
        assert by_key.pop(one.key) == (7, texts[-1], PlayedEpisode(texts, one.messages))
    assert not by_key
    assert {len(texts) for texts in said.values()} == {3}


def test_rewards_of_tokens_come_with_the_episode_and_their_sum_is_the_turns() -> None:
    (episode,) = play("Metered", tasks(1))
    (row,) = episode.rows
    sampled = sum(turn == 1 and bit for turn, bit in zip(row.turns, row.mask, strict=True))
    assert sampled > 1 and episode.token_rewards == [None, (1.0, *[0.5] * (sampled - 1)), None]
    assert episode.turn_rewards[:2] == [0.5, 1.0 + 0.5 * (sampled - 1)]
    (other,) = play("Game", tasks(1))
    assert other.token_rewards == (), "nobody pays by token"


def test_another_number_of_rewards_than_of_tokens_fails_the_episode_by_name() -> None:
    with pytest.raises(
        EpisodeError, match=r"Metered.*step.* returned 1 rewards for a turn of \d+ tokens, where a number"
    ):
        play("Metered", tasks(1, most=1))


class Shows(Lost):
    """A world that shows messages first, and others after the policy's turn, where there are any."""

    def __init__(self, first: Sequence[Mapping[str, Any]], later: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.first, self.later = first, later

    def open(self, *_: Any) -> Any:
        return self

    async def reset(self) -> Observation:
        return Observation(messages=self.first)

    async def step(self, action: Action) -> StepResult:
        more = None if self.later is None or action.turn else Observation(messages=self.later)
        return StepResult(more, done=more is None)


ASKED = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    ("shown", "sampled", "max_turns", "answer"),
    [
        (Shows([ASKED]), ["it is 42"], 8, "it is 42"),
        (Shows([ASKED], [ASKED]), ["hm", "42"], 8, "42"),
        (Shows([ASKED], [{"role": "assistant", "content": "not the policy's"}, ASKED]), ["hm", ""], 8, ""),
        (Shows([ASKED], [ASKED]), ["hm"], 1, "hm"),
        (Shows([ASKED, {"role": "assistant", "content": "It is"}]), [" 42"], 8, " 42"),
        (Shows([ASKED], [ASKED, {"role": "assistant", "content": "It is"}]), ["hm", " 42"], 8, " 42"),
        (Shows([ASKED]), ["<think>6 * 7</think>42"], 8, "<think>6 * 7</think>42"),
    ],
)
def test_what_a_reward_function_is_given_is_what_was_sampled_last_and_nothing_that_it_was_shown(
    shown: Shows, sampled: list[str], max_turns: int, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a single response: all of its text, with reasoning, without the beginning that the prompt has."""

    def parse(_: TurnParser, ids: list[int], *, turn: int) -> ParsedTurn:
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        content = text.rpartition("</think>")[2]
        return ParsedTurn(text, content, None, (), {"role": "assistant", "content": content})

    monkeypatch.setattr("hrl.episodes.parsing.TurnParser.parse", parse)
    left = iter(sampled)

    async def generate(*_: Any, **__: Any) -> SampleOutput:
        ids = [*TOKENIZER.encode(next(left)), STOP]
        return SampleOutput(ids, [-0.5] * len(ids), "stop", VERSION)

    played = PlaySetup(TOKENIZER, (STOP,), {}, EnvironmentConfig(max_turns=max_turns), Limits(99, 999))
    episode = asyncio.run(Player(played, shown, generate).play(*tasks(1)))
    assert (episode.answer, [*episode.texts]) == (answer, sampled), episode.error


def test_an_engine_that_fails_ends_the_batch_with_its_own_error() -> None:
    class Broken(Engine):
        async def generate(self, *_: Any, **__: Any) -> SampleOutput:
            raise RolloutError("out of blocks")

    with pytest.raises(RolloutError, match="out of blocks"):
        play("Game", tasks(3), engines=[Broken()])


def test_an_environment_that_is_not_there_is_told_at_the_start() -> None:
    with pytest.raises(EnvironmentLoadError, match="no class or function 'Gaem'"):
        play("Gaem", tasks(1))
