"""Every alarm sounds in the run that it is for, once, and in no healthy one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hrl.config.alarms import ALARMS, default_thresholds
from hrl.report.health import Health, validation_score
from hrl.report.run_folder import read_jsonl

HEALTHY_RUN = Path(__file__).parent / "quickstart_metrics.jsonl"
"""What `make demo` wrote on two cores: the quickstart, until its time was up."""


def healthy(step: int, **changed: float | None) -> dict[str, float]:
    """The metrics of a step of a run that learns: the reward rises, answers become a little shorter."""
    metrics: dict[str, float | None] = {
        "timing_s/step": 5.0,
        "reward/mean": 0.2 + 0.04 * step,
        "reward/std": 0.4,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/advantages/max": 1.5,
        "critic/advantages/min": -1.5,
        "response_length/mean": 20.0 - 0.5 * step,
        "response_length/clip_ratio": 0.2,
        "rollout/empty_responses": 0.0,
        "rollout/logprob_diff_mean": 0.01,
        "actor/entropy": 0.8 - 0.03 * step,
        "actor/grad_norm": 1.2,
        "actor/pg_clipfrac": 0.02,
        "actor/ppo_kl": 0.001,
        "actor/kl_loss": 0.01 * step,
    }
    named = {name.replace("__", "/"): value for name, value in changed.items()}
    return {name: value for name, value in (metrics | named).items() if value is not None}


def learns(step: int, loss: float, **more: float) -> dict[str, float]:
    """The metrics of a step of a run that learns from a data set."""
    return {
        "timing_s/step": 2.0,
        "train/loss": loss,
        "train/grad_norm": 1.0,
        **{k.replace("__", "/"): v for k, v in more.items()},
    }


def val(score: float) -> dict[str, float]:
    return {"val/sums/mean@1": score, "val/sums/n": 16.0, "val/sums/format/mean@1": 0.0}


SICK: Mapping[str, tuple[list[dict[str, float]], int]] = {
    # alarm → (its history, the step in which it is raised)
    "zero_reward": ([healthy(s, reward__mean=0.0, reward__std=0.0, critic__score__max=0.0) for s in range(1, 5)], 3),
    "no_spread": (
        [healthy(1), healthy(2)]
        + [
            healthy(s, reward__mean=0.5, reward__std=0.5, critic__advantages__max=0.0, critic__advantages__min=0.0)
            for s in range(3, 9)
        ],
        7,
    ),
    "zero_gradient": ([healthy(1)] + [healthy(s, actor__grad_norm=0.0) for s in range(2, 6)], 4),
    "no_tokens": ([healthy(1), healthy(2, reward__mean=None, reward__std=None, rollout__empty_responses=64.0)], 2),
    "truncation": ([healthy(1)] + [healthy(s, response_length__clip_ratio=0.6) for s in range(2, 6)], 4),
    "length_drift": (
        [healthy(s, reward__mean=0.5, response_length__mean=20.0 if s < 5 else 45.0) for s in range(1, 9)],
        7,
    ),
    "entropy_low": ([healthy(s, reward__mean=0.5, actor__entropy=0.005) for s in range(1, 5)], 3),
    "entropy_high": ([healthy(s, actor__entropy=0.5 if s < 4 else 2.0) for s in range(1, 8)], 6),
    "sampler_gap": ([healthy(1), healthy(2, rollout__logprob_diff_mean=0.2)], 2),
    "kl": ([healthy(1)] + [healthy(s, actor__kl_loss=1.5) for s in range(2, 6)], 4),
    "update_kl": ([healthy(1)] + [healthy(s, actor__ppo_kl=-0.2) for s in range(2, 6)], 4),
    "clip_share": ([healthy(1)] + [healthy(s, actor__pg_clipfrac=0.4) for s in range(2, 6)], 4),
    "reward_hacking": (
        [healthy(1), healthy(2) | val(0.7), healthy(3), healthy(4) | val(0.5), healthy(5), healthy(6) | val(0.45)],
        6,
    ),
    "overfitting": (
        [
            learns(s, 1.0 / s) | ({} if loss is None else {"val/a/loss": loss, "val/a/n": 8.0})
            for s, loss in enumerate([1.0, 0.8, None, 0.9, None, 0.95], 1)
        ],
        6,
    ),
}


def raised_in(history: list[dict[str, float]], health: Health | None = None) -> Iterator[tuple[int, str]]:
    health = health or Health(default_thresholds())
    for step, metrics in enumerate(history, 1):
        for alarm in health.judge(step, metrics)[1]:
            yield step, alarm.name


def test_every_alarm_has_its_run() -> None:
    assert SICK.keys() == ALARMS.keys()


@pytest.mark.parametrize("name", ALARMS)
def test_an_alarm_is_raised_in_the_run_that_it_is_for_and_no_other_is(name: str) -> None:
    history, step = SICK[name]
    assert list(raised_in(history)) == [(step, name)]


@pytest.mark.parametrize("name", ALARMS)
def test_the_metric_is_one_while_the_alarm_is_raised(name: str) -> None:
    history, step = SICK[name]
    health = Health(default_thresholds())
    values = [health.judge(number, metrics)[0].get(f"health/{name}") for number, metrics in enumerate(history, 1)]
    assert values[step - 1] == 1.0
    assert 1.0 not in values[: step - 1]
    assert health.raised == (name,)


@pytest.mark.parametrize("name", ALARMS)
def test_an_alarm_that_is_off_stays_silent_and_leaves_no_metric(name: str) -> None:
    history, _ = SICK[name]
    health = Health(default_thresholds() | {name: None})
    told = [health.judge(step, metrics) for step, metrics in enumerate(history, 1)]
    assert not any(f"health/{name}" in metrics or news for metrics, news in told)


@pytest.mark.parametrize("name", ALARMS)
def test_a_higher_or_lower_threshold_is_obeyed(name: str) -> None:
    history, _ = SICK[name]
    easy = 0.0001 if name in ("entropy_low",) else 1e6
    assert list(raised_in(history, Health(default_thresholds() | {name: easy}))) == []


@pytest.mark.parametrize("name", ALARMS)
def test_an_alarm_is_told_once_also_in_a_run_that_was_interrupted(name: str) -> None:
    history, step = SICK[name]
    records = [{"step": number, **metrics} for number, metrics in enumerate(history, 1)]
    resumed = Health(default_thresholds(), records)
    assert resumed.raised == (name,)
    assert resumed.judge(len(history) + 1, history[-1])[1] == []
    halfway = Health(default_thresholds(), records[: step - 1])
    assert [alarm.name for alarm in halfway.judge(step, history[step - 1])[1]] == [name]


def test_a_number_that_is_lost_is_beyond_any_limit() -> None:
    history = [healthy(1, rollout__logprob_diff_mean=math.nan)]
    assert list(raised_in(history)) == [(1, "sampler_gap")]


# ---------------------------------------------------------------------------------------------- healthy runs


def test_a_run_that_learns_is_silent() -> None:
    history = [healthy(step) | (val(0.2 + 0.04 * step) if step % 3 == 0 else {}) for step in range(1, 20)]
    assert list(raised_in(history)) == []


def test_the_quickstart_is_silent() -> None:
    records = read_jsonl(HEALTHY_RUN)
    health = Health(default_thresholds())
    assert len(records) == 14, "a validation and 13 steps"
    assert [news for record in records for news in health.judge(record["step"], record)[1]] == []


def test_a_task_that_is_solved_is_no_alarm() -> None:
    solved = {
        "reward__mean": 1.0,
        "reward__std": 0.0,
        "critic__score__min": 1.0,
        "critic__advantages__max": 0.0,
        "critic__advantages__min": 0.0,
        "actor__grad_norm": 0.0,
        "actor__entropy": 0.001,
        "response_length__mean": 4.0,
    }
    history = [healthy(step) for step in range(1, 10)] + [healthy(step, **solved) for step in range(10, 30)]
    assert list(raised_in(history)) == []


def test_a_reward_that_is_never_anything_else_is_one() -> None:
    same = {"reward__mean": 1.0, "reward__std": 0.0, "critic__score__min": 1.0}
    flat = {"critic__advantages__max": 0.0, "critic__advantages__min": 0.0, "actor__grad_norm": 0.0}
    assert list(raised_in([healthy(step, **same, **flat) for step in range(1, 10)])) == [(5, "no_spread")]


def test_longer_answers_that_pay_are_none() -> None:
    assert list(raised_in([healthy(step, response_length__mean=10.0 * step) for step in range(1, 12)])) == []


def test_one_bad_validation_is_none() -> None:
    scores = [0.7, 0.5, 0.7, 0.5, 0.7]
    assert list(raised_in([healthy(step) | val(score) for step, score in enumerate(scores, 1)])) == []


def test_a_validation_that_falls_with_the_training_reward_is_none() -> None:
    history = [healthy(step, reward__mean=0.8 - 0.1 * step) | val(0.8 - 0.1 * step) for step in range(1, 7)]
    assert list(raised_in(history)) == []


def test_losses_that_fall_are_none() -> None:
    history = [learns(step, 1 / step) | {"val/a/loss": 1.2 / step, "val/a/n": 8.0} for step in range(1, 10)]
    assert list(raised_in(history)) == []


# ---------------------------------------------------------------------------------------------- what is told


def test_the_text_says_what_it_means_what_helps_and_how_to_change_it() -> None:
    history, step = SICK["truncation"]
    health = Health(default_thresholds() | {"truncation": 0.4})
    (alarm,) = [news for number, metrics in enumerate(history, 1) for news in health.judge(number, metrics)[1]]
    assert alarm.text == (
        "alarm truncation in step 4: more than 0.4 of the answers are cut off at the length limit, for 3 steps "
        "(response_length/clip_ratio 0.60, 0.60, 0.60). "
        f"That says: {ALARMS['truncation'].meaning}. What helps: {ALARMS['truncation'].remedy}. "
        "Threshold: trainer.alarms={truncation: …}"
    )
    assert alarm.record() == {
        "step": step,
        "alarm": "truncation",
        "threshold": 0.4,
        "raised": "more than 0.4 of the answers are cut off at the length limit, for 3 steps",
        "seen": "response_length/clip_ratio 0.60, 0.60, 0.60",
        "meaning": ALARMS["truncation"].meaning,
        "remedy": ALARMS["truncation"].remedy,
    }


def test_the_score_of_a_validation_is_that_of_its_sources_and_not_of_parts() -> None:
    metrics = {
        "val/a/sums/mean@4": 0.5,
        "val/a/sums/n": 8.0,
        "val/a/sums/format/mean@4": 1.0,
        "val/b/mean@4": 0.25,
        "val/b/std@4": 0.1,
        "val/b/n": 8.0,
    }
    assert validation_score(metrics) == 0.375
    assert validation_score({"reward/mean": 1.0}) is None
