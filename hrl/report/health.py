"""Judge from its metrics whether a run is well: which alarms of `hrl.config.alarms` are raised.

Each alarm is a function of the history of the run and its threshold. It returns what was seen where the alarm is
raised, and None where it is not. Every number is one that `metrics.jsonl` has, so a run that continues is judged as if
it had not been interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hrl.config.alarms import ALARMS

WINDOW = 3
"""Steps in a row that an alarm looks at, where its threshold is no number of steps; and steps of the beginning."""
NEAR_TOP = 0.9
"""From this share of the range of rewards, counted from the lowest, a task counts as solved."""
NO_GAIN = 0.05
"""A reward that has risen by less than this share of the range of rewards has not risen."""
LEAST_ENTROPY = 0.5
"""Nats per token below which no entropy is noise."""
NEAR_BEST = 0.15
"""Within this share of the range of rewards below its best, the reward is as good as ever."""
LEAST_DRIFT_TOKENS = 10
"""Fewer tokens than this are no drift of the length: from 3 to 6 is an answer in words."""
RECENT = 5
"""Steps whose mean is the training reward, or the training loss, at a validation."""

_ENTROPY, _LENGTH, _REWARD = "actor/entropy", "response_length/mean", "reward/mean"
_CUT, _GAP, _CLIPPED = "response_length/clip_ratio", "rollout/logprob_diff_mean", "actor/pg_clipfrac"
_KL, _GRADIENT = ("actor/kl_loss", "actor/reward_kl_penalty"), ("actor/grad_norm", "train/grad_norm")
_MOVED, _SAMPLED, _LOSS = "actor/ppo_kl", "rollout/empty_responses", "train/loss"
_TOP, _LOW, _STD = "critic/score/max", "critic/score/min", "reward/std"
_SHAPED_STD = "reward/shaped_std"
_FAILED, _ENDED, _TOOL_ERRORS = "episode/failed_ratio", "episode/truncated_ratio", "episode/tool_error_ratio"
_ADVANTAGES = ("critic/advantages/max", "critic/advantages/min")
_WATCHED = (
    *(_ENTROPY, _LENGTH, _REWARD, _CUT, _GAP, _CLIPPED, *_KL, *_GRADIENT),
    *(_MOVED, _SAMPLED, _LOSS, _TOP, _LOW, _STD, _SHAPED_STD, *_ADVANTAGES, _FAILED, _ENDED, _TOOL_ERRORS),
)


@dataclass(frozen=True)
class Raised:
    """An alarm at the step in which it is raised.

    Attributes:
        name: Its name in `trainer.alarms`.
        step: The step.
        threshold: What it was compared with.
        seen: The numbers.
    """

    name: str
    step: int
    threshold: float
    seen: str

    @property
    def text(self) -> str:
        """What is wrong, what it means and what helps."""
        alarm = ALARMS[self.name]
        return (
            f"alarm {self.name} in step {self.step}: {alarm.when(self.threshold)} ({self.seen}). "
            f"That says: {alarm.meaning}. What helps: {alarm.remedy}. "
            f"Threshold: trainer.alarms={{{self.name}: …}}"
        )

    def record(self) -> dict[str, str | int | float]:
        """Return it as a line of `alarms.jsonl`."""
        alarm = ALARMS[self.name]
        return {
            "step": self.step,
            "alarm": self.name,
            "threshold": self.threshold,
            "raised": alarm.when(self.threshold),
            "seen": self.seen,
            "meaning": alarm.meaning,
            "remedy": alarm.remedy,
        }


class History:
    """What the alarms look at.

    Attributes:
        steps: The watched metrics of every step, with `step`.
        validations: (step, score) of every validation; the score is the mean over the sources.
        prompts: Number of prompts of a validation; 0 before the first.
        losses: (step, loss) of every validation of a run that learns from a data set.
        top: The highest reward of any sample.
        low: The lowest one.
        best_reward: The highest mean reward over `RECENT` steps.
    """

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []
        self.validations: list[tuple[int, float]] = []
        self.losses: list[tuple[int, float]] = []
        self.prompts = 0.0
        self.top, self.low = -math.inf, math.inf
        self.best_reward = -math.inf

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step, or a validation outside one (`step` 0, or metrics without a step's time)."""
        for found, scores in ((validation_score(metrics), self.validations), (validation_loss(metrics), self.losses)):
            if found is not None:
                scores.append((step, found))
                self.prompts = sum(metrics[f"{source}n"] for source in _sources(metrics))
        if "timing_s/step" not in metrics:
            return
        watched = {name: metrics[name] for name in _WATCHED if metrics.get(name) is not None}
        self.steps.append({"step": step, **watched})
        self.top, self.low = max(self.top, watched.get(_TOP, self.top)), min(self.low, watched.get(_LOW, self.low))
        if (rewards := self.last(_REWARD, RECENT)) is not None:
            self.best_reward = max(self.best_reward, fmean(rewards))

    @property
    def now(self) -> Mapping[str, float]:
        """The last step."""
        return self.steps[-1]

    @property
    def reward_range(self) -> float:
        """The highest reward of any sample less the lowest; 0 where there is none."""
        return max(self.top - self.low, 0.0) if math.isfinite(self.top) else 0.0

    @property
    def is_solved(self) -> bool:
        """Whether nearly all samples of the last step have the highest reward seen, and some had less before."""
        reward = self.now.get(_REWARD, -math.inf)
        return self.reward_range > 0 and reward >= self.low + NEAR_TOP * self.reward_range

    @property
    def is_at_its_best(self) -> bool:
        """Whether the reward has risen since the first steps, and is near the highest that it was."""
        start, now = self.first(_REWARD), self.last(_REWARD, RECENT)
        if start is None or now is None:
            return False
        return fmean(now) > max(start + NO_GAIN * self.reward_range, self.best_reward - NEAR_BEST * self.reward_range)

    @property
    def gained_in_validation(self) -> bool:
        """Whether the last validation is better than the first one."""
        return len(self.validations) > 1 and (
            self.validations[-1][1] > self.validations[0][1] + NO_GAIN * self.reward_range
        )

    @property
    def luck_of_the_best(self) -> float:
        """How much the best of the earlier validations may be above the others by chance alone.

        The largest of K draws from a normal distribution lies about sqrt(2 ln K) standard deviations above its mean; a
        mean over n prompts deviates by at most half of the range of rewards over sqrt(n).
        """
        number = max(len(self.validations) - 2, 1)
        return math.sqrt(2 * math.log(number)) * 0.5 * self.reward_range / math.sqrt(max(self.prompts, 1.0))

    def last(self, name: str, count: float = WINDOW) -> list[float] | None:
        """Return a metric of the last `count` steps, if all of them have it."""
        wanted = max(math.ceil(count), 1)
        values = [record[name] for record in self.steps[-wanted:] if name in record]
        return values if len(values) == wanted else None

    def first(self, name: str) -> float | None:
        """Return the mean of a metric over the first steps, if at least as many others came after them."""
        values = [record[name] for record in self.steps[:WINDOW] if name in record]
        return fmean(values) if len(values) == WINDOW and len(self.steps) >= 2 * WINDOW else None

    def around(self, name: str, step: int) -> float | None:
        """Return the mean of a metric over the last steps up to this one; of the first one where there is none."""
        before = [record for record in self.steps if step - RECENT < record["step"] <= step] or self.steps[:1]
        values = [record[name] for record in before if name in record]
        return fmean(values) if values else None


