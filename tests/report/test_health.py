"""Every alarm sounds in the run that it is for, once, and in no healthy one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hrl.config.alarms import ALARMS, default_thresholds
from hrl.report.health import Health, validation_score
from hrl.report.run_folder import json_line, read_jsonl

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
    "entropy_high": ([healthy(s, reward__mean=0.5, actor__entropy=0.5 if s < 4 else 2.0) for s in range(1, 8)], 6),
    "sampler_gap": ([healthy(1), healthy(2, rollout__logprob_diff_mean=0.2)], 2),
    "kl": ([healthy(1)] + [healthy(s, actor__kl_loss=1.5) for s in range(2, 6)], 4),
    "update_kl": ([healthy(1)] + [healthy(s, actor__ppo_kl=-0.2) for s in range(2, 6)], 4),
    "clip_share": ([healthy(1)] + [healthy(s, actor__pg_clipfrac=0.4) for s in range(2, 6)], 4),
    "episodes_failed": ([healthy(1)] + [healthy(s, episode__failed_ratio=0.08) for s in range(2, 6)], 4),
    "episodes_cut": ([healthy(1)] + [healthy(s, episode__truncated_ratio=0.6) for s in range(2, 6)], 4),
    "tool_errors": ([healthy(1)] + [healthy(s, episode__tool_error_ratio=0.7) for s in range(2, 6)], 4),
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


def test_episodes_that_limits_end_raise_one_alarm() -> None:
    cut = [healthy(s, response_length__clip_ratio=0.9, episode__truncated_ratio=0.9) for s in range(1, 6)]
    assert list(raised_in(cut)) == [(3, "episodes_cut")]


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


def test_a_number_that_was_lost_is_beyond_any_limit_after_a_resume_too() -> None:
    lost = [healthy(step, actor__ppo_kl=math.nan) for step in (1, 2)]
    written = [json.loads(json_line({"step": step} | metrics)) for step, metrics in enumerate(lost, 1)]
    assert written[1]["actor/ppo_kl"] is None
    resumed = Health(default_thresholds(), written)
    assert [alarm.name for alarm in resumed.judge(3, healthy(3, actor__ppo_kl=math.nan))[1]] == ["update_kl"]


def long_run(kind: str, prompts: int, steps: int = 600) -> Iterator[dict[str, float]]:
    """A run that is well, with the noise of real ones: warm-up, a plateau, small validations every tenth step."""
    noise = random.Random(kind)
    for step in range(1, steps + 1):
        done, warm = step / steps, min(1.0, step / 50)
        reward, skill = (0.2 + 0.5 * (1 - math.exp(-4 * done)), 0.3 + 0.4 * (1 - math.exp(-4 * done)))
        entropy, length, lowest = 0.05 + math.exp(-2.2 * done), 200 + 250 * done, 0.0
        if kind == "curriculum":  # harder rows as it gets better
            reward, length = 0.5, 100 + 400 * done
        elif kind == "exploring":
            entropy = 0.2 + 0.6 * done
        elif kind == "short answers":
            length = 3 + 4 * done
        elif kind == "penalties":
            reward, lowest = -0.6 + 1.2 * (1 - math.exp(-3 * done)), -1.5
        elif kind == "plateau":
            reward = skill = 0.6
            length = 200
        changed: dict[str, float] = {
            "reward__mean": reward + noise.gauss(0, 0.05),
            "critic__score__min": lowest,
            "response_length__mean": max(1.0, length * (1 + noise.gauss(0, 0.08))),
            "response_length__clip_ratio": max(0.0, 0.12 + noise.gauss(0, 0.06)),
            "actor__entropy": entropy * (1 + noise.gauss(0, 0.1)),
            "actor__grad_norm": 0.01 + abs(0.5 * warm + noise.gauss(0, 0.2)),
            "actor__pg_clipfrac": max(0.0, 0.1 * warm + noise.gauss(0, 0.04)),
            "actor__ppo_kl": 0.01 * warm + noise.gauss(0, 0.02),
            "actor__kl_loss": 0.4 * done + abs(noise.gauss(0, 0.03)),
            "rollout__logprob_diff_mean": abs(0.02 + noise.gauss(0, 0.01)),
        }
        right = sum(noise.random() < skill for _ in range(prompts)) / prompts
        seen = {"val/sums/mean@1": right, "val/sums/n": float(prompts)} if step % 10 == 0 else {}
        yield healthy(step, **changed) | seen


@pytest.mark.parametrize("prompts", [64, 256])
@pytest.mark.parametrize("kind", ["plain", "curriculum", "exploring", "short answers", "penalties", "plateau"])
def test_a_long_run_with_noise_is_silent(kind: str, prompts: int) -> None:
    assert not list(raised_in(list(long_run(kind, prompts))))


def test_in_a_long_run_a_validation_that_really_falls_is_seen() -> None:
    history = list(long_run("plain", 256))
    fallen = [{name: 0.4 for name in step if name.endswith("mean@1")} for step in history[400:]]
    history[400:] = [step | worse for step, worse in zip(history[400:], fallen, strict=True)]
    assert {name for _, name in raised_in(history)} == {"reward_hacking"}


def test_losses_near_zero_and_below_it_are_no_overfitting() -> None:
    of_pairs = [0.69, 0.2, 0.05, 0.02, 0.024, 0.025]
    assert not list(raised_in([learns(s, 1 / s, **{"val/a/loss": x, "val/a/n": 8}) for s, x in enumerate(of_pairs, 1)]))
    below = [0.5, -0.5, -1.0, -0.99, -0.98]
    assert not list(raised_in([learns(s, 1 / s, **{"val/a/loss": x, "val/a/n": 8}) for s, x in enumerate(below, 1)]))
    rises = [0.69, 0.2, 0.05, 0.12, 0.2]
    (alarm,) = raised_in([learns(s, 1 / s, **{"val/a/loss": x, "val/a/n": 8}) for s, x in enumerate(rises, 1)])
    assert alarm == (5, "overfitting")


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
