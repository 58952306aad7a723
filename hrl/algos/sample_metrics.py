"""What n scored samples of each of P prompts say about k samples of it: best@k, worst@k, maj@k, pass@k.

`best`, `worst` and `maj` are expectations over k draws *with* replacement from the n samples (what verl
estimates by a bootstrap), `pass` is the unbiased estimate from k samples *without*. Where the expectation has a
closed form it is computed; the majority vote is drawn, from a generator of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BOOTSTRAP_DRAWS = 1000
_MOST_AT_ONCE = 1 << 22
"""Counts of votes held in memory at once."""


def best_at_k(scores: Floats, k: int) -> Floats:
    """Return expected maximum of k draws with replacement, `sum_i ((i / n)^k - ((i - 1) / n)^k) s_(i)`, s sorted.

    Args:
        scores: `(P, n)`.
        k: Draws.

    Returns:
        `(P,)`.
    """
    n = scores.shape[1]
    reach = (np.arange(n + 1) / n) ** k  # the largest of k is at most the i-th smallest with this probability
    return np.sort(scores, axis=1) @ np.diff(reach)


def worst_at_k(scores: Floats, k: int) -> Floats:
    """Return expected minimum of k draws with replacement. `(P, n) -> (P,)`."""
    return -best_at_k(-scores, k)


def pass_at_k(num_correct: NDArray[np.int64], num_samples: int, k: int) -> Floats:
    """Probability that one of k samples is correct, `1 - C(n - c, k) / C(n, k)` (arXiv:2107.03374 equation 1).

    Args:
        num_correct: Correct samples of each prompt `(P,)`.
        num_samples: Samples of each prompt, n.
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
    """Bootstrap mean score of the most frequent answer among k draws with replacement, for several k.

    Of equally frequent answers each is as likely to win. Samples with the same answer count with their mean score. A
    vote of k is that of the first k draws of a larger one.

    Args:
        answers: `(P, n)` codes of the answers, 0 ... n-1; a code means the same within one prompt only.
        scores: `(P, n)`.
        sizes: Every k.
        rng: The bootstrap's own generator.
        draws: Votes per prompt.

    Returns:
        Per k `(P,)`.
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
    """For rising k the mean score of the winner `(P,)`, over `draws` votes."""
    prompts, n = answers.shape
    ballots = np.arange(prompts * draws)
    first = np.repeat(np.arange(prompts) * n, draws)  # where each ballot's prompt begins in the flat answers
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
