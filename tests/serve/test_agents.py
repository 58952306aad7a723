"""Programs that speak nothing but OpenAI's protocol play episodes; what they asked for are the episodes' rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hrl.serve.agents import AgentSession
from hrl.serve.rows import Call
from hrl.serve.sessions import Limits, Session, Sessions
from hrl.workers.rollout.base import sample_seed
from tests.serve.stage import Stage
from tests.serve.test_openai_client import require_sampled

PROGRAMS = Path(__file__).with_name("programs.py")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(f"{PROGRAMS}:agent", kwargs={"kind": "Plain"}, step_timeout_s=30.0) as one:
        yield one


def test_a_program_plays_an_episode_with_the_sampling_of_the_run(stage: Stage):
    (episode,), engine = stage.play("Plain")
    assert (episode.end, episode.error, episode.num_turns) == ("done", None, 2)
    assert episode.turn_rewards == [None, float(len("MORE"))]
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "user", "assistant"]
    require_sampled(list(episode.rows), engine)
    assert len(episode.rows) == 1
    samplings = [sampling for _, _, sampling in engine.record]
    assert {(one.temperature, one.top_p) for one in samplings} == {(0.7, 0.9)}
    assert [one.seed for one in samplings] == [sample_seed(1, 2, "uid", 0), sample_seed(1, 2, "uid", 0, 1)]
    assert episode.metrics["agent/overridden"] == 2.0


def test_a_program_that_pays_tokens_fails_its_episode_and_no_other(stage: Stage):
    (episode,), _ = stage.play("PaysTokens")
    assert episode.end == "failed" and "give one number, for the whole episode" in str(episode.error)


def test_agents_at_the_same_time_are_branches(stage: Stage):
    (episode,), engine = stage.play("Several")
    require_sampled(list(episode.rows), engine)
    assert len(episode.rows) == 2 and episode.num_turns == 3
    assert episode.turn_rewards == [None, None, 0.5] and episode.metrics["agents"] == 3.0


def test_every_turn_has_the_text_that_was_sampled_in_it_whatever_else_was_said(stage: Stage):
    (episode,), _ = stage.play("Critic")
    assert episode.texts == ["FIRST", "SECOND", "THIRD"] and episode.turn_rewards == [None, None, 1.0]
    assert episode.turn_places == [3, None, 5], "the second was asked in a conversation of its own"
    assert [episode.messages[place]["content"] for place in (3, 5)] == ["FIRST", "THIRD"]


def test_an_answer_that_a_program_did_not_wait_for_is_a_turn_without_text():
    session = Session("s", calls=[Call(2, [1], [2], [0.0], 0, "third"), Call(0, [1], [2], [0.0], 0, "first")])
    door: Any = SimpleNamespace(sessions=Sessions(None, Limits()))
    played = AgentSession(door, "", session, room=9).played()
    assert (played.texts, played.answer) == (["first", "", "third"], "third")


@pytest.mark.parametrize(
    ("limits", "max_turns", "end"),
    [((200, 300), 3, "max_turns"), ((60, 40), 50, "max_tokens"), ((10, 300), 3, "max_tokens")],
)
def test_a_limit_ends_a_program_that_would_go_on(stage: Stage, limits: tuple[int, int], max_turns: int, end: str):
    (episode,), engine = stage.play("Endless", limits=limits, max_turns=max_turns)
    if limits[0] < 20:
        assert episode.end == "failed" and "without asking" in str(episode.error)
        return
    assert episode.end == end and episode.error is None
    require_sampled(list(episode.rows), engine)
    assert all(len(row.prompt_ids) <= limits[0] and len(row.response_ids) <= limits[1] for row in episode.rows)
    assert episode.turn_rewards == [None] * episode.num_turns


@pytest.mark.parametrize(("answer", "end"), [("on", "max_tokens"), ("anew", "max_prompt")])
def test_a_chat_that_is_begun_too_long_meets_another_limit_than_one_that_goes_on(stage: Stage, answer: str, end: str):
    (episode,), _ = stage.play("Wordy", limits=(60, 100), answer=answer)
    assert (episode.end, episode.num_turns) == (end, 1)


def test_what_was_asked_for_limits_a_program_too(stage: Stage):
    (episode,), _ = stage.play("Endless", max_turns=50, max_tokens=30)
    assert episode.end == "max_tokens"
    assert all(len(row.response_ids) <= 30 for row in episode.rows)


@pytest.mark.parametrize("name", ["Hanging", "HangingOnThread"])
def test_a_program_that_hangs_is_cut_off_with_what_it_has_asked_for(stage: Stage, name: str):
    (episode,), engine = stage.play(name, episode_timeout_s=1.0)
    assert episode.end == "deadline" and episode.num_turns == 1
    require_sampled(list(episode.rows), engine)


def test_a_plain_program_may_take_longer_than_a_step_and_its_process_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hrl.episodes.pool._GRACE_S", 0.0)  # so that it is past the limit of threads, too
    with Stage(f"{PROGRAMS}:agent", kwargs={"kind": "Plain"}, step_timeout_s=0.5) as stage:
        (episode,), _ = stage.play("Slow")
        assert stage.pool.counts.retired_processes == 0
    assert (episode.end, episode.turn_rewards) == ("done", [1.0])


@pytest.mark.parametrize(
    ("name", "error"), [("Silent", "without asking the policy"), ("Failing", "ValueError: no luck")]
)
def test_a_program_that_fails_is_an_episode_that_failed(stage: Stage, name: str, error: str):
    (episode,), _ = stage.play(name)
    assert episode.end == "failed" and error in str(episode.error)


def test_what_programs_ask_for_is_counted_over_all_episodes_also_what_is_refused(stage: Stage):
    episodes, engine = stage.play("Endless", num_episodes=2, max_turns=2)
    assert [episode.num_turns for episode in episodes] == [2, 2]
    sampled = sum(len(output.token_ids) for _, output, _ in engine.record)
    assert stage.asked is not None
    asked = {name: stage.asked[name] for name in ("calls", "refused", "sampled_tokens", "dropped")}
    assert asked == {"calls": 4, "refused": 2, "sampled_tokens": sampled, "dropped": 0}


def test_the_key_of_an_episode_is_good_for_it_alone(stage: Stage):
    episodes, _ = stage.play("Thief", num_episodes=3)
    assert [episode.metrics["refused"] for episode in episodes] == [0.0, 1.0, 2.0]
    assert len({episode.metrics["pid"] for episode in episodes}) == 1
