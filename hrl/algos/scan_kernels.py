"""Compiled reverse scans over the trained tokens of each row. Imported only where numba is installed."""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray


@numba.njit(fastmath={"contract"}, nogil=True, cache=True)
def scan_rows(
    rewards: NDArray[np.floating],
    values: NDArray[np.floating],
    mask: NDArray[np.bool_],
    gamma: float,
    lam: float,
    advantages: NDArray[np.floating],
    returns: NDArray[np.floating],
    ends: NDArray[np.int64],
) -> tuple[int, float, float]:
    """Fill advantages and returns `(B, R)`, which hold zeros.

    Into `ends (B,)`, zeros too, goes the column behind each row's last trained token: padding is read once only.
    Gives count, mean and summed squared deviation of the advantages, taken row by row while the row is in cache and
    merged by Chan's formula, so that they lose no digits.
    """
    decay = gamma * lam
    total_count = 0
    total_mean = 0.0
    total_deviation = 0.0
    for row in range(rewards.shape[0]):
        next_value = 0.0
        advantage = 0.0
        row_sum = 0.0
        count = 0
        for t in range(rewards.shape[1] - 1, -1, -1):
            if not mask[row, t]:
                continue
            if count == 0:
                ends[row] = t + 1
            value = values[row, t]
            advantage = rewards[row, t] + gamma * next_value - value + decay * advantage
            next_value = value
            advantages[row, t] = advantage
            returns[row, t] = advantage + value
            row_sum += advantage
            count += 1
        if count == 0:
            continue
        row_mean = row_sum / count
        deviation = 0.0
        for t in range(ends[row]):
            if mask[row, t]:
                deviation += (advantages[row, t] - row_mean) ** 2
        shift = row_mean - total_mean
        merged = total_count + count
        total_deviation += deviation + shift * shift * total_count * count / merged
        total_mean += shift * count / merged
        total_count = merged
    return total_count, total_mean, total_deviation


@numba.njit(fastmath={"contract"}, nogil=True, cache=True)
def whiten_rows(
    matrix: NDArray[np.floating],
    mask: NDArray[np.bool_],
    ends: NDArray[np.int64],
    count: int,
    mean: float,
    deviation: float,
    epsilon: float,
) -> None:
    """Whiten the masked entries of `(B, R)` in place, given their moments."""
    scale = 1.0 / math.sqrt(deviation / max(count - 1, 1) + epsilon)
    for row in range(matrix.shape[0]):
        for t in range(ends[row]):
            if mask[row, t]:
                matrix[row, t] = (matrix[row, t] - mean) * scale if count > 1 else 0.0
