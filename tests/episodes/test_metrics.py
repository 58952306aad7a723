"""The numbers of a step's episodes, worked out by hand."""

from collections import Counter

import pytest

from hrl.episodes.episode import Episode, EpisodeRow
from hrl.episodes.metrics import door_metrics, episode_metrics, pool_metrics
from hrl.episodes.pool import PoolCounts
from hrl.metrics import StepMetrics


def row(versions, turns):
    trained = [int(version >= 0) for version in versions]
    return EpisodeRow([1], [2] * len(versions), trained, [0.0] * len(versions), versions, turns)


def episode(**changed):
    fields = {
        "key": ("a", 0),
        "rows": [row([5, 5, -1, 5], [0, 0, 0, 1])],
        "messages": [],
        "turn_rewards": [None, 1.0],
        "end": "done",
    }
    return Episode(**(fields | changed))


EPISODES = [
    episode(num_tool_calls=3, num_tool_errors=1, engine_s=2.0, environment_s=0.5, metrics={"won": 1.0, "score": 4.0}),
    # Its second branch repeats a token of turn 0, which trains in the first.
    episode(
        rows=[row([5, 5, 5], [0, 0, 0]), row([-1, -1, 6], [0, 0, 1])],
        end="max_turns",
        attempts=2,
        engine_s=4.0,
        metrics={"won": 0.0},
    ),
    episode(rows=[], turn_rewards=[], end="failed", error="broke", num_tool_errors=9, metrics={"won": 7.0}),
]


@pytest.fixture
def metrics():
    step = StepMetrics()
    step.observe(episode_metrics(EPISODES))
    return step


def test_calls_that_can_not_be_read_and_texts_that_were_cut_are_counted_in_episodes_that_did_not_fail():
    whole, more = episode(num_unread_calls=3, num_cut_observations=1), episode(num_cut_observations=4)
    failed = episode(end="failed", num_unread_calls=9, num_cut_observations=9)
    step = StepMetrics()
    step.observe(episode_metrics([whole, more, failed]))
    assert (step["episode/unread_calls/mean"], step["episode/cut_observations/mean"]) == (1.5, 2.5)


def test_episodes_that_their_seconds_cut_off_are_a_total_and_count_as_cut_off():
    step = StepMetrics()
    step.observe(episode_metrics([episode(end="deadline"), episode(end="deadline"), episode()]))
    assert (
        (step["episode/num_late"], step["episode/end/deadline"])
        == (2.0, 2 / 3)
        == (2.0, step["episode/truncated_ratio"])
    )


def test_what_happened_to_processes_since_the_last_step_is_a_total():
    then, now = PoolCounts(1, 2, 3, 4, 5, 6), PoolCounts(1, 3, 5, 7, 9, 11)
    step = StepMetrics()
    step.observe(pool_metrics(now.since(then)))
    assert [step[f"episode/pool/{name}"] for name in ("failures", "timeouts", "lost_processes")] == [0, 1, 2]
    names = ("retired_processes", "lost_episodes", "failed_closes")
    assert [step[f"episode/pool/{name}"] for name in names] == [3, 4, 5]


def test_calls_to_the_door_are_totals_and_absent_where_none_is_open():
    assert door_metrics(None) == {}
    step = StepMetrics()
    for counted in (Counter(calls=2, sampled_tokens=9, tool_calls=4), Counter(calls=1, refused=3, dropped=5)):
        step.observe(door_metrics(counted))
    assert [step[f"serve/{name}"] for name in ("calls", "tokens", "refused", "dropped")] == [3, 9, 3, 5]


def test_tokens_are_those_of_each_turn_and_of_the_environment(metrics):
    assert (metrics["episode/turns/mean"], metrics["episode/turns/max"]) == (2.0, 2.0)
    assert metrics["episode/turn_tokens/mean"] == (2 + 1 + 3 + 1) / 4
    assert metrics["episode/turn_tokens/max"] == 3
    assert metrics["episode/policy_tokens/mean"] == (3 + 4) / 2
    assert metrics["episode/environment_tokens/mean"] == (1 + 2) / 2
    assert metrics["episode/branches/mean"] == 1.5


def test_a_failed_episode_counts_in_how_many_failed_and_in_nothing_else(metrics):
    assert metrics["episode/end/done"] == metrics["episode/end/failed"] == metrics["episode/end/max_turns"] == 1 / 3
    assert metrics["episode/end/deadline"] == 0.0
    assert (metrics["episode/failed_ratio"], metrics["episode/num_failed"]) == (1 / 3, 1.0)
    assert metrics["episode/truncated_ratio"] == 1 / 3
    assert (metrics["episode/tool_calls/mean"], metrics["episode/tool_errors/mean"]) == (1.5, 0.5)
    assert metrics["episode/tool_error_ratio"] == 1 / 3, "of the calls, not of the episodes"
    assert (metrics["env/won"], metrics["env/score"]) == (0.5, 4.0)


def test_seconds_and_what_was_played_again(metrics):
    assert (metrics["episode/engine_s/mean"], metrics["episode/engine_s/max"]) == (3.0, 4.0)
    assert (metrics["episode/environment_s/mean"], metrics["episode/num_replayed"]) == (0.25, 1.0)


def test_waves_of_a_step_are_weighed_by_their_episodes():
    step, whole = StepMetrics(), StepMetrics()
    step.observe(episode_metrics(EPISODES[:1]), episode_metrics(EPISODES[1:]))
    whole.observe(episode_metrics(EPISODES))
    assert step == whole


def test_a_step_in_which_all_failed_has_no_means():
    step = StepMetrics()
    step.observe(episode_metrics(EPISODES[2:]))
    assert step["episode/failed_ratio"] == 1.0 and step["episode/num_failed"] == 1.0
    assert not any(name.startswith(("episode/turns", "env/", "episode/tool")) for name in step)