def validation_score(metrics: Mapping[str, float]) -> float | None:
    """Return the mean of `val/<source>/mean@<n>` over the sources, without parts of the reward; None without one."""
    return _over_sources(metrics, "mean@")


def validation_loss(metrics: Mapping[str, float]) -> float | None:
    """Return the mean of `val/<source>/loss` over the sources; None without one."""
    return _over_sources(metrics, "loss")


def _over_sources(metrics: Mapping[str, float], begins: str) -> float | None:
    values = [
        metrics[name]
        for source in _sources(metrics)
        for name in metrics
        if name.startswith(source + begins) and "/" not in name.removeprefix(source) and metrics[name] is not None
    ]
    return fmean(values) if values and all(map(math.isfinite, values)) else None


def _sources(metrics: Mapping[str, float]) -> list[str]:
    """Return `val/<source>/` of every source: names of sources and of parts may have slashes, but `n` tells."""
    return [name.removesuffix("n") for name in metrics if name.startswith("val/") and name.endswith("/n")]


# ---------------------------------------------------------------------------------------------- the alarms

Rule = Callable[[History, float], str | None]


def _zero_reward(run: History, steps: float) -> str | None:
    if run.last(_TOP, steps) is None or run.top > 0 or run.reward_range > 0:
        return None
    return f"highest reward {run.top:g}"


