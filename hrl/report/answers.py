"""What was answered to the same prompts: at several steps of a run, or by several runs.

Screen, page and comparison pair samples here and nowhere else. An answer is a whole group: the mean score of all
samples of the prompt, and the one with the middle score to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar

from rich.table import Table
from rich.text import Text

from hrl.report.run_folder import RolloutKind, rollouts_file, rollouts_steps
from hrl.report.samples import Sample, answer_text, number, printable, question, read_samples

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
    """The answers to one prompt, by step or by run; at least two."""

    answers: tuple[Answer, ...]

    @property
    def change(self) -> float | None:
        """The last score minus the first; None if either is missing."""
        first, last = self.answers[0].score, self.answers[-1].score
        return None if first is None or last is None else last - first

    @property
    def range(self) -> float:
        """The highest score minus the lowest; 0 without any."""
        scores = [answer.score for answer in self.answers if answer.score is not None]
        return max(scores) - min(scores) if scores else 0.0

    @property
    def differs_in_score(self) -> bool:
        """Whether the answers have different scores, or only some of them have one."""
        return len({answer.score for answer in self.answers}) > 1

    @property
    def differs_in_words(self) -> bool:
        """Whether the samples to read have different texts."""
        return len({answer.sample["response"] for answer in self.answers}) > 1


# ---------------------------------------------------------------------------------------------- pairing


def validation_series(rollouts: Path, most_steps: int = MOST_STEPS) -> list[Series]:
    """Return the answers of a run's validations to their prompts, the largest change of score first.

    Args:
        rollouts: The folder of the run's samples.
        most_steps: How many validations to read: the first, even one before a resume, the last, and some between.
    """
    return _over_time(rollouts, spread(rollouts_steps(rollouts, "val"), most_steps), "val", most_steps)


def training_series(rollouts: Path, most_steps: int = MOST_STEPS) -> list[Series]:
    """Return the answers to training prompts that came more than once, the largest change of score first.

    Of a run with many samples some steps are read: the first, the last, and some between.
    """
    steps = rollouts_steps(rollouts)
    size = sum(rollouts_file(rollouts, step).stat().st_size for step in steps)
    readable = len(steps) if size <= _READ_BYTES else max(2, len(steps) * _READ_BYTES // size)
    return _over_time(rollouts, spread(steps, readable), "train", most_steps)


def last_validations(folders: Sequence[Path]) -> list[Series]:
    """Return the answers of each run's last validation to the prompts that all of them had, in the order of the runs.

    Args:
        folders: The folders of the runs' samples.

    Returns:
        A series for each prompt, those whose scores differ most first; empty if a run has no validation.
    """
    steps = [rollouts_steps(rollouts, "val") for rollouts in folders]
    if not all(steps):
        return []
    answers = _answers(
        (last[-1], read_samples(rollouts, last[-1], "val")) for rollouts, last in zip(folders, steps, strict=True)
    )
    found = [Series(tuple(of_runs)) for of_runs in answers if len(of_runs) == len(folders)]
    return sorted(found, key=lambda series: -series.range)


def spread(steps: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of them, at least two: the first, the last, and some between."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def _over_time(rollouts: Path, steps: Iterable[int], kind: RolloutKind, most_steps: int) -> list[Series]:
    answers = _answers((step, read_samples(rollouts, step, kind)) for step in steps)
    found = [Series(tuple(spread(several, most_steps))) for several in answers if len(several) > 1]
    return sorted(found, key=lambda series: (-abs(series.change or 0.0), -series.range))


def _answers(batches: Iterable[tuple[int, Iterable[Sample]]]) -> Iterable[list[Answer]]:
    """Return the answers to each prompt in the order of the batches, at most one of each; a batch is of a step."""
    answers: dict[_Prompt, list[Answer]] = {}
    for step, samples in batches:
        for prompt, group in _by_prompt(samples).items():
            answers.setdefault(prompt, []).append(_answer(step, group))
    return answers.values()


def _by_prompt(samples: Iterable[Sample]) -> Mapping[_Prompt, list[Sample]]:
    """Return the samples of each prompt and data source, in order."""
    groups: dict[_Prompt, list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.get("data_source"), sample["prompt"]), []).append(sample)
    return groups


def _answer(step: int, samples: Sequence[Sample]) -> Answer:
    scored = sorted((s for s in samples if s.get("score") is not None), key=lambda s: -s["score"])
    middle = scored[len(scored) // 2] if scored else samples[0]
    return Answer(step, middle, fmean(s["score"] for s in scored) if scored else None, len(samples))


# ---------------------------------------------------------------------------------------------- what to show


def that_differ(series: Sequence[Series]) -> list[Series]:
    """Return the series whose scores differ; where there is none, those whose words do."""
    return [each for each in series if each.differs_in_score] or [each for each in series if each.differs_in_words]


def describe(series: Sequence[Series], shown: int) -> str:
    """Describe how many prompts got better or worse, and which of them are shown."""
    changes = [each.change or 0.0 for each in series]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    counts = f"{better} better, {worse} worse, {len(series) - better - worse} as before"
    different = that_differ(series)
    if not different:
        return f"{counts}, word for word"
    in_words = "" if different[0].differs_in_score else " in other words"
    which = f"the {shown} of {len(different)} that changed most" if shown < len(different) else ""
    return "; ".join(filter(None, (counts + in_words, which)))


def before_and_after_table(series: Sequence[Series], limit: int) -> Table | Text:
    """Return the first and the last answers to the same prompts that differ, with their scores; a line if none do."""
    shown = that_differ(series)[:limit]
    title = f"before and after: {describe(series, len(shown))}"
    if not shown:
        return Text(title)
    table = Table(title=title, title_justify="left", show_lines=True, expand=True)
    for heading in ("prompt", "before", "after"):
        table.add_column(heading, ratio=1, overflow="fold")
        if heading != "prompt":
            table.add_column("score", justify="right", no_wrap=True)
    for each in shown:
        cells = [printable(question(each.answers[0].sample), limit=200)]
        for answer in (each.answers[0], each.answers[-1]):
            cells += [printable(answer_text(answer.sample), limit=200), Text(number(answer.score, ".2f"))]
        table.add_row(*cells)
    return table
