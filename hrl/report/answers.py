"""What the model answered to the same prompts at several steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar

from hrl.report.run_folder import RolloutKind, rollouts_file, rollouts_steps
from hrl.report.samples import Sample, read_samples

MOST_STEPS = 4
"""Steps of which answers are shown side by side."""
_READ_BYTES = 32 << 20
T = TypeVar("T")
_Prompt = tuple[object, str]


class Answer(NamedTuple):
    """What was answered at a step.

    Attributes:
        step: The step.
        sample: One of the samples: that with the middle score.
        score: Mean score of all samples of the prompt at this step; None if none has one.
        samples: How many there are.
    """

    step: int
    sample: Sample
    score: float | None
    samples: int


class Series(NamedTuple):
    """The answers to one prompt, by step; at least two."""

    answers: tuple[Answer, ...]

    @property
    def change(self) -> float | None:
        """The last score minus the first; None if either is missing."""
        first, last = self.answers[0].score, self.answers[-1].score
        return None if first is None or last is None else last - first


def validation_series(rollouts: Path, most_steps: int = MOST_STEPS) -> list[Series]:
    """Return the answers of a run's validations to their prompts, the largest change of score first.

    Args:
        rollouts: The folder of the run's samples.
        most_steps: How many validations to read: the first, the last, and some between.
    """
    return _series(rollouts, spread(rollouts_steps(rollouts, "val"), most_steps), "val", most_steps)


def training_series(rollouts: Path, most_steps: int = MOST_STEPS) -> list[Series]:
    """Return the answers to training prompts that came more than once, the largest change of score first.

    Of a run with many samples some steps are read: the first, the last, and some between.
    """
    steps = rollouts_steps(rollouts)
    size = sum(rollouts_file(rollouts, step).stat().st_size for step in steps)
    readable = len(steps) if size <= _READ_BYTES else max(2, len(steps) * _READ_BYTES // size)
    return _series(rollouts, spread(steps, readable), "train", most_steps)


def spread(steps: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of them, at least two: the first, the last, and some between."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def _series(rollouts: Path, steps: Iterable[int], kind: RolloutKind, most_steps: int) -> list[Series]:
    answers: dict[_Prompt, list[Answer]] = {}
    for step in steps:
        for prompt, samples in by_prompt(read_samples(rollouts, step, kind)).items():
            answers.setdefault(prompt, []).append(_answer(step, samples))
    found = [Series(tuple(spread(several, most_steps))) for several in answers.values() if len(several) > 1]
    return sorted(found, key=lambda series: -abs(series.change or 0.0))


def by_prompt(samples: Iterable[Sample]) -> Mapping[_Prompt, list[Sample]]:
    """Return the samples of each prompt and data source, in order."""
    groups: dict[_Prompt, list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.get("data_source"), sample["prompt"]), []).append(sample)
    return groups


def _answer(step: int, samples: Sequence[Sample]) -> Answer:
    scored = sorted((s for s in samples if s.get("score") is not None), key=lambda s: -s["score"])
    middle = scored[len(scored) // 2] if scored else samples[0]
    return Answer(step, middle, fmean(s["score"] for s in scored) if scored else None, len(samples))


def describe(series: Sequence[Series]) -> str:
    """Describe how many prompts got better or worse."""
    changes = [each.change or 0.0 for each in series]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    return f"{better} better, {worse} worse, {len(series) - better - worse} as before"