def _is_flat(record: Mapping[str, float]) -> bool:
    """Return whether a step has nothing to learn from its rewards."""
    if all(name in record for name in _ADVANTAGES):
        return all(record[name] == 0.0 for name in _ADVANTAGES)
    return record.get(_SHAPED_STD, record.get(_STD)) == 0.0


def _no_spread(run: History, steps: float) -> str | None:
    window = run.steps[-math.ceil(steps) :]
    if len(window) < math.ceil(steps) or not all(map(_is_flat, window)) or run.is_solved:
        return None
    return f"mean reward {run.now.get(_REWARD, math.nan):.3f}"


def _zero_gradient(run: History, steps: float) -> str | None:
    for name in _GRADIENT:
        norms = run.last(name, steps)
        if norms is not None and not any(norms) and not any(map(_is_flat, run.steps[-len(norms) :])):
            return f"{name} {', '.join(f'{norm:g}' for norm in norms)}"
    return None


def _no_tokens(run: History, steps: float) -> str | None:
    window = run.steps[-math.ceil(steps) :]
    lacks = len(window) == math.ceil(steps) and all(_SAMPLED in one and _REWARD not in one for one in window)
    return f"{window[-1][_SAMPLED]:g} answers are empty" if lacks else None


def _above(run: History, names: Sequence[str], limit: float, spec: str, steps: int = WINDOW) -> str | None:
    for name in names:
        values = run.last(name, steps)
        # Written so that NaN is above any limit.
        if values is not None and not any(abs(value) <= limit for value in values):
            return f"{name} {', '.join(f'{value:{spec}}' for value in values)}"
    return None


def _truncation(run: History, share: float) -> str | None:
    # Of episodes, which any of several limits ends, the alarm of episodes speaks.
    return None if _ENDED in run.now else _above(run, (_CUT,), share, ".2f")


def _length_drift(run: History, factor: float) -> str | None:
    start, now = run.first(_LENGTH), run.last(_LENGTH)
    before, reward = run.first(_REWARD), run.last(_REWARD)
    if start is None or now is None or not (min(now) >= factor * start or max(now) * factor <= start):
        return None
    if abs(now[-1] - start) < LEAST_DRIFT_TOKENS or run.gained_in_validation:
        return None
    if before is not None and reward is not None and fmean(reward) > before + NO_GAIN * run.reward_range:
        return None
    return f"from {start:.0f} to {now[-1]:.0f} tokens on average"


def _entropy_low(run: History, limit: float) -> str | None:
    values = run.last(_ENTROPY)
    if values is None or max(values) >= limit or run.is_solved:
        return None
    return f"{_ENTROPY} {values[-1]:.4f}, mean reward {run.now.get(_REWARD, math.nan):.3f}"


def _entropy_high(run: History, factor: float) -> str | None:
    start, now = run.first(_ENTROPY), run.last(_ENTROPY)
    if start is None or now is None or min(now) < max(factor * start, LEAST_ENTROPY):
        return None
    if run.is_at_its_best:  # exploration that pays
        return None
    return f"from {start:.2f} to {now[-1]:.2f} nats"


def _reward_hacking(run: History, share: float) -> str | None:
    if len(run.validations) < 3 or not run.steps:
        return None
    best_step, best = max(run.validations[:-2], key=lambda one: one[1])
    least = share * run.reward_range + run.luck_of_the_best
    if not all(best - score >= least for _, score in run.validations[-2:]):
        return None
    before, now = run.around(_REWARD, best_step), run.around(_REWARD, run.validations[-1][0])
    if run.reward_range == 0 or before is None or now is None or now <= before:
        return None
    return (
        f"validation {best:.3f} after step {best_step}, {run.validations[-1][1]:.3f} now; training {before:.3f}, "
        f"{now:.3f} now"
    )


