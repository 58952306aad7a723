"""From scored samples to a table: mean@k, pass@k and maj@k of every source, with their standard errors.

A standard error is that of a mean over prompts, the sample standard deviation over the square root of their number:
samples of one prompt are not independent of each other (arXiv:2411.00640, section 2.2). `pass@k` is the unbiased
estimate of arXiv:2107.03374 equation 1, `maj@k` a bootstrap; see `hrl.algos.sample_metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hrl.algos.sample_metrics import maj_at_k, pass_at_k
from hrl.trainer.ppo.metrics import CORRECT_AT, answers_that_are_correct, answers_voted_on

ALL = "all"
"""The row of all sources together, where there are several."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    Attributes:
        value: The mean.
        error: Its standard error; None of a single prompt.
    """

    value: float
    error: float | None

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Estimate:
        """Return the mean of one number per prompt `(P,)`."""
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(float(values.mean()), error)


@dataclass(frozen=True)
class SourceScores:
    """The scores of one source.

    Attributes:
        prompts: Number of prompts.
        samples: Number of samples with a score.
        estimates: Metric → estimate: `mean@n`, and `pass@k`, `maj@k` of every k asked for.
        length: Mean number of tokens of a response.
        cut_off: Share of the responses that ended at the limit of tokens.
    """

    prompts: int
    samples: int
    estimates: Mapping[str, Estimate]
    length: float
    cut_off: float


def score_table(samples: Iterable[Mapping[str, Any]], n: int, sizes: Sequence[int]) -> dict[str, SourceScores]:
    """Return the scores of every source, and of all together if there are several.

    Args:
        samples: Records of a validation, as in `rollouts/val_step_N.jsonl`.
        n: Samples that were drawn of each prompt.
        sizes: Each k of `pass@k` and `maj@k`, at most n. A prompt some of whose samples have no score is left out of
            a `pass@k` with k above the number of its scores.

    Raises:
        ValueError: A k is not between 1 and n.
    """
    wrong = [k for k in sizes if not 1 <= k <= n]
    if wrong:
        raise ValueError(f"pass@{wrong[0]} needs at least {wrong[0]} samples of each prompt, and there are {n}")
    by_source: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for sample in samples:
        by_source.setdefault(sample["data_source"], {}).setdefault(sample["uid"], []).append(sample)
    table = {source: _source(list(prompts.values()), n, sizes) for source, prompts in by_source.items()}
    if len(by_source) > 1:
        table[ALL] = _source([rows for prompts in by_source.values() for rows in prompts.values()], n, sizes)
    return table


def _source(prompts: Sequence[Sequence[Mapping[str, Any]]], n: int, sizes: Sequence[int]) -> SourceScores:
    rows = [sample for prompt in prompts for sample in prompt]
    parts = [sample.get("reward_parts") or {} for sample in rows]
    voted, correct = answers_voted_on(parts), answers_that_are_correct(parts)
    rng = np.random.default_rng(0)
    collected: dict[str, list[float]] = {f"mean@{n}": []}
    start = 0
    for prompt in prompts:
        place = slice(start, start := start + len(prompt))
        scores = np.array([float(sample["score"]) for sample in prompt])
        is_correct = scores >= CORRECT_AT if correct is None else np.array(correct[place])
        collected[f"mean@{n}"].append(float(scores.mean()))
        for k in sizes:
            if k <= len(prompt):
                (passed,) = pass_at_k(np.array([int(is_correct.sum())]), len(prompt), k)
                collected.setdefault(f"pass@{k}", []).append(float(passed))
        if voted is not None:
            codes = {answer: code for code, answer in enumerate(dict.fromkeys(voted[place]))}
            answers = np.array([[codes[answer] for answer in voted[place]]])
            for k, won in maj_at_k(answers, scores[None], [k for k in sizes if k > 1], rng).items():
                collected.setdefault(f"maj@{k}", []).append(float(won[0]))
    estimates = {name: Estimate.of(np.array(values)) for name, values in collected.items()}
    order = ["mean", "pass", "maj"]
    names = sorted(estimates, key=lambda name: (order.index(name.split("@")[0]), int(name.split("@")[1])))
    return SourceScores(
        prompts=len(prompts),
        samples=len(rows),
        estimates={name: estimates[name] for name in names},
        length=float(np.mean([sample["response_length"] for sample in rows])),
        cut_off=float(np.mean([sample.get("finish_reason") == "length" for sample in rows])),
    )
