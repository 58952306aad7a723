"""Estimate the outcome of k samples of a prompt from n scored samples of it: best@k, worst@k, maj@k, pass@k.

`best`, `worst` and `maj` are expectations over k draws *with* replacement from the n samples, which verl estimates by a
bootstrap; `pass` is the unbiased estimate for k samples drawn *without* replacement. `best` and `worst` have a closed
form. Majority votes are drawn, from a generator of their own. P is the number of prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BOOTSTRAP_DRAWS = 1000
_MOST_AT_ONCE = 1 << 22
"""Number of counts of votes in memory at once."""


def best_at_k(scores: Floats, k: int) -> Floats:
    """Return the expected maximum of k draws with replacement.

    `sum_i ((i / n)^k - ((i - 1) / n)^k) s_(i)`, with `s_(i)` the i-th smallest score.

    Args:
        scores: `(P, n)`.
        k: Number of draws.

    Returns:
        `(P,)`.
    """
    n = scores.shape[1]
    reach = (np.arange(n + 1) / n) ** k  # the largest of k is at most the i-th smallest with this probability
    return np.sort(scores, axis=1) @ np.diff(reach)


def worst_at_k(scores: Floats, k: int) -> Floats:
    """Return the expected minimum of k draws with replacement. `(P, n) -> (P,)`."""
    return -best_at_k(-scores, k)


def pass_at_k(num_correct: NDArray[np.int64], num_samples: int, k: int) -> Floats:
    """Estimate the probability that one of k samples is correct, `1 - C(n - c, k) / C(n, k)`.

    arXiv:2107.03374 equation 1.

    Args:
        num_correct: Number of correct samples of each prompt, c `(P,)`.
        num_samples: Number of samples of each prompt, n.
        k: At most n.

    Returns:
        `(P,)`.

    Raises:
        ValueError: k is above n.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_samples} samples")
    missing = np.array([comb(num_samples - correct, k) / comb(num_samples, k) for correct in range(num_samples + 1)])
    return 1.0 - missing[num_correct]


def maj_at_k(
    answers: NDArray[np.int64],
    scores: Floats,
    sizes: Sequence[int],
    rng: np.random.Generator,
    draws: int = BOOTSTRAP_DRAWS,
) -> dict[int, Floats]:
    """Bootstrap the mean score of the most frequent answer among k draws with replacement, for several k.

    Equally frequent answers win with the same probability. An answer's score is the mean over the samples that gave it.
    A vote of k uses the first k draws of the larger votes.

    Args:
        answers: Codes of the answers, 0 ... n-1 `(P, n)`; the same code in another prompt is another answer.
        scores: `(P, n)`.
        sizes: The numbers of draws k.
        rng: The bootstrap's own generator.
        draws: Number of votes per prompt.

    Returns:
        k → `(P,)`.
    """
    prompts, n = scores.shape
    cells = answers + n * np.arange(prompts)[:, None]
    counts = np.bincount(cells.ravel(), minlength=prompts * n)
    totals = np.bincount(cells.ravel(), weights=scores.ravel(), minlength=prompts * n)
    value = (totals / np.maximum(counts, 1)).reshape(prompts, n)[:, : int(answers.max(initial=0)) + 1]
    result = {k: np.empty(prompts) for k in sizes}
    step = max(_MOST_AT_ONCE // (draws * n), 1)
    for part in (slice(start, start + step) for start in range(0, prompts, step)):
        for k, won in _votes(answers[part], value[part], sorted(result), rng, draws):
            result[k][part] = won
    return result


def _votes(
    answers: NDArray[np.int64], value: Floats, sizes: list[int], rng: np.random.Generator, draws: int
) -> Iterator[tuple[int, Floats]]:
    """Yield k and the winner's score `(P,)`, the mean over `draws` votes, for rising k."""
    prompts, n = answers.shape
    ballots = np.arange(prompts * draws)
    first = np.repeat(np.arange(prompts) * n, draws)  # where the answers of each ballot's prompt begin
    counts = np.zeros((value.shape[1], prompts * draws), np.int16)
    cast, drawn = answers.ravel(), 0
    for k in sizes:
        for _ in range(k - drawn):
            counts[cast[first + rng.integers(n, size=len(ballots))], ballots] += 1
        drawn = k
        won = np.zeros(len(ballots))
        most, ties = counts.max(axis=0), np.zeros(len(ballots), np.int16)
        for answer, count in enumerate(counts):
            winner = count == most
            ties += winner
            won += winner * np.repeat(value[:, answer], draws)
        yield k, (won / ties).reshape(prompts, draws).mean(axis=1)
