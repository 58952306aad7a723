"""A trial finds what a run could not rely on, and nothing in an environment that keeps to everything."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from hrl.config.environment import EnvironmentConfig
from hrl.episodes.episode import Episode, EpisodeRow
from hrl.episodes.play import EpisodeTask, Limits
from hrl.episodes.pool import environment_of
from hrl.episodes.trial import Check, Record, Trial, TrialSetup, _masks, run_trial
from hrl.episodes.trial_policy import Script
from hrl.serve.agents import AgentDoor
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import SampleOutput
from tests.data.conftest import make_tokenizer
from tests.episodes.families import FAMILIES

WORLDS = Path(__file__).with_name("tried.py")


def task(number: int) -> EpisodeTask:
    row = {"prompt": [{"role": "user", "content": "?"}], "hint": f"row {number}"}
    return EpisodeTask((f"trial-{number}", 0), row, SamplingParams(max_tokens=2000), 1, 0)


def trial_of(name: str, tokenizer: Any = None, words: tuple[str, ...] = (), **settings: Any) -> Trial:
    tokenizer = tokenizer or make_tokenizer()
    config = EnvironmentConfig(**{"path": f"{WORLDS}:{name}", "step_timeout_s": 10.0, **settings})
    setup = TrialSetup(
        environment_of(config), config, Limits(2000, 2000), tokenizer, (tokenizer.eos_token_id,), {}, has_reward=False
    )
    return asyncio.run(
        run_trial(setup, [task(number) for number in range(3)], Script(tokenizer, setup.stop_ids, words), AgentDoor)
    )


def found(trial: Trial) -> dict[str, Check]:
    return {check.name: check for check in trial.checks}


def test_an_environment_that_keeps_to_everything_fits() -> None:
    trial = trial_of("Good")
    assert trial.fits, [check for check in trial.checks if check.is_right is False]
    assert {name for name, check in found(trial).items() if check.is_right} == {
        *("replies", "masks", "rewards", "repeats", "close")
    }
    assert [episode.turn_rewards for episode in trial.episodes] == [[0.5, 0.5]] * 3
    secrets = {episode.messages[2]["content"] for episode in trial.episodes}
    assert len(secrets) > 1, "each episode has a seed of its own"
    assert trial.episodes[1].messages[0]["content"] == "Guess. row 1"


@pytest.mark.parametrize(
    ("name", "check", "says"),
    [
        ("Unseeded", "repeats", '`reset` of episode 1 returned "Guess between 1 and 0."'),
        ("Shared", "repeats", "while others play in the same process"),
        ("ChangesItsRewards", "repeats", "turn 1 of episode 1 had, as its `reward`, 0.0, and"),
        ("Breaks", "replies", "3 of 3 episodes failed:\nepisode 1: Breaks.step returned a dict, where"),
        ("Unpaid", "rewards", "set reward.functions"),
        ("ClosesBadly", "close", "`close` failed or took too long"),
    ],
)
def test_what_a_run_could_not_rely_on_is_found_and_nothing_else(name: str, check: str, says: str) -> None:
    trial = trial_of(name)
    assert [one.name for one in trial.checks if one.is_right is False] == [check]
    assert says in found(trial)[check].says and not trial.fits


def test_what_failed_is_told_once_and_nothing_is_said_of_what_nobody_played() -> None:
    trial = trial_of("Reads")
    assert {check.name for check in trial.checks} == {"replies", "close"}
    says = found(trial)["replies"].says
    assert says.startswith("3 of 3 episodes failed:\nepisode 1: Reads.reset failed:\nTraceback")
    assert says.count("episode ") == 1, "the error is the same in all"
    assert says.count("Traceback") == 1


def test_a_call_that_hangs_is_the_slowest_and_nothing_is_said_of_a_close_that_waits_for_it() -> None:
    trial = trial_of("Hangs", step_timeout_s=2.0)
    assert [check.name for check in trial.checks if check.is_right is False] == ["replies"]
    assert "close" not in found(trial)
    says = found(trial)["time"].says
    took = re.fullmatch(
        r"the slowest call was `step`, (\S+) s of environment.step_timeout_s=2, and past its deadline", says
    )
    assert took is not None and float(took[1]) >= 2, says


def test_a_close_that_fails_is_told_beside_calls_that_hang() -> None:
    trial = trial_of("HangsOnce", step_timeout_s=2.0)
    assert {episode.end for episode in trial.episodes} == {"done", "failed"}, "a seed of each kind"
    assert found(trial)["close"].is_right is False and "too long" in found(trial)["close"].says


def test_nothing_is_said_of_the_close_of_what_was_not_made() -> None:
    assert [check.name for check in trial_of("Unmade").checks] == ["replies"]


def test_an_environment_that_never_ends_and_one_that_pays_all_the_same_are_remarked() -> None:
    never = trial_of("NeverDone", max_turns=2)
    assert never.fits and "the environment itself ended none (done=True)" in found(never)["ends"].says
    assert found(never)["spread"].is_right is None and "all episodes earned 0.5" in found(never)["spread"].says
    assert "itself" not in found(trial_of("Good"))["ends"].says
    assert "spread" not in found(trial_of("ChangesItsRewards"))


def test_a_column_that_the_row_lacks_is_told_with_those_that_it_has() -> None:
    [line] = [line for line in found(trial_of("Reads"))["replies"].says.splitlines() if "NoColumnError" in line]
    assert "the row has no column 'hnt'; it has prompt, hint. Did you mean hint?" in line
    assert line.endswith("Rows that have it are named with data.train_files")
    assert "__missing__" not in found(trial_of("Reads"))["replies"].says


def test_an_environment_of_tools_without_one_is_told() -> None:
    check = found(trial_of("NoTools"))["tools"]
    assert check.is_right is None and "there are none for the policy to call" in check.says


def test_an_agents_program_is_played_and_what_it_asked_for_is_trained() -> None:
    trial = trial_of("Agent")
    assert trial.fits, [check for check in trial.checks if check.is_right is False]
    assert [episode.num_turns for episode in trial.episodes] == [2, 2, 2]
    assert [message["content"] for message in trial.episodes[0].messages] == ["?", "1", "more", "2"]
    assert [episode.turn_rewards for episode in trial.episodes] == [[None, 0.25]] * 3
    assert found(trial)["repeats"].is_right is None and found(trial)["masks"].is_right
    assert found(trial)["close"].is_right and "while a program waits for an answer" in found(trial)["close"].says


def test_a_program_that_does_not_close_while_it_waits_for_an_answer_is_told() -> None:
    check = found(trial_of("ClosesIdleOnly"))["close"]
    assert check.is_right is False and "`close` failed or took too long 3×" in check.says


def test_messages_that_lose_their_middle_and_limits_are_told() -> None:
    trial = trial_of("Talks", max_observation_tokens=100, max_turns=1)
    assert trial.fits
    assert "max_observation_tokens=100" in found(trial)["observations"].says
    assert "episode 2 max_turns after 1 turn (environment.max_turns=1)" in found(trial)["ends"].says


def test_tools_have_to_be_in_the_chat_template() -> None:
    pytest.importorskip("vllm")
    trial = trial_of("Tools", FAMILIES["qwen2_5"].tokenizer)
    assert trial.fits, [check for check in trial.checks if check.is_right is False]
    assert "names add; calls are read by vLLM's parser hermes" in found(trial)["tools"].says
    assert trial.episodes[0].num_tool_calls == 1 and trial.episodes[0].num_tool_errors == 0
    assert [message["role"] for message in trial.episodes[0].messages] == ["user", "assistant", "tool", "assistant"]
    assert trial.episodes[0].messages[2]["content"] == "4"


def test_a_template_that_shows_no_tools_is_told() -> None:
    pytest.importorskip("vllm")
    trial = trial_of("Tools", tool_parser="hermes")
    assert "does not name add, so the policy never learns of them" in found(trial)["tools"].says and not trial.fits
    described = trial_of("Described", tool_parser="hermes")
    assert described.fits, "the first messages say what the template does not"


def test_the_script_says_what_it_is_told_to_and_the_last_again_and_again() -> None:
    trial = trial_of("Good", words=("first", "then"), max_turns=2)
    said = [message["content"] for message in trial.episodes[0].messages if message["role"] == "assistant"]
    assert said == ["first", "then"]
    assert trial_of("Good", words=("same",)).episodes[0].messages[3]["content"] == "same"


def test_a_token_that_is_trained_in_another_context_is_found() -> None:
    """Which hrl itself would have to be wrong for."""
    record = Record(task(0), sampled=[([1, 2], SampleOutput([7, 8], [-1.0, -1.0], "stop", 0))])

    def judged(row: EpisodeRow) -> Check:
        [check] = _masks([Episode(("trial-0", 0), [row], [], [None], "done")], {("trial-0", 0): record})
        return check

    right = EpisodeRow([1, 2], [7, 8], [1, 1], [-1.0, -1.0], [0, 0], [0, 0])
    assert judged(right).is_right
    assert not judged(EpisodeRow([1, 3], [7, 8], [1, 1], [-1.0, -1.0], [0, 0], [0, 0])).is_right
    assert not judged(EpisodeRow([1, 2], [7, 8], [1, 0], [-1.0, -1.0], [0, 0], [0, 0])).is_right
    assert not judged(EpisodeRow([1, 2], [7, 8, 9], [1, 1, 1], [-1.0] * 3, [0] * 3, [0] * 3)).is_right