def _overfitting(run: History, share: float) -> str | None:
    if len(run.losses) < 3 or not run.steps:
        return None
    best_step, best = min(run.losses[:-2], key=lambda one: one[1])
    # Losses of pairs come near to 0, where every noise is a large share of them; and some are negative.
    least = share * max(abs(best), run.losses[0][1] - best)
    if not all(loss > best + least for _, loss in run.losses[-2:]):
        return None
    before, now = run.around(_LOSS, best_step), run.around(_LOSS, run.losses[-1][0])
    if before is None or now is None or now >= before:
        return None
    return (
        f"validation {best:.4f} after step {best_step}, {run.losses[-1][1]:.4f} now; training {before:.4f}, "
        f"{now:.4f} now"
    )


_RULES: Mapping[str, tuple[Rule, tuple[str, ...]]] = {
    "zero_reward": (_zero_reward, (_TOP,)),
    "no_spread": (_no_spread, (_STD,)),
    "zero_gradient": (_zero_gradient, _GRADIENT),
    "no_tokens": (_no_tokens, (_SAMPLED,)),
    "truncation": (_truncation, (_CUT,)),
    "length_drift": (_length_drift, (_REWARD,)),
    "entropy_low": (_entropy_low, (_ENTROPY,)),
    "entropy_high": (_entropy_high, (_ENTROPY,)),
    "sampler_gap": (lambda run, limit: _above(run, (_GAP,), limit, ".3f", steps=1), (_GAP,)),
    "kl": (lambda run, limit: _above(run, _KL, limit, ".3f"), _KL),
    "update_kl": (lambda run, limit: _above(run, (_MOVED,), limit, ".3f"), (_MOVED,)),
    "clip_share": (lambda run, limit: _above(run, (_CLIPPED,), limit, ".2f"), (_CLIPPED,)),
    "episodes_failed": (lambda run, limit: _above(run, (_FAILED,), limit, ".2f"), (_FAILED,)),
    "episodes_cut": (lambda run, limit: _above(run, (_ENDED,), limit, ".2f"), (_ENDED,)),
    "tool_errors": (lambda run, limit: _above(run, (_TOOL_ERRORS,), limit, ".2f"), (_TOOL_ERRORS,)),
    "reward_hacking": (_reward_hacking, (_REWARD,)),
    "overfitting": (_overfitting, (_LOSS,)),
}
"""Name → its rule, and the metrics one of which a step has that it can judge."""


class Health:
    """Judges a run step by step.

    Args:
        thresholds: Name of an alarm → its threshold, None for off (`trainer.alarms`).
        before: The records of `metrics.jsonl`, where the run continues; a number that was not finite is None there.

    Attributes:
        raised: The alarms that are raised now.
    """

    def __init__(
        self, thresholds: Mapping[str, float | None], before: Iterable[Mapping[str, float | None]] = ()
    ) -> None:
        self._thresholds = {name: limit for name, limit in thresholds.items() if limit is not None}
        self._history = History()
        self._told: dict[str, int] = {}
        self.raised: tuple[str, ...] = ()
        for record in before:
            metrics = {name: math.nan if value is None else value for name, value in record.items()}
            self.judge(int(metrics["step"]), metrics)

    @property
    def summary(self) -> str:
        """The alarms that were raised in the run, each with the number of its steps; empty if none was."""
        steps = len(self._history.steps)
        return ", ".join(f"{name} in {count} of {steps} steps" for name, count in self._told.items())

    def judge(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[Raised]]:
        """Take the metrics of a step, or of a validation outside one.

        Returns:
            `health/<name>`, 1 for an alarm that is raised and 0 for one that is not, of those that the step can be
            judged by; and the alarms that are raised for the first time in the run.
        """
        self._history.add(step, metrics)
        if "timing_s/step" not in metrics:
            return {}, []
        found = {name: _RULES[name][0](self._history, limit) for name, limit in self._judged(metrics)}
        self.raised = tuple(name for name, seen in found.items() if seen is not None)
        news = [
            Raised(name, step, self._thresholds[name], seen)
            for name, seen in found.items()
            if seen is not None and name not in self._told
        ]
        for name in self.raised:
            self._told[name] = self._told.get(name, 0) + 1
        return {f"health/{name}": float(seen is not None) for name, seen in found.items()}, news

    def _judged(self, metrics: Mapping[str, float]) -> list[tuple[str, float]]:
        return [
            (name, limit)
            for name, limit in self._thresholds.items()
            if any(metrics.get(needed) is not None for needed in _RULES[name][1])
        ]
