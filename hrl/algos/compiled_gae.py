"""GAE of large batches as one compiled pass over the trained tokens of each row. Importing it needs numba.

It computes what `hrl.algos.advantages` computes with NumPy, in float64 as well, and touches every token once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call, half a second together, in every process anew.

    Machine code kept on disk would save half of that, and processes that compile for other types, or on other
    processors that see the same folder, could find each other's.
    """
    # Products and sums may be fused. They are not reordered: numbers that are not finite stay what they are.
    return numba.njit(fastmath={"contract"})(function)  # type: ignore[no-any-return]


@_compiled
def end_of(trained: Bools) -> int:
    """Return where the padding of a row `(R,)` begins."""
    end = 0
    for t in range(len(trained)):  # several tokens at once, which a loop that stops at the first cannot do
        end = t + 1 if trained[t] else end
    return end


@_compiled
def scan_rows(
    rewards: Floats,
    values: Floats,
    trained: Bools,
    gamma: float,
    lam: float,
    advantages: Floats,
    returns: Floats,
    ends: NDArray[np.int64],
) -> tuple[int, float, float]:
    """Write advantages and returns of the trained tokens `(B, R)`, and where the padding of each row begins `(B,)`.

    Returns:
        Of the advantages their number, mean and summed squared deviation. Each row's are taken from the mean of the
        rows before it and joined by Chan's formula, so that they lose no digits where the mean is far from 0.
    """
    decay = gamma * lam
    total, mean, squares = 0, 0.0, 0.0
    for row in range(rewards.shape[0]):
        end = ends[row] = end_of(trained[row])
        following, advantage, count = 0.0, 0.0, 0
        shifted, shifted_squares = 0.0, 0.0
        for place in range(end - 1, -1, -1):
            t = np.uint64(place)  # numba looks at every signed index whether it counts from the end
            if not trained[row, t]:
                continue
            value = np.float64(values[row, t])
            advantage = rewards[row, t] - value + gamma * following + decay * advantage
            following = value
            stored = np.float64(advantages.dtype.type(advantage))  # what is whitened: equal entries have to become 0
            advantages[row, t] = stored
            returns[row, t] = advantage + value
            if total + count == 0:
                mean = stored
            count += 1
            distance = stored - mean
            shifted += distance
            shifted_squares += distance * distance
        if count > 0:
            joined = total + count
            squares += shifted_squares - shifted * shifted / count + shifted * shifted / count * total / joined
            mean += shifted / joined
            total = joined
    return total, mean, squares


@_compiled
def whiten_rows(
    matrix: Floats, trained: Bools, ends: NDArray[np.int64], total: int, mean: float, squares: float, epsilon: float
) -> None:
    """Shift and scale the trained entries of `(B, R)` in place to mean 0 and (unbiased) variance 1."""
    scale = 1.0 / math.sqrt(squares / max(total - 1, 1) + epsilon)
    for row in range(matrix.shape[0]):
        for t in range(ends[row]):
            matrix[row, t] = (matrix[row, t] - mean) * scale if trained[row, t] else 0.0
