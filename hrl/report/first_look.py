"""The first look: whether there is anything to learn from the first samples of a run, before anything is learnt.

A run whose samples all score the same teaches nothing, and its curve is a flat line that says nothing about why. The
samples of the first step say it at once, and cost nothing extra.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hrl.algos.registry import estimator_traits
from hrl.config.arithmetic import count
from hrl.config.ppo import PPOTrainerConfig
from hrl.episodes.episode import limits_by_end
from hrl.report.conversation import is_episode
from hrl.report.samples import Sample, answer_text, expected, number, question

_MANY = 0.5
"""The share of samples from which on something is worth a remark."""
_RIGHT = 1.0
"""The `acc`, or the score of a function, from which on an answer is right."""
_ROUNDING = 1e-6


class Finding(StrEnum):
    """What there is to learn."""

    UNSCORED = "no sample has a score"
    NOTHING_RIGHT = "no sample scores above 0"
    ALL_RIGHT = "every sample has the full score"
    ALIKE = "the answers that are compared score alike"
    SOMETHING = "there is something to learn"


@dataclass(frozen=True)
class FirstLook:
    """What the samples of the first step say.

    Attributes:
        finding: What there is to learn.
        headline: That in a sentence, with the counts.
        example: One of the samples; None if there is something to learn.
        advice: What to try, a sentence each; empty if there is something to learn.
    """

    finding: Finding
    headline: str
    example: Sample | None = None
    advice: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, str]:
        """The example and the advice, label → text."""
        if self.example is None:
            return {}
        example = self.example
        parts = {name: part for name, part in example.get("reward_parts", {}).items() if part is not None}
        score = number(example.get("score"), ".3g").strip()
        shown = {
            "prompt": question(example),
            "response": answer_text(example),
            "expected": str(expected(example) or ""),
            "score": ", ".join([score, *(f"{name} {_short(part)}" for name, part in parts.items())]),
            "ended by": _ending(example),
        }
        advice = {"to try" if index == 0 else " " * index: text for index, text in enumerate(self.advice)}
        return {label: text for label, text in shown.items() if text} | advice

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        example = None if self.example is None else dict(self.example)
        return {"finding": self.finding.name.lower(), "headline": self.headline, "example": example} | {
            "advice": list(self.advice)
        }


def first_look(samples: Sequence[Sample], config: PPOTrainerConfig) -> FirstLook:
    """Judge the samples of a step, as `rollout_records` gives them.

    Args:
        samples: All of them, scored.
        config: Of the run; names the keys and values of the advice.
    """
    scores = [sample["score"] for sample in samples if sample.get("score") is not None]
    groups: dict[Any, set[float]] = defaultdict(set)
    for sample in samples:
        if sample.get("score") is not None:
            groups[sample.get("uid")].add(_compared(sample))
    with_spread = sum(len(group) > 1 for group in groups.values())
    # Some estimators compare the answers to a prompt; for the others all answers of the step are one group.
    in_prompts = estimator_traits(config.algorithm.adv_estimator).min_group_size > 1
    differ = with_spread > 0 if in_prompts else len(set().union(*groups.values())) > 1
    above, right = sum(score > 0 for score in scores), _right(samples)
    of = f"{len(samples)} samples"
    counts = f"{above} of {of} score above 0"
    if right is not None and right != above:  # a form or a part of the way is paid for too
        counts = f"{right} of {of} are right, {above} score above 0"
    if not scores:
        finding, headline = Finding.UNSCORED, f"none of {of} has a score: the reward function left them all out"
    elif len(set(scores)) == 1 and not differ and _all_right(samples, config):
        finding, headline = Finding.ALL_RIGHT, f"all {of} have the score {scores[0]:g}: there is nothing left to learn"
    elif above == 0 and not differ:
        finding, headline = Finding.NOTHING_RIGHT, f"0 of {of} score above 0: there is nothing to learn from yet"
    elif not differ:
        finding = Finding.ALIKE
        which = "the answers to each prompt" if in_prompts else "all of them"
        headline = f"{counts}, but {which} score alike, so none is preferred"
    else:
        mean = sum(scores) / len(scores)
        spread = f"; the answers to {with_spread} of {count(len(groups), 'prompt')} differ in score"
        return FirstLook(
            Finding.SOMETHING,
            f"{counts}, {mean:.3g} on average" + (spread if in_prompts else ""),
        )
    return FirstLook(finding, headline, _typical(samples), tuple(_advice(finding, samples, config)))


def _advice(finding: Finding, samples: Sequence[Sample], config: PPOTrainerConfig) -> Iterator[str]:
    if finding is Finding.UNSCORED:
        yield "a function that returns None for every sample teaches nothing; let it return a number"
        return
    if finding is Finding.ALL_RIGHT:
        yield "harder rows" + (", e.g. the task's next level (&level=1)" if _is_made(samples) else "")
        return
    if config.environment.is_used:
        yield from _advice_on_ends(samples, config)
        if config.environment.pays and not config.reward_entries and not any(map(_is_paid, samples)):
            yield "no turn had a reward: `step` gives it, as hrl.StepResult(…, reward=1.0)"
    cut = sum(not is_episode(sample) and sample.get("finish_reason") == "length" for sample in samples)
    if cut >= _MANY * len(samples):
        limit = config.data.max_response_length
        yield f"{cut} of {len(samples)} answers were cut off at data.max_response_length={limit}: raise it"
    empty = sum(not sample["response"].strip() for sample in samples)
    if empty >= _MANY * len(samples):
        yield f"{empty} of {len(samples)} answers are empty: does the prompt end where an answer begins?"
    names = [name for name, value in samples[0].get("reward_parts", {}).items() if isinstance(value, int | float)]
    never = [name for name in names if not any(sample.get("reward_parts", {}).get(name) for sample in samples)]
    if never and len(never) < len(names):
        yield f"these parts of the reward are 0 in every sample: {', '.join(never)}"
    if finding is Finding.NOTHING_RIGHT:
        if _is_made(samples) and not _is_plain(config):
            yield "answer=plain in the task's address, or more shots: the answer's format may be what never comes"
        yield "show the form of the answer in the prompt, or give part of the score for it"
        yield "easier rows, or a model that solves some of them: a policy learns only from answers that sometimes score"
        return
    yield (
        "more samples per prompt (actor_rollout_ref.rollout.n), a higher actor_rollout_ref.rollout.temperature, other "
        "rows, or a score with steps between wrong and right"
    )


def _is_paid(sample: Sample) -> bool:
    """Return whether an environment gave a turn a reward."""
    return any(turn.get("reward") is not None for turn in sample.get("turns") or ())


def _advice_on_ends(samples: Sequence[Sample], config: PPOTrainerConfig) -> Iterator[str]:
    """Say what to do about episodes that mostly ended the same bad way."""
    ends = Counter(sample.get("end") for sample in samples)
    limits = limits_by_end(config.environment, config.data.max_prompt_length, config.data.max_response_length)
    for end, limit in limits.items():
        if ends[end] >= _MANY * len(samples):
            yield f"{ends[end]} of {len(samples)} episodes were cut off at {limit}: raise it"
    if ends["failed"] >= _MANY * len(samples):
        errors = Counter(sample.get("error") for sample in samples if sample.get("error"))
        why = f", most often with: {errors.most_common(1)[0][0]}" if errors else ""
        yield f"{ends['failed']} of {len(samples)} episodes failed{why}; `hrl env-test` plays some of them alone"


def _ending(sample: Sample) -> str:
    if is_episode(sample):
        return f"{sample.get('end')} after {count(len(sample['turns']), 'turn')}"
    return f"{sample.get('finish_reason')} after {sample.get('response_length', 0):.0f} tokens"


def _all_right(samples: Sequence[Sample], config: PPOTrainerConfig) -> bool:
    """Return whether no sample could be better: by its `acc`, or else by the highest sum of functions from 0 to 1."""
    functions = config.reward.functions
    if config.environment.pays and not all("acc" in sample.get("reward_parts", {}) for sample in samples):
        return False  # nobody knows how much an episode can earn
    full = sum(max(one.weight, 0.0) for one in functions) if functions else _RIGHT
    for sample in samples:
        if sample.get("score") is not None:
            right = sample.get("reward_parts", {}).get("acc")
            is_judged = isinstance(right, int | float)
            if (is_judged and right < _RIGHT) or (not is_judged and sample["score"] < full - _ROUNDING):
                return False
    return True


def _right(samples: Sequence[Sample]) -> int | None:
    """Return how many samples are right by their `acc`; None if not all that have a score have one."""
    judged = [sample.get("reward_parts", {}).get("acc") for sample in samples if sample.get("score") is not None]
    numbers = [value for value in judged if isinstance(value, int | float)]
    return sum(value >= _RIGHT for value in numbers) if numbers and len(numbers) == len(judged) else None


def _compared(sample: Sample) -> float:
    """Return the score that answers are compared by: what is trained on."""
    shaped = sample.get("shaped_score")
    return float(sample["score"] if shaped is None else shaped)


def _is_made(samples: Sequence[Sample]) -> bool:
    return str(samples[0].get("data_source")).startswith("reasoning_gym/")


def _is_plain(config: PPOTrainerConfig) -> bool:
    return not any(f"answer={form}" in str(config.data.train_files) for form in ("tags", "boxed"))


def _typical(samples: Sequence[Sample]) -> Sample:
    """Return the first sample that ended by itself, or else the first."""
    return next((sample for sample in samples if _ended_by_itself(sample)), samples[0])


def _ended_by_itself(sample: Sample) -> bool:
    return bool(sample.get("end") == "done" if is_episode(sample) else sample.get("finish_reason") == "stop")


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else str(value)[:40]
